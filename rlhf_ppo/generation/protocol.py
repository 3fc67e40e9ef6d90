"""Generation engines: the protocol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from rlhf_ppo.data.rollout import Prompts


class Sampled(NamedTuple):
    """An engine's responses to `B` prompts.

    A row ends with its first stop token, or has `max_new_tokens` tokens; `sample_with` checks this.

    Attributes:
        ids: Sampled ids, long `(B, T)` with `T <= max_new_tokens`; ids after a row's end are ignored.
        logprobs: Log-probabilities of these tokens in the distribution that the engine sampled from, after
            temperature, top_k, top_p and min_p, nats, float32 `(B, T)`, ignored after a row's end; None if unknown.
        lengths: Number of sampled ids of each row, long `(B,)`. None: all `T`, or up to the stop token. An engine that
            may cut a row must return them: with stop tokens as padding, a cut row would look ended.
    """

    ids: Tensor
    logprobs: Tensor | None = None
    lengths: Tensor | None = None


class NonFiniteLogitsError(RuntimeError):
    """A model's logits are NaN, infinite, or minus infinity for every token."""


class Generates(Protocol):
    """A model with transformers' `generate`."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Sample token ids."""
        ...


MAX_ROUNDING = 1e-3
"""Largest log-probability in nats: engines that compute in 16 bits may round to a little above 0."""

ROW_COLUMN = "<row>"
"""Column of prompts that names each row of a batch of episodes: an int, the same at each of its turns."""


class GenerationEngine(Protocol):
    """Interface of an engine that samples responses; those of `generation_engine` have `called`, a name for errors."""

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
