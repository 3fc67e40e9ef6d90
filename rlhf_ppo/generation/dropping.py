"""Generation in which finished rows leave the batch: a few long responses do not pay for many short ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from rlhf_ppo.generation.inversion import sampling_processors
from rlhf_ppo.generation.nonfinite import ChecksLogits
from rlhf_ppo.generation.protocol import length_and_filling
from rlhf_ppo.generation.stopping import StopsAtStrings, StopStrings
from rlhf_ppo.processes.signals import give_up_if_stopped, give_up_together

SHARE_LEFT = 0.75
"""Share of a batch's rows that must still be unfinished for it to go on as it is."""


class IsGivenUp(StoppingCriteria):
    """Ends `generate` by raising `Stopped` after the token at which a signal has come that ends the run."""

    def __call__(self, input_ids: Any, scores: Any = None, **kwargs: Any) -> Any:
        """Tell that no row is to end, bool `(B,)`."""
        give_up_if_stopped()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@contextmanager
def given_up_together(model: nn.Module) -> Iterator[None]:
    """Raise `Stopped` on all ranks before the same token, where every forward pass of a model is one of all ranks.

    `generate` goes on calling the model on ranks that are through, but no stopping criterion.
    """

    def ask(module: nn.Module, arguments: Any) -> None:
        give_up_together(next(model.parameters()).device)

    hook = model.register_forward_pre_hook(ask, prepend=True)
    try:
        yield
    finally:
        hook.remove()


class FewAreLeft(StoppingCriteria):
    """Ends `generate` once at most `most_left` rows are unfinished, and tells which.

    Args:
        stop_token_id: The stop token, several, or None.
        stop_strings: Ends rows too, or None.
        most_left: With how many unfinished rows `generate` ends.

    Attributes:
        finished: Which rows have ended by themselves, bool `(B,)`.
    """

    def __init__(
        self, stop_token_id: int | Sequence[int] | None, stop_strings: StopsAtStrings | None, most_left: int
    ) -> None:
        one = [] if stop_token_id is None else [stop_token_id]
        self.stop_tokens = stop_token_id if isinstance(stop_token_id, Sequence) else one
        self.stop_strings, self.most_left = stop_strings, most_left
        self.finished = torch.zeros(())

    def __call__(self, input_ids: Any, scores: Any = None, **kwargs: Any) -> Any:
        """Tell which rows `generate` need not go on with, bool `(B,)`."""
        last = input_ids[:, -1]
        ends = torch.zeros_like(last, dtype=torch.bool)
        for token in self.stop_tokens:
            ends = ends | (last == token)
        if self.stop_strings is not None:
            ends = ends | self.stop_strings(input_ids)
        self.finished = self.finished.to(ends) | ends
        return self.finished | ((~self.finished).sum() <= self.most_left)


def generate_dropping(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    config: GenerationConfig,
    stop_strings: StopStrings | None = None,
    synced_gpus: bool = False,
    keeps_cache: bool = True,
    make_cache: Callable[[], Cache | None] = lambda: None,
) -> Tensor:
    """Generate, going on with the unfinished rows and their key-value cache alone whenever a quarter have ended.

    Args:
        model: A transformers model.
        input_ids: Prompts, long `(B, C)`, left-padded.
        attention_mask: 1 on real tokens, long `(B, C)`.
        config: How to sample; its `eos_token_id` is one token, several, or None.
        stop_strings: Texts that end a row too, or None.
        synced_gpus: Whether every forward pass is one of all ranks: all rows then stay until the last has ended.
        keeps_cache: Whether the unfinished rows' part of the cache can be kept; else their tokens are read again.
        make_cache: Makes the cache of the first call, or None, which leaves it to `generate`.

    Returns:
        Sampled ids, long `(B, T)` with `T <= max_new_tokens`; `pad_token_id` follows a row's end.

    Raises:
        NonFiniteLogitsError: There are logits that are NaN or infinite.
        Stopped: A signal has come, to this rank or with `synced_gpus` to any.
    """
    num_rows, prompt_length = input_ids.shape
    size, filling = length_and_filling(config)
    result, longest = input_ids.new_full((num_rows, size), filling), prompt_length + size
    rows = torch.arange(num_rows, device=input_ids.device)
    strings = None if stop_strings is None else StopsAtStrings(stop_strings, prompt_length)
    share_left = 0.0 if synced_gpus else SHARE_LEFT
    how, processors = sampling_processors(config, input_ids.device)
    checks, cache = ChecksLogits(), _as_argument(make_cache())
    while len(rows) and input_ids.shape[1] < longest:
        few_are_left = FewAreLeft(config.eos_token_id, strings, int(share_left * len(rows)))
        length = longest - input_ids.shape[1]
        with given_up_together(model) if synced_gpus else nullcontext():
            output = model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=_with(how, max_new_tokens=length, return_dict_in_generate=True),
                logits_processor=LogitsProcessorList([checks, *processors]),
                stopping_criteria=StoppingCriteriaList([few_are_left] if synced_gpus else [few_are_left, IsGivenUp()]),
                synced_gpus=synced_gpus,
                **cache,
            )
        checks.check()
        sampled = output.sequences
        result[rows, : sampled.shape[1] - prompt_length] = sampled[:, prompt_length:]
        left = (~few_are_left.finished).nonzero().squeeze(1)
        attention_mask = torch.cat(
            (attention_mask, attention_mask.new_ones(len(rows), sampled.shape[1] - input_ids.shape[1])), dim=1
        )[left]
        rows, input_ids = rows[left], sampled[left]
        cache = rows_of_cache(output, left) if keeps_cache else _as_argument(make_cache())
    return result[:, : max(1, sampled.shape[1] - prompt_length)]


def _as_argument(cache: Cache | None) -> dict[str, Any]:
    return {} if cache is None else {"past_key_values": cache}


def _with(config: GenerationConfig, **changes: Any) -> GenerationConfig:
    changed = copy.deepcopy(config)
    changed.update(**changes)
    return changed


def rows_of_cache(output: Any, rows: Tensor) -> dict[str, Any]:
    """Keep some rows' part of the cache of `generate`, as its argument; {} where it has none that can be parted.

    Args:
        output: What `generate` returned.
        rows: Indices of the rows.
    """
    cache: Any = getattr(output, "past_key_values", None)
    layers = getattr(cache, "layers", [None])
    if not all(hasattr(layer, "reorder_cache") for layer in layers):
        return {}
    for layer in layers:
        layer.reorder_cache(rows)  # `batch_select_indices` forgets the states of convolutions and recurrences
    return {"past_key_values": cache}
