"""The prefix tree of rows against sets of prefixes, and micro-batches that keep shared beginnings together."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ppo.data.prefix_tree import num_computed, prefix_tree, sizes_within_shared, sorted_like_a_dictionary
from rlhf_ppo.data.rollout import Responses, dealt_evenly, micro_batch_rows

Rows = list[list[int]]


def squeezed(rows: Rows) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [-1] * (width - len(row)) for row in rows])


def test_the_tree_of_the_docstring() -> None:
    rows = [[9, 8, 7, 1, 2], [9, 8, 7, 1, 3, 4], [9, 8, 5], [6]]
    tree = prefix_tree(squeezed(rows), min_shared=1)
    nodes = torch.tensor([*chain(*rows)])[tree.tokens].split(tree.lengths)
    by_path = {tuple(nodes[n].tolist()): [nodes[a].tolist() for a in path] for n, path in enumerate(tree.paths)}
    assert by_path == {
        (9, 8): [],
        (7, 1): [[9, 8]],
        (2,): [[9, 8], [7, 1]],
        (3, 4): [[9, 8], [7, 1]],
        (5,): [[9, 8]],
        (6,): [],
    }


@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=9),
    min_shared=st.integers(1, 3),
)
def test_a_token_has_its_rows_tokens_above_it_and_no_other(rows: Rows, min_shared: int) -> None:
    tree = prefix_tree(squeezed(rows), min_shared)
    ids = torch.tensor([*chain(*rows)])
    assert sum(tree.lengths) == len(tree.tokens) and sorted({*tree.expand.tolist()}) == list(range(len(tree.tokens)))
    assert (ids[tree.tokens][tree.expand] == ids).all()
    first = np.cumsum([0, *tree.lengths])
    node_of = np.repeat(np.arange(len(tree.lengths)), tree.lengths)
    for places in np.split(tree.expand.numpy(), np.cumsum([len(row) for row in rows])[:-1]):
        last = node_of[places[-1]]
        above = [np.arange(first[node], first[node + 1]) for node in tree.paths[last]]
        assert (np.concatenate([*above, np.arange(first[last], places[-1] + 1)]) == places).all()
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert len(tree.tokens) >= len(prefixes) and (min_shared > 1 or len(tree.tokens) == len(prefixes))
    shared = {above for path in tree.paths for above in path}
    assert all(tree.lengths[node] >= min_shared for node in shared)


@pytest.mark.parametrize(("shared", "of_two", "beside_a_long_row"), [(7, 80, 180), (8, 72, 180), (40, 40, 140)])
def test_short_beginnings_and_small_savings_are_left_alone(shared: int, of_two: int, beside_a_long_row: int) -> None:
    rows = [list(range(shared)) + [100 + row] * (40 - shared) for row in range(2)]
    assert num_computed(squeezed(rows)) == of_two
    assert num_computed(squeezed([*rows, [200] * 100])) == beside_a_long_row


# ---- Micro-batches ----


def responses_of(rows: Rows) -> Responses:
    """The last token of each row is its response."""
    width = max(map(len, rows)) - 1
    ids = torch.tensor([[99] * (width + 1 - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (width + 1 - len(row)) + [True] * len(row) for row in rows])
    return Responses(ids, mask, torch.ones(len(rows), 1, dtype=torch.bool))


def rows_of(part: Responses) -> Rows:
    return [ids[mask].tolist() for ids, mask in zip(part.query_responses, part.attention_mask, strict=True)]


def cut(rows: Rows, max_rows: int = 4, max_tokens: int | None = None, **given: Any) -> list[Rows]:
    responses = responses_of(rows)
    parts = micro_batch_rows(responses, max_rows, max_tokens, lambda number: number, is_packed=True, **given)
    return [rows_of(responses[part].trimmed()) for part in parts]


GROUPS = [
    [prompt] * (20 + prompt) + [50 + response] * (3 * response + 1) for response in range(4) for prompt in (3, 1)
]


def test_responses_to_one_prompt_share_a_micro_batch() -> None:
    parts = cut(GROUPS, shares_prefixes=True)
    assert [{row[0] for row in part} for part in parts] == [{1}, {3}]
    assert sorted(chain(*parts)) == sorted(GROUPS)
    assert [{row[0] for row in part} for part in cut(GROUPS)] == [{1, 3}, {1, 3}]


@pytest.mark.parametrize("shared", [0, 7, 12])
@pytest.mark.parametrize("max_tokens", [None, 60])
def test_rows_that_share_nothing_more_are_cut_as_without_sharing(shared: int, max_tokens: int | None) -> None:
    """In all rows together: any cut by rows saves as much."""
    rows = [[9] * shared + [row] * (5 + row) for row in range(10, 18)]
    if max_tokens is None or shared < 12:
        assert cut(rows, 4, max_tokens, shares_prefixes=True) == cut(rows, 4, max_tokens)
    order = dealt_evenly([len(row) for row in rows], 4)
    assert cut(rows, 4) == [[rows[row] for row in part] for part in (order[:4], order[4:])]


@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=40), min_size=1, max_size=12),
    max_tokens=st.integers(1, 90),
)
def test_parts_have_at_most_max_tokens_and_take_no_further_row(rows: Rows, max_tokens: int) -> None:
    ids = squeezed(rows)
    ids = ids[sorted_like_a_dictionary(ids)]
    sizes = sizes_within_shared(ids, max_tokens)
    assert sum(sizes) == len(rows) and min(sizes) >= 1
    ends = np.cumsum(sizes)
    for end, size in zip(ends, sizes, strict=True):
        assert size == 1 or num_computed(ids[end - size : end]) <= max_tokens
        assert end == len(rows) or num_computed(ids[end - size : end + 1]) > max_tokens


def test_max_tokens_counts_the_tokens_of_the_tree() -> None:
    """Four rows with one prompt of 21 tokens are 21 + 1 + 4 + 7 + 10, of 23 two more; the rows have twice as many."""
    parts = cut(GROUPS, max_tokens=45, shares_prefixes=True)
    assert [len(part) for part in parts] == [4, 4] and [{row[0] for row in part} for part in parts] == [{1}, {3}]
    assert [sum(map(len, part)) for part in parts] == [106, 114]
    assert len(cut(GROUPS, max_tokens=45)) == 8
