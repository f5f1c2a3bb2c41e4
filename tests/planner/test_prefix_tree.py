from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.planner import prefix_tree
from batchinfer.planner.prefix_tree import PrefixTree, build_prefix_tree

# Few ids and short rows, so that prefixes, duplicates and empty rows are common; two ids need their high bytes.
token = st.sampled_from([0, 1, 2, 255, 256, 2**31 - 1])
row_lists = st.lists(st.lists(token, max_size=7), max_size=25)


def as_rows(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, np.int32) for row in rows]


def spelled(tree: PrefixTree, rows: list[list[int]], node: int) -> list[int]:
    """The tokens on the path to `node`, each span read from the last row below it."""
    tokens: list[int] = []
    for step in tree.path(node):
        row = rows[tree.order[tree.row_end[step] - 1]]
        tokens += row[tree.start[step] : tree.end[step]]
    return tokens


def prefixes(rows: list[list[int]]) -> set[tuple[int, ...]]:
    """The nodes of the brute-force trie."""
    return {tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)}


@pytest.fixture(params=[1, 40, 1 << 20], ids=lambda n: f"blocks-of-{n}-tokens")
def block_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "_BLOCK_TOKENS", request.param)


@pytest.mark.usefixtures("block_tokens")
class TestAgainstBruteForceTrie:
    @settings(max_examples=120, deadline=None)
    @given(rows=row_lists)
    def test_order_is_lexicographic_with_ties_by_index(self, rows: list[list[int]]) -> None:
        tree = build_prefix_tree(as_rows(rows))
        assert tree.order.tolist() == sorted(range(len(rows)), key=lambda r: (rows[r], r))
        assert tree.order.dtype == np.int32

    @settings(max_examples=120, deadline=None)
    @given(rows=row_lists)
    def test_every_path_spells_its_row(self, rows: list[list[int]]) -> None:
        tree = build_prefix_tree(as_rows(rows))
        for row, tokens in enumerate(rows):
            node = int(tree.node_of_row[row])
            assert spelled(tree, rows, node) == tokens
            assert tree.end[node] == len(tokens)
            for step in [0, *tree.path(node)]:
                assert row in tree.order[tree.row_begin[step] : tree.row_end[step]]

    @settings(max_examples=120, deadline=None)
    @given(rows=row_lists)
    def test_counts_equal_the_tries(self, rows: list[list[int]]) -> None:
        tree = build_prefix_tree(as_rows(rows))
        assert tree.num_tokens == sum(map(len, rows))
        assert tree.num_unique_tokens == len(prefixes(rows))
        assert tree.num_shareable_tokens == tree.num_tokens - tree.num_unique_tokens

    @settings(max_examples=120, deadline=None)
    @given(rows=row_lists)
    def test_a_node_stands_exactly_where_rows_part_or_end(self, rows: list[list[int]]) -> None:
        tree = build_prefix_tree(as_rows(rows))
        followers: dict[tuple[int, ...], set[int]] = {}
        for row in rows:
            for length in range(len(row)):
                followers.setdefault(tuple(row[:length]), set()).add(row[length])
        expected = {prefix for prefix, tokens in followers.items() if len(tokens) > 1} | {tuple(row) for row in rows}
        found = [tuple(spelled(tree, rows, node)) for node in range(tree.num_nodes)]
        assert len(set(found)) == len(found)
        assert set(found) == expected | {()}

    @settings(max_examples=120, deadline=None)
    @given(rows=row_lists)
    def test_nodes_are_in_preorder_and_nest(self, rows: list[list[int]]) -> None:
        tree = build_prefix_tree(as_rows(rows))
        assert (tree.parent[0], tree.start[0], tree.end[0]) == (-1, 0, 0)
        assert (tree.row_begin[0], tree.row_end[0]) == (0, len(rows))
        path: list[int] = [0]
        for node in range(1, tree.num_nodes):
            parent = int(tree.parent[node])
            while path[-1] != parent:  # IndexError: the parent is not on the path, so not pre-order
                path.pop()
            path.append(node)
            assert tree.start[node] == tree.end[parent] < tree.end[node]
            assert tree.row_begin[parent] <= tree.row_begin[node] < tree.row_end[node] <= tree.row_end[parent]
        for parent in range(tree.num_nodes):
            children = np.nonzero(tree.parent == parent)[0]
            ends_here = np.count_nonzero(tree.node_of_row == parent)
            covered = sum(int(tree.row_end[c] - tree.row_begin[c]) for c in children)
            assert ends_here + covered == tree.row_end[parent] - tree.row_begin[parent]
            assert (tree.row_end[children[:-1]] == tree.row_begin[children[1:]]).all()


def test_rows_of_a_small_example() -> None:
    rows = [[5, 6, 7, 8], [], [5, 6], [5, 6, 9], [4], [5, 6, 9], [5, 6, 7, 8, 1]]
    tree = build_prefix_tree(as_rows(rows))
    assert tree.order.tolist() == [1, 4, 2, 0, 6, 3, 5]
    assert tree.parent.tolist() == [-1, 0, 0, 2, 3, 2]
    assert tree.start.tolist() == [0, 0, 0, 2, 4, 2]
    assert tree.end.tolist() == [0, 1, 2, 4, 5, 3]
    assert tree.row_begin.tolist() == [0, 1, 2, 3, 4, 5]
    assert tree.row_end.tolist() == [7, 2, 7, 5, 5, 7]
    # the empty row at the root, the strict prefix [5, 6] at an inner node, the duplicates at one leaf
    assert tree.node_of_row.tolist() == [3, 0, 2, 5, 1, 5, 4]
    assert tree.path(4) == [2, 3, 4]
    assert tree.path(0) == []
    assert (tree.num_tokens, tree.num_unique_tokens, tree.num_shareable_tokens) == (18, 7, 11)


def test_no_rows() -> None:
    tree = build_prefix_tree([])
    assert (tree.num_rows, tree.num_nodes, tree.num_tokens, tree.num_unique_tokens) == (0, 1, 0, 0)


def test_one_row_is_one_node() -> None:
    tree = build_prefix_tree(as_rows([[3, 1, 2]]))
    assert tree.parent.tolist() == [-1, 0]
    assert tree.end.tolist() == [0, 3]
    assert tree.node_of_row.tolist() == [1]


@pytest.mark.parametrize("row", [[1, -1], [1, -1, 4], [-5]])
def test_a_negative_id_is_refused(row: list[int]) -> None:
    with pytest.raises(ValueError, match=f"row 1 has {min(row)}"):
        build_prefix_tree(as_rows([[1, 2], row, row, [1]]))
