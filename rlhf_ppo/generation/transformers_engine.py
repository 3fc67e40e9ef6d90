"""Generation with transformers' `generate`: calls of similar lengths, from which finished rows are dropped.

PPO learns from the log-probabilities of the forward pass. Generation must draw from the same distributions: for a
prompt alone, beside longer prompts, and after finished rows have left the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf_ppo.data.images import IMAGES_COLUMN, RowImages, model_inputs, with_spare
from rlhf_ppo.data.rollout import Prompts, pad_right, padding_columns, sent, split_until
from rlhf_ppo.generation.protocol import ROW_COLUMN, Generates, NonFiniteLogitsError, Sampled
from rlhf_ppo.generation.sampling import StopStrings, changed, length_and_filling, stop_tokens
from rlhf_ppo.models.heads import float32_head_apart, frozen_head_cast
from rlhf_ppo.models.packing import deviation, looked_at
from rlhf_ppo.models.unwrapping import (
    CACHE,
    default_generation_config,
    gathers_in_passes,
    in_eval_mode,
    rounding,
    text_config,
    transformers_model,
)


@dataclass(frozen=True)
class TransformersEngine:
    """transformers' `generate`, on the policy's own weights.

    Attributes:
        rows_per_call: Maximum number of prompts of one `generate` call.
        stop_strings: Texts that also end a row, or None.
        gather: Concatenates a tensor over all ranks; with sharded layers all ranks make the same number of calls. None
            in a single process.
        kept: Caches of rows between calls, by the column `ROW_COLUMN`; those of the first `rows_per_call` are kept
            again. None keeps none.
    """

    rows_per_call: int
    stop_strings: StopStrings | None = None
    gather: Callable[[Tensor], Tensor] | None = None
    kept: KeptRows | None = None
    reads_sharded: bool = False
    called: str = "generation_engine='transformers'"

    @torch.no_grad()
    def sample(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Sampled:
        """Generate a response to each prompt, in calls with prompts of similar length; see `call_sizes`.

        Args:
            policy: A causal language model, or a `PeftModel` around one.
            prompts: `B` left-padded prompts; ids under the mask are ignored.
            config: The sampling distribution and the length limit.

        Returns:
            Sampled ids, long `(B, T)` with `T <= max_new_tokens`; padding follows a row's end.
        """
        kept = self.kept if self.kept is not None and continues(policy) else None
        lengths, device = prompts.mask.sum(axis=1), prompts.input_ids.device
        names = np.array([] if kept is None else prompts.columns[ROW_COLUMN])
        images = prompts.columns.get(IMAGES_COLUMN)
        is_kept = np.zeros(len(lengths), dtype=bool) if kept is None else names < self.rows_per_call
        longest_first = np.lexsort((-lengths, ~is_kept))
        in_step = gathers_in_passes(policy)
        max_new_tokens, filling = length_and_filling(config)
        max_rows = 1 if _generates_one_by_one(policy) else self.rows_per_call
        shares = kept is None and _repeats(prompts) and continues(policy)
        parts = []
        # Activation checkpointing, active in training mode, forbids the KV cache.
        with (
            in_eval_mode(policy),
            frozen_head_cast(policy),
            float32_head_apart(policy),
            default_generation_config(policy) as model,
        ):
            equal_lengths = _reads_padding(policy, model)
            sizes = [
                size
                for part in (longest_first[: is_kept.sum()], longest_first[is_kept.sum() :])
                for size in call_sizes(lengths[part].tolist(), max_new_tokens, max_rows, equal_lengths)
                if len(part)
            ]
            if in_step and self.gather is not None:
                sizes = split_until(sizes, int(self.gather(torch.tensor([len(sizes)], device=device)).max()))
            for rows in np.split(longest_first, np.cumsum(sizes)[:-1]):
                first, indices = padding_columns(prompts.mask[rows]), sent(torch.from_numpy(rows), device)
                mask = prompts.attention_mask[indices]
                ids = prompts.input_ids[indices].masked_fill(~mask, 0)
                caches = KeptCaches(kept, names[rows].tolist()) if kept is not None and is_kept[rows].all() else None
                ids, mask, pictured = ids[:, first:], mask[:, first:].long(), None
                if images is not None:
                    pictured, ids, mask = with_spare([images[row] for row in rows], ids, mask, left=True)
                sampled = generate_compacting(
                    model, ids, mask, config, self.stop_strings, in_step, caches, shares, pictured
                )
                parts.append(sampled[: len(rows)])
        in_order = sent(torch.from_numpy(longest_first.argsort()), device)
        return Sampled(pad_right(parts, padding_value=filling)[in_order])

    def continuing(self) -> TransformersEngine:
        """Return an engine for the turns of a batch of episodes, which keeps the rows' caches between its calls."""
        return replace(self, kept={})

    def policy_changed(self) -> None:
        """Do nothing: the policy itself generates."""


