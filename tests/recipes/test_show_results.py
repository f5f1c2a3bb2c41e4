"""What `make demo` shows at the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def test_shows_question_output_and_reference_of_a_few_rows_per_family(tmp_path: Path, repo_root: Path) -> None:
    prompts = pq.read_table(repo_root / "data" / "quickstart.parquet")
    outputs = [None if i == 1 else f"output [{i}]" for i in range(prompts.num_rows)]  # [..]: not markup
    reasons = ["error" if output is None else "stop" for output in outputs]
    results = prompts.append_column("output", pa.array(outputs)).append_column("finish_reason", pa.array(reasons))
    path = tmp_path / "results.parquet"
    pq.write_table(results, path)

    command = [sys.executable, str(repo_root / "recipes" / "show_results.py"), str(path), "--per-family", "1"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)

    assert shown.returncode == 0, shown.stderr
    families = prompts["family"].to_pylist()
    for i, family in enumerate(families):
        is_first = family not in families[:i]
        assert (f"{family}-000" in shown.stdout) or not is_first
        if outputs[i] is not None:
            assert (f"{outputs[i]} " in shown.stdout) == is_first
    assert "error" in shown.stdout  # row 1 is shown, and as failed
