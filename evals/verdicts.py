"""From the tests of all metrics, and their noise floors, to a verdict on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchinfer.evals.aggregate import LEVEL, MIN_CLUSTERS_TO_TEST
from batchinfer.evals.result import MetricResult, NoiseFloor, Verdict
from batchinfer.evals.stats.significance import holm


def judge(results: Sequence[MetricResult], floors: dict[str, NoiseFloor] | None = None) -> list[MetricResult]:
    """Holm over the tested metrics, then each one's verdict against its noise floor.

    A metric of which no row differs cannot come out significant, and does not count among the tests (Tarone
    1990, A modified Bonferroni method for discrete data).
    """
    floors = floors or {}
    p_values = {i: p for i, result in enumerate(results) if (p := _p_value(result)) is not None}
    can_differ = [i for i in p_values if results[i].wins + results[i].losses]
    adjusted = dict.fromkeys(p_values, 1.0)
    adjusted.update(zip(can_differ, holm([p_values[i] for i in can_differ]), strict=True))
    judged = []
    for i, result in enumerate(results):
        floor = floors.get(result.name)
        if i in adjusted:
            first = replace(result.tests[0], p_adjusted=adjusted[i])
            result = replace(result, tests=(first, *result.tests[1:]))
        verdict, reason = _verdict(result, adjusted.get(i), floor)
        both = "; ".join(filter(None, [reason, result.reason]))
        judged.append(replace(result, noise_floor=floor, verdict=verdict, reason=both or None))
    return judged


def _p_value(result: MetricResult) -> float | None:
    return result.tests[0].p_value if result.tests else None


def noise_floor(result: MetricResult) -> NoiseFloor:
    """`result` compares a model with itself."""
    ends = [result.difference.low, result.difference.high, result.difference.mean]
    distances = [abs(end - result.spec.neutral) for end in ends if end is not None]
    return NoiseFloor(result.difference, max(distances) if distances else None)


def _verdict(result: MetricResult, p_adjusted: float | None, floor: NoiseFloor | None) -> tuple[Verdict, str | None]:
    mean = result.difference.mean
    if mean is None:
        return Verdict.NOT_TESTED, None
    distance = abs(mean - result.spec.neutral)
    is_within_noise = floor is not None and floor.size is not None and distance <= floor.size
    if result.spec.is_derived:
        return Verdict.NOT_TESTED, "derived from another metric, which is tested"
    if not result.is_paired:
        return _verdict_between(result, floor, is_within_noise)
    if p_adjusted is None:
        few = f"{result.num_clusters} clusters are too few to test: at least {MIN_CLUSTERS_TO_TEST} are needed"
        return Verdict.NOT_TESTED, few if result.num_clusters < MIN_CLUSTERS_TO_TEST else "not testable"
    if p_adjusted >= LEVEL:
        return Verdict.NO_CHANGE, None
    if is_within_noise:
        return Verdict.NO_CHANGE, "the difference is within the noise floor"
    if result.spec.higher_is_better is None or mean == 0:
        return Verdict.CHANGED, None
    return (Verdict.BETTER if (mean > 0) == result.spec.higher_is_better else Verdict.WORSE), None


def _verdict_between(
    result: MetricResult, floor: NoiseFloor | None, is_within_noise: bool
) -> tuple[Verdict, str | None]:
    """Such figures are never exactly neutral for different models, so zero is no hypothesis to test."""
    ends = [end for end in (result.difference.low, result.difference.high) if end is not None]
    if ends and all(end == result.spec.neutral for end in ends):
        return Verdict.NO_CHANGE, None
    if floor is None or floor.size is None:
        return Verdict.NOT_TESTED, "measured between the two sides: judged only against a noise floor"
    if is_within_noise or not ends:
        return Verdict.NO_CHANGE, "within the noise floor"
    nearest = min(abs(end - result.spec.neutral) for end in ends)
    if nearest <= floor.size:
        return Verdict.NO_CHANGE, "its interval reaches into the noise floor"
    return Verdict.CHANGED, None
