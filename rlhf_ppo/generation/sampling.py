"""Sampling of responses: the call of the engine, its settings, where responses end, and checks of what it returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.images import IMAGES_COLUMN
from rlhf_ppo.data.prompts import eos_id, pad_id
from rlhf_ppo.data.rollout import (
    HostMasks,
    PositionLimit,
    Prompts,
    Responses,
    check_lengths,
    check_masks,
    selected,
    sent,
)
from rlhf_ppo.generation.protocol import GenerationEngine, NonFiniteLogitsError, Sampled
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import advice_by_type, gathered, transformers_model
from rlhf_ppo.ranks.processes import get_logger, zero_stage

logger = get_logger(__name__)


@dataclass(eq=False, repr=False)
class Sampler:
    """Samples responses of the policy, or of another model.

    Attributes:
        engine: Generates the tokens.
        args: The arguments.
        accelerator: Prepared the models.
        tokens: Padding and stop tokens.
        never_sampled: Ids that not all models embed, or None.
        longest_sequence: Longest prompt plus response that models and engine support; None without a limit.
        when: Returns the position of the run, for errors.
    """

    engine: GenerationEngine
    args: PPOConfig
    accelerator: Accelerator
    tokens: SpecialTokens
    never_sampled: list[int] | None
    longest_sequence: PositionLimit | None
    when: Callable[[], str]

    def settings(self, greedy: bool = False) -> GenerationConfig:
        """Return the sampling settings of training, or those of sample tables."""
        return (greedy_config if greedy else sampling_config)(self.args, self.tokens.stops, self.never_sampled)

    def sample(self, model: nn.Module, prompts: Prompts, config: GenerationConfig | None = None) -> Responses:
        """Sample a response to each prompt, and truncate it after the stop token or stop string.

        Args:
            model: The prepared `PolicyAndValue`, or the placed `FrozenPolicy` of the reference.
            prompts: `B` prompts.
            config: Sampling settings; None takes those of training.
        """
        settings, tokens = config or self.settings(), self.tokens
        check_lengths(prompts.input_ids.shape[1], length_and_filling(settings)[0], self.longest_sequence)
        with self.policy_of(model) as policy:
            sampled = sample_with(self.engine, policy, prompts, settings, tokens.stop_strings)
        return join_responses(prompts, sampled.ids, tokens.stops, tokens.pad, tokens.stop_strings, sampled.logprobs)

    @contextmanager
    def policy_of(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the language model in the form that the engine reads, under autocast.

        An error of one rank is not exchanged: the other ranks may wait for it in a pass of a sharded model.

        Args:
            model: As for `sample`.
        """
        plain: Any = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        role = "policy" if isinstance(plain, PolicyAndValue) else "reference"
        whole = whole_policy(model, self.accelerator, self.args.ds3_gather_for_generation)
        with nullcontext(plain.policy) if self.engine.reads_sharded else whole as policy:
            try:
                with self.accelerator.autocast():
                    yield policy
            except NonFiniteLogitsError as error:
                path = getattr(getattr(policy, "config", None), "_name_or_path", "")
                name = f"{type(policy).__name__}{f' from {path}' if path else ''}"
                fix = "lower learning_rate or max_grad_norm, and resume from an earlier checkpoint"
                raise NonFiniteLogitsError(
                    f"{self.when()}: the {role} ({name}) gives no probabilities to sample from: {error}. "
                    + advice_by_type(policy, f"Its weights are NaN or too large: {fix}")
                ) from error


@contextmanager
def whole_policy(model: nn.Module, accelerator: Accelerator, gathers: bool) -> Iterator[nn.Module]:
    """Yield the policy in a form that `generate` can run.

    Under ZeRO-3 the policy's parameters, not the value model's, are gathered once. Under FSDP2 a layer stays unsharded
    after its first use.

    Args:
        model: The prepared `PolicyAndValue`, or the placed `FrozenPolicy`.
        accelerator: Prepared it.
        gathers: With ZeRO-3, False gathers each layer at each token instead.
    """
    plain: Any = accelerator.unwrap_model(model, keep_torch_compile=False)
    is_prepared = not isinstance(model, PolicyAndValue)
    # After a step all small parameters may be gathered; hooks would reshard them, at a different time on each rank.
    if zero_stage(accelerator) == 3 and gathers and is_prepared:
        with _gathered(model, plain.policy):
            yield plain.policy
    elif isinstance(model, FSDPModule):
        with _unsharded(model, accelerator.state):
            yield plain.policy
    else:
        yield plain.policy