def continues(policy: nn.Module) -> bool:
    """Return whether the cache of a row can be continued beside other rows: only attention reads the row."""
    look = looked_at(policy)
    return look.packs and look.pads_left and not gathers_in_passes(policy)


def _forget_earlier_calls(policy: nn.Module) -> bool:
    """Drop what modules have kept of the rows of an earlier call; return whether a module keeps their states.

    RecurrentGemma keeps states, which compaction does not divide, and Qwen the images' shift of positions.
    """
    kept = [
        (module, name)
        for module in policy.modules()
        for name in ("conv1d_state", "rope_deltas")
        if name in vars(module)
    ]
    for module, name in kept:
        setattr(module, name, None)
    return any(name == "conv1d_state" for _, name in kept)


def _generates_one_by_one(policy: nn.Module) -> bool:
    """Return whether each prompt needs its own call: RWKV's state mixes rows."""
    mixes_rows = "state" in inspect.signature(transformers_model(policy).forward).parameters
    return mixes_rows or _forget_earlier_calls(policy)


_READS_PADDING: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""What `_reads_padding` has found, so that it runs each model once."""


def _reads_padding(policy: nn.Module, model: Any) -> bool:
    """Return whether a row depends on the padding before it, in a first pass or in one that continues its cache.

    Layers that pack rows attend by transformers' own functions, with its own caches.

    Args:
        policy: The policy.
        model: The transformers model in it, ready for `generate`.
    """
    look = looked_at(policy)
    if look.packs or not look.pads_left:
        return not look.pads_left
    if policy not in _READS_PADDING:
        ids = (torch.arange(8, device=model.device) * 7 + 1).repeat(2, 1) % text_config(policy).vocab_size
        mask = torch.ones_like(ids)
        mask[1, :-3] = 0
        how = changed(_READING, max_new_tokens=2, output_logits=True)
        padded_and_alone = [(ids, mask), (ids[1:, -3:], mask[1:, -3:])]
        seen: list[Tensor] = []
        for part, part_mask in padded_and_alone:
            _forget_earlier_calls(model)
            output = model.generate(input_ids=part, attention_mask=part_mask, generation_config=how)
            seen.append(output.logits[1][-1])
        _READS_PADDING[policy] = deviation(*seen) > rounding(seen[0])
    return _READS_PADDING[policy]


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
    sizes, longest, used = [0], 0, 0
    most_positions = 1 if equal_lengths else 2  # for each that a token takes
    for length in lengths:
        width = length + max_new_tokens
        if sizes[-1] and (sizes[-1] == max_rows or (sizes[-1] + 1) * longest > most_positions * (used + width)):
            sizes.append(0)
            used = 0
        if sizes[-1] == 0:
            longest = width
        sizes[-1] += 1
        used += width
    return sizes


# ---- Drawing a token ----


class InverseCDFSampling(LogitsProcessor):
    r"""Draw each row's token and mask all others, so that greedy decoding takes it.

    `y = min {v : F_v > u F_V}` with `F_v = sum_{w <= v} p_w` in float64 and one `u ~ U[0, 1)` a row (inverse transform
    sampling; Devroye 1986, III.2): a token of probability 0 is never drawn.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw from `softmax(scores)`, `(B, V)`."""
        cumulative = scores.softmax(dim=-1).double().cumsum_(dim=-1)
        total = cumulative[:, -1:]
        drawn = torch.rand_like(total) * total
        tokens = torch.searchsorted(cumulative, torch.minimum(drawn, total.nextafter(total * 0)), right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


def sampling_processors(
    config: GenerationConfig, device: torch.device
) -> tuple[GenerationConfig, LogitsProcessorList]:
    """Return the configuration and processors with which `generate` samples.

    On a CPU a processor draws the token, and `generate` is greedy. On an accelerator, which draws fast, `generate`
    draws.

    Args:
        config: The sampling distribution: `do_sample`, `temperature`, `top_k`, `top_p` and `min_p`.
        device: The device of the logits.
    """
    if not config.do_sample or device.type != "cpu":
        return config, LogitsProcessorList()
    greedy = changed(config, do_sample=False, temperature=None, top_k=None, top_p=None, min_p=None)
    return greedy, LogitsProcessorList([*_warpers(config), InverseCDFSampling()])


def _warpers(config: GenerationConfig) -> Iterator[LogitsProcessor]:
    """Make the processors that `generate` applies when it samples, in its order."""
    if config.temperature not in (None, 1.0):
        yield TemperatureLogitsWarper(config.temperature)
    if config.top_k:
        yield TopKLogitsWarper(config.top_k)
    if config.top_p is not None and config.top_p < 1.0:
        yield TopPLogitsWarper(config.top_p)
    if config.min_p is not None:
        yield MinPLogitsWarper(config.min_p)


class FiniteLogitsCheck(LogitsProcessor):
    """Check that each row's largest logit is finite; the first processor.

    On a CPU it raises the error at once. On an accelerator, where the host would wait for each token and drawing from
    NaN would end the process, a bad row gets logits of 0, and `check` raises the error after generation.
    """

    def __init__(self) -> None:
        self._failed: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Check logits `(B, V)`."""
        failed = ~scores.amax(dim=-1).isfinite()  # the largest of a row is NaN if any is
        self._failed = failed.any() if self._failed is None else self._failed | failed.any()
        if scores.device.type == "cpu":
            self.check()
            return scores
        return scores.masked_fill_(failed[:, None], 0.0)

    def check(self) -> None:
        """Raise a `NonFiniteLogitsError` if any row failed."""
        if self._failed is not None and bool(self._failed):
            raise NonFiniteLogitsError("its logits are NaN or infinite")

    def check_beside(self, flags: Tensor) -> Tensor:
        """Like `check`; also copy other flags, bool `(B,)`, to the host, with one wait for the device."""
        if self._failed is None:
            return flags.cpu()
        both = torch.cat((flags, self._failed[None])).cpu()
        self._failed = both[-1]
        self.check()
        return both[:-1]


