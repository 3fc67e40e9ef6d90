"""Generation with transformers' `generate`: calls of similar lengths, from which finished rows are dropped.

PPO learns from the log-probabilities of the forward pass. Generation must draw from the same distributions: for a
prompt alone, beside longer prompts, and after finished rows have left the batch. A probe of a few forced tokens finds
out how a model must be called for that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import pad_right, padding_columns, sent, split_until
from rlhf_ppo.generation.caches import KeptCaches, KeptRows, preallocated_cache, read_once, rows_of_cache
from rlhf_ppo.generation.protocol import ROW_COLUMN, Sampled, length_and_filling, stop_tokens
from rlhf_ppo.generation.sampling import (
    FiniteLogitsCheck,
    StopsAtStrings,
    StopStrings,
    changed,
    default_generation_config,
    float32_head_apart,
    frozen_head_cast,
    sampling_processors,
)
from rlhf_ppo.models.capabilities import deviation, rounding
from rlhf_ppo.models.packing import hidden_states
from rlhf_ppo.models.policy_and_value import logits
from rlhf_ppo.models.unwrapping import (
    CACHE,
    autocast_dtype,
    gathers_in_passes,
    in_eval_mode,
    text_config,
    transformers_model,
)
from rlhf_ppo.processes.distributed import preserve_rng


@dataclass(frozen=True)
class TransformersEngine:
    """transformers' `generate`, on the policy's own weights.

    Attributes:
        rows_per_call: Maximum number of prompts of one `generate` call.
        stop_strings: Texts that also end a row, or None.
        gather: Concatenates a tensor over all ranks.
        kept: Caches of rows, kept between calls, or None.
    """

    rows_per_call: int
    stop_strings: StopStrings | None = None
    gather: Callable[[Tensor], Tensor] | None = None
    kept: KeptRows | None = None
    reads_sharded: bool = False
    called: str = "generation_engine='transformers'"

    def sample(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Sampled:
        """Generate a response to each prompt; see `sample_responses`."""
        kept = self.kept if self.kept is not None and continues(policy) else None
        return Sampled(
            sample_responses(policy, prompts, config, self.rows_per_call, self.stop_strings, self.gather, kept)
        )

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
        # `generate` embeds this id in finished rows; the model may not embed an added "[PAD]".
        pad_token_id=0 if stop_token_id is None else stop_token_id,
    )


def sampling_config(
    args: PPOConfig, stop_token_id: int | None, never_sampled: list[int] | None = None
) -> GenerationConfig:
    """Build the sampling distribution of the rollout from the arguments alone.

    Args:
        args: Gives `response_length`, `temperature`, `top_k`, `top_p` and `min_p`.
        stop_token_id: Ends a row; generation ends when every row has ended.
        never_sampled: Ids at the end of the vocabulary that other models cannot embed; None allows all. The
            log-probabilities ignore it, as they ignore `top_k`.

    Returns:
        A configuration that sets all fields that the model's own generation_config could fill in.
    """
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return changed(greedy_config(args, stop_token_id, never_sampled), do_sample=True, **sampling)


@dataclass
class GenerationNeeds:
    """Results of the generation probe of a model.

    Attributes:
        equal_lengths: The prompts of a call must have one length, because padding changes the logits.
        one_by_one: Each prompt needs its own call, because other rows change the logits even at equal length.
        keeps_cache: The cache of the remaining rows can be kept; otherwise their tokens are read again.
        preallocates: By autocast's type, or None: whether a preallocated cache gives the same logits.
        continues: By that type: whether keys and values kept between two turns give the same logits.
    """

    equal_lengths: bool = False
    one_by_one: bool = False
    keeps_cache: bool = True
    preallocates: dict[torch.dtype | None, bool] = field(default_factory=dict, compare=False)
    continues: dict[torch.dtype | None, bool] = field(default_factory=dict, compare=False)


def generation_needs(policy: nn.Module) -> GenerationNeeds:
    """Return a model's cached probe results; the first use under each type of autocast probes it.

    Args:
        policy: A causal language model, or a `PeftModel` around one. If it is sharded, all ranks call this together.

    Raises:
        ValueError: Even a single prompt gets other distributions than those of the forward pass.
    """
    needs: GenerationNeeds | None = vars(transformers_model(policy)).get("generation_needs")
    if needs is None or _autocast_dtype(policy) not in needs.preallocates:
        needs = probe_generation(policy, needs, _autocast_dtype(policy))
        vars(transformers_model(policy))["generation_needs"] = needs
    return needs


def continues(policy: nn.Module) -> bool:
    """Return whether caches of a model's rows can be kept between turns; the first use probes it."""
    needs, dtype = generation_needs(policy), _autocast_dtype(policy)
    if gathers_in_passes(policy) or needs.one_by_one or needs.equal_lengths or not needs.keeps_cache:
        return False
    if dtype not in needs.continues:
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
        rows_per_call: Maximum number of prompts of a call; see `call_sizes`.
        stop_strings: Texts that also end a row, or None.
        gather: Concatenates a tensor over all ranks; with sharded layers all ranks make the same number of calls. None
            in a single process.
        kept: Kept caches of the rows, by the column `ROW_COLUMN`; those of the first `rows_per_call` are kept again.

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
            parts.append(
                generate_compacting(
                    model, ids[:, first:], mask[:, first:].long(), config, stop_strings, synced_gpus=in_step,
                    keeps_cache=needs.keeps_cache, preallocates=preallocates, kept=caches, shares=shares,
                )
            )  # fmt: skip
    return pad_right(parts, padding_value=filling)[sent(torch.from_numpy(longest_first.argsort()), device)]