@contextmanager
def _gathered(model: Any, policy: nn.Module) -> Iterator[None]:
    from trl.models.utils import add_hooks, remove_hooks

    with gathered(policy.parameters()):
        remove_hooks(model)
        try:
            yield
        finally:
            add_hooks(model)


@contextmanager
def _unsharded(model: Any, state: Any) -> Iterator[None]:
    """Keep blocks gathered after their first use.

    Afterwards they are resharded after each pass as configured. Parameters outside of blocks, the first shard, are
    gathered for the whole context.
    """
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    register_fsdp_forward_method(model, "on_policy")
    model.on_policy(lambda policy: None)  # the first forward method that runs tells FSDP2 the root
    model.unshard()
    for shard in shards[1:]:
        shard.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for shard in shards[1:]:
            shard.set_reshard_after_forward(state.fsdp_plugin.reshard_after_forward, recurse=False)
        for shard in shards:
            shard.reshard()


# ---- Settings ----


def greedy_config(args: PPOConfig, stop_token_id: StopIds, never_sampled: list[int] | None = None) -> GenerationConfig:
    """Build the configuration of sample tables: the most likely token at each step."""
    stops = listed(stop_token_id)
    return GenerationConfig(
        max_new_tokens=args.response_length,
        do_sample=False,
        use_cache=True,
        suppress_tokens=never_sampled,
        eos_token_id=stops or None,
        # `generate` embeds this id in finished rows; the model may not embed an added "[PAD]".
        pad_token_id=stops[0] if stops else 0,
    )


def sampling_config(
    args: PPOConfig, stop_token_id: StopIds, never_sampled: list[int] | None = None
) -> GenerationConfig:
    """Build the sampling distribution of the rollout from the arguments alone.

    Args:
        args: Gives `response_length`, `temperature`, `top_k`, `top_p` and `min_p`.
        stop_token_id: Ends a row, or several; generation ends when every row has ended.
        never_sampled: Ids at the end of the vocabulary that other models cannot embed; None allows all. The
            log-probabilities ignore it, as they ignore `top_k`.

    Returns:
        A configuration that sets all fields that the model's own generation_config could fill in.
    """
    sampling = {name: getattr(args, name) for name in ("top_k", "top_p", "min_p")}
    temperature = float(args.temperature)  # transformers refuses an int
    config = greedy_config(args, stop_token_id, never_sampled)
    return changed(config, do_sample=True, temperature=temperature, **sampling)


def warn_of_stored_settings(policy: nn.Module, args: PPOConfig) -> None:
    """Warn once if a policy's `generation_config` has other sampling settings than the arguments."""
    wanted = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    wanted["repetition_penalty"] = 1.0
    stored = {name: getattr(getattr(policy, "generation_config", None), name, None) for name in wanted}
    differing = [f"{name}={value}" for name, value in stored.items() if value not in (None, wanted[name])]
    if differing:
        logger.warning_once(
            f"The policy's generation_config has {', '.join(differing)}, which differs from the arguments, and "
            "generate() samples with it unless you pass other values: before you sample, set "
            "policy.generation_config = GenerationConfig(do_sample=True, ...) with the settings of the arguments."
        )


def changed(config: GenerationConfig, **changes: Any) -> GenerationConfig:
    """Return a copy of a configuration with other values."""
    result = copy.deepcopy(config)
    result.update(**changes)
    return result


def length_and_filling(config: GenerationConfig) -> tuple[int, int]:
    """Return `max_new_tokens` and `pad_token_id`."""
    return cast(int, config.max_new_tokens), cast(int, config.pad_token_id)


def stop_tokens(config: GenerationConfig) -> list[int]:
    """Return the tokens that end a row."""
    return listed(cast(StopIds, config.eos_token_id))


# ---- Where responses end ----


_CONTEXT = 4
"""Tokens decoded before those of a stop string: a decoder may strip or garble its first tokens, a UTF-8 character."""