# ---- Batch compaction ----

UNFINISHED_SHARE = 0.75
"""A batch is compacted once at most this share of its rows is unfinished."""


@dataclass(eq=False)
class CompactionCriterion(StoppingCriteria):
    """End `generate` once at most `most_left` rows are unfinished.

    `generate` may call it once more, for a token that it then drops: that token ends no row. Stop strings count in
    responses only; transformers' `StopStringCriteria` also finds those that begin in the prompt.

    Attributes:
        finished: Rows that have ended by themselves, bool `(B,)`; updated after each token.
        stop_tokens: Tokens that end a row.
        stop_strings: Texts that also end a row, or None.
        prompt_length: Number of columns of the prompts.
        most_left: Number of unfinished rows at which `generate` ends.
        is_over: Whether it was told to end, a bool of shape `()`.
    """

    finished: Tensor
    stop_tokens: Sequence[int]
    stop_strings: StopStrings | None
    prompt_length: int
    most_left: int

    def __post_init__(self) -> None:
        """Begin with `generate` not told to end."""
        self.is_over = self.finished.new_zeros(())

    def __call__(self, input_ids: Tensor, scores: Tensor | None = None, **kwargs: object) -> Tensor:
        """Return the rows that `generate` need not continue, bool `(B,)`."""
        finished = self.finished
        for token in self.stop_tokens:
            finished = finished | (input_ids[:, -1] == token)
        if self.stop_strings is not None:
            responses = input_ids[:, self.prompt_length :].tolist()
            completed = torch.tensor([self.stop_strings.is_completed(ids) for ids in responses])
            finished = finished | sent(completed, input_ids.device)
        self.finished = torch.where(self.is_over, self.finished, finished)
        self.is_over = (~self.finished).sum() <= self.most_left
        return self.finished | self.is_over


