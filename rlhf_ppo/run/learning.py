"""Learning from a rollout: advantages and returns, the terms of the loss, gradients, and critic warm-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from rlhf_ppo.algorithm.advantages import gae, turn_gae, turn_starts
from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss, sequence_weights, token_mean
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.checks import reduces_once
from rlhf_ppo.data.rollout import Experience, Rollout, micro_batch_rows
from rlhf_ppo.models.heads import ValueHead
from rlhf_ppo.models.policy_and_value import PolicyAndValue, PolicyAndValueOutput
from rlhf_ppo.rewards.resolve import load_object
from rlhf_ppo.run.run_state import RunState


def advantages_and_returns(
    rollout: Rollout, rewards: Tensor, args: PPOConfig, warms_up: bool = False
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns with GAE; one pass if both have the same lambda.

    Decoupled GAE: VAPO, 2504.05118, section 4.1, after VC-PPO, 2503.01491, section 3.3.

    Args:
        rollout: `B` responses.
        rewards: Reward of each token, `(B, T)`.
        args: Gives `gamma`, `lam`, `lam_policy`, `lam_critic`, `gae_level` and `bootstrap_truncated`.
        warms_up: Whether this is an update of critic warm-up, whose returns have lambda 1.

    Returns:
        Advantages and returns, float32 `(B, T)` each, in the reward's unit, 0 outside `rollout.loss_mask`.
    """
    bootstrap = rollout.final_values.masked_fill(rollout.ended, 0.0) if args.bootstrap_truncated else None
    estimator = turn_gae if args.gae_level == "turn" else gae

    def estimate(lam: float) -> tuple[Tensor, Tensor]:
        return estimator(rewards, rollout.values, rollout.loss_mask, args.gamma, lam, bootstrap)

    lam_critic = args.lam if args.lam_critic is None else args.lam_critic
    lam_critic = 1.0 if warms_up else lam_critic
    lam_policy = args.lam if args.lam_policy is None else args.lam_policy
    advantages, returns = estimate(lam_policy)
    return advantages, returns if lam_policy == lam_critic else estimate(lam_critic)[1]


def monte_carlo_returns(rollout: Rollout, rewards: Tensor, args: PPOConfig) -> Tensor:
    """Compute the discounted sum of the rewards from each token on, float32 `(B, T)`: the return of lambda 1.

    Args:
        rollout: `B` responses.
        rewards: Reward of each token, `(B, T)`.
        args: As for `advantages_and_returns`.

    Returns:
        In the reward's unit; NaN for responses that no reward scored.
    """
    returns = advantages_and_returns(rollout, rewards, args, warms_up=True)[1]
    return returns.masked_fill(rollout.scores.isnan()[:, None], torch.nan)


def valued_tokens(loss_mask: Tensor, args: PPOConfig) -> Tensor:
    """Return the tokens with a value: all learned tokens, or with `gae_level="turn"` the first tokens of turns.

    Args:
        loss_mask: True on the learned tokens, bool `(B, T)`.
        args: Gives `gae_level`.

    Returns:
        bool `(B, T)`.
    """
    return turn_starts(loss_mask) if args.gae_level == "turn" else loss_mask


PolicyLossFunction = Callable[[Tensor, Experience, PPOConfig], PolicyLoss]
"""Takes the current log-probabilities of response tokens, nats `(B, T)`, the micro-batch and the arguments."""


def resolve_policy_loss(policy_loss: str | PolicyLossFunction) -> PolicyLossFunction | None:
    """Return the policy loss for an argument.

    Args:
        policy_loss: 'ppo', 'path/file.py:function', 'package.module.function', or a function.

    Returns:
        The function; None for PPO's loss, which is `PPOTrainer.policy_loss`.

    Raises:
        TypeError: The name is not that of a function.
        ValueError: The loss, file or module does not exist.
    """
    if not isinstance(policy_loss, str):
        return policy_loss
    if policy_loss == "ppo":
        return None
    return load_object(policy_loss, "policy_loss", ", or 'ppo'")


def weighted_micro_batches(minibatch: Experience, num_tokens: float, run: RunState) -> list[Experience]:
    """Cut a mini-batch into micro-batches, after weighting each token as its loss counts in the mini-batch.

    Args:
        minibatch: This rank's share.
        num_tokens: Learned tokens of the mini-batch, on all ranks.
        run: The run.
    """
    args, mask = run.args, minibatch.loss_mask
    if args.loss_aggregation == "sequence":
        weights = sequence_weights(mask, num_tokens, run.sum_over_ranks)
        minibatch = replace(minibatch, policy_weights=weights.expand(mask.shape))
    if args.gae_level == "turn":  # a mean over the first tokens of turns
        starts = valued_tokens(mask, args)
        num_turns = run.sum_over_ranks(starts.sum())
        minibatch = replace(minibatch, value_weights=starts * (num_tokens / num_turns))
    rows_of_parts = micro_batch_rows(
        minibatch.responses,
        args.per_device_train_batch_size,
        args.max_tokens_per_micro_batch,
        run.gather,
        run.models.packs_rows,
        run.models.shares_prefixes,
    )
    return [minibatch[rows].trimmed() for rows in rows_of_parts]


