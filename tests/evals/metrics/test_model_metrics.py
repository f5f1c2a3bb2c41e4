"""perplexity and drift: two tiny models, their own runs, and both read again by both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_folder import write_tiny_llama
from typer.testing import CliRunner

from batchinfer.cli.main import app
from batchinfer.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.errors import InputError
from batchinfer.evals.comparison import compare
from batchinfer.evals.metrics.reference_texts import read_texts
from batchinfer.evals.protocol import EvalOptions
from batchinfer.evals.result import ComparisonResult, Table
from batchinfer.scoring.divergence import compare_tokens
from batchinfer.scoring.encode import TextEncoder

CONFIG = EngineConfig(device="cpu", threads=1)
PROMPTS = [f"prompt number {i}" for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, `before` and `after` (of another rope), and a run of each with two samples and logprobs."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("before", {}), ("after", {"rope_theta": 100.0})):
        (folder / name).mkdir()
        write_tiny_llama(folder / name, config=config)
    rows = {"id": list(range(8)), "prompt": PROMPTS, "reference": [f"answer {i}" if i != 3 else None for i in range(8)]}
    pq.write_table(pa.table(rows), folder / "prompts.parquet")
    for name in ("before", "after"):
        run(folder, name, f"{name}.parquet")
    return folder


def run(folder: Path, model: str, output: str, *args: object) -> Path:
    words = ["run", folder / "prompts.parquet", "--model", folder / model, "--output", folder / output]
    words += ["--max-tokens", 12, "--temperature", 0.9, "--n", 2, "--logprobs", 0, "--device", "cpu", "--threads", 1]
    result = CliRunner().invoke(app, [*map(str, words), *map(str, args)])
    assert result.exit_code == 0, result.stderr
    return folder / output


def evaluate(
    folder: Path, *metrics: str, before: str = "before", after: str = "after", **options: Any
) -> ComparisonResult:
    files = options.pop("files", (f"{before}.parquet", f"{after}.parquet"))
    return compare(
        folder / files[0],
        folder / files[1],
        metrics=metrics,
        before_model=str(folder / before),
        after_model=str(folder / after),
        engine=CONFIG,
        **options,
    )


def table(result: ComparisonResult, name: str) -> Table:
    return next(one for one in result.tables if one.name == name)


def cells(found: Table) -> dict[Any, tuple[Any, ...]]:
    return {row[0]: row[1:] for row in found.rows}


@pytest.fixture(scope="module")
def both(folder: Path) -> ComparisonResult:
    return evaluate(folder, "perplexity", "drift")


def sampled(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def test_two_by_two_is_the_score_of_the_sampled_ids(folder: Path, both: ComparisonResult) -> None:
    found = cells(table(both, "perplexity_2x2"))
    for origin in ("before", "after"):
        for place, model in enumerate(("before", "after")):
            engine = Engine(str(folder / model), CONFIG)
            prompts = engine.tokenizer.encode_batch([row["prompt"] for row in sampled(folder, origin)])
            outputs = [row["output_token_ids"] for row in sampled(folder, origin)]
            rows = engine.score(list(zip(prompts, outputs, strict=True)))
            expected = np.exp(sum(row.nll for row in rows) / sum(row.num_scored_tokens for row in rows))
            assert found[origin][place] == pytest.approx(expected, rel=1e-5)
            metric = both.metric(f"output_perplexity_{model}")
            side = metric.before if origin == "before" else metric.after
            assert side is not None
            assert np.exp(side.mean) == pytest.approx(expected, rel=1e-5) or side.mean == pytest.approx(
                expected, rel=1e-5
            )


def test_the_reference_is_read_after_its_prompt(folder: Path, both: ComparisonResult) -> None:
    metric = both.metric("reference_perplexity")
    assert metric.n == 7
    assert dict(metric.num_null_before) == {"no reference": 1}
    engine = Engine(str(folder / "before"), CONFIG)
    pairs = [(prompt, f" answer {i}") for i, prompt in enumerate(PROMPTS) if i != 3]
    rows = engine.score(pairs)
    expected = np.exp(sum(row.nll for row in rows) / sum(row.num_scored_tokens for row in rows))
    assert metric.before is not None
    assert metric.before.mean == pytest.approx(expected, rel=1e-6)


def test_estimates_from_other_than_plain_draws_are_said_to_be_none(both: ComparisonResult) -> None:
    assert any("no draws from the models' own distributions" in notice.message for notice in both.warnings)


def test_drift_is_the_divergence_of_the_sampled_tokens(folder: Path, both: ComparisonResult) -> None:
    engines = [Engine(str(folder / name), CONFIG) for name in ("before", "after")]
    encoder = TextEncoder(engines[0].tokenizer, engines[0].model.spec.vocab_size)
    on_after = []
    for row in sampled(folder, "after"):
        prompt = engines[0].tokenizer.encode_batch([row["prompt"]])[0]
        ids = np.array(row["output_token_ids"], np.int32)
        ended = np.flatnonzero(ids == 1)
        on_after.append(encoder.continued(prompt, ids[: ended[0] + 1] if len(ended) else ids))
    found = compare_tokens(*engines, on_after)
    kl = np.concatenate([row.kl_after_before for row in found])
    assert both.metric("kl").difference.mean == pytest.approx(kl.mean(), rel=1e-9)
    summary = cells(table(both, "drift"))
    assert summary["KL(after || before)"][1] == pytest.approx(kl.mean())
    assert summary["tokens"][1] == len(kl)
    ratios = np.concatenate([row.logprobs_after - row.logprobs_before for row in found])
    assert both.metric("kl_k1").difference.mean == pytest.approx(ratios.mean())
    assert both.metric("kl").difference.mean > 0.001
    assert 0 < both.metric("top1_agreement").difference.mean < 1
    entropy = both.metric("token_entropy")
    assert entropy.after is not None
    assert entropy.after.mean == pytest.approx(np.concatenate([row.entropies_after for row in found]).mean())


def test_runs_stored_what_their_models_say(both: ComparisonResult) -> None:
    for _, num_tokens, mean, largest in table(both, "stored_logprobs").rows:
        assert num_tokens > 50
        assert 0 <= mean <= largest < 1e-4


def test_curves_go_along_the_output(both: ComparisonResult) -> None:
    names = {curve.name: curve for curve in both.curves}
    assert {"kl_by_position", "entropy_by_position"} <= set(names)
    series = names["kl_by_position"].series[0]
    assert series.x == tuple(range(12))
    assert all(value is not None and value >= 0 for value in series.y)


def test_the_report_is_strict(both: ComparisonResult) -> None:
    json.dumps(both.to_dict(), allow_nan=False)
    assert not both.warnings or all("made by another model" not in one.message for one in both.warnings)


def test_a_model_against_itself_has_not_moved(folder: Path) -> None:
    run(folder, "before", "again.parquet", "--seed", 5, "--max-batch-tokens", 7)
    found = evaluate(folder, "perplexity", "drift", after="before", files=("before.parquet", "again.parquet"))
    for name in ("kl", "kl_before_after", "kl_k1", "kl_k3", "clip_rate"):
        assert found.metric(name).difference.mean == 0
    assert found.metric("top1_agreement").difference.mean == 1
    ((_, num, mean, clipped, size, share), _) = table(found, "policy_ratio").rows
    assert (mean, clipped, size, share) == (1, 0, num, 1)
    rows = cells(table(found, "perplexity_2x2"))
    assert rows["before"][0] == rows["before"][1]


def test_outputs_of_another_model_are_a_warning(folder: Path) -> None:
    found = evaluate(folder, "drift", files=("after.parquet", "after.parquet"))
    assert any("outputs before were made by another model" in notice.message for notice in found.warnings)


def test_what_follows_an_end_is_left_out(folder: Path, tmp_path: Path) -> None:
    """With --ignore-eos runs go on: those tokens are no answer."""
    original = pq.read_table(folder / "before.parquet")
    place = original.column_names.index("output_token_ids")
    ids = [[*row[:3], 1, *row[3:]] for row in original.column("output_token_ids").to_pylist()]
    changed = original.set_column(place, original.schema.field(place), pa.array(ids, pa.list_(pa.int32())))
    pq.write_table(changed, tmp_path / "long.parquet")
    found = evaluate(folder, "drift", files=(tmp_path / "long.parquet", tmp_path / "long.parquet"))
    lengths = [row.index(1) + 1 for row in ids]  # some have ended before
    assert sum(lengths) > 50
    assert cells(table(found, "drift"))["tokens"] == (sum(lengths), sum(lengths))


def test_texts_of_a_file(folder: Path, tmp_path: Path) -> None:
    texts = ["some reference text", "another one of them", "", None, "a third text, longer than the others"]
    pq.write_table(pa.table({"text": texts}), tmp_path / "texts.parquet")
    found = evaluate(folder, "perplexity", options=EvalOptions(texts=str(tmp_path / "texts.parquet")))
    rows = cells(table(found, "reference_texts"))
    for place, name in enumerate(("before", "after")):
        scores = [row for row in Engine(str(folder / name), CONFIG).score(texts) if row.nll is not None]
        total = sum(row.num_scored_tokens for row in scores)
        assert rows["perplexity"][place] == pytest.approx(np.exp(sum(row.nll for row in scores) / total))
        assert (rows["tokens"][place], rows["texts"][place]) == (total, 3)
    difference, low, high = rows["perplexity"][2:]
    assert difference == pytest.approx(rows["perplexity"][1] - rows["perplexity"][0])
    assert low <= difference <= high
    with pytest.raises(InputError, match="column 'text'"):
        read_texts(str(folder / "prompts.parquet"))
    with pytest.raises(InputError, match="does not exist"):
        read_texts(str(tmp_path / "none.parquet"))


def test_models_of_other_tokenizers_read_the_texts(folder: Path, tmp_path: Path) -> None:
    """No divergence is defined; perplexities are, each in the model's own tokens."""
    (folder / "other").mkdir(exist_ok=True)
    write_tiny_llama(folder / "other", config={"rope_theta": 50.0})
    config = json.loads((folder / "other" / "tokenizer_config.json").read_text())
    (folder / "other" / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<s>"}))
    run(folder, "other", "other.parquet", "--seed", 2)
    found = compare(
        folder / "before.parquet",
        folder / "other.parquet",
        metrics=["perplexity"],
        before_model=str(folder / "before"),
        after_model=str(folder / "other"),
        engine=CONFIG,
    )
    rows = cells(table(found, "perplexity_2x2"))
    engine = Engine(str(folder / "before"), CONFIG)
    pairs = [(row["prompt"], row["output"]) for row in sampled(folder, "other")]
    scores = [row for row in engine.score(pairs) if row.nll is not None]
    expected = np.exp(sum(row.nll for row in scores) / sum(row.num_scored_tokens for row in scores))
    assert rows["after"][0] == pytest.approx(expected, rel=1e-5)


def test_why_they_cannot_run(folder: Path) -> None:
    files = folder / "before.parquet", folder / "after.parquet"
    skipped = {one.name: one.reason for one in compare(*files).skipped}
    assert "give --before and --after" in skipped["drift"]
    assert "give --before and --after" in skipped["perplexity"]
    wide = folder / "wide"
    if not wide.exists():
        wide.mkdir()
        write_tiny_llama(wide)
        config = json.loads((wide / "config.json").read_text())
        (wide / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    reason = "vocabularies of 272 and 300"
    with pytest.raises(InputError, match=reason):
        compare(*files, metrics=["drift"], before_model=str(folder / "before"), after_model=str(wide))
    with pytest.raises(InputError, match="no such folder"):
        compare(*files, metrics=["perplexity"], before_model="./none", after_model="./none")
    texts = pq.read_table(files[0]).drop_columns(["output_token_ids"])
    with pytest.raises(InputError, match="output_token_ids"):
        compare(
            texts, files[1], metrics=["drift"], before_model=str(folder / "before"), after_model=str(folder / "after")
        )


def test_texts_without_ids_are_tokenized_again(folder: Path) -> None:
    plain = [
        pq.read_table(folder / f"{name}.parquet", columns=["id", "prompt", "sample_index", "output"])
        for name in ("before", "after")
    ]
    plain = [
        one.replace_schema_metadata(None).cast(pa.schema([pa.field(f.name, f.type) for f in one.schema]))
        for one in plain
    ]
    found = compare(
        *plain,
        metrics=["perplexity"],
        before_model=str(folder / "before"),
        after_model=str(folder / "after"),
        engine=replace(CONFIG, max_num_seqs=3),
    )
    assert any(notice.code == "retokenized" for notice in found.warnings)
    rows = cells(table(found, "perplexity_2x2"))
    engine = Engine(str(folder / "before"), CONFIG)
    texts = [row["output"] for row in sampled(folder, "before")]
    ids = engine.tokenizer.encode_batch(texts, add_special_tokens=False)
    prompts = engine.tokenizer.encode_batch([row["prompt"] for row in sampled(folder, "before")])
    scores = [row for row in engine.score(list(zip(prompts, ids, strict=True))) if row.nll is not None]
    expected = np.exp(sum(row.nll for row in scores) / sum(row.num_scored_tokens for row in scores))
    assert rows["before"][0] == pytest.approx(expected, rel=1e-5)