def _repeats(prompts: Prompts) -> bool:
    """Return whether a prompt equals the one before it, as with `num_generations` above 1."""
    ids = prompts.input_ids.masked_fill(~prompts.attention_mask, -1)
    return bool((ids[1:] == ids[:-1]).all(dim=1).any())


def call_sizes(lengths: Sequence[int], max_new_tokens: int, max_rows: int, equal_lengths: bool = False) -> list[int]:
    """Return the number of rows of each `generate` call; at most half of all positions are padding.

    With prompts of `l_1 >= l_2 >= ...` and `T` new tokens, `n` rows from the `i`-th on share a call if

        n (l_i + T) <= 2 sum_{j = i}^{i + n - 1} (l_j + T)

    If this rule ends a call, the rows of the next one are less than half as long: it adds at most
    `log2((l_max + T) / (l_min + T))` calls.

    Args:
        lengths: Tokens of each prompt, longest first.
        max_new_tokens: Longest response, in tokens.
        max_rows: Maximum rows of a call.
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
    """End `generate` once at most `most_left` rows are unfinished.

    Args:
        finished: Rows that have ended by themselves, bool `(B,)`; updated after each token.
        stop_tokens: Tokens that end a row.
        stop_strings: Texts that also end a row, or None.
        most_left: Number of unfinished rows at which `generate` ends.
    """

    def __init__(
        self,
        finished: Tensor,
        stop_tokens: Sequence[int],
        stop_strings: StopsAtStrings | None,
        most_left: int,
    ) -> None:
        self.finished, self.stop_tokens, self.stop_strings = finished, stop_tokens, stop_strings
        self.most_left = most_left

    def __call__(self, input_ids: Any, scores: Any = None, **kwargs: Any) -> Any:
        """Return the rows that `generate` need not continue, bool `(B,)`."""
        for token in self.stop_tokens:
            self.finished = self.finished | (input_ids[:, -1] == token)
        if self.stop_strings is not None:
            self.finished = self.finished | self.stop_strings(input_ids)
        return self.finished | ((~self.finished).sum() <= self.most_left)


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
    """Generate; drop the finished rows and their cache whenever a quarter of the rows has ended.

    Args:
        model: A transformers model.
        input_ids: Prompts, long `(B, C)`, left-padded.
        attention_mask: 1 on real tokens, long `(B, C)`.
        config: The sampling distribution; its `eos_token_id` is a token, several, or None.
        stop_strings: Texts that also end a row, or None.
        synced_gpus: All ranks run each forward pass together; rows stay until the last one has ended.
        keeps_cache: Keep the unfinished rows of the cache; otherwise read their tokens again.
        preallocates: Use a preallocated cache.
        kept: Caches of the rows to continue, which are kept again, or None.
        shares: Read equal prompts of adjacent rows once, into a preallocated cache.

    Returns:
        Sampled ids, long `(B, T)` with `T <= max_new_tokens`; `pad_token_id` follows a row's end.

    Raises:
        NonFiniteLogitsError: Logits are NaN or infinite.
    """
    prompt_length, (size, filling) = input_ids.shape[1], length_and_filling(config)
    result, longest = input_ids.new_full((len(input_ids), size), filling), prompt_length + size
    rows = torch.arange(len(input_ids), device=input_ids.device)
    strings = None if stop_strings is None else StopsAtStrings(stop_strings, prompt_length)
    how, processors = sampling_processors(changed(config, return_dict_in_generate=True), input_ids.device)
    new_cache = (lambda: preallocated_cache(model)) if preallocates else dict
    check, cache = FiniteLogitsCheck(), new_cache() if kept is None else kept.cache(model, input_ids, attention_mask)
    if shares:
        read_once(model, input_ids, attention_mask, cache[CACHE])
    while len(rows) and input_ids.shape[1] < longest:
        how.max_new_tokens = longest - input_ids.shape[1]
        most_left, none_yet = 0 if synced_gpus else int(UNFINISHED_SHARE * len(rows)), rows < 0
        criterion = CompactionCriterion(none_yet, stop_tokens(config), strings, most_left)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "generation_config": how, **cache}
        given["logits_processor"] = LogitsProcessorList([check, *processors])
        stopping = StoppingCriteriaList([criterion])
        output = model.generate(**given, stopping_criteria=stopping, synced_gpus=synced_gpus)
        finished, sampled = check.check_beside(criterion.finished), output.sequences
        result[rows, : sampled.shape[1] - prompt_length] = sampled[:, prompt_length:]
        if kept is not None:
            kept.keep(rows, finished | (sampled.shape[1] >= longest), getattr(output, CACHE), sampled, attention_mask)
        left = sent((~finished).nonzero().squeeze(1), input_ids.device)
        attention_mask = nn.functional.pad(attention_mask, (0, sampled.shape[1] - input_ids.shape[1]), value=1)[left]
        rows, input_ids = rows[left], sampled[left]
        cache = rows_of_cache(output, left) if keeps_cache else new_cache()
    return result[:, : max(1, sampled.shape[1] - prompt_length)]


# ---- The probe of a model's generation ----

_SHORT, _LONG = 3, 7
"""Tokens of the prompts; the short prompt is generated from alone and beside the long ones."""
_NEW_TOKENS = 4


class _ForcedTokens(LogitsProcessor):
    """Make `generate` choose given tokens, long `(B, T)`."""

    def __init__(self, tokens: Tensor, prompt_length: int) -> None:
        self.tokens, self.prompt_length = tokens, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[:, input_ids.shape[1] - self.prompt_length]
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)


@torch.no_grad()
def probe_generation(policy: nn.Module, known: GenerationNeeds | None, dtype: torch.dtype | None) -> GenerationNeeds:
    """Find out how `generate` must be called for a model; with sharded parameters, all ranks call this together.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
        known: Earlier results; then only the preallocated cache is tried, under autocast's current type.
        dtype: That type, or None.

    Raises:
        ValueError: Even a single prompt gets other distributions than those of the forward pass.
    """
    with in_eval_mode(policy), preserve_rng(), default_generation_config(policy):
        needs = _probe_batches(policy) if known is None else known
        needs.preallocates[dtype] = _takes_preallocated_cache(policy)
    return needs


@torch.no_grad()
def probe_continuing(policy: nn.Module) -> bool:
    """Find out whether rows can be continued from kept keys and values, beside other rows than before."""
    with in_eval_mode(policy), preserve_rng(), default_generation_config(policy):
        if not preallocated_cache(transformers_model(policy), keeps_all=True):
            return False
        prompts = _prompts(policy)
        return _agree(policy, lambda: _continued_logits(policy, *prompts), _forward_logits(policy, *prompts)[:, -1:])


def _continued_logits(policy: nn.Module, ids: Tensor, mask: Tensor, forced: Tensor) -> Tensor:
    """Return the logits `(3, 1, V)` of the last forced token; the first is a turn, those between are its answer.

    The short row, and the two long ones in the other order, continue in calls of their own.
    """
    model, found, kept = transformers_model(policy), [], {}
    rows = KeptCaches(kept, [0, 1, 2])
    output = _generate(policy, ids, mask, forced[:, :1], **rows.cache(model, ids, mask.long()))
    rows.keep(torch.arange(3), torch.ones(3, dtype=torch.bool), getattr(output, CACHE), output.sequences, mask.long())
    for names in ([0], [2, 1]):
        start = int((~mask[names[0]]).sum())
        context = torch.cat((ids[names, start:], forced[names, :-1]), dim=1)
        real = torch.ones_like(context)
        cache = KeptCaches(kept, names).cache(model, context, real)
        found.append(_generated_logits(policy, context, real, forced[names, -1:], **cache))
    return torch.cat((found[0], found[1].flip(0)))


def _takes_preallocated_cache(policy: nn.Module) -> bool:
    cache = preallocated_cache(transformers_model(policy))
    if not cache:
        return False
    prompts = _prompts(policy)
    expected = _generated_logits(policy, *prompts)
    # Kernels of an accelerator may add up in any order.
    tolerance = 0.0 if expected.device.type == "cpu" else None
    return _agree(policy, lambda: _generated_logits(policy, *prompts, **cache), expected, tolerance)


def _check_name_of_cache(model: PreTrainedModel) -> None:
    """Check that a model's own code uses the name of this transformers version for the cache."""
    taken = inspect.signature(model.forward).parameters
    for other in {"cache", "past_key_values"} - {CACHE}:
        if other in taken and CACHE not in taken:
            raise ValueError(
                f"{type(model).__name__}.forward takes {other}, but transformers {transformers.__version__} generates "
                f"with {CACHE}: rename it in the model's own code, or install transformers "
                + ("5.24 or newer" if other == "cache" else "5.23 or older")
            )


