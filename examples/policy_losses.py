"""Policy losses for `PPOTrainer(policy_loss=...)`, or `--policy_loss examples/policy_losses.py:gspo`.

Each takes the log-probabilities of the response tokens, the micro-batch and the arguments, and returns the loss of
each token. With engines that report log-probabilities, `weighted` corrects the loss for the engine.
"""

import torch
from torch import Tensor

from rlhf_ppo import PPOConfig
from rlhf_ppo.algorithm import PolicyLoss, clipped_policy_loss, zero_outside
from rlhf_ppo.data.rollout import Experience


def gspo(logprobs: Tensor, experience: Experience, args: PPOConfig) -> PolicyLoss:
    """Clip the ratio of the response, the geometric mean of its tokens' ratios (GSPO, 2507.18071, eq. 14).

        s_i = exp(mean_t(logprob_it - old_logprob_it)),    rho_it = stop(s_i) exp(logprob_it - stop(logprob_it))

    Use small ranges, such as cliprange=3e-4 and cliprange_high=4e-4.
    """
    mask = experience.loss_mask
    log_ratio = zero_outside(logprobs - experience.logprobs, mask)
    mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    old, high = (logprobs - mean).detach(), args.cliprange_high
    return clipped_policy_loss(
        logprobs, old, experience.advantages, args.cliprange, experience.importance_weights, high
    )


def cispo(logprobs: Tensor, experience: Experience, args: PPOConfig) -> PolicyLoss:
    """Weight the policy gradient by the clipped ratio (CISPO of MiniMax-M1, 2506.13585, eq. 4).

    loss = -stop(min(rho, 1 + cliprange_high)) A logprob
    """
    ratio = (logprobs.detach() - experience.logprobs).exp()
    limit = 1 + (args.cliprange if args.cliprange_high is None else args.cliprange_high)
    loss = -ratio.clamp(max=limit) * experience.advantages * logprobs
    return PolicyLoss(weighted(loss, experience), ratio, torch.zeros_like(ratio, dtype=torch.bool))


def dual_clip(logprobs: Tensor, experience: Experience, args: PPOConfig) -> PolicyLoss:
    """Limit PPO's loss of tokens with negative advantage to that of a ratio of 3 (Ye et al., 1912.09729, section 4.2).

    loss = min(PPO's loss, -3 A)    for A < 0
    """
    advantages = experience.advantages
    clipped = clipped_policy_loss(
        logprobs, experience.logprobs, advantages, args.cliprange, cliprange_high=args.cliprange_high
    )
    most = torch.where(advantages < 0, -3 * advantages, torch.inf)
    loss = weighted(torch.minimum(clipped.loss, most), experience)
    return PolicyLoss(loss, clipped.ratio, clipped.clipped | (clipped.loss > most))


def weighted(loss: Tensor, experience: Experience) -> Tensor:
    """Multiply by the importance weights of the policy over the engine, if there are any."""
    return loss if experience.importance_weights is None else loss * experience.importance_weights
