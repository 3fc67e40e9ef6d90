"""Drawing tokens with one random number each: `torch.multinomial` draws one per token of the vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf_ppo.generation.nucleus import NucleusInIntegers


class DrawsByInversion(LogitsProcessor):
    r"""Draws each row's token and leaves it alone finite, so that greedy decoding takes it.

    `y = min {v : F_v > u F_V}` with `F_v = sum_{w <= v} p_w` in float64 and one `u ~ U[0, 1)` a row (inverse transform
    sampling; Devroye 1986, III.2): a token of probability 0 is never drawn.
    """

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Draw from `softmax(scores)`, `(B, V)`."""
        cumulative = scores.softmax(dim=-1).double().cumsum_(dim=-1)
        total = cumulative[:, -1:]
        drawn = torch.rand_like(total) * total
        tokens = torch.searchsorted(cumulative, torch.minimum(drawn, total.nextafter(total * 0)), right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


def sampling_processors(
    config: GenerationConfig, device: torch.device
) -> tuple[GenerationConfig, LogitsProcessorList]:
    """Say how `generate` draws: on a CPU greedily, after processors that have drawn from the same distribution.

    Elsewhere it draws by itself: an accelerator makes its random numbers fast, but has no sum of floats that is
    the same at every run. Where such are asked for (`full_determinism`), `top_p` adds integers up.

    Args:
        config: Samples, if at all, with its `temperature`, `top_k`, `top_p` and `min_p`.
        device: Where the logits are.

    Returns:
        The configuration and the processors to give to `generate`.
    """
    if not config.do_sample:
        return config, LogitsProcessorList()
    if device.type == "cpu":
        greedy = _changed(config, do_sample=False, temperature=None, top_k=None, top_p=None, min_p=None)
        return greedy, LogitsProcessorList([*_warpers(config, TopPLogitsWarper), DrawsByInversion()])
    if _cuts(config.top_p) and torch.are_deterministic_algorithms_enabled():
        plain = _changed(config, temperature=1.0, top_k=0, top_p=1.0, min_p=None)
        return plain, LogitsProcessorList(_warpers(config, NucleusInIntegers))
    return config, LogitsProcessorList()


def _changed(config: GenerationConfig, **changes: Any) -> GenerationConfig:
    changed = copy.deepcopy(config)
    changed.update(**changes)
    return changed


def _cuts(top_p: float | None) -> TypeGuard[float]:
    return top_p is not None and top_p < 1.0


def _warpers(config: GenerationConfig, nucleus: Callable[[float], LogitsProcessor]) -> Iterator[LogitsProcessor]:
    """Make the processors that `generate` applies when it samples, in its order."""
    if config.temperature not in (None, 1.0):
        yield TemperatureLogitsWarper(config.temperature)
    if config.top_k:
        yield TopKLogitsWarper(config.top_k)
    if _cuts(config.top_p):
        yield nucleus(config.top_p)
    if config.min_p is not None:
        yield MinPLogitsWarper(config.min_p)
