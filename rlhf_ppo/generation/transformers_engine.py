"""Generation with transformers' `generate`: calls of similar lengths, from which finished rows are dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import pad_right, padding_columns, sent, split_until
from rlhf_ppo.generation.caches import KeptCaches, KeptRows, preallocated_cache, read_once, rows_of_cache
from rlhf_ppo.generation.protocol import ROW_COLUMN, Sampled, length_and_filling, stop_tokens
from rlhf_ppo.generation.sampling import (
    FiniteLogitsCheck,
    changed,
    default_generation_config,
    float32_head_apart,
    frozen_head_cast,
    sampling_processors,
)
from rlhf_ppo.generation.stopping import StopsAtStrings, StopStrings
from rlhf_ppo.models.unwrapping import autocast_dtype, gathers_in_passes, in_eval_mode, transformers_model
from rlhf_ppo.processes.signals import raise_if_any_rank_stopped, raise_if_stopped

if TYPE_CHECKING:
    from rlhf_ppo.config import PPOConfig


@dataclass(frozen=True)
class TransformersEngine:
    """transformers' `generate`, on the policy's own weights.

    Attributes:
        rows_per_call: Returns the largest number of prompts of one `generate` call.
        stop_strings: Texts that end a row too, or None.
        gather: Concatenates a tensor over all ranks.
        kept: What is kept of rows between calls, or None.
    """

    rows_per_call: Callable[[], int]
    stop_strings: StopStrings | None = None
    gather: Callable[[Tensor], Tensor] | None = None
    kept: KeptRows | None = None
    reads_sharded: bool = False
    called: str = "generation_engine='transformers'"

    def sample(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Sampled:
        """Generate a response to each prompt; see `sample_responses`."""
        kept = self.kept if self.kept is not None and continues(policy) else None
        given = (self.rows_per_call(), self.stop_strings, self.gather, kept)
        return Sampled(sample_responses(policy, prompts, config, *given))

    def continuing(self) -> TransformersEngine:
        """Return an engine for the turns of a batch of episodes, which keeps the rows' caches between its calls."""
        return replace(self, kept={})

    def policy_changed(self) -> None:
        """Do nothing: the policy itself generates."""


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
        # `generate` feeds this to finished rows, and embeds it, which an added "[PAD]" may not allow.
        pad_token_id=0 if stop_token_id is None else stop_token_id,
    )


def sampling_config(
    args: PPOConfig, stop_token_id: int | None, never_sampled: list[int] | None = None
) -> GenerationConfig:
    """Build the sampling distribution of the rollout from the arguments alone.

    Args:
        args: Gives `response_length`, `temperature`, `top_k`, `top_p` and `min_p`.
        stop_token_id: Ends a row; generation ends when every row has ended.
        never_sampled: Ids that other models cannot read, the last of the vocabulary; None allows all. The
            log-probabilities ignore it, as they ignore `top_k`.

    Returns:
        A configuration that leaves nothing for the model's own generation_config to fill in.
    """
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return changed(greedy_config(args, stop_token_id, never_sampled), do_sample=True, **sampling)


@dataclass
class GenerationNeeds:
    """Answers of the generation probe of a model.

    Attributes:
        equal_lengths: The prompts of a call must have one length: padding before them changes what follows.
        one_by_one: Each prompt needs a call of its own: other rows change what follows, even at equal length.
        keeps_cache: The cache of some rows can be kept; otherwise their tokens are read again.
        preallocates: By the type that autocast casts to, or None: a preallocated cache gives the same logits.
        continues: By that type: keys and values that were kept between two turns give the same logits.
    """

    equal_lengths: bool = False
    one_by_one: bool = False
    keeps_cache: bool = True
    preallocates: dict[torch.dtype | None, bool] = field(default_factory=dict, compare=False)
    continues: dict[torch.dtype | None, bool] = field(default_factory=dict, compare=False)


def generation_needs(policy: nn.Module) -> GenerationNeeds:
    """Return the answers that are kept with a model; probe it at its first use, under each type of autocast.

    Args:
        policy: A causal language model, or a `PeftModel` around one. If it is sharded, all ranks call this together.

    Raises:
        ValueError: Even a single prompt gets other distributions than those of the forward pass.
    """
    needs: GenerationNeeds | None = vars(transformers_model(policy)).get("generation_needs")
    if needs is None or _autocast_dtype(policy) not in needs.preallocates:
        from rlhf_ppo.generation.capability_probe import probe_generation

        needs = probe_generation(policy, needs, _autocast_dtype(policy))
        vars(transformers_model(policy))["generation_needs"] = needs
    return needs


def continues(policy: nn.Module) -> bool:
    """Tell whether caches of a model's rows can be kept between turns; probe it at its first use, as above."""
    needs, dtype = generation_needs(policy), _autocast_dtype(policy)
    if gathers_in_passes(policy) or needs.one_by_one or needs.equal_lengths or not needs.keeps_cache:
        return False
    if dtype not in needs.continues:
        from rlhf_ppo.generation.capability_probe import probe_continuing

        needs.continues[dtype] = probe_continuing(policy)
    return needs.continues[dtype]


