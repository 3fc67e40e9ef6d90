"""The prefix tree (trie) of a batch: tokens with which several rows begin are computed once.

    rows                                   tree
    0  You are helpful. | What is 2 + 2?   You are helpful. ─┬─ What is 2 + ─┬─ 2?
    1  You are helpful. | What is 2 + 3?                     │               └─ 3?
    2  You are helpful. | Who wrote it?                      └─ Who wrote it?

**Why the states are equal.** A causal model computes the state of a token from this token, its position and the tokens
before it in its row. Rows that begin alike have the same of all three there, so their states are equal: `h` of a token
of the tree is the state of all of its copies `h_1 = ... = h_n` in the rows. Attention must ensure one thing: a token
sees its own node up to itself and the nodes above it, never another branch.

**Why the gradients add up.** The loss `L(h_1, ..., h_n)` of the rows is unchanged; only the copies now come from one
`h`. By the chain rule

    dL/dw = sum_i dL/dh_i dh_i/dw = (sum_i dL/dh_i) dh/dw,

because `dh_i/dw` is the same for all copies. The rows' separate passes add up the left sum in the weights; the copy's
backward pass adds up the right one at the state (`index_select` becomes `index_add`), and one pass through the model
does the rest.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MIN_SHARED = 8
"""Tokens of the shortest node that rows share: each node is a separate call in the attention of every layer."""

WORTH_IT = 0.95
"""A tree is used if it has at most this share of the rows' tokens."""


@dataclass(frozen=True)
class PrefixTree:
    """The `U` tokens of a tree, node after node, each node after those above it.

    Attributes:
        tokens: Index of each token of the tree among the `N` tokens of the rows: of its first copy, long `(U,)`.
        expand: Index in the tree of each token of the rows, long `(N,)`.
        lengths: Tokens of each node.
        paths: The nodes above each node, the root first.
    """

    tokens: Tensor
    expand: Tensor
    lengths: list[int]
    paths: list[tuple[int, ...]]

    @property
    def is_worth_it(self) -> bool:
        """Whether the tree has so few tokens that it saves time."""
        return len(self.tokens) <= WORTH_IT * len(self.expand)


def sorted_like_a_dictionary(rows: np.ndarray) -> np.ndarray:
    """Return the order of rows `(B, L)` that puts those with a common beginning side by side; a stable sort."""
    return np.lexsort(rows.T[::-1])


def common_beginnings(rows: np.ndarray) -> np.ndarray:
    """Count the tokens with which each row and the next begin, `(B - 1,)`; the padding of `rows` is -1."""
    same = (rows[1:] == rows[:-1]) & (rows[1:] >= 0)
    return same.cumprod(axis=1).sum(axis=1)


def prefix_tree(rows: np.ndarray, min_shared: int = MIN_SHARED) -> PrefixTree:
    """Build the tree of rows.

    Sorted rows with a common beginning are neighbors. A group of them shares as many tokens as the two neighbors that
    share the fewest; these are a node. Below it the group falls apart where neighbors share fewer than `min_shared`
    further tokens. A group of one row is a leaf.

    Args:
        rows: Token ids, padded with -1 on the right, `(B, L)`.
        min_shared: Tokens of the shortest shared node.
    """
    lengths = (rows >= 0).sum(axis=1)
    starts = lengths.cumsum() - lengths
    order = sorted_like_a_dictionary(rows)
    common = common_beginnings(rows[order])

    def groups(first: int, last: int, depth: int, path: tuple[int, ...]) -> list[Group]:
        """Split the sorted rows `first` to `last - 1`, which have the nodes of `path`, `depth` tokens, in common."""
        ends = first + 1 + np.flatnonzero(common[first : last - 1] < depth + min_shared)
        return [(*rows, depth, path) for rows in itertools.pairwise([first, *ends.tolist(), last])]

    tokens: list[np.ndarray] = []
    lengths_of_nodes: list[int] = []
    paths: list[tuple[int, ...]] = []
    expand, num_tokens = np.empty(rows.shape, dtype=np.int64), 0
    pending = groups(0, len(rows), 0, ())
    while pending:
        first, last, begin, path = pending.pop()
        is_leaf = last - first == 1
        end = int(lengths[order[first]] if is_leaf else common[first : last - 1].min())
        if end > begin:  # not where a row ends in the node above
            expand[order[first:last], begin:end] = num_tokens + np.arange(end - begin)
            tokens.append(starts[order[first]] + np.arange(begin, end))
            path, num_tokens = (*path, len(paths)), num_tokens + end - begin
            lengths_of_nodes.append(end - begin)
            paths.append(path[:-1])
        if not is_leaf:
            pending += groups(first, last, end, path)
    unique, copies = torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(expand[rows >= 0])
    return PrefixTree(unique, copies, lengths_of_nodes, paths)


def num_computed(rows: np.ndarray) -> int:
    """Count the tokens that a pass over rows computes: those of their tree, or all if it is not worth it."""
    tree = prefix_tree(rows)
    return len(tree.tokens) if tree.is_worth_it else len(tree.expand)


def num_computed_in_parts(rows: np.ndarray, sizes: Sequence[int]) -> int:
    """Count the tokens that passes over consecutive parts of rows compute."""
    return sum(num_computed(part) for part in np.split(rows, np.cumsum(sizes)[:-1]))


def sizes_within_shared(rows: np.ndarray, max_tokens: int) -> list[int]:
    """Fill consecutive parts with as many rows as fit; return the number of rows of each.

    Args:
        rows: Sorted rows, as for `prefix_tree`.
        max_tokens: Maximum of `num_computed` of a part; a longer row is a separate part.
    """
    sizes: list[int] = []
    while (first := sum(sizes)) < len(rows):
        further = range(1, len(rows) - first)
        sizes.append(
            1 + bisect_right(further, max_tokens, key=lambda last: num_computed(rows[first : first + last + 1]))
        )
    return sizes


Group = tuple[int, int, int, tuple[int, ...]]
"""The first of a group of sorted rows, the last plus 1, the tokens of the path to it, and this path."""
