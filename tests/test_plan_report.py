"""`batchinfer plan`: the figures over windows, and what is shown of shared prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeModelSource

from batchinfer.plan_report import PlanReport, plan_run
from batchinfer.settings import job_settings

SHARED = "Sort each message to the help desk.\n" * 4  # 144 bytes, a token each


def plan(folder: Path, window_rows: int | None = None, *, columns: dict[str, Any], **flags: Any) -> PlanReport:
    path = folder / "p.parquet"
    pq.write_table(pa.table(columns), path)
    flags = {"prompts": str(path), "model": "m", "dtype": "float32", **flags}
    settings = job_settings(flags, {}, None, needs_output=False)
    return plan_run(settings, resolve=FakeModelSource, window_rows=window_rows)


def test_figures_of_one_window(tmp_path: Path) -> None:
    prompts = [SHARED + "a", SHARED + "b", SHARED + "b", "x" * 10]
    report = plan(tmp_path, columns={"prompt": prompts}, max_tokens=8)
    figures = report.plan
    assert (report.num_rows, figures.num_duplicate_rows, report.num_windows) == (4, 1, 1)
    assert figures.num_prompt_tokens == 3 * 145 + 10
    assert figures.num_unique_prompt_tokens == 144 + 2 + 10
    assert figures.num_shareable_prompt_tokens == 2 * 144 + 1
    assert figures.tree_depth == 2
    assert figures.max_output_tokens == 4 * 8
    assert figures.kv.bytes_per_token == 2 * 2 * 1 * 8 * 4  # keys and values, layers, kv heads, head_dim, float32
    assert figures.kv.all_tokens == 144 + 2 + 10 + 4 * 7
    text = report.to_text()
    assert "rows           4 · duplicates: 1 · cannot run: 0" in text
    assert "total: 445 · unique: 156 · possible saving: 289 (64.9 %)" in text
    assert "prefix tree    5 nodes · depth: 2" in text


def test_shared_prefixes_show_how_they_begin_and_end(tmp_path: Path) -> None:
    report = plan(tmp_path, columns={"prompt": ["short", SHARED + "a", SHARED + "b"]})
    (shown,) = report.shared_prefixes
    assert (shown.prefix.num_tokens, shown.prefix.num_rows, shown.prefix.num_tokens_saved) == (144, 2, 144)
    assert shown.prefix.example_row == 1
    assert (shown.begin, shown.end) == (SHARED[:40], SHARED[-40:])
    assert f'"{SHARED[:35]}\\nSort" … "' in report.to_text()


def test_a_short_prefix_is_shown_whole(tmp_path: Path) -> None:
    (shown,) = plan(tmp_path, columns={"prompt": ["abc 1", "abc 2"]}).shared_prefixes
    assert (shown.begin, shown.end) == ("abc ", "")


def test_windows_add_up_and_share_nothing(tmp_path: Path) -> None:
    prompts = [SHARED + "a", SHARED + "b", SHARED + "c", SHARED + "d", "tail"]
    whole = plan(tmp_path, columns={"prompt": prompts}, max_tokens=8)
    parts = plan(tmp_path, 2, columns={"prompt": prompts}, max_tokens=8)
    pair = plan(tmp_path, columns={"prompt": prompts[:2]}, max_tokens=8)
    last = plan(tmp_path, columns={"prompt": prompts[4:]}, max_tokens=8)
    assert parts.num_windows == 3
    assert parts.plan.num_prompt_tokens == whole.plan.num_prompt_tokens
    assert parts.plan.num_unique_prompt_tokens == whole.plan.num_unique_prompt_tokens + 144
    assert parts.plan.with_sharing.flops == 2 * pair.plan.with_sharing.flops + last.plan.with_sharing.flops
    assert parts.plan.without_sharing.flops == whole.plan.without_sharing.flops
    assert parts.plan.kv.peak_bytes == pair.plan.kv.peak_bytes  # windows run one after the other
    assert parts.plan.num_parameters == whole.plan.num_parameters
    assert parts.plan.shareable_share == pytest.approx(2 * 144 / (4 * 145 + 4))
    assert [shown.prefix.example_row for shown in parts.shared_prefixes] == [0, 2]


def test_rows_that_cannot_run_are_counted_apart(tmp_path: Path) -> None:
    report = plan(tmp_path, columns={"prompt": ["a", None, "", "x" * 600, "y" * 512]})
    assert report.refused_by_code == {"prompt_empty": 1, "prompt_null": 1, "prompt_too_long": 2}
    assert (report.num_rows, report.plan.num_rows) == (5, 1)
    assert "cannot run: 4 (prompt_empty: 1, prompt_null: 1, prompt_too_long: 2)" in report.to_text()


def test_no_row_can_run(tmp_path: Path) -> None:
    report = plan(tmp_path, columns={"prompt": pa.array([None, None], pa.string())})
    assert report.plan.num_rows == 0
    assert "shared prefixes none" in report.to_text()
    json.dumps(report.to_dict(), allow_nan=False)


def test_outputs_are_cut_to_what_the_model_can_hold_and_n_counts(tmp_path: Path) -> None:
    report = plan(tmp_path, columns={"prompt": ["x" * 500]}, max_tokens=100, n=3)
    assert report.plan.max_output_tokens == 3 * 12  # max_position is 512
    assert "total: 500, once for each row · unique" in report.to_text()
    assert "total: 500 · unique" in plan(tmp_path, columns={"prompt": ["x" * 500, None]}).to_text()


def test_rows_have_their_own_lengths(tmp_path: Path) -> None:
    params = [{"max_tokens": 5, "n": 2}, {"max_tokens": None, "n": None}]
    report = plan(tmp_path, columns={"prompt": ["a", "b"], "sampling_params": params}, max_tokens=7)
    assert report.plan.max_output_tokens == 2 * 5 + 7


def test_json_values(tmp_path: Path) -> None:
    report = plan(tmp_path, columns={"prompt": [SHARED + "a", SHARED + "b", None]})
    value = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (value["num_rows"], value["num_rows_refused"], value["num_prompt_tokens"]) == (3, 1, 290)
    assert value["shared_prefixes"][0]["begin"] == SHARED[:40]
    assert value["with_sharing"]["flops"] < value["without_sharing"]["flops"]
    assert value["params"]["max_tokens"] == {"value": 1024, "origin": "default"}
