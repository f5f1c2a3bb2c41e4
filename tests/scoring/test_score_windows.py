"""Windows over long rows: each scored token in exactly one of them, with at least the stated context."""

from __future__ import annotations

import random

import numpy as np
import pytest

from batchinfer.errors import InputError
from batchinfer.scoring.item import ScoreItem
from batchinfer.scoring.windows import Window


def item(num_tokens: int, *spans: tuple[int, int]) -> ScoreItem:
    """Token ids that are their own positions."""
    return ScoreItem(np.arange(num_tokens, dtype=np.int32), spans or ((1, num_tokens),))


def scored(one: ScoreItem, window: Window) -> list[tuple[int, int]]:
    """(position, number of tokens before it in its window) of each token that is scored, in order."""
    found = []
    for token_ids, request in window.pieces(one):
        assert len(token_ids) <= window.size
        assert request.spans[-1][1] == len(token_ids) + 1, "nothing is read behind the last scored token"
        begin = int(token_ids[0])
        assert token_ids.tolist() == list(range(begin, begin + len(token_ids)))
        assert request.next_id == begin + len(token_ids)
        found += [(begin + int(position), int(position)) for position in request.positions()]
    return found


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_ten_tokens_in_windows_of_four(stride: int) -> None:
    found = scored(item(10), Window(4, stride))
    assert [position for position, _ in found] == list(range(1, 10))
    assert all(context >= min(position, 4 - stride + 1) for position, context in found)


def test_a_row_that_fits_is_one_piece() -> None:
    for size in (9, 10, 100):
        pieces = list(Window(size, size).pieces(item(10)))
        assert len(pieces) == 1
        assert len(pieces[0][0]) == 9
        assert Window(size, 1).sees_all(item(10))
    assert len(list(Window(8, 8).pieces(item(10)))) == 2
    assert not Window(8, 8).sees_all(item(10))


def test_the_last_window_is_full() -> None:
    pieces = list(Window(4, 4).pieces(item(11)))
    assert [ids.tolist() for ids, _ in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7], [6, 7, 8, 9]]
    assert [request.spans for _, request in pieces] == [((1, 5),), ((1, 5),), ((3, 5),)]


def test_a_long_context_is_cut_in_front_and_its_continuation_scored_at_once() -> None:
    pieces = list(Window(8, 8).pieces(item(30, (25, 30))))
    assert [ids.tolist() for ids, _ in pieces] == [list(range(21, 29))]
    assert pieces[0][1].spans == ((4, 9),)


def test_everything_at_random() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        num_tokens = rng.randint(2, 60)
        size = rng.randint(1, 70)
        window = Window(size, rng.randint(1, size))
        borders = sorted(rng.sample(range(1, num_tokens + 1), rng.randint(1, min(4, num_tokens // 2)) * 2 or 2))
        one = item(num_tokens, *zip(borders[::2], borders[1::2], strict=True))
        found = scored(one, window)
        assert [position for position, _ in found] == [p for begin, end in one.spans for p in range(begin, end)]
        assert all(context >= min(position, window.min_context) for position, context in found)
        assert window.sees_all(one) == all(context == position for position, context in found)


def test_an_item_without_scored_tokens_has_no_piece() -> None:
    assert list(Window(4, 4).pieces(ScoreItem.empty("nothing"))) == []
    assert Window(4, 4).sees_all(ScoreItem.empty("nothing"))


def test_options() -> None:
    assert Window.of(None, None, 100) == Window(100, 100)
    assert Window.of(50, None, 100) == Window(50, 50)
    assert Window.of(50, 10, 100).min_context == 41
    for size, stride in ((101, None), (0, None), (50, 51), (50, 0), (None, 101)):
        with pytest.raises(InputError, match=r"--window|--stride"):
            Window.of(size, stride, 100)