def _probe_batches(policy: nn.Module) -> GenerationNeeds:
    _check_name_of_cache(transformers_model(policy))
    ids, mask, forced = _prompts(policy)
    expected = _forward_logits(policy, ids, mask, forced)
    alone = _generated_logits(policy, ids[:1, -_SHORT:], mask[:1, -_SHORT:], forced[:1])
    if not (expected.isfinite().all() and alone.isfinite().all()):
        return GenerationNeeds()  # broken weights are reported where they are used
    if (error := deviation(alone, expected[:1])) > _rounding(policy):
        raise ValueError(
            f"{type(transformers_model(policy)).__name__} generates from other distributions than those of its "
            f"forward pass (logits differ by {error:.2g} of their size), so that PPO would learn from wrong "
            "probabilities; use another architecture"
        )
    needs = GenerationNeeds()
    if not _agree(policy, lambda: _generated_logits(policy, ids, mask, forced), expected):
        if not _agree(policy, lambda: _generated_logits(policy, ids[1:], mask[1:], forced[1:]), expected[1:]):
            return GenerationNeeds(one_by_one=True)
        needs.equal_lengths = True
    needs.keeps_cache = _agree(policy, lambda: _logits_of_kept_row(policy, ids, forced), expected[2:, -1:])
    return needs