def _autocast_dtype(policy: nn.Module) -> torch.dtype | None:
    return autocast_dtype(next(policy.parameters()).device.type)


@torch.no_grad()
def sample_responses(
    policy: nn.Module,
    prompts: Prompts,
    config: GenerationConfig,
    rows_per_call: int,
    stop_strings: StopStrings | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
    kept: KeptRows | None = None,
) -> Tensor:
    """Generate a response for each prompt, in calls with prompts of similar length.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
        prompts: `B` left-padded prompts; ids under the mask are ignored.
        config: The sampling distribution and the length limit.
        rows_per_call: Largest number of prompts of a call; see `call_sizes`.
        stop_strings: Texts that end a row too, or None.
        gather: Concatenates a tensor over all ranks, which make equally many calls where each pass is one of all
            ranks; None in a single process.
        kept: What was kept of the rows, by the column `ROW_COLUMN`; of the first `rows_per_call` it is kept again.

    Returns:
        Sampled ids, long `(B, T)` with `T <= max_new_tokens`; padding follows a row's end.
    """
    lengths, device = prompts.mask.sum(axis=1), prompts.input_ids.device
    names = np.array([] if kept is None else prompts.columns[ROW_COLUMN])
    is_kept = np.zeros(len(lengths), dtype=bool) if kept is None else names < rows_per_call
    longest_first = np.lexsort((-lengths, ~is_kept))
    in_step, needs = gathers_in_passes(policy), generation_needs(policy)
    max_new_tokens, filling = length_and_filling(config)
    max_rows = 1 if needs.one_by_one else rows_per_call
    sizes = [
        size
        for part in (longest_first[: is_kept.sum()], longest_first[is_kept.sum() :])
        for size in call_sizes(lengths[part].tolist(), max_new_tokens, max_rows, needs.equal_lengths)
        if len(part)
    ]
    if in_step and gather is not None:
        sizes = split_until(sizes, int(gather(torch.tensor([len(sizes)], device=device)).max()))
    preallocates = needs.preallocates[_autocast_dtype(policy)]
    shares = preallocates and kept is None and _repeats(prompts) and continues(policy)
    parts = []
    # Activation checkpointing, active in training mode, forbids the KV cache.
    with (
        in_eval_mode(policy),
        frozen_head_cast(policy),
        float32_head_apart(policy),
        default_generation_config(policy) as model,
    ):
        for rows in np.split(longest_first, np.cumsum(sizes)[:-1]):
            first, indices = padding_columns(prompts.mask[rows]), sent(torch.from_numpy(rows), device)
            mask = prompts.attention_mask[indices]
            ids = prompts.input_ids[indices].masked_fill(~mask, 0)
            caches = KeptCaches(kept, names[rows].tolist()) if kept is not None and is_kept[rows].all() else None
            how = (config, stop_strings, in_step, needs.keeps_cache, preallocates, caches, shares)
            parts.append(generate_compacting(model, ids[:, first:], mask[:, first:].long(), *how))
    return pad_right(parts, padding_value=filling)[sent(torch.from_numpy(longest_first.argsort()), device)]


def _repeats(prompts: Prompts) -> bool:
    """Return whether a prompt equals the one before it, as with `num_generations` above 1."""
    ids = prompts.input_ids.masked_fill(~prompts.attention_mask, -1)
    return bool((ids[1:] == ids[:-1]).all(dim=1).any())


