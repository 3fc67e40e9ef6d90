"""Sampling of tokens, and the end of responses.

Top-p, inverse-CDF sampling, logits that are not finite, the head's dtype, and the model's own generation config; stop
tokens and stop strings, truncation after them, and joining responses to their prompts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.images import IMAGES_COLUMN
from rlhf_ppo.data.prompts import eos_id, pad_id
from rlhf_ppo.data.rollout import HostMasks, Prompts, Responses, check_masks, sent
from rlhf_ppo.models.heads import Float32Linear
from rlhf_ppo.models.unwrapping import advice_by_type, autocast_dtype, transformers_model
from rlhf_ppo.ranks.processes import get_logger

logger = get_logger(__name__)

# ---- Inverse-CDF sampling ----


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
    if not config.do_sample:
        return config, LogitsProcessorList()
    if device.type == "cpu":
        greedy = changed(config, do_sample=False, temperature=None, top_k=None, top_p=None, min_p=None)
        return greedy, LogitsProcessorList([*_warpers(config), InverseCDFSampling()])
    return config, LogitsProcessorList()


def changed(config: GenerationConfig, **changes: Any) -> GenerationConfig:
    """Return a copy of a configuration with other values."""
    result = copy.deepcopy(config)
    result.update(**changes)
    return result


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


# ---- Non-finite logits ----


class NonFiniteLogitsError(RuntimeError):
    """A model's logits are NaN, infinite, or minus infinity for every token."""


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


@contextmanager
def naming_the_model(model: torch.nn.Module, role: str, when: str) -> Iterator[None]:
    """Name the model and the position of the run in a `NonFiniteLogitsError`.

    Args:
        model: The model that generates.
        role: Its role, for example `policy`.
        when: The position of the run, for example `update 3`.
    """
    try:
        yield
    except NonFiniteLogitsError as error:
        path = getattr(getattr(model, "config", None), "_name_or_path", "")
        name = f"{type(model).__name__}{f' from {path}' if path else ''}"
        raise NonFiniteLogitsError(
            f"{when}: the {role} ({name}) gives no probabilities to sample from: {error}. "
            + advice_by_type(
                model,
                "Its weights are NaN or too large: lower learning_rate or max_grad_norm, and resume from an earlier "
                "checkpoint",
            )
        ) from error


# ---- The head's dtype ----


@contextmanager
def frozen_head_cast(policy: nn.Module) -> Iterator[None]:
    """Store a frozen head in the type that autocast casts it to; products stay the same to the bit.

    Autocast caches its casts of trained weights, and casts frozen weights again for each token; the head is the
    largest.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
    """
    head = transformers_model(policy).get_output_embeddings()
    layer: Any = getattr(head, "base_layer", head)
    dtype = None
    if type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and not layer.weight.requires_grad:
        dtype = autocast_dtype(layer.weight.device.type)
    with _weights_stored([layer] if dtype is not None else [], dtype or torch.float32):
        yield


@contextmanager
def float32_head_apart(policy: nn.Module) -> Iterator[None]:
    """Give a head that multiplies in float32 its own float32 weights, separate from a tied embedding.

    `Float32Linear` would convert 16-bit weights for each token.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
    """
    head = transformers_model(policy).get_output_embeddings()
    layers = [] if head is None else [layer for layer in head.modules() if isinstance(layer, Float32Linear)]
    with _weights_stored(layers, torch.float32):
        yield


@contextmanager
def _weights_stored(layers: Sequence[nn.Linear], dtype: torch.dtype) -> Iterator[None]:
    """Store the weights of unsharded layers in another type inside a context, separate from tied weights."""
    before = [
        (layer, layer.weight)
        for layer in layers
        if type(layer.weight) is nn.Parameter and not hasattr(layer.weight, "ds_id")
    ]
    for layer, weight in before:
        layer.weight = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in before:
            layer.weight = weight


# ---- The model's own generation config ----


