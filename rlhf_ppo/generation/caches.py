"""Key-value caches of transformers' `generate`: parted, shared between rows, and kept between turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from rlhf_ppo.models.unwrapping import CACHE


def rows_of_cache(output: Any, rows: Tensor) -> dict[str, Any]:
    """Keep some rows of the cache of a `generate` call; return it as an argument of the next call.

    Args:
        output: The result of `generate`.
        rows: Indices of the rows.

    Returns:
        `{}` if there is no cache, or its rows cannot be separated.
    """
    cache: Any = getattr(output, CACHE, None)
    layers = getattr(cache, "layers", [None])
    if not all(hasattr(layer, "reorder_cache") for layer in layers):
        return {}
    for layer in layers:
        layer.reorder_cache(rows)  # `batch_select_indices` forgets the states of convolutions and recurrences
    return {CACHE: cache}


def read_once(model: Any, ids: Tensor, mask: Tensor, cache: Any) -> None:
    """Read equal prompts of adjacent rows once, except for the last token, whose logits `generate` needs.

    Args:
        model: A transformers model whose rows can be continued beside other rows.
        ids: Prompts, long `(B, C)`, left-padded.
        mask: 1 on real tokens, long `(B, C)`.
        cache: An empty cache. It stays empty if no rows are equal or a prompt has one token; otherwise it then holds
            `C - 1` columns of all `B` rows.
    """
    marked, places = ids.masked_fill(mask == 0, -1).unique_consecutive(return_inverse=True, dim=0)
    read = marked[:, :-1]
    if len(read) == len(ids) or not (read >= 0).any(dim=1).all():
        return
    given = {"input_ids": read.clamp(min=0), "attention_mask": (read >= 0).long(), CACHE: cache}
    model.generate(**given, generation_config=_READING)
    cache.reorder_cache(places)


_READING = GenerationConfig(max_new_tokens=1, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
"""Reads all given tokens, but not the token that it generates."""

# ---- Kept between turns ----

KeptRows = dict[int, tuple[np.ndarray, list[tuple[Tensor, Tensor]]]]
"""By name of a row: its read tokens, and their keys and values `(heads, n, D)` in each layer."""


@dataclass(frozen=True)
class KeptCaches:
    """Caches of the rows of a `generate` call, which a later call continues.

    Keys and values of a token depend on the tokens before it, not on padding, so they can move to other columns.

    Attributes:
        kept: The kept rows.
        names: Names of the rows of this call.
    """

    kept: KeptRows
    names: list[int]

    def cache(self, model: Any, ids: Tensor, mask: Tensor) -> dict[str, Any]:
        """Return the rows' caches as an argument of `generate`, which reads the tokens that they lack.

        All rows of a cache have the same number of columns. The row with the fewest unread tokens sets how many
        `generate` reads; the other rows' additional tokens are read here, in groups of similar size.

        Args:
            model: A transformers model that `continues`.
            ids: The rows' tokens, long `(B, C)`, left-padded.
            mask: 1 on real tokens, long `(B, C)`.
        """
        width, starts = ids.shape[1], (mask == 0).sum(dim=1).tolist()
        tokens = [row[start:] for row, start in zip(ids.cpu().numpy(), starts, strict=True)]
        unread = [len(row) - self._num_known(name, row) for name, row in zip(self.names, tokens, strict=True)]
        if any(number == len(row) for number, row in zip(unread, tokens, strict=True)):
            return {CACHE: DynamicCache()}
        fewest, groups = min(unread), dict[int, list[int]]()
        for place, number in enumerate(unread):
            if number > fewest:
                groups.setdefault((number - fewest - 1).bit_length(), []).append(place)
        for places in groups.values():
            most = max(unread[place] for place in places) - fewest
            self._read(model, places, ids[places, : width - fewest], mask[places, : width - fewest], most)
        return self._taken(range(len(ids)), starts, width - fewest)

    def _num_known(self, name: int, row: np.ndarray) -> int:
        """Return the number of a row's first tokens that are kept; the last, whose logits are needed, is not one."""
        known = self.kept[name][0][: len(row) - 1] if name in self.kept else row[:0]
        differs = np.flatnonzero(known != row[: len(known)])
        return int(differs[0]) if len(differs) else len(known)

    def _read(self, model: Any, places: list[int], ids: Tensor, mask: Tensor, most: int) -> None:
        """Read the last `most` tokens of rows, for some rows again, and keep the caches."""
        starts = (mask == 0).sum(dim=1).tolist()
        first, rows = min(starts), torch.arange(len(places))
        cache = self._taken(places, [start - first for start in starts], ids.shape[1] - first - most)
        given = {"input_ids": ids[:, first:], "attention_mask": mask[:, first:], "generation_config": _READING}
        output = model.generate(**given, **cache)
        of_rows = KeptCaches(self.kept, [self.names[place] for place in places])
        of_rows.keep(rows, rows >= 0, getattr(output, CACHE), output.sequences, mask[:, first:])

    def _taken(self, places: Iterable[int], starts: list[int], columns: int) -> dict[str, Any]:
        """Stack the keys and values of rows, each from its start to `columns`."""
        cache = DynamicCache()  # without the configuration, sliding layers keep all states
        rows = [self.kept.pop(self.names[place])[1] for place in places]
        for index in range(len(rows[0])):
            cache.update(*(_stacked([row[index][part] for row in rows], starts, columns) for part in (0, 1)), index)
        return {CACHE: cache}

    def keep(self, rows: Tensor, leaving: Tensor, cache: Any, ids: Tensor, mask: Tensor) -> None:
        """Keep the caches of rows that leave the batch.

        Args:
            rows: Indices of the rows of the batch in this call, long `(B,)`.
            leaving: Whether each row leaves the batch, bool `(B,)`.
            cache: The batch's cache of `N` columns.
            ids: The batch's tokens, long `(B, C)` with `C >= N`.
            mask: 0 on the left padding, long `(B, M)`.
        """
        starts, tokens = (mask == 0).sum(dim=1).tolist(), ids.cpu().numpy()
        columns, of_call = cache.get_seq_length(), rows.tolist()
        for place in leaving.nonzero().flatten().tolist():
            start = starts[place]
            states = [
                (layer.keys[place, :, start:columns].clone(), layer.values[place, :, start:columns].clone())
                for layer in cache.layers
            ]
            self.kept[self.names[of_call[place]]] = (tokens[place, start:columns], states)


def _stacked(rows: list[Tensor], starts: list[int], columns: int) -> Tensor:
    """Stack keys or values `(heads, n, D)` into `(B, heads, columns, D)`, each from its row's start on."""
    stacked = rows[0].new_zeros(len(rows), rows[0].shape[0], columns, rows[0].shape[-1])
    for place, (row, start) in enumerate(zip(rows, starts, strict=True)):
        stacked[place, :, start:] = row[:, : max(columns - start, 0)]
    return stacked