def model_passes(
    accelerator: Accelerator, args: PPOConfig, value_model: nn.Module, warms_up: bool
) -> tuple[Literal["policy", "value_model"] | None, ...]:
    """Return which model each pass over a micro-batch runs, None for both; the loss is the sum of the passes' terms.

    A pass for each model saves memory if its backward pass comes before the next pass. DDP, DeepSpeed and FSDP
    exchange gradients in one backward pass in which every parameter takes part, and a value model that is a head of
    the policy has no separate pass. In critic warm-up only the value model has a pass.

    Args:
        accelerator: Gives the kind of distribution.
        args: Gives `torch_compile`.
        value_model: The value model.
        warms_up: Whether this is an update of critic warm-up.
    """
    if warms_up:
        return ("value_model",)
    is_plain = accelerator.distributed_type == DistributedType.NO and not args.torch_compile
    return (None,) if not is_plain or isinstance(value_model, ValueHead) else ("policy", "value_model")


class Losses(NamedTuple):
    """Outputs and losses of each token of a micro-batch.

    Attributes:
        output: Outputs of both models.
        policy: The policy loss.
        value: The value loss.
    """

    output: PolicyAndValueOutput
    policy: PolicyLoss
    value: ValueLoss

    @classmethod
    def before(cls, part: Experience) -> Losses:
        """Return the losses of models that have not changed since the rollout: ratio 1, losses and entropies 0."""
        logprobs, values = part.logprobs, part.values
        loss, clipped = torch.zeros_like(logprobs), torch.zeros_like(logprobs, dtype=torch.bool)
        output = PolicyAndValueOutput(logprobs, loss, values, torch.full_like(loss[:, 0], torch.nan))
        return cls(output, PolicyLoss(loss, torch.ones_like(loss), clipped), ValueLoss(loss, clipped))


def policy_term(
    policy: PolicyLoss,
    output: PolicyAndValueOutput,
    part: Experience,
    num_tokens: float,
    args: PPOConfig,
) -> Tensor:
    """Compute a micro-batch's share of the policy loss.

        mean_t(w_t loss_t - entropy_coef entropy_t)

    over the mini-batch's tokens. The weights w follow `loss_aggregation`.

    Args:
        policy: Loss of each token.
        output: Log-probability and entropy of each token.
        part: The micro-batch.
        num_tokens: Learned tokens of the mini-batch, on all ranks.
        args: Gives `entropy_coef`.

    Raises:
        ValueError: The loss lacks the tokens' shape, or a gradient.
    """
    loss = policy.loss
    _check_loss("policy_loss", loss, part)
    if output.logprobs.requires_grad and not loss.requires_grad:
        raise ValueError("policy_loss returned a loss without a gradient: compute it from logprobs, without detach()")
    if part.policy_weights is not None:
        loss = loss * part.policy_weights
    if args.entropy_coef > 0:
        loss = loss - args.entropy_coef * output.entropy
    return token_mean(loss, part.loss_mask, num_tokens)


def value_term(value: ValueLoss, part: Experience, num_tokens: float, args: PPOConfig) -> Tensor:
    """Compute a micro-batch's share of `vf_coef` times the value loss, a mean over the mini-batch's tokens.

    With `gae_level="turn"` it is a mean over the first tokens of turns.
    """
    _check_loss("value_loss", value.loss, part)
    loss = value.loss if part.value_weights is None else value.loss * part.value_weights
    return args.vf_coef * token_mean(loss, part.loss_mask, num_tokens)


def _check_loss(name: str, loss: Tensor, part: Experience) -> None:
    """Raise a `ValueError` if a loss, perhaps of the user's function, is not one per token: it would broadcast."""
    if loss.shape != part.loss_mask.shape:
        shape, expected = tuple(loss.shape), tuple(part.loss_mask.shape)
        raise ValueError(f"{name} returned a loss of shape {shape}, expected {expected}: the loss of each token")


# ---- Gradients ----


def zero_of_policy(model: nn.Module, policy: nn.Module) -> Tensor | float:
    """Return 0 as a function of the policy's parameters, for DDP, which waits for each of them in a backward pass."""
    finds_unused = getattr(model, "find_unused_parameters", True) and not getattr(model, "static_graph", False)
    if finds_unused:
        return 0.0
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return torch.stack([0.0 * parameter.sum().float() for parameter in trained]).sum()