@dataclass(frozen=True)
class StopStrings:
    """Search for the token that completes a stop string in a response.

    Texts are decoded with special tokens, which a stop string may contain, and from the response's first token on: a
    stop string that is or begins in the prompt does not count.

    Attributes:
        tokenizer: The policy's tokenizer.
        strings: The stop strings, none of them empty.
    """

    tokenizer: PreTrainedTokenizerBase
    strings: tuple[str, ...]

    @property
    def num_tail_tokens(self) -> int:
        """Number of last tokens that contain any stop string ending in the last token; a token has at least a byte."""
        return max(len(text.encode()) for text in self.strings) + _CONTEXT

    def end(self, ids: Sequence[int]) -> int | None:
        """Find the first token that completes a stop string.

        Returns:
            Number of tokens up to and including it, or None.
        """
        # Token by token: later bytes may make a character invalid, and the text then loses the stop string.
        return next((n for n in range(1, len(ids) + 1) if self.is_completed(ids[:n])), None)

    def is_completed(self, ids: Sequence[int]) -> bool:
        """Return whether a response's last token completes a stop string."""
        # Only the whole response decides: a tail's first token may decode differently from inside the response.
        return self.is_in(ids[-self.num_tail_tokens :]) and self.is_in(ids)

    def is_in(self, ids: Sequence[int]) -> bool:
        """Return whether a response's text holds a stop string."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in str(text) for string in self.strings)

    def mask(self, responses: Tensor) -> Tensor:
        """Mark each response's tokens up to and including the first that completes a stop string.

        Args:
            responses: Sampled ids, long `(B, T)`.

        Returns:
            Bool `(B, T)`.
        """
        width = responses.shape[1]
        ends = [self.end(ids) for ids in responses.tolist()]
        lengths = sent(torch.tensor([width if end is None else end for end in ends]), responses.device)
        return torch.arange(width, device=responses.device) < lengths[:, None]


StopIds = int | Sequence[int] | None
"""A token that ends a response, several, or none."""


def listed(tokens: StopIds) -> list[int]:
    """Return a token, several, or none as a list."""
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


def is_one_of(ids: Tensor, tokens: StopIds) -> Tensor:
    """Return which ids are one of these tokens, bool, with their shape."""
    is_token = torch.zeros_like(ids, dtype=torch.bool)
    for token in listed(tokens):
        is_token |= ids == token
    return is_token


def response_mask(responses: Tensor, stop_token_id: StopIds) -> Tensor:
    """Mark each response's tokens up to and including its first stop token.

    Args:
        responses: Sampled ids, long `(B, T)`.
        stop_token_id: The stop token, or several; without any, every token is real.

    Returns:
        Bool `(B, T)`.
    """
    stops = is_one_of(responses, stop_token_id).long()
    return stops.cumsum(dim=1) - stops == 0


def join_responses(
    prompts: Prompts,
    sampled: Tensor,
    stop_token_id: StopIds,
    pad_token_id: int,
    stop_strings: StopStrings | None = None,
    logprobs: Tensor | None = None,
) -> Responses:
    """Truncate sampled responses, append them to their prompts and make the masks.

    Args:
        prompts: `B` left-padded prompts.
        sampled: Sampled ids, long `(B, T)`.
        stop_token_id: The stop token, several, or None.
        pad_token_id: Id of the padding.
        stop_strings: Texts that also end a response, or None.
        logprobs: The engine's log-probabilities, float32 `(B, T)`, or None.

    Returns:
        The truncated responses, as wide as the longest.
    """
    mask = response_mask(sampled, stop_token_id)
    if stop_strings is not None:
        mask &= stop_strings.mask(sampled)
    written = mask.cpu().numpy()
    width = int(written.sum(axis=1).max())
    mask, written = mask[:, :width], written[:, :width]
    attention = torch.cat((prompts.attention_mask, mask), dim=1)
    on_host = HostMasks(np.concatenate((prompts.mask, written), axis=1), written, (attention, mask))
    check_masks(on_host)
    return Responses(
        torch.cat((prompts.input_ids, sampled[:, :width].masked_fill(~mask, pad_token_id)), dim=1),
        attention,
        mask,
        sampling_logprobs=None if logprobs is None else logprobs[:, :width].masked_fill(~mask, 0.0),
        images=prompts.columns.get(IMAGES_COLUMN),
        on_host=on_host,
    )


def last_turn(response_mask: Tensor) -> Tensor:
    """Mark the policy's last turn: the tokens after a response's last gap, or all of them.

    Args:
        response_mask: True on the tokens that the policy wrote, bool `(B, T)`.

    Returns:
        Bool `(B, T)`.
    """
    from_right = response_mask.flip(1)
    begins_gap = torch.zeros_like(from_right)
    begins_gap[:, 1:] = from_right[:, :-1] & ~from_right[:, 1:]
    return (from_right & (begins_gap.cumsum(dim=1) == 0)).flip(1)


def ended(responses: Responses, end_token_id: StopIds, stop_strings: StopStrings | None = None) -> Tensor:
    """Return which responses ended by themselves: with a token, or with a stop string, in the policy's last turn.

    The stop token may end other turns too.

    Args:
        responses: `B` truncated responses.
        end_token_id: The token, several, or None.
        stop_strings: The stop strings, or None.

    Returns:
        Bool `(B,)`.
    """
    turns = last_turn(responses.response_mask)
    has_ended = (is_one_of(responses.response_ids, end_token_id) & turns).any(dim=1)
    if stop_strings is None:
        return has_ended
    completed = [stop_strings.is_completed(ids) for ids in selected(responses.response_ids, turns)]
    return has_ended | torch.tensor(completed, device=has_ended.device)


# ---- The tokens of a run ----


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids for generation and truncation.

    Attributes:
        pad: Pads prompts, and responses after their stop token; may equal `stop`, or lie outside the vocabulary.
        stops: Responses are cut after these tokens; the first is `stop_token_id`, or EOS.
        ends: `missing_eos_penalty` and `missing_eos_score` apply without one of these tokens or a stop string: the
            stop tokens, or EOS without any stop token or stop string.
        stop_strings: Responses are also cut after these texts; or None.
    """

    pad: int
    stops: tuple[int, ...]
    ends: tuple[int, ...]
    stop_strings: StopStrings | None = None

    @property
    def stop(self) -> int | None:
        """The first stop token, or None."""
        return next(iter(self.stops), None)

    def ended(self, responses: Responses) -> Tensor:
        """Return which responses ended by themselves, bool `(B,)`; every part uses this definition."""
        return responses.ended if responses.ended is not None else ended(responses, self.ends, self.stop_strings)

    def with_those_of(self, policy: nn.Module, args: PPOConfig) -> SpecialTokens:
        """Add all EOS tokens that a policy's `generation_config` lists, if EOS or one of them is a stop token."""
        config = getattr(transformers_model(policy), "generation_config", None)
        listed = None if config is None else config.eos_token_id
        if not isinstance(listed, list) or not (args.stop_token == "eos" or self.stop in listed):
            return self
        stops = tuple(dict.fromkeys([*self.stops, *listed]))
        return replace(self, stops=stops, ends=stops)


