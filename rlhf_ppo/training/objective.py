"""What an optimizer step minimises, from the two models' losses of each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from rlhf_ppo.algorithm.aggregation import aggregation_weights, imitation_weights
from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss, token_mean
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.experience import Experience
from rlhf_ppo.models.logprobs import ResponseLogprobs
from rlhf_ppo.models.policy_and_value import PolicyAndValueOutput
from rlhf_ppo.training.advantages import valued_tokens

if TYPE_CHECKING:
    from rlhf_ppo.training.critic import CriticLearning


class LearningTrainer(Protocol):
    """What the objective asks of its trainer."""

    args: PPOConfig
    _critic: CriticLearning
    _sum: Callable[[Tensor], Tensor]
    _gather: Callable[[Tensor], Tensor]


class Objective:
    """`policy_term + value_term`, the loss of a mini-batch, whose shares micro-batches and ranks add up to.

    Args:
        run: The trainer.
    """

    def __init__(self, run: LearningTrainer) -> None:
        self.run = run

    def micro_batches(self, minibatch: Experience, num_tokens: float, packs_rows: bool) -> list[Experience]:
        """Cut a mini-batch, after giving each token the weight that its loss has in the whole of it.

        Args:
            minibatch: This rank's share.
            num_tokens: Real tokens of the mini-batch, of all ranks.
            packs_rows: Whether the models read rows without padding.
        """
        args, mask = self.run.args, minibatch.loss_mask
        weights = aggregation_weights(mask, args.loss_aggregation, num_tokens, args.response_length, self.run._sum)
        if weights is not None:
            minibatch = replace(minibatch, loss_weights=weights.expand(mask.shape))
        if minibatch.is_positive is not None:
            weights = imitation_weights(mask, minibatch.is_positive, num_tokens, self.run._sum)
            minibatch = replace(minibatch, nll_weights=weights)
        if args.gae_level == "turn":  # the mean over turns, of their first tokens
            starts = valued_tokens(mask, args)
            num_turns = self.run._sum(starts.sum())
            minibatch = replace(minibatch, value_weights=starts * (num_tokens / num_turns))
        max_rows, max_tokens = args.per_device_train_batch_size, args.max_tokens_per_micro_batch
        return minibatch.micro_batches(max_rows, max_tokens, self.run._gather, packs_rows)

    def loss(
        self,
        output: PolicyAndValueOutput,
        policy: PolicyLoss,
        value: ValueLoss,
        part: Experience,
        num_tokens: float,
    ) -> Tensor:
        """Return a micro-batch's share of the whole loss; see the two terms.

        In critic warm-up it is the value term alone: the policy has a gradient of 0, for engines that wait for one.
        """
        of_policy = self.policy_term(policy, output, part, num_tokens)
        of_policy = 0.0 * of_policy if self.run._critic.is_alone else of_policy
        return of_policy + self.value_term(value, part, num_tokens)

    def policy_term(
        self, policy: PolicyLoss, output: ResponseLogprobs | PolicyAndValueOutput, part: Experience, num_tokens: float
    ) -> Tensor:
        """Return a micro-batch's share of the policy's loss.

            mean_t(w_t loss_t - entropy_coef entropy_t - positive_nll_coef v_t logprob_t)

        over the mini-batch's tokens, with the weights w of `loss_aggregation`, and v that make the last term a mean
        over the tokens of positive responses.

        Args:
            policy: The tokens' losses.
            output: What the policy says of them.
            part: The micro-batch.
            num_tokens: Real tokens of the mini-batch, of all ranks.
        """
        args, loss = self.run.args, policy.loss
        if part.loss_weights is not None:
            loss = loss * part.loss_weights
        if args.entropy_coef > 0:
            loss = loss - args.entropy_coef * output.entropy
        if part.nll_weights is not None:
            loss = loss - args.positive_nll_coef * part.nll_weights * output.logprobs
        return token_mean(loss, part.loss_mask, num_tokens)

    def value_term(self, value: ValueLoss, part: Experience, num_tokens: float) -> Tensor:
        """Return a micro-batch's share of `vf_coef` times the value loss, the mean over the mini-batch's tokens.

        With `gae_level="turn"` it is the mean over its turns, of each one's first token.
        """
        loss = value.loss if part.value_weights is None else value.loss * part.value_weights
        return self.run.args.vf_coef * token_mean(loss, part.loss_mask, num_tokens)
