"""What a generation engine is: prompts in, sampled ids out, with their log-probabilities where it says them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.models.unwrapping import transformers_model


class Sampled(NamedTuple):
    """What an engine answers to `B` prompts.

    Attributes:
        ids: Sampled ids, long `(B, T)` with `T <= max_new_tokens`; anything after a row's end is filling.
        logprobs: Log-probabilities of these tokens in the distribution that the engine drew them from, after
            temperature, top_k, top_p and min_p, nats, float32 `(B, T)`, 0 on filling; None if it does not say them.
    """

    ids: Tensor
    logprobs: Tensor | None = None


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
        Ids `(B, T)` and log-probabilities `(B, T)`, `T` being the longest row.
    """

    def stacked(values: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
        rows = [torch.tensor(row, dtype=dtype) for row in values]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value).to(device)

    return Sampled(stacked(ids, filling, torch.long), stacked(logprobs, 0.0, torch.float32))
