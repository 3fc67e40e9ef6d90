"""The policy losses other than PPO's own that `policy_loss` names: functions of the micro-batch and the arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlhf_ppo.algorithm.losses import (
    PolicyLoss,
    sequence_clipped_policy_loss,
    weight_clipped_policy_loss,
)
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.experience import Experience
from rlhf_ppo.rewards.resolve import found_function

PolicyLossFunction = Callable[[Tensor, Experience, PPOConfig], PolicyLoss]
"""Takes the log-probabilities of the response tokens now, nats `(B, T)`, the micro-batch and the arguments."""


def gspo(logprobs: Tensor, experience: Experience, args: PPOConfig) -> PolicyLoss:
    """The loss with a whole response's ratio, 2507.18071."""
    return sequence_clipped_policy_loss(
        logprobs,
        experience.logprobs,
        experience.advantages,
        experience.loss_mask,
        args.cliprange,
        args.cliprange_high,
        experience.importance_weights,
    )


def cispo(logprobs: Tensor, experience: Experience, args: PPOConfig) -> PolicyLoss:
    """The loss that clips weights instead of gradients, 2506.13585."""
    high = args.cliprange if args.cliprange_high is None else args.cliprange_high
    return weight_clipped_policy_loss(
        logprobs, experience.logprobs, experience.advantages, 1 + high, experience.importance_weights
    )


POLICY_LOSSES: Mapping[str, PolicyLossFunction] = {"gspo": gspo, "cispo": cispo}


def resolve_policy_loss(given: Any) -> PolicyLossFunction | None:
    """Return the loss that an argument names or is.

    Args:
        given: 'ppo', a name of `POLICY_LOSSES`, 'path/file.py:function', 'package.module.function', or a function.

    Returns:
        The function; None for PPO's own loss, which `PPOTrainer.policy_loss` is.

    Raises:
        TypeError: It is something else, or names what cannot be called.
        ValueError: There is no such loss, file or module.
    """
    if isinstance(given, type) or not (isinstance(given, str) or callable(given)):
        raise TypeError(f"policy_loss={given!r:.60} must be a name or a function (logprobs, experience, args)")
    if given == "ppo":
        return None
    if not isinstance(given, str):
        own: Any = given
        return own
    function: Any = POLICY_LOSSES.get(given) or found_function(given, "policy_loss")
    if function is None:
        raise ValueError(
            f"policy_loss={given!r} names no loss; write one of {['ppo', *POLICY_LOSSES]}, 'package.module.function' "
            "or 'path/file.py:function'"
        )
    return function
