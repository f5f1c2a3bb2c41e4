"""Gates: what they accept, and at which end of the interval they are judged."""

from __future__ import annotations

import pytest

from batchinfer.errors import InputError
from batchinfer.evals import compare
from batchinfer.evals.gates import Gate, parse_gates


@pytest.mark.parametrize(
    ("text", "metric", "is_at_least", "limit"),
    [
        ("accuracy>=-0.01", "accuracy", True, -0.01),
        (" kl <= 0.05 ", "kl", False, 0.05),
        ("pass@4>=.5", "pass@4", True, 0.5),
        ("win_rate.accuracy>=4e-1", "win_rate.accuracy", True, 0.4),
        ("output_tokens<=+10", "output_tokens", False, 10.0),
    ],
)
def test_gates_are_read(text: str, metric: str, is_at_least: bool, limit: float) -> None:
    gate = Gate.parse(text)
    assert (gate.metric, gate.is_at_least, gate.limit) == (metric, is_at_least, limit)


@pytest.mark.parametrize(
    "text", ["", "accuracy", "accuracy>0.1", "accuracy>=", ">=0.1", "accuracy>=x", "accuracy>=1e999", "a b>=1"]
)
def test_what_is_no_gate_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="write METRIC>=NUMBER or METRIC<=NUMBER"):
        Gate.parse(text)


def test_a_gate_on_a_metric_that_nobody_gives_is_refused() -> None:
    assert parse_gates(["pass@8>=0"], ["accuracy", "pass@*"])
    with pytest.raises(InputError, match="no chosen evaluator gives a metric 'acuracy'; there are accuracy, pass"):
        parse_gates(["acuracy>=0"], ["accuracy", "pass@*"])


def test_gates_are_judged_at_the_unfavourable_end(make_run) -> None:
    inputs = {"id": list(range(200)), "reference": ["a"] * 200}
    before = make_run(["a"] * 100 + ["b"] * 100, inputs)
    after = make_run(["a"] * 90 + ["b"] * 100 + ["a"] * 10, inputs)  # 10 lost, 10 gained
    difference = compare(before, after, metrics=["accuracy"]).metric("accuracy").difference
    assert difference.mean == 0.0
    assert -0.06 < difference.low < -0.03
    assert 0.03 < difference.high < 0.06
    gates = ["accuracy>=-0.02", "accuracy>=-0.07", "accuracy<=0.02", "accuracy<=0.07"]
    result = compare(before, after, metrics=["accuracy"], gates=gates)
    assert [gate.passed for gate in result.gates] == [False, True, False, True]
    assert [gate.bound for gate in result.gates] == [difference.low] * 2 + [difference.high] * 2


def test_a_gate_on_what_could_not_be_measured_fails(make_run) -> None:
    run = make_run(["a"] * 10)
    (gate,) = compare(run, run, gates=["accuracy>=-1"]).gates
    assert not gate.passed
    assert "accuracy was not measured; left out:" in gate.reason
    assert "there is no reference column" in gate.reason


def test_the_same_outputs_pass_any_gate_around_zero(make_run) -> None:
    run = make_run(["a"] * 10, {"id": list(range(10)), "reference": ["a"] * 9 + ["b"]})
    result = compare(run, run, metrics=["accuracy"], gates=["accuracy>=0"])
    assert result.gates[0].passed
    assert "all outputs are the same" in result.metric("accuracy").reason


def test_samples_without_a_difference_do_not_pass_it_either(make_run) -> None:
    inputs = {"id": list(range(20)), "reference": ["a"] * 20}
    before, after = make_run([["a", "b"]] * 20, inputs), make_run([["A.", "c"]] * 20, inputs)
    result = compare(before, after, metrics=["accuracy"], gates=["accuracy>=-0.01", "pass@2>=-0.01"])
    assert result.metric("accuracy").num_clusters == 20
    assert result.metric("pass@2").n == 20
    assert [gate.passed for gate in result.gates] == [False, False]
    assert all(gate.bound < -0.05 for gate in result.gates)


def test_few_rows_do_not_pass_a_narrow_gate_for_lack_of_differences(make_run) -> None:
    """Other outputs, all as right as before: 20 rows cannot show that less than 1 % are lost."""
    inputs = {"id": list(range(20)), "reference": ["a"] * 20}
    result = compare(
        make_run(["a"] * 20, inputs), make_run(["A."] * 20, inputs), metrics=["accuracy"], gates=["accuracy>=-0.01"]
    )
    assert not result.gates[0].passed
    assert result.gates[0].bound < -0.05
