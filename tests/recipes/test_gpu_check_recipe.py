"""The check of a GPU: what it makes of parts that fail in every way, and a dry run of them all."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

#: What an image for GPUs need not have. The check must do without.
ABSENT = (
    "typer", "datasets", "pyarrow", "pandas", "rich", "sacrebleu", "scipy", "matplotlib", "sentence_transformers",
    "gguf", "peft",
)  # fmt: skip
#: Figures that each part must have measured.
FIGURES = {
    "kernels": ("rms_norm_worst_units", "tree_attention_4x2x16_window_worst_units", "copy_kv_equal", "greedy_equal",
                "sample_same_tokens", "linear_down_300_worst_units", "linear_logprobs_error"),
    "invariance": ("triton-deterministic", "triton"),
    "rates": ("copy_bytes_per_s", "decode_product_flops_per_s", "prefill_product_us"),
    "model": ("decode_tokens_per_s", "decode_share", "prefill_tokens_per_s", "prefill_share_of_products",
              "engine_output_tokens_per_s", "engine_ahead_speed_up", "engine_ahead_same_rows"),
    "shared": ("shared_ms", "unshared_ms", "speed_up", "shared_least_ms"),
    "deterministic": ("decode_cost", "small_decode_cost", "prefill_cost"),
    "fp8": ("fp8_values_equal", "fp8_attention_4x2x16_worst_units", "fp8_rows_in_company_equal", "plain_decode_ms",
            "fp8_decode_ms", "fp8_decode_speed_up"),
    "peer": ("ours_output_tokens_per_s", "peer_output_tokens_per_s", "times_peer", "logprob_difference_mean"),
    "times": ("decode_times", "prefill_times"),
}  # fmt: skip
#: Python of an image without those packages, and without batchinfer installed.
BARE = f"""
import sys
from importlib.machinery import PathFinder
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT!r} else super().find_spec(name, path, target)
sys.meta_path[:] = [
    Bare if finder is PathFinder else finder for finder in sys.meta_path if "editable" not in str(finder).lower()
]
"""


@pytest.fixture
def recipe(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repo_root / "recipes"))
    return importlib.import_module("gpu_check")


@pytest.fixture
def parts(recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the check parts of one's own: name -> source, which finds the path of its report in `report`."""
    monkeypatch.setattr(recipe, "FOLDER", tmp_path)
    monkeypatch.setattr(recipe, "find_chip", lambda: {"name": "made up"})

    def use(limit_s: float = 30, **sources: str) -> None:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(f"import sys\nreport = sys.argv[1]\n{source}\n")
        made = {name: recipe.Part(f"{name}.py", limit_s, is_timed=bool(i % 2)) for i, name in enumerate(sources)}
        monkeypatch.setattr(recipe, "PARTS", made)

    return use


def run(recipe: ModuleType, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert recipe.main([*options, "--parts", ",".join(recipe.PARTS)]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=refuse)


WRITE = """open(report, "w").write('{"rate": 3, "problems": []}')"""


def test_one_part_that_fails_does_not_stop_the_others(
    recipe: ModuleType, parts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    parts(
        good=WRITE,
        wrong="""open(report, "w").write('{"error": NaN, "problems": ["too far off"]}')""",
        crash=WRITE + "\nimport os; os.abort()",
        raises="print('why it failed', file=sys.stderr); raise SystemExit(3)",
        late=WRITE,
    )
    found = run(recipe, capsys)
    assert not found["passed"]
    assert {name: part["status"] for name, part in found["parts"].items()} == {
        "good": "passed", "wrong": "failed", "crash": "failed", "raises": "failed", "late": "passed",
    }  # fmt: skip
    assert found["parts"]["good"]["values"] == {"rate": 3}
    assert found["parts"]["wrong"]["values"] == {"error": None}
    assert found["parts"]["wrong"]["problems"] == ["too far off"]
    assert found["parts"]["crash"]["values"] == {"rate": 3}, "what was known before it crashed"
    assert "why it failed" in found["parts"]["raises"]["stderr"]
    assert found["parts"]["raises"]["problems"] == ["ended with code 3"]
    assert found["chip"] == {"name": "made up"}


def test_a_part_that_hangs_is_ended_with_what_it_started(
    recipe: ModuleType, parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = f"import time; time.sleep(4); open({str(tmp_path / 'alive')!r}, 'w')"
    hang = f"{WRITE}\nimport subprocess, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(60)"
    parts(limit_s=1.5, hang=hang)
    found = run(recipe, capsys)["parts"]["hang"]
    assert (found["status"], found["values"]) == ("timed out", {"rate": 3})
    assert found["seconds"] < 20
    time.sleep(4)
    assert not (tmp_path / "alive").exists()


def test_no_part_begins_when_the_time_is_over(
    recipe: ModuleType, parts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    parts(one=WRITE)
    found = run(recipe, capsys, "--limit-s", "1")["parts"]["one"]
    assert (found["status"], found["problems"]) == ("not run", ["no time was left"])


def test_without_a_gpu_it_says_so(
    recipe: ModuleType,
    parts: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts(one=WRITE)
    monkeypatch.setattr(recipe, "find_chip", lambda: None)
    found = run(recipe, capsys, "--output", str(tmp_path / "check.json"))
    assert json.loads((tmp_path / "check.json").read_text()) == found
    assert not found["passed"]
    assert found["chip"] is None
    assert found["parts"]["one"]["problems"] == ["torch finds no GPU here; --dry-run needs none"]


def test_limits_fit_six_minutes(recipe: ModuleType) -> None:
    assert recipe.LIMIT_S < 350
    assert all(5 <= part.limit_s < recipe.LIMIT_S for part in recipe.PARTS.values())
    assert set(FIGURES) == set(recipe.PARTS)


@pytest.mark.slow
def test_dry_run(repo_root: Path, tmp_path: Path) -> None:
    """All parts, at tiny sizes, from a checkout that is not installed, without the packages that only commands need."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # it sees to that itself
    command = [sys.executable, str(repo_root / "recipes" / "gpu_check.py"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name, part in found["parts"].items():
        assert part["status"] == "passed", (name, part["problems"], part["stderr"])
        missing = [figure for figure in FIGURES[name] if figure not in part["values"]]
        assert not missing, (name, missing)
        figures = [value for value in part["values"].values() if isinstance(value, float)]
        assert all(math.isfinite(value) for value in figures)
    assert found["passed"]
    assert found["dry_run"]
    assert found["parts"]["invariance"]["values"]["triton-deterministic"]["holds"]
    assert found["parts"]["peer"]["values"]["same_first_tokens"] == 1, "fp32: the tokens are transformers'"
    assert found["seconds"] < 345
