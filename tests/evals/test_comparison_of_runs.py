"""A planted change is found, with its size, and nothing else is."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from batchinfer.errors import InputError
from batchinfer.evals import EvalOptions, MetricScores, MetricSpec, Needs, RowValues, Scores, compare
from batchinfer.evals.result import Verdict

FLAGGED = {Verdict.BETTER, Verdict.WORSE, Verdict.CHANGED}
LABELS = ("billing", "delivery", "account", "defect", "question")


def answers(num_rows: int, seed: int, share_right: float = 0.8) -> tuple[list[str], dict[str, list]]:
    """(outputs, input columns)"""
    rng = random.Random(seed)
    references = [rng.choice(LABELS) for _ in range(num_rows)]
    outputs = [label if rng.random() < share_right else rng.choice(LABELS) for label in references]
    inputs = {
        "id": list(range(num_rows)),
        "prompt": [f"message {i}" for i in range(num_rows)],
        "reference": references,
        "family": [("short", "long")[i % 2] for i in range(num_rows)],
    }
    return outputs, inputs


def flagged(result) -> dict[str, Verdict]:
    return {metric.name: metric.verdict for metric in result.metrics if metric.verdict in FLAGGED}


def test_a_model_against_itself_in_another_order_is_never_flagged(make_run) -> None:
    for seed in range(20):
        outputs, inputs = answers(150, seed)
        before = make_run(outputs, inputs)
        order = list(range(150))
        random.Random(seed).shuffle(order)
        result = compare(before, make_run(outputs, inputs).take(order), metrics=["accuracy", "diversity", "length"])
        assert flagged(result) == {}
        assert result.metric("accuracy").verdict is Verdict.NO_CHANGE
        assert (result.metric("accuracy").difference.low, result.metric("accuracy").difference.high) == (0.0, 0.0)


def test_noise_that_favours_neither_side_is_hardly_ever_flagged(make_run) -> None:
    """Both sides draw their errors anew: 60 comparisons at a level of 5 % for all metrics together."""
    num_flagged = 0
    for seed in range(60):
        outputs, inputs = answers(120, seed)
        others = [
            label if random.Random(f"{seed} {i}").random() < 0.8 else random.Random(f"{i} {seed}").choice(LABELS)
            for i, label in enumerate(inputs["reference"])
        ]
        result = compare(make_run(outputs, inputs), make_run(others, inputs), metrics=["accuracy", "length"])
        num_flagged += bool(flagged(result))
    assert num_flagged <= 6  # 3 expected at most, more than 6 in 3 of 100 such tests


def test_5_percent_corrupted_answers_are_flagged_with_their_size(make_run) -> None:
    outputs, inputs = answers(1_000, seed=1)
    corrupted = list(outputs)
    for row in random.Random(2).sample(range(1_000), 50):
        corrupted[row] = "harm"  # never right
    num_right = sum(a == b and c != b for a, b, c in zip(outputs, inputs["reference"], corrupted, strict=True))
    result = compare(make_run(outputs, inputs), make_run(corrupted, inputs), metrics=["accuracy", "diversity"])
    accuracy = result.metric("accuracy")
    assert flagged(result) == {"accuracy": Verdict.WORSE}
    assert accuracy.difference.mean == pytest.approx(-num_right / 1_000)
    assert accuracy.difference.low < -num_right / 1_000 < accuracy.difference.high < 0
    assert accuracy.difference.low > -0.07
    assert (accuracy.wins, accuracy.losses) == (0, num_right)
    assert accuracy.tests[0].detail == {"only_before": float(num_right), "only_after": 0.0}
    assert accuracy.tests[0].p_adjusted < 1e-6
    assert [example.id for example in result.worst["accuracy"]] == sorted(
        row for row, text in enumerate(corrupted) if text == "harm" and outputs[row] == inputs["reference"][row]
    )[:20]
    assert result.best["accuracy"] == ()


def test_longer_outputs_are_a_change_without_a_better_direction(make_run) -> None:
    outputs, inputs = answers(200, seed=3)
    longer = [text + " indeed" * (i % 3) for i, text in enumerate(outputs)]
    result = compare(make_run(outputs, inputs), make_run(longer, inputs), metrics=["length"])
    assert flagged(result) == {"output_tokens": Verdict.CHANGED}
    tokens = result.metric("output_tokens")
    assert tokens.difference.mean == pytest.approx(np.mean([7 * (i % 3) for i in range(200)]))
    assert [test.name for test in tokens.tests] == ["sign-flip permutation", "Wilcoxon signed-rank"]
    assert tokens.min_detectable_effect == pytest.approx(2.80 * 5.72 / np.sqrt(200), rel=0.1)


def test_samples_of_a_prompt_are_one_cluster(make_run) -> None:
    """8 samples of 30 prompts: taken for 240 independent rows the interval would be far too short."""
    rng = random.Random(0)
    inputs = {"id": list(range(30)), "prompt": [str(i) for i in range(30)], "reference": ["yes"] * 30}
    before = [["yes"] * 8 if rng.random() < 0.5 else ["no"] * 8 for _ in range(30)]
    after = [["yes"] * 8 if rng.random() < 0.5 else ["no"] * 8 for _ in range(30)]
    result = compare(make_run(before, inputs), make_run(after, inputs), metrics=["accuracy"])
    accuracy = result.metric("accuracy")
    assert (accuracy.n, accuracy.num_clusters) == (240, 30)
    width = accuracy.difference.high - accuracy.difference.low
    one_sample = compare(
        make_run([texts[0] for texts in before], inputs),
        make_run([texts[0] for texts in after], inputs),
        metrics=["accuracy"],
    ).metric("accuracy")
    assert width == pytest.approx(one_sample.difference.high - one_sample.difference.low, rel=0.2)
    assert [test.name for test in accuracy.tests] == ["sign-flip permutation"]
    assert {"pass@2", "pass@4", "pass@8", "maj@4", "maj@8"} <= {metric.name for metric in result.metrics}


def test_differences_within_the_noise_floor_are_no_change(make_run) -> None:
    outputs, inputs = answers(400, seed=5)
    longer, much_longer = ([text + "!" * k for text in outputs] for k in (1, 4))
    before = make_run(outputs, inputs)
    noise = [text + "!" * (2 if i % 2 else 1) for i, text in enumerate(outputs)]  # 1.5 tokens
    options = {"metrics": ["length"], "noise_run": make_run(noise, inputs)}
    small = compare(before, make_run([t + "!" * (i % 2) for i, t in enumerate(longer)], inputs), **options)
    assert flagged(small) == {}
    assert small.metric("output_tokens").noise_floor.size == pytest.approx(1.5, abs=0.1)
    assert "noise floor" in small.metric("output_tokens").reason
    large = compare(before, make_run([t + "!" * (i % 2) for i, t in enumerate(much_longer)], inputs), **options)
    assert flagged(large) == {"output_tokens": Verdict.CHANGED}


class Distance:
    """An evaluator between the sides."""

    name = "distance"
    title = "Distance"
    needs = Needs()
    metric_names = ("distance",)

    def why_not(self, pairs, context) -> str | None:
        return None

    def score(self, pairs, context) -> Scores:
        values = [abs(float(b) - float(a)) for a, b in zip(pairs.before.texts, pairs.after.texts, strict=True)]
        spec = MetricSpec("distance", "Distance", "", "continuous", higher_is_better=False)
        return Scores((MetricScores(spec, between=RowValues.of(values)),))


def test_figures_between_the_sides_are_judged_by_the_noise_floor_alone(make_run) -> None:
    rng = np.random.default_rng(0)

    def run(scale: float) -> pa.Table:
        return make_run([f"{abs(value):.6f}" for value in rng.normal(0, scale, size=100)])

    before = make_run(["0.0"] * 100)
    alone = compare(before, run(1.0), metrics=[Distance()])
    assert alone.metric("distance").verdict is Verdict.NOT_TESTED
    assert alone.metric("distance").before is None
    assert alone.metric("distance").difference.low > 0.5
    noisy = compare(before, run(0.5), metrics=[Distance()], noise_run=run(1.0))
    assert noisy.metric("distance").verdict is Verdict.NO_CHANGE
    clear = compare(before, run(1.0), metrics=[Distance()], noise_run=run(0.01))
    assert clear.metric("distance").verdict is Verdict.CHANGED
    same = compare(before, before, metrics=[Distance()])
    assert same.metric("distance").verdict is Verdict.NO_CHANGE


def test_evaluators_are_checked(make_run) -> None:
    run = make_run(["1.0", "2.0"])

    class Short(Distance):
        def score(self, pairs, context) -> Scores:
            (one,) = super().score(pairs, context).metrics
            return Scores((replace(one, between=RowValues(one.between.values[:1], {})),))

    with pytest.raises(ValueError, match="'distance' gave 1 values of 'distance' for 2 samples"):
        compare(run, run, metrics=[Short()])
    with pytest.raises(InputError, match="both give a metric 'distance'"):
        compare(run, run, metrics=[Distance(), Distance()])


def test_what_cannot_run_is_left_out_with_its_reason_unless_it_was_asked_for(make_run) -> None:
    run = make_run(["a"] * 10)
    result = compare(run, run)
    left_out = {skipped.name: skipped.reason for skipped in result.skipped}
    assert left_out["accuracy"] == "there is no reference column: name one with --reference-column"
    with pytest.raises(InputError, match="--metrics accuracy: there is no reference column"):
        compare(run, run, metrics=["accuracy"])
    with pytest.raises(InputError, match="no evaluator 'acuracy'; did you mean 'accuracy'"):
        compare(run, run, metrics=["acuracy"])


def test_no_pairs_is_a_result_without_metrics(make_run) -> None:
    before = make_run(["a"], {"id": ["x"], "prompt": ["p"]})
    after = make_run(["a"], {"id": ["y"], "prompt": ["p"]})
    result = compare(before, after, gates=["output_tokens<=1"], slice_by=["prompt"])
    assert result.pairing.num_pairs == 0
    assert result.metrics == ()
    assert {skipped.reason for skipped in result.skipped} == {"no pairs"}
    assert not result.gates[0].passed
    assert result.rows.num_rows == 0


def test_one_row_has_no_interval_and_no_test(make_run) -> None:
    run = make_run(["a"], {"id": ["x"], "reference": ["a"]})
    accuracy = compare(run, run, metrics=["accuracy"]).metric("accuracy")
    assert (accuracy.before.mean, accuracy.difference.mean, accuracy.difference.low) == (1.0, 0.0, None)
    assert accuracy.verdict is Verdict.NOT_TESTED
    assert accuracy.tests == ()
    assert "at least 6 are needed" in accuracy.reason


def test_rows_that_failed_on_one_side_are_null_there(make_run) -> None:
    inputs = {"id": list(range(40)), "reference": ["a"] * 40}
    before = make_run(["a"] * 40, inputs)
    after = make_run([None, None, *["a"] * 38], inputs)
    result = compare(before, after, metrics=["accuracy", "length"])
    accuracy = result.metric("accuracy")
    assert accuracy.n == 38
    assert accuracy.num_null_before == {}
    assert accuracy.num_null_after == {"no output: prompt_null": 2}
    assert result.metric("failed").difference.mean == pytest.approx(2 / 40)
    assert result.rows.column("accuracy.after").null_count == 2
    assert result.rows.column("accuracy.null_reason")[0].as_py() == "after: no output: prompt_null"


def test_slices_are_the_metric_over_part_of_the_rows(make_run) -> None:
    outputs, inputs = answers(200, seed=7)
    after = [text if family == "short" else "wrong" for text, family in zip(outputs, inputs["family"], strict=True)]
    result = compare(make_run(outputs, inputs), make_run(after, inputs), metrics=["accuracy"], slice_by=["family"])
    by_value = {one.value: one for one in result.slices}
    assert set(by_value) == {"short", "long"}
    assert by_value["short"].difference.mean == 0.0
    assert by_value["long"].after.mean == 0.0
    assert by_value["long"].n == 100
    assert by_value["long"].before.mean == pytest.approx(
        np.mean([o == r for o, r in zip(outputs[1::2], inputs["reference"][1::2], strict=True)])
    )
    with pytest.raises(InputError, match="--slice-by task: before has no such column"):
        compare(make_run(outputs, inputs), make_run(after, inputs), slice_by=["task"])


def test_numbers_depend_on_the_seed_alone_and_not_on_the_other_metrics(make_run) -> None:
    outputs, inputs = answers(150, seed=8)
    longer = [text + " indeed" * (i % 3) for i, text in enumerate(outputs)]
    runs = make_run(outputs, inputs), make_run(longer, inputs)
    first, again, alone = (compare(*runs, metrics=names) for names in (["length", "accuracy"],) * 2 + (["length"],))
    assert first.metrics == again.metrics
    assert first.metric("output_tokens").difference == alone.metric("output_tokens").difference
    other = compare(*runs, metrics=["length"], options=EvalOptions(seed=1)).metric("output_tokens").difference
    assert other.mean == first.metric("output_tokens").difference.mean
    assert other != first.metric("output_tokens").difference


def test_a_noise_run_of_another_model_is_refused(make_run) -> None:
    run = make_run(["a"] * 8)
    with pytest.raises(InputError, match="a run of another model"):
        compare(run, run, metrics=["length"], noise_run=make_run(["a"] * 8, digests={"model": "other"}))