def special_tokens(args: PPOConfig, tokenizer: PreTrainedTokenizerBase, *, is_stepped: bool = False) -> SpecialTokens:
    """Return the special tokens from arguments and tokenizer; warn if no token ends a response.

    Args:
        args: The arguments.
        tokenizer: The policy's tokenizer.
        is_stepped: The responses come from the user, who ends them: no warning.

    Raises:
        TypeError: `processing_class` is not a tokenizer.
        ValueError: The tokenizer has neither PAD nor EOS, or lacks the EOS that an argument needs.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"processing_class must be a tokenizer, got {type(tokenizer).__name__}; pass AutoTokenizer's")
    eos = eos_id(tokenizer)
    pad = pad_id(tokenizer)
    filling = eos if pad is None else pad
    if filling is None:
        raise ValueError(
            "processing_class has neither a pad_token nor an eos_token; set tokenizer.pad_token to a token that "
            "prompts do not use"
        )
    if eos is None and args.stop_token == "eos":
        raise ValueError("stop_token='eos', but processing_class has no eos_token; set stop_token_id instead")
    stop = eos if args.stop_token == "eos" else args.stop_token_id
    stops = () if stop is None else (stop,)
    ends = stops if stops or args.stop_strings or eos is None else (eos,)
    for name in ("missing_eos_penalty", "missing_eos_score"):
        if not ends and not args.stop_strings and getattr(args, name) is not None:
            raise ValueError(
                f"{name}={getattr(args, name)} needs something that ends a response; set stop_token_id, stop_strings, "
                "or an eos_token"
            )
    if stop is None and eos is not None and not args.stop_strings and not is_stepped:
        logger.warning_once(
            "No stop token is set: every response has response_length tokens, even if EOS comes earlier. Set "
            "stop_token='eos' to end responses at EOS."
        )
    strings = StopStrings(tokenizer, tuple(args.stop_strings)) if args.stop_strings else None
    return SpecialTokens(filling, stops, ends, strings)


# ---- Checks of responses ----


def sample_with(
    engine: GenerationEngine,
    policy: nn.Module,
    prompts: Prompts,
    config: GenerationConfig,
    stop_strings: StopStrings | None = None,
) -> Sampled:
    """Sample responses with an engine, and check every token that the policy will learn from.

    Args:
        engine: The engine.
        policy: The language model in the form that the engine reads.
        prompts: `B` left-padded prompts.
        config: The sampling distribution, the stop token (or several) and the length limit.
        stop_strings: Texts that also end a row, or None.

    Raises:
        RuntimeError: A row ends before the limit without a stop token or string, holds a suppressed id, or lacks the
            log-probability of a token.
        ValueError: The engine's result has another type or shape.
    """
    answer = _of_right_shape(engine, engine.sample(policy, prompts, config), config, len(prompts))
    ids = answer.ids
    width, (most, _) = ids.shape[1], length_and_filling(config)
    lengths = torch.full_like(ids[:, 0], width) if answer.lengths is None else answer.lengths.to(ids.device)
    stops = sent(torch.tensor(stop_tokens(config), dtype=ids.dtype), ids.device)
    sampled = torch.arange(width, device=ids.device) < lengths[:, None]
    is_stop = torch.isin(ids, stops) & sampled
    is_real = sampled & (is_stop.cumsum(dim=1) - is_stop.long() == 0)
    is_cut = ~is_stop.any(dim=1) & (lengths < most)
    suppressed = sent(torch.tensor(config.suppress_tokens or [], dtype=ids.dtype), ids.device)
    is_forbidden = is_real & ((ids < 0) | torch.isin(ids, suppressed))
    values = torch.zeros_like(ids) if answer.logprobs is None else answer.logprobs
    is_unknown = is_real & ~values.isfinite()
    if bool(is_cut.any() | is_forbidden.any() | is_unknown.any()):  # one wait for the device
        _refuse_cut_rows(engine, answer, is_cut, lengths, prompts, most, stop_strings)
        _refuse_tokens(engine, answer, is_forbidden, is_unknown)
    return answer


def _of_right_shape(engine: GenerationEngine, answer: Sampled, config: GenerationConfig, num_rows: int) -> Sampled:
    answer = Sampled(*answer)
    ids, logprobs, _ = answer
    most, _ = length_and_filling(config)
    expected = (num_rows, min(ids.shape[-1], most))
    if ids.dtype != torch.long or ids.shape != expected or (logprobs is not None and logprobs.shape != expected):
        raise ValueError(
            f"{called(engine)} gave ids {ids.dtype} {tuple(ids.shape)} and log-probabilities of "
            f"{None if logprobs is None else tuple(logprobs.shape)}; sample() must return Sampled(ids, logprobs) of "
            f"({num_rows}, T) with T <= {most}, ids torch.int64"
        )
    return answer


def called(engine: GenerationEngine) -> str:
    """Return an engine's name in error messages: its argument and value."""
    return getattr(engine, "called", f"engine={type(engine).__name__}")


