"""Sampling responses with transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from rlhf_ppo.data.experience import split_until
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import pad_right, padding_columns
from rlhf_ppo.generation.dropping import generate_dropping
from rlhf_ppo.generation.head_cast import float32_head_apart, frozen_head_cast
from rlhf_ppo.generation.hiding import own_generation_config_hidden
from rlhf_ppo.generation.protocol import Sampled, length_and_filling
from rlhf_ppo.generation.stopping import StopStrings
from rlhf_ppo.generation.trying import cache_maker, generation_needs
from rlhf_ppo.models.modes import in_eval_mode
from rlhf_ppo.models.sharded import gathers_in_passes

if TYPE_CHECKING:
    from rlhf_ppo.config import PPOConfig


def sampling_config(
    args: PPOConfig, stop_token_id: int | None, never_sampled: list[int] | None = None
) -> GenerationConfig:
    """Build the sampling distribution of the rollout from the arguments alone.

    Args:
        args: Gives `response_length`, `temperature`, `top_k`, `top_p` and `min_p`.
        stop_token_id: Where a row ends; generation ends when every row has.
        never_sampled: Ids that other models could not read, the last ones of the vocabulary; None allows all. The
            log-probabilities do not know of it, as they do not know of `top_k`.

    Returns:
        A configuration in which nothing is left for the model's own generation_config to fill in.
    """
    return GenerationConfig(
        max_new_tokens=args.response_length,
        do_sample=True,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        use_cache=True,
        suppress_tokens=never_sampled,
        eos_token_id=stop_token_id,
        pad_token_id=_valid_padding(stop_token_id),
    )


def greedy_config(
    args: PPOConfig, stop_token_id: int | None, never_sampled: list[int] | None = None
) -> GenerationConfig:
    """Build the configuration of sample tables: the most likely token at each step."""
    return GenerationConfig(
        max_new_tokens=args.response_length,
        do_sample=False,
        use_cache=True,
        suppress_tokens=never_sampled,
        eos_token_id=stop_token_id,
        pad_token_id=_valid_padding(stop_token_id),
    )


def _valid_padding(stop_token_id: int | None) -> int:
    # What `generate` feeds to finished rows must be in the vocabulary, which an added "[PAD]" need not be;
    # everything after the stop token is masked afterwards.
    return 0 if stop_token_id is None else stop_token_id


@torch.no_grad()
def sample_responses(
    policy: nn.Module,
    prompts: Prompts,
    config: GenerationConfig,
    rows_per_call: int,
    stop_strings: StopStrings | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Generate a response for each prompt, from prompts of similar length at a time.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
        prompts: `B` left-padded prompts; ids under the mask are ignored.
        config: The sampling distribution and the length limit.
        rows_per_call: Most prompts that are generated from at once; see `call_sizes`.
        stop_strings: Texts that end a row too, or None.
        gather: Concatenates a tensor over all ranks, which make equally many calls where their passes are in step;
            None when there is one process.

    Returns:
        Sampled ids, long `(B, T)` with `T <= max_new_tokens`; anything after a row's end is filling.
    """
    lengths, longest_first = prompts.attention_mask.sum(dim=1).sort(descending=True, stable=True)
    in_step = gathers_in_passes(policy)
    needs, make_cache = generation_needs(policy), cache_maker(policy)
    max_rows = 1 if needs.one_by_one else rows_per_call
    max_new_tokens, filling = length_and_filling(config)
    sizes = call_sizes(lengths.tolist(), max_new_tokens, max_rows, needs.equal_lengths)
    if in_step and gather is not None:
        sizes = split_until(sizes, int(gather(torch.tensor([len(sizes)], device=lengths.device)).max()))
    # Activation checkpointing, active in training mode, forbids the KV cache.
    heads = (frozen_head_cast(policy), float32_head_apart(policy))
    with in_eval_mode(policy), heads[0], heads[1], own_generation_config_hidden(policy) as model:
        parts = [
            _sample_part(model, prompts, rows, config, stop_strings, in_step, needs.keeps_cache, make_cache)
            for rows in longest_first.split(sizes)
        ]
    return pad_right(parts, padding_value=filling)[longest_first.argsort()]


def call_sizes(lengths: Sequence[int], max_new_tokens: int, max_rows: int, equal_lengths: bool = False) -> list[int]:
    """Count the rows that `generate` is called with, so that at most half of all positions are padding.

    With prompts of `l_1 >= l_2 >= ...` and `T` new tokens, `n` rows from the `i`-th on share a call as long as

        n (l_i + T) <= 2 sum_{j = i}^{i + n - 1} (l_j + T)

    A call that ends for another reason than `max_rows` is followed by one whose rows take less than half as many
    positions each, so that there are at most `log2((l_max + T) / (l_min + T))` of them.

    Args:
        lengths: Tokens of each prompt, in falling order.
        max_new_tokens: Longest response, in tokens.
        max_rows: Most rows of a call.
        equal_lengths: Whether only prompts of one length share a call, for models that take padding for text.

    Returns:
        Number of rows of each call.
    """
    sizes, longest, taken = [0], 0, 0
    most_positions = 1 if equal_lengths else 2  # for each that a token takes
    for length in lengths:
        width = length + max_new_tokens
        if sizes[-1] and (sizes[-1] == max_rows or (sizes[-1] + 1) * longest > most_positions * (taken + width)):
            sizes.append(0)
            taken = 0
        if sizes[-1] == 0:
            longest = width
        sizes[-1] += 1
        taken += width
    return sizes


def _sample_part(model: Any, prompts: Prompts, rows: Tensor, *how: Any) -> Tensor:
    mask = prompts.attention_mask[rows]
    left = padding_columns(mask)
    ids = prompts.input_ids[rows].masked_fill(~mask, 0)
    return generate_dropping(model, ids[:, left:], mask[:, left:].long(), *how)


@dataclass(frozen=True)
class TransformersEngine:
    """transformers' `generate`, on the policy's own weights.

    Attributes:
        rows_per_call: Tells how many prompts at most are generated from at once.
        stop_strings: Texts that end a row too, or None.
        gather: Concatenates a tensor over all ranks.
    """

    rows_per_call: Callable[[], int]
    stop_strings: StopStrings | None = None
    gather: Callable[[Tensor], Tensor] | None = None
    reads_sharded: bool = False
    called: str = "generation_engine='transformers'"

    def sample(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Sampled:
        """Generate a response to each prompt; see `sample_responses`."""
        how = (config, self.rows_per_call(), self.stop_strings, self.gather)
        return Sampled(sample_responses(policy, prompts, *how))

    def policy_changed(self) -> None:
        """Do nothing: the policy itself generates."""
