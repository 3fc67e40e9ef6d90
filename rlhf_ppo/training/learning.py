"""The two terms of a micro-batch's loss, and the backward pass of one after the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from rlhf_ppo.algorithm.losses import (
    PolicyLoss,
    ValueLoss,
    clipped_policy_loss,
    clipped_value_loss,
    token_mean,
)
from rlhf_ppo.models.policy_and_value import PolicyAndValue, PolicyAndValueOutput

if TYPE_CHECKING:
    from rlhf_ppo.config import PPOConfig
    from rlhf_ppo.data.experience import Experience


LossParts = tuple[PolicyAndValueOutput, PolicyLoss, ValueLoss]
"""What the metrics read: the models' output and both terms' per-token figures."""


def policy_term(
    args: PPOConfig, logprobs: Tensor, experience: Experience, num_tokens: float
) -> tuple[Tensor, PolicyLoss]:
    """Compute the policy's part of the loss.

    Args:
        args: Gives `cliprange`.
        logprobs: Log-probabilities of the response tokens now, nats, `(B, T)`.
        experience: The micro-batch.
        num_tokens: Real tokens to divide by.

    Returns:
        The mean over the tokens, a scalar, and its per-token parts.
    """
    terms = clipped_policy_loss(
        logprobs, experience.logprobs, experience.advantages, args.cliprange, experience.importance_weights
    )
    return token_mean(terms.loss, experience.loss_mask, num_tokens), terms


def value_term(args: PPOConfig, values: Tensor, experience: Experience, num_tokens: float) -> tuple[Tensor, ValueLoss]:
    """Compute the value model's part of the loss.

    Args:
        args: Gives `cliprange_value` and `vf_coef`.
        values: Value estimates of the response tokens now, `(B, T)`.
        experience: The micro-batch.
        num_tokens: Real tokens to divide by.

    Returns:
        `vf_coef` times the mean over the tokens, a scalar, and its per-token parts.
    """
    terms = clipped_value_loss(values, experience.values, experience.returns, args.cliprange_value)
    return args.vf_coef * token_mean(terms.loss, experience.loss_mask, num_tokens), terms


def can_learn_in_turn(model: nn.Module) -> bool:
    """Tell whether each model may have a backward pass of its own: nothing is around them that expects one for both.

    DDP, DeepSpeed and FSDP exchange gradients in a backward pass and count on every parameter to take part in it.

    Args:
        model: The prepared model.
    """
    return type(model) is PolicyAndValue


def learn_in_turn(
    model: nn.Module,
    args: PPOConfig,
    experience: Experience,
    num_tokens: float,
    forward_context: Callable[[], AbstractContextManager[None]],
    backward: Callable[[Tensor], None],
) -> tuple[Tensor, LossParts]:
    """Run the policy forward and backward, then the value model: activations of one of them exist at a time.

    The gradients are those of the sum of both terms, bit for bit.

    Args:
        model: Policy and value model, for which `can_learn_in_turn` is true.
        args: Gives the coefficients.
        experience: The micro-batch.
        num_tokens: Real tokens to divide by.
        forward_context: What the forward passes run in.
        backward: Adds a loss's gradients to the parameters'.

    Returns:
        The sum of both terms, a scalar, and its parts.
    """
    batch = experience.query_responses, experience.attention_mask, experience.response_mask
    with forward_context():
        of_policy = model(*batch, only="policy", places=experience.places)
        policy_loss, policy_parts = policy_term(args, of_policy.logprobs, experience, num_tokens)
    backward(policy_loss)
    with forward_context():
        of_value_model = model(*batch, only="value_model", places=experience.places)
        value_loss, value_parts = value_term(args, of_value_model.values, experience, num_tokens)
    backward(value_loss)
    return policy_loss + value_loss, (PolicyAndValueOutput(*of_policy, *of_value_model), policy_parts, value_parts)