def _refuse_cut_rows(
    engine: GenerationEngine,
    answer: Sampled,
    is_cut: Tensor,
    lengths: Tensor,
    prompts: Prompts,
    most: int,
    stop_strings: StopStrings | None,
) -> None:
    for row in is_cut.nonzero().flatten().tolist():
        length, prompt = int(lengths[row]), int(prompts.attention_mask[row].sum())
        if stop_strings is not None and stop_strings.is_in(answer.ids[row, :length].tolist()):
            continue
        fix = getattr(engine, "cut_rows_advice", "end a row with its stop token, or return that many tokens")
        raise RuntimeError(
            f"{called(engine)} cut the response to row {row} of the batch: {length} tokens after a prompt of "
            f"{prompt}, where {most} were asked for, and no stop token at its end; {fix}"
        )


def _refuse_tokens(engine: GenerationEngine, answer: Sampled, is_forbidden: Tensor, is_unknown: Tensor) -> None:
    for row, place in is_unknown.nonzero().tolist():
        raise RuntimeError(
            f"{called(engine)} gave no finite log-probability for token {place} of row {row} of the batch: it must "
            "give one for each token, or logprobs=None; if it does, the policy's logits are NaN or infinite"
        )
    for row, place in is_forbidden.nonzero().tolist():
        raise RuntimeError(
            f"{called(engine)} sampled the id {int(answer.ids[row, place])} in row {row} of the batch, which not all "
            "models have; it must respect suppress_tokens of the GenerationConfig"
        )
