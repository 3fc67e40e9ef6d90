"""Generation engines: prompts in, sampled ids out, with their log-probabilities where an engine knows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.generation.nonfinite import NonFiniteLogitsError
from rlhf_ppo.generation.stopping import StopStrings
from rlhf_ppo.models.unwrapping import transformers_model


class Sampled(NamedTuple):
    """An engine's answer to `B` prompts.

    A row ends with its first stop token, or has `max_new_tokens` tokens; `sample_with` checks it.

    Attributes:
        ids: Sampled ids, long `(B, T)` with `T <= max_new_tokens`; anything after a row's end is filling.
        logprobs: Log-probabilities of these tokens in the distribution that the engine drew them from, after
            temperature, top_k, top_p and min_p, nats, float32 `(B, T)`, anything on filling; None if the engine does
            not know them.
        lengths: Number of ids that were sampled in each row, long `(B,)`. None: all `T`, or up to the stop token. An
            engine that may cut a row must give them: filling with the stop token would make a cut row an ended one.
    """

    ids: Tensor
    logprobs: Tensor | None = None
    lengths: Tensor | None = None


class Generates(Protocol):
    """A model with transformers' `generate`."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Sample as the keyword arguments say."""
        ...


def generating(policy: nn.Module) -> Generates:
    """Return the transformers model of a policy, whose own types do not say that it generates."""
    return cast(Generates, transformers_model(policy))


class GenerationEngine(Protocol):
    """Samples responses."""

    @property
    def reads_sharded(self) -> bool:
        """Whether it puts together by itself the parameters that ZeRO-3 or FSDP has taken apart."""
        ...

    def sample(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Sampled:
        """Generate a response to each prompt.

        Args:
            policy: A causal language model, or a `PeftModel` around one.
            prompts: `B` left-padded prompts; ids under the mask are ignored.
            config: The sampling distribution, the stop token and the length limit.
        """
        ...

    def policy_changed(self) -> None:
        """Take note that the policy's weights are no longer those of the last call of `sample`."""
        ...


def length_and_filling(config: GenerationConfig) -> tuple[int, int]:
    """Return `max_new_tokens` and `pad_token_id`; a `ValueError` if one is not set, which generation needs."""
    if config.max_new_tokens is None or config.pad_token_id is None:
        raise ValueError(f"max_new_tokens={config.max_new_tokens} and pad_token_id={config.pad_token_id} must be set")
    return config.max_new_tokens, config.pad_token_id


def prompt_rows(prompts: Prompts) -> list[list[int]]:
    """Return each prompt's ids without padding."""
    rows = zip(prompts.input_ids.cpu(), prompts.attention_mask.cpu(), strict=True)
    return [ids[real].tolist() for ids, real in rows]


def stack_rows(
    ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], filling: int, device: torch.device
) -> Sampled:
    """Put rows of different lengths into tensors.

    Args:
        ids: Each row's sampled ids.
        logprobs: Their log-probabilities, nats.
        filling: The id behind shorter rows.
        device: Where the tensors go.

    Returns:
        Ids `(B, T)` and log-probabilities `(B, T)`, `T` being the longest row; NaN where a log-probability is missing.
    """

    def stacked(values: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
        rows = [torch.tensor(row, dtype=dtype) for row in values]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value).to(device)

    lengths = torch.tensor([len(row) for row in ids], device=device)
    values = [[*row, *[math.nan] * (len(tokens) - len(row))] for tokens, row in zip(ids, logprobs, strict=True)]
    return Sampled(stacked(ids, filling, torch.long), stacked(values, math.nan, torch.float32), lengths)


# ---- What every engine's answer must be ----