def generate_compacting(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    config: GenerationConfig,
    stop_strings: StopStrings | None = None,
    synced_gpus: bool = False,
    kept: KeptCaches | None = None,
    shares: bool = False,
    images: Sequence[RowImages] | None = None,
) -> Tensor:
    """Generate; drop the finished rows and their cache whenever a quarter of the rows has ended.

    Args:
        model: A transformers model.
        input_ids: Prompts, long `(B, C)`, left-padded.
        attention_mask: 1 on real tokens, long `(B, C)`.
        config: The sampling distribution; its `eos_token_id` is a token, several, or None.
        stop_strings: Texts that also end a row, or None.
        synced_gpus: All ranks run each forward pass together; rows stay until the last one has ended.
        kept: Caches of the rows to continue, which are kept again, or None.
        shares: Read equal prompts of adjacent rows once.
        images: The images of each row, or None.

    Returns:
        Sampled ids, long `(B, T)` with `T <= max_new_tokens`; `pad_token_id` follows a row's end.

    Raises:
        NonFiniteLogitsError: Logits are NaN or infinite.
    """
    prompt_length, (size, filling) = input_ids.shape[1], length_and_filling(config)
    result, longest = input_ids.new_full((len(input_ids), size), filling), prompt_length + size
    rows = torch.arange(len(input_ids), device=input_ids.device)
    how, processors = sampling_processors(changed(config, return_dict_in_generate=True), input_ids.device)
    check = FiniteLogitsCheck()
    cache = {} if kept is None else kept.cache(model, input_ids, attention_mask)
    if shares:
        cache = {CACHE: DynamicCache(config=text_config(model))}
        read_once(model, input_ids, attention_mask, cache[CACHE])
    stays = synced_gpus or (images is not None and any("rope_deltas" in vars(part) for part in model.modules()))
    while len(rows) and input_ids.shape[1] < longest:
        how.max_new_tokens = longest - input_ids.shape[1]
        most_left, none_yet = 0 if stays else int(UNFINISHED_SHARE * len(rows)), rows < 0
        criterion = CompactionCriterion(none_yet, stop_tokens(config), stop_strings, prompt_length, most_left)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "generation_config": how, **cache}
        inputs["logits_processor"] = LogitsProcessorList([check, *processors])
        if images is not None and not cache:
            inputs |= model_inputs([images[row] for row in rows.tolist()], attention_mask)
        stopping = StoppingCriteriaList([criterion])
        _forget_earlier_calls(model)
        output = model.generate(**inputs, stopping_criteria=stopping, synced_gpus=synced_gpus)
        finished, sampled = check.check_beside(criterion.finished), output.sequences
        result[rows, : sampled.shape[1] - prompt_length] = sampled[:, prompt_length:]
        if kept is not None:
            kept.keep(rows, finished | (sampled.shape[1] >= longest), getattr(output, CACHE), sampled, attention_mask)
        left = sent((~finished).nonzero().squeeze(1), input_ids.device)
        attention_mask = nn.functional.pad(attention_mask, (0, sampled.shape[1] - input_ids.shape[1]), value=1)[left]
        rows, input_ids = rows[left], sampled[left]
        cache = rows_of_cache(output, left)
    return result[:, : max(1, sampled.shape[1] - prompt_length)]


# ---- Key-value caches: divided, shared between rows, and kept between turns ----


def rows_of_cache(output: object, rows: Tensor) -> dict[str, Any]:
    """Keep some rows of the cache of a `generate` call; return it as an argument of the next call.

    Args:
        output: The result of `generate`.
        rows: Indices of the rows.

    Returns:
        `{}` if there is no cache, or its rows cannot be separated.
    """
    cache: Any = getattr(output, CACHE, None)
    layers = getattr(cache, "layers", [])
    # Other classes hold states beside their layers; `generate` finds its place by the length of keys.
    has_keys = type(cache) is DynamicCache and any(hasattr(layer, "keys") for layer in layers)
    if not has_keys or not all(hasattr(layer, "reorder_cache") for layer in layers):
        return {}
    for layer in layers:
        layer.reorder_cache(rows)  # `batch_select_indices` forgets the states of convolutions and recurrences
    return {CACHE: cache}


