"""From texts to tokens to score: BOS is context, borders inside tokens, bytes and words of what is scored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import FakeTokenizer
from score_models import BOS, EOS, merging_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from batchinfer.errors import InputError
from batchinfer.models.tokenizer import Tokenizer
from batchinfer.scoring.encode import TextEncoder, common_prefix
from batchinfer.scoring.item import ScoreItem, spans_of
from batchinfer.types import ErrorCode

PLAIN = merging_tokenizer()
FRONT = merging_tokenizer(front=True)
FRAMED = merging_tokenizer(front=True, behind=True)


def encoder(tokenizer: Any = PLAIN, bos: Any = "auto") -> TextEncoder:
    return TextEncoder(tokenizer, tokenizer.num_ids, bos)


def text_of(tokenizer: Any, item: ScoreItem) -> list[str]:
    return [tokenizer.decode([i], False) for i in item.scored_ids]


def test_without_bos_the_first_token_is_context() -> None:
    (item,) = encoder().texts(["abc def"])
    assert text_of(PLAIN, item) == [" ", "d", "e", "f"]
    assert (item.num_scored, item.num_bytes, item.num_words) == (4, 4, 1)
    assert not encoder().adds_bos


@pytest.mark.parametrize(
    ("tokenizer", "bos"), [(FRONT, "auto"), (FRAMED, "auto"), (PLAIN, "always"), (FRONT, "always"), (FRAMED, "always")]
)
def test_bos_is_context_and_never_scored(tokenizer: Any, bos: str) -> None:
    """One BOS, whoever puts it there; what a tokenizer puts behind is left out."""
    (item,) = encoder(tokenizer, bos).texts(["abc de"])
    assert item.token_ids.tolist().count(BOS) == 1
    assert item.token_ids[0] == BOS
    assert EOS not in item.token_ids
    assert text_of(tokenizer, item) == ["abc", " ", "d", "e"]
    assert (item.num_bytes, item.num_words) == (6, 2)
    assert encoder(tokenizer, bos).adds_bos


def test_never_means_no_bos() -> None:
    (item,) = encoder(FRAMED, "never").texts(["abc de"])
    assert BOS not in item.token_ids
    assert item.num_scored == 3


def test_a_text_that_holds_its_bos_gets_no_second_one() -> None:
    for bos in ("auto", "always"):
        (item,) = encoder(FRONT, bos).texts(["<s>abc"])
        assert item.token_ids.tolist() == [BOS, *PLAIN.encode_batch(["abc"])[0]]
        assert (item.num_scored, item.num_bytes) == (1, 3)
    (item,) = encoder(PLAIN, "always").texts(["<s>abc"])
    assert (item.token_ids.tolist().count(BOS), item.num_bytes) == (1, 3)


@pytest.mark.parametrize(("bos", "num_scored"), [("auto", 0), ("always", 1)])
def test_a_text_of_one_token(bos: str, num_scored: int) -> None:
    (item,) = encoder(bos=bos).texts(["abc"])
    assert item.num_scored == num_scored
    if not num_scored:
        assert item.error is not None
        assert item.error.code is ErrorCode.NOTHING_TO_SCORE
        assert "--bos always" in item.error.message


@pytest.mark.parametrize("tokenizer", [PLAIN, FRONT, FRAMED])
def test_empty_null_and_broken_texts_are_rows_of_their_own(tokenizer: Any) -> None:
    items = encoder(tokenizer).texts(["abc ab", "", None, "\ud800", b"\xff", "  ", "abc ab"])
    codes = [item.error.code if item.error else None for item in items]
    expected = [None, "nothing_to_score", "prompt_null", "invalid_prompt", "invalid_prompt", None, None]
    assert codes == expected
    assert items[0].token_ids.tolist() == items[6].token_ids.tolist()


def test_always_needs_a_bos() -> None:
    with pytest.raises(InputError, match="no beginning-of-sequence"):
        TextEncoder(FakeTokenizer(), 256, "always")
    with pytest.raises(InputError, match="auto, always, never"):
        encoder(bos="sometimes")


@pytest.mark.parametrize("text", ["é🙂 汉字 é", "🙂🙂", "a🙂", "abc 汉", "ab\n\nab  x "])
@pytest.mark.parametrize("tokenizer", [PLAIN, FRONT])
def test_bytes_are_those_of_the_scored_text(text: str, tokenizer: Any) -> None:
    (item,) = encoder(tokenizer).texts([text])
    scored = len(text.encode())
    if tokenizer is PLAIN:  # the first token's character may go on in the next ones: it counts as read
        scored -= len(text[0].encode()) if text[0] != "a" else len(text.split(" ")[0].split("\n")[0].split("🙂")[0])
    assert item.num_bytes == scored
    assert item.num_words == len(text.encode()[-scored:].decode().split())


def test_a_continuation_is_what_its_context_is_not() -> None:
    pairs = [("xyz", " abc"), ("xyz", "a"), ("x", "yz"), ("xyz ", "ax")]
    for tokenizer in (PLAIN, FRONT, FRAMED):
        for (context, continuation), item in zip(pairs, encoder(tokenizer).pairs(pairs), strict=True):
            assert "".join(text_of(tokenizer, item)).endswith(continuation)
            whole = tokenizer.encode_batch([context + continuation], add_special_tokens=False)[0].tolist()
            assert item.token_ids.tolist()[-len(whole) :] == whole
    items = encoder().pairs(pairs)
    assert [text_of(PLAIN, item) for item in items] == [[" ", "abc"], ["a"], ["y", "z"], [" a", "x"]]
    assert [item.num_bytes for item in items] == [4, 1, 2, 3]


def test_a_token_over_the_border_is_scored_with_its_bytes() -> None:
    (item,) = encoder(FRONT).pairs([("xa", "bc z")])
    assert text_of(FRONT, item) == ["abc", " ", "z"]
    assert (item.num_bytes, item.num_words) == (5, 2)
    (item,) = encoder(FRONT).pairs([("a", "b")])
    assert text_of(FRONT, item) == ["ab"]
    assert item.num_bytes == 2
    (item,) = encoder().pairs([("a", "bc z")])  # the token over the border is the first of all: nothing predicts it
    assert text_of(PLAIN, item) == [" ", "z"]
    assert (item.num_bytes, item.num_words) == (2, 1)


def test_continuations_without_a_context() -> None:
    (item,) = encoder(FRONT).pairs([("", "abc x")])
    assert (text_of(FRONT, item), item.num_bytes) == (["abc", " ", "x"], 5)
    (item,) = encoder().pairs([("", "abc x")])
    assert (text_of(PLAIN, item), item.num_bytes) == ([" ", "x"], 2)
    items = encoder().pairs([("", "abc"), ("x", ""), (None, "x"), ("x", None), ("a", "b")])
    codes = [item.error.code.value if item.error else None for item in items]
    assert codes == ["nothing_to_score", "nothing_to_score", "prompt_null", "prompt_null", "nothing_to_score"]


def test_token_ids_are_scored_as_they_are() -> None:
    ids = [*PLAIN.encode_batch(["abc de"])[0].tolist(), EOS]
    (item,) = encoder(FRONT).token_ids([ids])
    assert item.token_ids.tolist() == ids
    assert (item.num_scored, item.num_bytes, item.num_words) == (4, 3, 1), "an end-of-sequence token has no text"
    (item,) = encoder(FRONT).pairs([(ids[:3], np.array(ids[3:]))])
    assert item.spans == ((3, 5),)
    ids = PLAIN.encode_batch(["a é"])[0]
    assert [encoder().token_ids([ids[:cut]])[0].num_bytes for cut in (len(ids), -1)] == [3, 2], "half a character"
    items = encoder().token_ids([[], [7], None, [1, 9999], [1, -1], [1, None]])
    codes = [item.error.code.value if item.error else None for item in items]
    assert codes == ["nothing_to_score"] * 2 + ["prompt_null"] + ["invalid_prompt"] * 3
    assert "token id 9999 at position 1" in str(items[3].error)


def test_special_tokens_in_a_text_have_no_bytes() -> None:
    (item,) = encoder(FRONT).texts(["ab</s>cd e"])
    assert item.num_scored == 6
    assert (item.num_bytes, item.num_words) == (6, 3)
    (item,) = encoder(FRONT).pairs([("ab", "</s>cd")])
    assert (item.num_scored, item.num_bytes) == (3, 2)


def test_a_row_that_the_tokenizer_refuses_is_its_own_error() -> None:
    class Picky(FakeTokenizer):
        def encode_with_ends(self, texts: Any, add_special_tokens: bool = True) -> Any:
            if any("!" in text for text in texts):
                raise Exception("no unknown token")
            return super().encode_with_ends(texts, add_special_tokens)

    items = TextEncoder(Picky(), 256).texts(["ab", "a!", "abc"])
    assert [item.num_scored for item in items] == [1, 0, 2]
    assert items[1].error is not None
    assert "no unknown token" in items[1].error.message


def test_many_texts_are_tokenized_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinfer.scoring.encode._BATCH_CHARS", 10)
    texts = ["ab" * (i % 5 + 1) + str(i) for i in range(40)]
    assert [i.token_ids.tolist() for i in encoder().texts(texts)] == [ids.tolist() for ids in PLAIN.encode_batch(texts)]


def test_common_prefixes_and_spans() -> None:
    def ids(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    assert common_prefix(ids(1, 2, 3), ids(1, 2, 4, 5)) == 2
    assert common_prefix(ids(1, 2), ids(1, 2, 4)) == 2
    assert common_prefix(ids(), ids(1)) == 0
    assert spans_of(np.array([False, True, True, False, True])) == ((1, 3), (4, 5))
    assert spans_of(np.array([False, False])) == ()


def test_bytes_of_ids_are_those_of_the_text_with_sentencepiece_too() -> None:
    """Decoding drops the space in front of the first token that it is given: here one inside the text."""
    vocab = {"<unk>": 0, "\u2581on": 1, "\u2581a": 2, "\u2581hill": 3}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, {})
    (of_text,) = encoder(tokenizer).texts(["on a hill"])
    (of_ids,) = encoder(tokenizer).token_ids([[1, 2, 3]])
    assert of_text.token_ids.tolist() == of_ids.token_ids.tolist() == [1, 2, 3]
    assert (of_text.num_bytes, of_text.num_words) == (of_ids.num_bytes, of_ids.num_words) == (7, 2)