def accumulate(
    accelerator: Accelerator, model: nn.Module, is_last: bool, args: PPOConfig
) -> AbstractContextManager[Any]:
    """Exchange gradients with the last micro-batch only.

    DeepSpeed counts micro-batches itself; FSDP would keep unsharded gradients of both models on every rank, unless the
    arguments ask for it.
    """
    accelerator.gradient_state._set_sync_gradients(is_last)
    backend = accelerator.distributed_type
    is_exchanged = backend == DistributedType.DEEPSPEED or (backend == DistributedType.FSDP and not reduces_once(args))
    if is_last or is_exchanged:
        return nullcontext()
    return accelerator.no_sync(model)


def backward(accelerator: Accelerator, loss: Tensor) -> Tensor:
    """Add a loss's gradients to those of the parameters; return the detached loss.

    Backends average gradients over ranks, but the loss is already divided by the tokens of all ranks.
    """
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    accelerator.backward(loss * accelerator.num_processes, **({"scale_wrt_gas": False} if is_deepspeed else {}))
    return loss.detach()


def gradient_norms(accelerator: Accelerator, models: PolicyAndValue) -> Tensor | None:
    """Return the gradient norms of policy and value model without fp16's loss scale, float32 `(2,)`.

    Shared parameters count for the policy. With sharded gradients (FSDP2) every rank calls this.

    Args:
        accelerator: Gives the loss scale.
        models: Policy and value model, after the backward passes of a step.

    Returns:
        None without gradients, and under DeepSpeed, which holds them.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return None
    policy = list(models.policy.parameters())
    of_policy = {id(parameter) for parameter in policy}
    critic = [parameter for parameter in models.value_model.parameters() if id(parameter) not in of_policy]
    grads_of = [[weight.grad for weight in part if weight.grad is not None] for part in (policy, critic)]
    if not any(grads_of):
        return None
    norms: list[Any] = [torch.nn.utils.get_total_norm(grads) for grads in grads_of]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    device = next(grads[0].device for grads in grads_of if grads)
    result = torch.stack([norm.float().to(device) for norm in norms])
    return result if accelerator.scaler is None else result / accelerator.scaler.get_scale()


# ---- Critic warm-up ----

_NOT_MEASURED = frozenset({"policy/entropy_avg", "loss/policy_avg", "val/first_logratio"})
"""Metrics of the policy's forward passes, which warm-up skips."""


class CriticOnly:
    """Critic warm-up: the first `critic_warmup_steps` updates, in which only the value model learns.

    The policy's parameters, including those shared with the value model, then have no gradient: neither weight decay
    nor an optimizer's moments move them. Returns have lambda 1. Value pretraining: VC-PPO, 2503.01491; VAPO,
    2504.05118.
    """

    def __init__(self, run: RunState) -> None:
        self.run = run
        self._hooks: list[Any] = []
        self._held: set[int] = set()
        self._left_out: list[tuple[Tensor, Tensor | None]] = []

    @property
    def warms_up(self) -> bool:
        """Whether only the value model learns in the current update."""
        return self.run.state.global_step < self.run.args.critic_warmup_steps

    def drop_policy_gradients(self) -> None:
        """Remove the gradients of the policy's parameters where only the value model learns."""
        if self.warms_up:
            for parameter in self.run.models.policy.parameters():
                parameter.grad = None

    def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Drop metrics of the policy's forward passes during warm-up, and add whether it is active."""
        if self.run.args.critic_warmup_steps == 0:
            return dict(metrics)
        kept = {name: value for name, value in metrics.items() if not (self.warms_up and name in _NOT_MEASURED)}
        return kept | {"val/critic_warmup": float(self.warms_up)}

    def begin(self, optimizer: Any, policy_groups: Sequence[int]) -> None:
        """Freeze the policy's parameter groups under DeepSpeed, whose groups always have gradients.

        Args:
            optimizer: The prepared optimizer.
            policy_groups: Indices of the policy's groups; empty without such groups.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if policy_groups:
            while hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer
            groups = optimizer.param_groups  # ZeRO passes them to the optimizer one at a time
            self._held = {id(groups[index]) for index in policy_groups}
            self._hooks = [optimizer.register_step_pre_hook(self._hide), optimizer.register_step_post_hook(self._show)]

    def _hide(self, optimizer: Any, *_: object) -> None:
        if self.warms_up:
            held = [group for group in optimizer.param_groups if id(group) in self._held]
            self._left_out = [(weight, weight.grad) for group in held for weight in group["params"]]
            for weight, _grad in self._left_out:
                weight.grad = None

    def _show(self, *_: object) -> None:
        for weight, grad in self._left_out:  # some exist for the whole run
            weight.grad = grad
        self._left_out = []
