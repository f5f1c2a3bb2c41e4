"""How the numbers of this report were made, each method named only where it was used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from batchinfer.evals.result import ComparisonResult


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    text: str
    source: str = ""


def methods(result: ComparisonResult) -> list[Method]:
    return list(_pairs(result)) + list(_statistics(result)) + list(_metrics(result))


def _pairs(result: ComparisonResult) -> Iterator[Method]:
    pairing = result.pairing
    if not pairing.num_pairs:
        return
    yield Method(
        "Pairs",
        f"Rows are paired by {pairing.paired_by} and sample. Every difference is after − before, over the pairs with a "
        "value on both sides; a null has a reason and counts on neither side.",
    )
    yield Method(
        "Clusters",
        f"{pairing.num_clusters:,} clusters by {pairing.clustered_by}. Rows of a cluster are resampled and swapped "
        "together, so that samples of one prompt do not count as independent.",
        "Davison and Hinkley 1997, Bootstrap Methods and their Application, 3.8",
    )


def _statistics(result: ComparisonResult) -> Iterator[Method]:
    measured = [metric for metric in result.metrics if metric.difference.low is not None]
    tests = {test.name for metric in result.metrics for test in metric.tests}
    if measured:
        yield Method(
            "Intervals",
            f"{result.confidence:.0%} bias-corrected and accelerated bootstrap over clusters (BCa), with Student's "
            "quantiles for few clusters.",
            "Efron 1987, Better Bootstrap Confidence Intervals; Hesterberg 2015, What Teachers Should Know About the "
            "Bootstrap, 5.3",
        )
    if any(metric.spec.kind == "binary" and metric.is_paired for metric in measured):
        yield Method(
            "Shares with few events",
            "Below 20 events, or 20 pairs that differ, independent rows have closed-form intervals.",
            "Wilson 1927 for one share; Bonett and Price 2012, equation 2, for a paired difference",
        )
    if any(name.startswith("McNemar") for name in tests):
        yield Method(
            "McNemar's test",
            "Binary metrics of independent rows. Of the b + c pairs that differ, are b and c as a fair coin would give "
            "them? Exact binomial, above 1,000 such pairs (|b − c| − 1)² / (b + c) against χ².",
            "McNemar 1947; Edwards 1948",
        )
    if any(name.startswith("sign-flip") for name in tests):
        yield Method(
            "Permutation test",
            "Other metrics, and clustered rows. Before and after are swapped in whole clusters, in all ways or 9,999 "
            "random ones; p = (1 + hits) / (1 + swaps).",
            "Fisher 1935, The Design of Experiments, 21; Phipson and Smyth 2010",
        )
    if any(name.startswith("Wilcoxon") for name in tests):
        yield Method("Wilcoxon's signed-rank test", "Beside the permutation test; it does not decide.", "Wilcoxon 1945")
    if tests:
        yield Method(
            "Adjusted p",
            "Over all tested metrics in which any row differs: the chance of even one false finding among them stays "
            "below 5 %. A metric is better, worse or changed if its adjusted p is below 0.05 and its difference is "
            "above the noise floor.",
            "Holm 1979; Tarone 1990",
        )
    if any(metric.min_detectable_effect is not None for metric in result.metrics):
        yield Method(
            "Detectable",
            "The smallest true difference that a test at 5 % would find in 80 of 100 such comparisons, (1.96 + 0.84) "
            "standard errors.",
            "Bloom 1995, Minimum detectable effects",
        )
    if any(metric.noise_floor is not None for metric in result.metrics):
        yield Method(
            "Noise floor",
            "The same model against itself, under another seed and in other batches: the far end of that difference's "
            "interval. Nothing at or below it counts as a change.",
        )


def _metrics(result: ComparisonResult) -> Iterator[Method]:
    for metric in result.metrics:
        spec = metric.spec
        if spec.is_derived or not spec.description:
            continue
        summary = "" if spec.summary == "mean" else ". Shown is exp(Σ weight · value / Σ weight)"
        yield Method(spec.title, f"{spec.name}: {spec.description}{summary}.")