@contextmanager
def default_generation_config(policy: nn.Module) -> Iterator[Any]:
    """Replace the model's generation_config, from which `generate` fills unset fields, by transformers' default.

    With a stored repetition penalty or list of EOS tokens, `generate` would sample from a distribution that the
    log-probabilities do not describe.

    Args:
        policy: A causal language model, or a `PeftModel` around one.

    Yields:
        The transformers model to call `generate` on.
    """
    model = transformers_model(policy)
    models_config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield model
    finally:
        model.generation_config = models_config


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
        # Only the whole response decides: a tail's first token may decode to another text than inside the response.
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


class StopsAtStrings(StoppingCriteria):
    """End each row of `generate` at the token of `StopStrings.end`.

    transformers' own `StopStringCriteria` also ends rows at strings that begin in the prompt.

    Args:
        stop_strings: The stop strings.
        prompt_length: Number of columns of the prompts, which are ignored.
    """

    def __init__(self, stop_strings: StopStrings, prompt_length: int) -> None:
        self.stop_strings, self.prompt_length = stop_strings, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor | None = None, **kwargs: object) -> Tensor:
        """Return which rows' last tokens complete a stop string, bool `(B,)`."""
        responses = input_ids[:, self.prompt_length :].tolist()
        completed = [self.stop_strings.is_completed(ids) for ids in responses]
        return sent(torch.tensor(completed, dtype=torch.bool), input_ids.device)


# ---- Truncation and joining ----


StopIds = int | Sequence[int] | None
"""A token that ends a response, several, or none."""


def is_one_of(ids: Tensor, tokens: StopIds) -> Tensor:
    """Return which ids are one of these tokens, bool, with their shape."""
    is_token = torch.zeros_like(ids, dtype=torch.bool)
    for token in [tokens] if isinstance(tokens, int) else tokens or ():
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


def truncate_response(stop_token_id: int, pad_token_id: int, responses: Tensor) -> Tensor:
    """Replace all tokens after the first stop token by PAD; the stop token stays.

    Args:
        stop_token_id: The token that ends a response.
        pad_token_id: Id of the padding; may equal the stop token.
        responses: Sampled ids, long `(B, T)`.

    Returns:
        Long `(B, T)`.
    """
    return responses.masked_fill(~response_mask(responses, stop_token_id), pad_token_id)


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
    rows = [ids[real].tolist() for ids, real in zip(responses.response_ids, turns, strict=True)]
    return has_ended | torch.tensor([stop_strings.is_completed(ids) for ids in rows], device=has_ended.device)


# ---- The tokens of a run ----


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids for generation and truncation.

    Attributes:
        pad: Pads prompts, and responses after their stop token; may equal `stop`, or lie outside the vocabulary.
        stops: Responses are cut after these tokens; the first is `stop_token_id`, or EOS.
        ends: `missing_eos_penalty` and `missing_eos_score` apply without one of these tokens: the stop tokens, or EOS
            without any.
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


def special_tokens(args: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Return the special tokens from arguments and tokenizer.

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
    stops, ends = [() if one is None else (one,) for one in (stop, eos if stop is None else stop)]
    for name in ("missing_eos_penalty", "missing_eos_score"):
        if not ends and not args.stop_strings and getattr(args, name) is not None:
            raise ValueError(
                f"{name}={getattr(args, name)} needs something that ends a response; set stop_token_id, stop_strings, "
                "or an eos_token"
            )
    if stop is None and eos is not None and not args.stop_strings:
        logger.warning_once(
            "No stop token is set: every response has response_length tokens, even if EOS comes earlier. Set "
            "stop_token='eos' to end responses at EOS."
        )
    strings = StopStrings(tokenizer, tuple(args.stop_strings)) if args.stop_strings else None
    return SpecialTokens(filling, stops, ends, strings)


def length_and_filling(config: GenerationConfig) -> tuple[int, int]:
    """Return `max_new_tokens` and `pad_token_id`."""
    return cast(int, config.max_new_tokens), cast(int, config.pad_token_id)


def stop_tokens(config: GenerationConfig) -> list[int]:
    """Return the tokens that end a row: `eos_token_id`, which may be a number, a list or None."""
    eos: Any = config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
