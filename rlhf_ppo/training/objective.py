"""What an optimizer step minimises, from the two models' losses of each token."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss, token_mean
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.experience import Experience
from rlhf_ppo.models.logprobs import ResponseLogprobs
from rlhf_ppo.models.policy_and_value import PolicyAndValueOutput


class LearningTrainer(Protocol):
    """What the objective asks of its trainer."""

    args: PPOConfig


class Objective:
    """`policy_term + value_term`, the loss of a mini-batch, whose shares micro-batches and ranks add up to.

    Args:
        run: The trainer.
    """

    def __init__(self, run: LearningTrainer) -> None:
        self.run = run

    def policy_term(
        self, policy: PolicyLoss, output: ResponseLogprobs | PolicyAndValueOutput, part: Experience, num_tokens: float
    ) -> Tensor:
        """Return a micro-batch's share of the policy's loss: the mean over the mini-batch's tokens.

        Args:
            policy: The tokens' losses.
            output: What the policy says of them.
            part: The micro-batch.
            num_tokens: Real tokens of the mini-batch, of all ranks.
        """
        return token_mean(policy.loss, part.loss_mask, num_tokens)

    def value_term(self, value: ValueLoss, part: Experience, num_tokens: float) -> Tensor:
        """Return a micro-batch's share of `vf_coef` times the value loss, the mean over the mini-batch's tokens."""
        return self.run.args.vf_coef * token_mean(value.loss, part.loss_mask, num_tokens)