def sample_with(
    engine: GenerationEngine,
    policy: nn.Module,
    prompts: Prompts,
    config: GenerationConfig,
    stop_strings: StopStrings | None = None,
) -> Sampled:
    """Ask an engine for responses, and check that it sampled every token that will be learned from.

    Args:
        engine: The engine.
        policy: A causal language model, or a `PeftModel` around one.
        prompts: `B` left-padded prompts.
        config: The sampling distribution, the stop token (or several) and the length limit.
        stop_strings: Texts that end a row too, or None.

    Returns:
        The engine's answer.

    Raises:
        NonFiniteLogitsError: The log-probability of a token is missing, NaN or infinite.
        RuntimeError: A row ends before the limit without a stop token or string, or holds an id that must not be
            sampled.
        TypeError, ValueError: The answer has another type or shape.
    """
    answer = _of_right_shape(engine, engine.sample(policy, prompts, config), len(prompts.input_ids), config)
    ids = answer.ids
    width, (most, _) = ids.shape[1], length_and_filling(config)
    lengths = torch.full_like(ids[:, 0], width) if answer.lengths is None else answer.lengths.to(ids.device)
    given = config.eos_token_id
    stops = torch.tensor([] if given is None else given, dtype=ids.dtype, device=ids.device).flatten()
    sampled = torch.arange(width, device=ids.device) < lengths[:, None]
    is_stop = torch.isin(ids, stops) & sampled
    is_real = sampled & (is_stop.cumsum(dim=1) - is_stop.long() == 0)
    is_cut = ~is_stop.any(dim=1) & (lengths < most)
    suppressed = torch.tensor(config.suppress_tokens or [], dtype=ids.dtype, device=ids.device)
    is_odd = is_real & ((ids < 0) | torch.isin(ids, suppressed))
    values = torch.zeros_like(ids) if answer.logprobs is None else answer.logprobs
    is_unknown = is_real & ~values.isfinite()
    if bool(is_cut.any() | is_odd.any() | is_unknown.any()):  # the device is waited for once
        _refuse_cut_rows(engine, answer, is_cut, lengths, prompts, most, stop_strings)
        _refuse_tokens(engine, answer, is_odd, is_unknown)
    return answer


def _of_right_shape(engine: GenerationEngine, answer: Any, num_rows: int, config: GenerationConfig) -> Sampled:
    name, (most, _) = called(engine), length_and_filling(config)
    if not isinstance(answer, tuple) or not 1 <= len(answer) <= 3 or not isinstance(answer[0], Tensor):
        raise TypeError(f"{name} gave a {type(answer).__name__}; sample() must return Sampled(ids, logprobs)")
    answer = Sampled(*answer)
    ids, logprobs, lengths = answer
    kind = f"{ids.dtype} {tuple(ids.shape)}"
    if ids.dtype != torch.long or ids.dim() != 2 or len(ids) != num_rows or not 1 <= ids.shape[1] <= most:
        raise ValueError(
            f"{name} gave ids {kind}; sample() must give torch.int64 ({num_rows}, T) with 1 <= T <= {most}"
        )
    for what, given, shape in (("logprobs", logprobs, ids.shape), ("lengths", lengths, ids.shape[:1])):
        if given is not None and given.shape != shape:
            raise ValueError(f"{name} gave {what} {tuple(given.shape)} beside ids {kind}; give {tuple(shape)}")
    return answer


def called(engine: GenerationEngine) -> str:
    """Return what error messages call an engine: its argument and value."""
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
        fix = getattr(engine, "cut_rows_advice", "give a row's stop token, or that many tokens")
        raise RuntimeError(
            f"{called(engine)} cut the response to row {row} of the batch: {length} tokens after a prompt of "
            f"{prompt}, where {most} were asked for, and no stop token at its end; {fix}"
        )


def _refuse_tokens(engine: GenerationEngine, answer: Sampled, is_odd: Tensor, is_unknown: Tensor) -> None:
    for row, place in is_unknown.nonzero().tolist():
        raise NonFiniteLogitsError(
            f"{called(engine)} gave no finite log-probability for token {place} of row {row} of the batch"
        )
    for row, place in is_odd.nonzero().tolist():
        raise RuntimeError(
            f"{called(engine)} sampled the id {int(answer.ids[row, place])} in row {row} of the batch, which not all "
            "models embed; it must respect suppress_tokens of the GenerationConfig"
        )
