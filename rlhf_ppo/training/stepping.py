"""Optimizer steps of several micro-batches, under every launcher."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.reporting.update_statistics import UpdateStatistics
from rlhf_ppo.training.divergence import DivergenceGuard

if TYPE_CHECKING:
    from rlhf_ppo.training.critic import CriticLearning


class SteppedRun(Protocol):
    """What an optimizer step asks of its trainer."""

    args: PPOConfig
    accelerator: Accelerator
    is_deepspeed_enabled: bool
    optimizer: Any
    _critic: CriticLearning
    _tr_loss: Tensor

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Give the context that Trainer computes losses in."""
        ...

    def _clip_grad_norm(self, model: nn.Module) -> Any: ...
    def _fire(self, event: str) -> None: ...
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any: ...
    def _unwrapped(self, model: nn.Module) -> PolicyAndValue: ...


class OptimizerSteps:
    """Adds the gradients of micro-batches up, and takes the steps.

    Args:
        run: The trainer.
        guard: Tells whether a step may be taken.
    """

    def __init__(self, run: SteppedRun, guard: DivergenceGuard) -> None:
        self.run, self.guard = run, guard

    def accumulating(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """Exchange gradients with the last micro-batch only.

        DeepSpeed keeps its own account; FSDP would keep whole gradients of both models on every rank.
        """
        accelerator = self.run.accelerator
        accelerator.gradient_state._set_sync_gradients(is_last)
        if is_last or accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            return nullcontext()
        return accelerator.no_sync(model)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Have models compute a loss as Trainer's own step would."""
        with self.run.compute_loss_context_manager(), self.run.accelerator.autocast():
            yield

    def backward(self, loss: Tensor) -> Tensor:
        """Add a loss's gradients to the parameters'; return the loss alone.

        Engines average gradients over ranks, but the loss is divided by all ranks' tokens already.
        """
        accelerator = self.run.accelerator
        is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        accelerator.backward(loss * accelerator.num_processes, **({"scale_wrt_gas": False} if is_deepspeed else {}))
        return loss.detach()

    def step(self, model: nn.Module, losses: Sequence[Tensor], statistics: UpdateStatistics) -> float | Tensor:
        """Clip, step and clear the gradients, and count the step, unless something of it is not finite.

        Args:
            model: The prepared model.
            losses: Those of the step's micro-batches; the mean over the update's steps is what Trainer logs.
            statistics: Holds the figures of these micro-batches, which are dropped with the step.

        Returns:
            The gradients' norm before clipping.
        """
        run, args = self.run, self.run.args
        run._critic.drop_policy_gradients(model)
        norms = self._norms_of_models(model)
        clipped = run._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        grad_norm = cast("float | Tensor", run._get_grad_norm(model, grad_norm=clipped))
        if run.is_deepspeed_enabled and run.accelerator.optimizer_step_was_skipped:
            grad_norm = math.inf  # its step is behind us; it leaves out those whose gradients overflow
        if self.guard.allows_step(statistics, len(losses), torch.stack(list(losses)).sum(), grad_norm):
            statistics.add_grad_norms(norms)
            run._fire("on_pre_optimizer_step")
            run.optimizer.step()
            run._fire("on_optimizer_step")
            for loss in losses:
                run._tr_loss += loss / (args.num_ppo_epochs * args.num_mini_batches)
        else:
            statistics.drop_last(len(losses))
            if run.accelerator.scaler is not None:
                run.accelerator.scaler.update()  # the gradients were unscaled, which it expects a step to follow
        model.zero_grad()
        return grad_norm

    def _norms_of_models(self, model: nn.Module) -> Tensor | None:
        """Return what `gradient_norms` does, of gradients without fp16's loss scale; None where DeepSpeed has them."""
        accelerator = self.run.accelerator
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            return None
        norms = gradient_norms(self.run._unwrapped(model))
        return norms if norms is None or accelerator.scaler is None else norms / accelerator.scaler.get_scale()


def gradient_norms(models: PolicyAndValue) -> Tensor | None:
    """Return the norms of the gradients of policy and value model, float32 `(2,)`; None if there is no gradient.

    Parameters that both hold are the policy's. Shards are put together: under FSDP2 every rank calls this.

    Args:
        models: Policy and value model, after the backward passes of a step.
    """
    policy = list(models.policy.parameters())
    of_policy = {id(parameter) for parameter in policy}
    critic = [parameter for parameter in models.value_model.parameters() if id(parameter) not in of_policy]
    owned = [[each.grad for each in part if each.grad is not None] for part in (policy, critic)]
    if not any(owned):
        return None
    norms = [_whole(torch.nn.utils.get_total_norm(grads)) for grads in owned]
    device = next(grads[0].device for grads in owned if grads)
    return torch.stack([norm.float().to(device) for norm in norms])


def _whole(norm: Tensor) -> Tensor:
    return cast(Any, norm).full_tensor() if hasattr(norm, "full_tensor") else norm
