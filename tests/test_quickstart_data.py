"""The committed prompt sets: made by the script, right, and shaped as the demo needs them."""

from __future__ import annotations

import ast
import importlib.util
import json
import operator
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

if TYPE_CHECKING:
    from batchinfer.models.tokenizer import Tokenizer

NAMES = ("quickstart", "quickstart_chat")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@pytest.fixture(scope="module")
def script(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_quickstart", repo_root / "data" / "make_quickstart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=NAMES)
def table(request: pytest.FixtureRequest, repo_root: Path) -> pa.Table:
    return pq.read_table(repo_root / "data" / f"{request.param}.parquet")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from batchinfer.models.source import resolve_model

    return resolve_model("smollm2-135m").tokenizer


def by_family(table: pa.Table) -> dict[str, list[dict]]:
    rows: dict[str, list[dict]] = defaultdict(list)
    for row in table.to_pylist():
        rows[row["family"]].append(row)
    return rows


def question(row: dict) -> str:
    return row["messages"][-1]["content"] if "messages" in row else row["prompt"]


def test_committed_files_are_what_the_script_makes(script: ModuleType, repo_root: Path) -> None:
    for name, made in zip(NAMES, script.tables(), strict=True):
        path = repo_root / "data" / f"{name}.parquet"
        assert pq.read_table(path).equals(made), f"{path.name} is stale: run data/make_quickstart.py"
        assert path.stat().st_size < 200_000


def test_at_least_six_families_of_forty_distinct_rows(table: pa.Table) -> None:
    families = by_family(table)
    assert len(families) >= 6
    assert min(map(len, families.values())) >= 40
    assert len(set(table["id"].to_pylist())) == table.num_rows >= 240
    assert len({question(row) for row in table.to_pylist()}) == table.num_rows
    assert all(row["reference"].strip() for row in table.to_pylist())


def test_both_files_ask_the_same_questions(repo_root: Path) -> None:
    plain, chat = (pq.read_table(repo_root / "data" / f"{name}.parquet").to_pylist() for name in NAMES)
    for row, chat_row in zip(plain, chat, strict=True):
        assert (row["id"], row["family"], row["reference"]) == (
            chat_row["id"],
            chat_row["family"],
            chat_row["reference"],
        )
        assert all(turn["content"] in row["prompt"] for turn in chat_row["messages"])


def test_chat_rows_alternate_and_end_with_the_user(repo_root: Path) -> None:
    for row in pq.read_table(repo_root / "data" / "quickstart_chat.parquet").to_pylist():
        roles = [turn["role"] for turn in row["messages"]]
        num_shots = (len(roles) - 2) // 2
        assert num_shots >= 5
        assert roles == ["system", *(["user", "assistant"] * num_shots), "user"]


def value(node: ast.expr) -> float:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    assert isinstance(node, ast.Constant)
    return node.value


def test_arithmetic_references_are_right_and_use_the_numbers_of_the_text(table: pa.Table) -> None:
    for row in by_family(table)["arithmetic"]:
        expression, _, result = row["reference"].partition(" = ")
        assert value(ast.parse(expression, mode="eval").body) == int(result) > 0, row["id"]
        asked = question(row).rpartition("Problem:")[2]
        in_text = set(re.findall(r"\d+", asked)) | {"2"}  # 2: "twice as many"
        assert set(re.findall(r"\d+", expression)) <= in_text, row["id"]


def test_extraction_references_are_json_with_values_from_the_text(table: pa.Table) -> None:
    for row in by_family(table)["extraction"]:
        values = json.loads(row["reference"])
        assert list(values) == ["customer", "product", "quantity", "city", "due"]
        assert isinstance(values["quantity"], int)
        asked = question(row).rpartition("Order:")[2]
        assert all(str(v) in asked for v in values.values()), row["id"]


def test_classification_has_every_label_of_its_instruction(table: pa.Table) -> None:
    counts = Counter(row["reference"] for row in by_family(table)["classification"])
    assert set(counts) == {"billing", "delivery", "account", "defect", "question"}
    assert min(counts.values()) >= 5


def num_shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_families_share_a_prefix_of_200_to_800_tokens(table: pa.Table, tokenizer: Tokenizer) -> None:
    for family, rows in by_family(table).items():
        if "messages" in table.column_names:
            encoded = [list(tokenizer.encode_chat(row["messages"])) for row in rows]
        else:
            encoded = [list(ids) for ids in tokenizer.encode_batch([row["prompt"] for row in rows])]
        shared = min(num_shared(encoded[0], ids) for ids in encoded[1:])
        assert 200 <= shared <= 800, family
        assert max(map(len, encoded)) <= shared + 250, family  # the questions are short beside the prefix
