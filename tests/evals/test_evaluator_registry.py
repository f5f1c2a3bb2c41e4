"""Evaluators by name: built-in ones, and those of other packages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from batchinfer.errors import InputError
from batchinfer.evals.protocol import EvalOptions, Evaluator
from batchinfer.evals.registry import BUILTIN, evaluator_names, make_evaluators


def test_built_in_evaluators_keep_the_contract() -> None:
    evaluators = make_evaluators(None, EvalOptions())
    assert {one.name for one in evaluators} >= {"accuracy", "semantic", "diversity", "length", "win_rate"}
    for one in evaluators:
        assert isinstance(one, Evaluator)
        assert one.title
        assert one.metric_names
    assert set(BUILTIN) <= set(evaluator_names())
    assert evaluators[-1].name == "win_rate"  # it reads the others


def test_names_are_taken_once_and_typing_errors_get_a_hint() -> None:
    assert [one.name for one in make_evaluators(["win_rate", "length", "length"], EvalOptions())] == [
        "length",
        "win_rate",
    ]
    with pytest.raises(InputError, match=r"no evaluator 'lenght'; did you mean 'length'\?"):
        make_evaluators(["lenght"], EvalOptions())


PLUGIN = """
from batchinfer.evals import MetricScores, MetricSpec, Needs, Scores

class WordCount:
    name = "word_count"
    title = "Words per output"
    needs = Needs()
    metric_names = ("words",)

    def __init__(self, options):
        self.seed = options.seed

    def why_not(self, pairs, context):
        return self.needs.why_not(pairs, context)

    def score(self, pairs, context):
        spec = MetricSpec("words", "Words", "words", "continuous", higher_is_better=None)
        return Scores((MetricScores.of_texts(spec, pairs, lambda text: float(len(text.split()))),))
"""
USE_PLUGIN = """
import sys
from batchinfer.evals import compare
from batchinfer.evals.registry import evaluator_names
print(evaluator_names())
result = compare(sys.argv[1], sys.argv[1], metrics=["word_count"])
print(result.metric("words").before.mean)
result = compare(sys.argv[1], sys.argv[1])
print(result.metric("words").before.mean, [one.reason for one in result.skipped if one.name == "broken"])
"""


def test_an_installed_package_adds_its_own(write_run, tmp_path) -> None:
    """An entry point and a module, as pip would install them."""
    site = tmp_path / "site"
    info = site / "word_count-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "word_count.py").write_text(PLUGIN, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: word-count\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[batchinfer.evaluators]\nword_count = word_count:WordCount\nbroken = no_such_module:X\n", encoding="utf-8"
    )
    run = write_run("run.parquet", ["one", "one two", "one two three"])
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))

    def python(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, str(run)],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )

    done = python(USE_PLUGIN)
    assert done.returncode == 0, done.stderr
    names, mean, all_of_them = done.stdout.splitlines()
    assert all_of_them == "2.0 [\"evaluator 'broken' cannot be loaded: No module named 'no_such_module'\"]"
    assert "'word_count'" in names
    assert float(mean) == 2.0
    broken = python("from batchinfer.evals.registry import *; make_evaluators(['broken'], None)")
    assert "evaluator 'broken' cannot be loaded: No module named 'no_such_module'" in broken.stderr
