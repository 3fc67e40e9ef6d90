"""Generation engines: the protocol, and checks of an engine's responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import sent
from rlhf_ppo.generation.sampling import NonFiniteLogitsError, StopStrings


class Sampled(NamedTuple):
    """An engine's responses to `B` prompts.

    A row ends with its first stop token, or has `max_new_tokens` tokens; `sample_with` checks this.

    Attributes:
        ids: Sampled ids, long `(B, T)` with `T <= max_new_tokens`; ids after a row's end are ignored.
        logprobs: Log-probabilities of these tokens in the distribution that the engine sampled from, after
            temperature, top_k, top_p and min_p, nats, float32 `(B, T)`, ignored after a row's end; None if unknown.
        lengths: Number of sampled ids of each row, long `(B,)`. None: all `T`, or up to the stop token. An engine that
            may cut a row must return them: with stop tokens as filling, a cut row would look ended.
    """

    ids: Tensor
    logprobs: Tensor | None = None
    lengths: Tensor | None = None


class Generates(Protocol):
    """A model with transformers' `generate`."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Sample token ids."""
        ...


ROW_COLUMN = "<row>"
"""Column of prompts that names each row of a batch of episodes: an int, the same at each of its turns."""


class GenerationEngine(Protocol):
    """Samples responses."""

    @property
    def reads_sharded(self) -> bool:
        """Whether the engine gathers parameters that ZeRO-3 or FSDP has sharded."""
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
        """Note that the policy's weights have changed since the last call of `sample`."""
        ...


@runtime_checkable
class Continues(Protocol):
    """An engine that can keep an episode's cache for the next turn; other engines read the episode again."""

    def continuing(self) -> GenerationEngine:
        """Return an engine for the turns of one batch of episodes, whose prompts name their rows in `ROW_COLUMN`.

        Its `sample` reads only the new tokens of a known row. The weights do not change meanwhile.
        """
        ...


def length_and_filling(config: GenerationConfig) -> tuple[int, int]:
    """Return `max_new_tokens` and `pad_token_id`."""
    return cast(int, config.max_new_tokens), cast(int, config.pad_token_id)


def stop_tokens(config: GenerationConfig) -> list[int]:
    """Return the tokens that end a row: `eos_token_id`, which may be a number, a list or None."""
    given: Any = config.eos_token_id
    return [] if given is None else [given] if isinstance(given, int) else list(given)


def prompt_rows(prompts: Prompts) -> list[list[int]]:
    """Return each prompt's ids without padding."""
    rows = zip(prompts.input_ids.cpu(), prompts.attention_mask.cpu(), strict=True)
    return [ids[real].tolist() for ids, real in rows]


def stack_rows(
    ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], filling: int, device: torch.device
) -> Sampled:
    """Stack rows of different lengths into tensors.

    Args:
        ids: Each row's sampled ids.
        logprobs: Their log-probabilities, nats.
        filling: Id of the padding.
        device: Device of the tensors.

    Returns:
        Ids and log-probabilities `(B, T)` with the longest row's `T`; NaN where a log-probability is missing.
    """

    def stacked(values: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
        rows = [torch.tensor(row, dtype=dtype) for row in values]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value).to(device)

    lengths = torch.tensor([len(row) for row in ids], device=device)
    values = [[*row, *[math.nan] * (len(tokens) - len(row))] for tokens, row in zip(ids, logprobs, strict=True)]
    return Sampled(stacked(ids, filling, torch.long), stacked(values, math.nan, torch.float32), lengths)


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
        policy: A causal language model, or a `PeftModel` around one.
        prompts: `B` left-padded prompts.
        config: The sampling distribution, the stop token (or several) and the length limit.
        stop_strings: Texts that also end a row, or None.

    Returns:
        The engine's responses.

    Raises:
        NonFiniteLogitsError: The log-probability of a token is missing, NaN or infinite.
        RuntimeError: A row ends before the limit without a stop token or string, or holds a suppressed id.
        ValueError: The result has another type or shape.
    """
    answer = _of_right_shape(engine, engine.sample(policy, prompts, config), len(prompts.input_ids), config)
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


def _of_right_shape(engine: GenerationEngine, answer: Sampled, num_rows: int, config: GenerationConfig) -> Sampled:
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
        fix = getattr(engine, "cut_rows_advice", "give a row's stop token, or that many tokens")
        raise RuntimeError(
            f"{called(engine)} cut the response to row {row} of the batch: {length} tokens after a prompt of "
            f"{prompt}, where {most} were asked for, and no stop token at its end; {fix}"
        )


def _refuse_tokens(engine: GenerationEngine, answer: Sampled, is_forbidden: Tensor, is_unknown: Tensor) -> None:
    for row, place in is_unknown.nonzero().tolist():
        raise NonFiniteLogitsError(
            f"{called(engine)} gave no finite log-probability for token {place} of row {row} of the batch"
        )
    for row, place in is_forbidden.nonzero().tolist():
        raise RuntimeError(
            f"{called(engine)} sampled the id {int(answer.ids[row, place])} in row {row} of the batch, which not all "
            "models have; it must respect suppress_tokens of the GenerationConfig"
        )