def read_once(model: Generates, ids: Tensor, mask: Tensor, cache: DynamicCache) -> None:
    """Read equal prompts of adjacent rows once, except for the last token, whose logits `generate` needs.

    Args:
        model: A transformers model whose rows can be continued beside other rows.
        ids: Prompts, long `(B, C)`, left-padded.
        mask: 1 on real tokens, long `(B, C)`.
        cache: An empty cache. It stays empty if no rows are equal or a prompt has one token; otherwise it then holds
            `C - 1` columns of all `B` rows.
    """
    marked, row_of_prompt = ids.masked_fill(mask == 0, -1).unique_consecutive(return_inverse=True, dim=0)
    read = marked[:, :-1]
    if len(read) == len(ids) or not (read >= 0).any(dim=1).all():
        return
    inputs = {"input_ids": read.clamp(min=0), "attention_mask": (read >= 0).long(), CACHE: cache}
    model.generate(**inputs, generation_config=_READING)
    cache.reorder_cache(row_of_prompt)


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

    def cache(self, model: Generates, ids: Tensor, mask: Tensor) -> dict[str, Any]:
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
        for member, number in enumerate(unread):
            if number > fewest:
                groups.setdefault((number - fewest - 1).bit_length(), []).append(member)
        for members in groups.values():
            most = max(unread[member] for member in members) - fewest
            self._read(model, members, ids[members, : width - fewest], mask[members, : width - fewest], most)
        return self._stacked_cache(range(len(ids)), starts, width - fewest)

    def _num_known(self, name: int, row: np.ndarray) -> int:
        """Return how many of a row's first tokens are cached, without the last, whose logits are needed."""
        known = self.kept[name][0][: len(row) - 1] if name in self.kept else row[:0]
        differs = np.flatnonzero(known != row[: len(known)])
        return int(differs[0]) if len(differs) else len(known)

    def _read(self, model: Generates, members: list[int], ids: Tensor, mask: Tensor, most: int) -> None:
        """Read the last `most` tokens of rows, for some rows again, and keep the caches."""
        starts = (mask == 0).sum(dim=1).tolist()
        first, rows = min(starts), torch.arange(len(members))
        cache = self._stacked_cache(members, [start - first for start in starts], ids.shape[1] - first - most)
        inputs = {"input_ids": ids[:, first:], "attention_mask": mask[:, first:], "generation_config": _READING}
        output = model.generate(**inputs, **cache)
        of_rows = KeptCaches(self.kept, [self.names[member] for member in members])
        of_rows.keep(rows, rows >= 0, getattr(output, CACHE), output.sequences, mask[:, first:])

    def _stacked_cache(self, members: Iterable[int], starts: list[int], columns: int) -> dict[str, Any]:
        """Stack the keys and values of rows, each from its start to `columns`."""
        cache = DynamicCache()  # without the configuration, sliding layers keep all states
        rows = [self.kept.pop(self.names[member])[1] for member in members]
        for index in range(len(rows[0])):
            keys, values = (_stacked([row[index][part] for row in rows], starts, columns) for part in (0, 1))
            cache.update(keys, values, index)
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
        for member in leaving.nonzero().flatten().tolist():
            start = starts[member]
            states = [
                (layer.keys[member, :, start:columns].clone(), layer.values[member, :, start:columns].clone())
                for layer in cache.layers
            ]
            self.kept[self.names[of_call[member]]] = (tokens[member, start:columns], states)


def _stacked(rows: list[Tensor], starts: list[int], columns: int) -> Tensor:
    """Stack keys or values `(heads, n, D)` into `(B, heads, columns, D)`, each from its row's start on."""
    stacked = rows[0].new_zeros(len(rows), rows[0].shape[0], columns, rows[0].shape[-1])
    for member, (row, start) in enumerate(zip(rows, starts, strict=True)):
        stacked[member, :, start:] = row[:, : max(columns - start, 0)]
    return stacked