def call_sizes(lengths: Sequence[int], max_new_tokens: int, max_rows: int, equal_lengths: bool = False) -> list[int]:
    """Count the rows of each `generate` call; at most half of all positions are padding.

    With prompts of `l_1 >= l_2 >= ...` and `T` new tokens, `n` rows from the `i`-th on share a call as long as

        n (l_i + T) <= 2 sum_{j = i}^{i + n - 1} (l_j + T)

    A call that this rule ends is followed by one whose rows take less than half as many positions each: there are at
    most `log2((l_max + T) / (l_min + T))` of them.

    Args:
        lengths: Tokens of each prompt, in falling order.
        max_new_tokens: Longest response, in tokens.
        max_rows: Largest number of rows of a call.
        equal_lengths: Only prompts of one length share a call, for models that read padding as text.
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


# ---- Batch compaction ----

UNFINISHED_SHARE = 0.75
"""A batch is compacted once at most this share of its rows is unfinished."""


class CompactionCriterion(StoppingCriteria):
    """Ends `generate` once at most `most_left` rows are unfinished.

    Args:
        finished: Rows that have ended by themselves, bool `(B,)`; updated after each token.
        stop_tokens: End rows.
        stop_strings: Ends rows too, or None.
        most_left: Number of unfinished rows at which `generate` ends.
        checks_signals: Raise `Stopped` after a token if a signal has arrived that ends the run.
    """

    def __init__(
        self,
        finished: Tensor,
        stop_tokens: Sequence[int],
        stop_strings: StopsAtStrings | None,
        most_left: int,
        checks_signals: bool = True,
    ) -> None:
        self.finished, self.stop_tokens, self.stop_strings = finished, stop_tokens, stop_strings
        self.most_left, self.checks_signals = most_left, checks_signals

    def __call__(self, input_ids: Any, scores: Any = None, **kwargs: Any) -> Any:
        """Return the rows that `generate` need not continue, bool `(B,)`."""
        if self.checks_signals:
            raise_if_stopped()
        for token in self.stop_tokens:
            self.finished = self.finished | (input_ids[:, -1] == token)
        if self.stop_strings is not None:
            self.finished = self.finished | self.stop_strings(input_ids)
        return self.finished | ((~self.finished).sum() <= self.most_left)


@contextmanager
def raising_on_all_ranks_if_stopped(model: nn.Module) -> Iterator[None]:
    """Raise `Stopped` on all ranks before the same token, where each forward pass of a model is one of all ranks.

    `generate` still calls the model on ranks that have finished, but no stopping criterion.
    """

    def ask(module: nn.Module, arguments: Any) -> None:
        raise_if_any_rank_stopped(next(model.parameters()).device)

    hook = model.register_forward_pre_hook(ask, prepend=True)
    try:
        yield
    finally:
        hook.remove()


def generate_compacting(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    config: GenerationConfig,
    stop_strings: StopStrings | None = None,
    synced_gpus: bool = False,
    keeps_cache: bool = True,
    preallocates: bool = False,
    kept: KeptCaches | None = None,
    shares: bool = False,
) -> Tensor:
    """Generate, and drop the finished rows and their key-value cache whenever a quarter of the rows has ended.

    Args:
        model: A transformers model.
        input_ids: Prompts, long `(B, C)`, left-padded.
        attention_mask: 1 on real tokens, long `(B, C)`.
        config: The sampling distribution; its `eos_token_id` is a token, several, or None.
        stop_strings: Texts that end a row too, or None.
        synced_gpus: Every forward pass is one of all ranks: all rows stay until the last has ended.
        keeps_cache: Keep the unfinished rows of the cache; otherwise read their tokens again.
        preallocates: Use a preallocated cache.
        kept: Continues the rows' caches, and keeps them.
        shares: Read equal prompts of adjacent rows once, into a preallocated cache.

    Returns:
        Sampled ids, long `(B, T)` with `T <= max_new_tokens`; `pad_token_id` follows a row's end.

    Raises:
        NonFiniteLogitsError, Stopped: Logits are NaN or infinite; a signal has arrived, at any rank if `synced_gpus`.
    """
    prompt_length, (size, filling) = input_ids.shape[1], length_and_filling(config)
    result, longest = input_ids.new_full((len(input_ids), size), filling), prompt_length + size
    rows = torch.arange(len(input_ids), device=input_ids.device)
    strings = None if stop_strings is None else StopsAtStrings(stop_strings, prompt_length)
    how, processors = sampling_processors(changed(config, return_dict_in_generate=True), input_ids.device)
    new_cache = (lambda: preallocated_cache(model)) if preallocates else dict
    check, cache = FiniteLogitsCheck(), new_cache() if kept is None else kept.cache(model, input_ids, attention_mask)
    if shares:
        read_once(model, input_ids, attention_mask, cache["past_key_values"])
    while len(rows) and input_ids.shape[1] < longest:
        how.max_new_tokens = longest - input_ids.shape[1]
        most_left, none_yet = 0 if synced_gpus else int(UNFINISHED_SHARE * len(rows)), rows < 0
        criterion = CompactionCriterion(none_yet, stop_tokens(config), strings, most_left, not synced_gpus)
        with raising_on_all_ranks_if_stopped(model) if synced_gpus else nullcontext():
            output = model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=how,
                logits_processor=LogitsProcessorList([check, *processors]),
                stopping_criteria=StoppingCriteriaList([criterion]),
                synced_gpus=synced_gpus,
                **cache,
            )
        finished, sampled = check.check_beside(criterion.finished), output.sequences
        result[rows, : sampled.shape[1] - prompt_length] = sampled[:, prompt_length:]
        if kept is not None:
            kept.keep(rows, finished | (sampled.shape[1] >= longest), output.past_key_values, sampled, attention_mask)
        left = sent((~finished).nonzero().squeeze(1), input_ids.device)
        attention_mask = nn.functional.pad(attention_mask, (0, sampled.shape[1] - input_ids.shape[1]), value=1)[left]
        rows, input_ids = rows[left], sampled[left]
        cache = rows_of_cache(output, left) if keeps_cache else new_cache()
    return result[:, : max(1, sampled.shape[1] - prompt_length)]
