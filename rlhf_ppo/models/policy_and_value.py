"""Policy and value model as one module, so that one `prepare`, one optimizer and one backward serve both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rlhf_ppo.data.rollout import PackedIndices
from rlhf_ppo.models.heads import last_real, multiply_scores_in_float32, token_values
from rlhf_ppo.models.logprobs import ResponseLogprobs, response_logprobs
from rlhf_ppo.models.packing import packs_rows
from rlhf_ppo.models.unwrapping import (
    backbone,
    no_split_modules,
    recompute_in_eval_mode,
    set_learning,
    transformers_model,
)


class PolicyAndValueOutput(NamedTuple):
    """One forward pass of both models over a response.

    Attributes:
        logprobs: Log-probabilities of the response tokens, nats, float32 `(B, T)`, 0 outside the mask.
        entropy: Entropy of the next-token distributions, nats, float32 `(B, T)`, 0 outside the mask; NaN inside it if
            the entropy was not computed.
        values: Value estimate before each response token, float32 `(B, T)`, 0 outside the mask.
        final_values: Value estimate after the last token of the row, whoever wrote it, float32 `(B,)`.
        value_logits: Logits of the values' bins, float32 `(B, T, num_bins)`, or `(B, T, num_heads, num_bins)` of
            several heads; None without bins.
        head_values: The value of each head, float32 `(B, T, num_heads)`, whose mean `values` is; None for one head.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    final_values: Tensor
    value_logits: Tensor | None = None
    head_values: Tensor | None = None


class ResponseValues(NamedTuple):
    """Output of the value model for a response.

    Attributes:
        values: Value estimate before each response token, float32 `(B, T)`, 0 outside the mask.
        final_values: Value estimate after the last token of the row, whoever wrote it, float32 `(B,)`.
        value_logits: As in `PolicyAndValueOutput`.
        head_values: As in `PolicyAndValueOutput`.
    """

    values: Tensor
    final_values: Tensor
    value_logits: Tensor | None = None
    head_values: Tensor | None = None


class PolicyAndValue(nn.Module):
    """The two trained models; rollout and optimizer steps call the same `forward`.

    Args:
        policy: The causal language model that is trained, or a `PeftModel` around it.
        value_model: A model with a per-token scalar head.
        temperature: Sampling temperature that divides the logits.
    """

    _keys_to_ignore_on_save = None
    supports_gradient_checkpointing = True

    def __init__(self, policy: nn.Module, value_model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.policy = policy
        self.value_model = value_model
        multiply_scores_in_float32(value_model)
        self.temperature = temperature
        self.generation_config = getattr(transformers_model(policy), "generation_config", None)
        self.register_load_state_dict_post_hook(_allow_missing_frozen)

    @property
    def config(self) -> PreTrainedConfig:
        """The policy's configuration; Trainer and its integrations read it."""
        return transformers_model(self.policy).config

    @property
    def _no_split_modules(self) -> list[str]:
        return no_split_modules(self.policy, self.value_model)

    @property
    def device(self) -> torch.device:
        """Device of the policy's parameters."""
        return next(self.policy.parameters()).device

    @property
    def packs_rows(self) -> bool:
        """Whether both models pack rows: they compute nothing for padding."""
        return all(packs_rows(backbone(model)) for model in (self.policy, self.value_model))

    def train(self, mode: bool = True) -> Self:
        """Switch between learning and evaluation, which compute the same; see `set_learning`."""
        super().train(mode)
        if mode:
            for model in (self.policy, self.value_model):
                set_learning(model)
        return self

    def tie_weights(self) -> None:
        """Tie each model's tied weights again; accelerate calls this after moving models to the meta device."""
        for model in (self.policy, self.value_model):
            transformers_model(model).tie_weights()

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Recompute activations in the backward pass, in both models."""
        for model in (self.policy, self.value_model):
            transformers_model(model).gradient_checkpointing_enable(**kwargs)
            recompute_in_eval_mode(model)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Recompute activations in the backward pass, in both models (the name since transformers 5.2x)."""
        for model in (self.policy, self.value_model):
            transformers_model(model).activation_checkpointing_enable(**kwargs)
            recompute_in_eval_mode(model)

    def forward(
        self,
        query_responses: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        only: Literal["policy", "value_model"] | None = None,
        with_entropy: bool = True,
        places: PackedIndices | None = None,
        temperature: float | None = None,
    ) -> PolicyAndValueOutput | ResponseLogprobs | ResponseValues:
        """Evaluate both models, or one of them, on responses.

        Args:
            query_responses: Token ids, long `(B, C + T)`.
            attention_mask: True on real tokens, bool `(B, C + T)`.
            response_mask: True on the response tokens that the policy wrote, bool `(B, T)`.
            only: The model to run; None runs both.
            with_entropy: Compute the policy's entropy.
            places: Indices of the real tokens; None reads them from the device, once for each model.
            temperature: Divides the logits; None: the sampling temperature.

        Returns:
            Log-probabilities and entropy of the response tokens, and their values.
        """
        batch = query_responses, attention_mask, response_mask
        if only == "value_model":
            return response_values(self.value_model, *batch, places)
        divisor = self.temperature if temperature is None else temperature
        of_policy = response_logprobs(self.policy, *batch, divisor, with_entropy, places)
        if only == "policy":
            return of_policy
        return PolicyAndValueOutput(*of_policy, *response_values(self.value_model, *batch, places))

    def on_policy(self, function: Callable[[nn.Module], Any]) -> Any:
        """Call `function` with the policy; FSDP registers this method to run the way it runs `forward`."""
        return function(self.policy)


def response_values(
    value_model: nn.Module,
    query_responses: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    places: PackedIndices | None = None,
) -> ResponseValues:
    """Estimate the value before each response token, and after the last token of the row.

    The last token may be a tool's: its answer is part of the state in which the next turn begins.

    Args:
        value_model: A model with a per-token scalar head.
        query_responses: Token ids, long `(B, C + T)`.
        attention_mask: True on real tokens, bool `(B, C + T)`.
        response_mask: True on the response tokens that the policy wrote, bool `(B, T)`.
        places: Indices of the real tokens; None reads them from the device.
    """
    last = response_mask.shape[1] + 1
    values, logits, of_heads = token_values(value_model, query_responses, attention_mask, last, places)
    after_last = last_real(attention_mask[:, -values.shape[1] :])[:, None]

    def before(figures: Tensor) -> Tensor:
        outside = ~response_mask.reshape(*response_mask.shape, *[1] * (figures.dim() - 2))
        return figures[:, :-1].masked_fill(outside, 0.0)

    of_bins, by_head = (None if each is None else before(each) for each in (logits, of_heads))
    return ResponseValues(before(values), values.gather(1, after_last).squeeze(1).clone(), of_bins, by_head)


def _allow_missing_frozen(model: nn.Module, incompatible: Any) -> None:
    """Let DeepSpeed's checkpoints omit frozen parameters."""
    parameters = model.named_parameters(remove_duplicate=False)  # two models may share a base
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in frozen]