def _prompts(policy: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return left-padded ids and mask `(3, C)` of a short and two long prompts, and their forced tokens `(3, T)`."""
    device = next(policy.parameters()).device
    width = _LONG + _NEW_TOKENS
    ids = (torch.arange(3 * width, device=device).view(3, width) * 5 + 1) % text_config(policy).vocab_size
    lengths = torch.tensor([_SHORT, _LONG, _LONG], device=device)
    mask = torch.arange(_LONG, device=device) >= _LONG - lengths[:, None]
    return ids[:, :_LONG].masked_fill(~mask, 0), mask, ids[:, _LONG:]


def _forward_logits(policy: nn.Module, ids: Tensor, mask: Tensor, forced: Tensor) -> Tensor:
    """Return the logits `(B, T, V)` of the forced tokens in a forward pass."""
    whole = torch.cat((mask, torch.ones_like(forced, dtype=torch.bool)), dim=1)
    states = hidden_states(policy, torch.cat((ids, forced), dim=1), whole)
    return logits(policy, states[:, -_NEW_TOKENS - 1 : -1])


def _logits_of_kept_row(policy: nn.Module, ids: Tensor, forced: Tensor) -> Tensor:
    """Return the logits `(1, 1, V)` of the last token of the last row, after the row before it has left the batch."""
    mask = torch.ones_like(ids[1:], dtype=torch.bool)
    output = _generate(policy, ids[1:], mask, forced[1:, :-1])
    cache = rows_of_cache(output, torch.tensor([1], device=ids.device))
    ids, mask = output.sequences[1:], torch.ones_like(output.sequences[1:], dtype=torch.bool)
    return _generated_logits(policy, ids, mask, forced[2:, -1:], **cache)


def _generated_logits(policy: nn.Module, ids: Tensor, mask: Tensor, forced: Tensor, **cache: Any) -> Tensor:
    """Return the logits `(B, T, V)` of the forced tokens."""
    return torch.stack(_generate(policy, ids, mask, forced, **cache).logits or (), dim=1).float()


def _generate(policy: nn.Module, ids: Tensor, mask: Tensor, forced: Tensor, **cache: Any) -> GenerateDecoderOnlyOutput:
    config = GenerationConfig(
        max_new_tokens=forced.shape[1],
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    model: Any = transformers_model(policy)
    return model.generate(
        input_ids=ids,
        attention_mask=mask.long(),
        generation_config=config,
        logits_processor=LogitsProcessorList([_ForcedTokens(forced, ids.shape[1])]),
        **cache,
    )


def _rounding(policy: nn.Module) -> float:
    """Return the rounding of logits, which are float32 whatever they were computed in."""
    return rounding(next(weight for weight in policy.parameters() if weight.is_floating_point()))


def _agree(
    policy: nn.Module, generate: Callable[[], Tensor], expected: Tensor, tolerance: float | None = None
) -> bool:
    try:
        return deviation(generate(), expected) <= (_rounding(policy) if tolerance is None else tolerance)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):  # the model cannot compute these shapes
        return False
