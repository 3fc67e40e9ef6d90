"""The optimizer and its schedule: over all that is trained, and as this run's arguments say, resumed or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from torch import nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from transformers.optimization import GreedyLR

from rlhf_ppo.training.saving import SavesPolicyAndValue
from rlhf_ppo.training.schedules import Settings, changes, describe_changes

logger = get_logger(__name__)

MakeOptimizer = Callable[[list[tuple[str, Parameter]]], Optimizer]
"""Takes the names and parameters that are trained, `policy...` and `value_model...`; returns the optimizer."""

MakeScheduler = Callable[[Optimizer, int], Any]
"""Takes the optimizer and the number of PPO updates; returns the scheduler."""

Optimizers = tuple[Optimizer | MakeOptimizer | None, Any]
"""Optimizer and scheduler, or the functions that make them."""

_FIX = (
    "pass optimizers=(make_optimizer, None), where make_optimizer takes the trainer's own list of (name, parameter) "
    "and returns the optimizer; what is not to be trained needs requires_grad_(False) before the trainer is made"
)


class OptimizesPolicyAndValue(SavesPolicyAndValue):
    """Trainer whose optimizer holds every trainable parameter, and whose schedule is that of its own arguments."""

    def __init__(self, *args: Any, optimizers: Any = (None, None), **kwargs: Any) -> None:
        optimizer, scheduler = checked_pair(optimizers)
        self._make_optimizer: MakeOptimizer | None = None if _is_optimizer(optimizer) else optimizer
        self._make_scheduler: MakeScheduler | None = None if _is_scheduler(scheduler) else scheduler
        self._settings: Settings | None = None
        given = (optimizer if _is_optimizer(optimizer) else None, scheduler if _is_scheduler(scheduler) else None)
        super().__init__(*args, optimizers=cast(Any, given), **kwargs)
        if given[0] is not None:
            check_covers(given[0], self.model)
        self._check_engine_takes(optimizer)

    def _check_engine_takes(self, optimizer: Any) -> None:
        """Check that DeepSpeed neither replaces the optimizer that was given nor steps the scheduler itself."""
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is None:
            return
        if "scheduler" in plugin.deepspeed_config or "optimizer" in plugin.deepspeed_config:
            raise ValueError(
                "the DeepSpeed configuration has an `optimizer` or a `scheduler`, with which DeepSpeed would step the "
                "schedule at every optimizer step; remove both and set optim, learning_rate, lr_scheduler_type and "
                "warmup_steps, which count PPO updates"
            )
        if _is_optimizer(optimizer):
            raise ValueError(
                f"optimizers[0] is a {type(optimizer).__name__}, but DeepSpeed needs one that is made when training "
                f"starts; {_FIX}"
            )

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """Make the optimizer, by the function that was given if there is one.

        Args:
            model: The prepared model; None takes `self.model`.

        Raises:
            TypeError: The function returned something else.
            ValueError: Its optimizer misses trainable parameters, or holds others.
        """
        if self.optimizer is None and self._make_optimizer is not None:
            model = self.model if model is None else model
            self.optimizer = self._make_optimizer(_trainable(model))
            if not _is_optimizer(self.optimizer):
                raise TypeError(f"optimizers[0] returned {type(self.optimizer).__name__}, not a torch optimizer")
            check_covers(self.optimizer, model)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Make the scheduler; one that follows a metric follows it upwards where greater is better."""
        if self.args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
            mode = "max" if self.args.greater_is_better else "min"
            self.args.lr_scheduler_kwargs = {"mode": mode} | cast(dict, self.args.lr_scheduler_kwargs or {})
        if self.lr_scheduler is None and self._make_scheduler is not None:
            self.lr_scheduler = self._make_scheduler(
                self.optimizer if optimizer is None else optimizer, num_training_steps
            )
            self._created_lr_scheduler = True
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self._settings is None or self._settings.scheduler is not scheduler:
            self._settings = Settings(scheduler)
        self._settings.arguments = {
            "num_total_batches": num_training_steps,
            "lr_scheduler_type": str(self.args.lr_scheduler_type),
            "lr_scheduler_kwargs": self.args.lr_scheduler_kwargs,
            "warmup_steps": self.args.warmup_steps,
        }
        return scheduler

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        shards = self.is_deepspeed_enabled or self.is_fsdp_enabled  # these put tensors of their own into the optimizer
        layer_by_layer = any(part in self.args.optim for part in ("layerwise", "lomo"))  # and these none
        if not shards and not layer_by_layer:
            check_covers(self.optimizer, prepared[0])
        self._progress.optimization = cast(Settings, self._settings).recorded()
        return prepared

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both; where the arguments are no longer the checkpoint's, those of this run are in force."""
        super()._load_optimizer_and_scheduler(checkpoint)
        settings, before = cast(Settings, self._settings), self._progress.optimization
        changed = changes(before, settings.recorded()) if checkpoint is not None and before else {}
        if not changed:
            return
        settings.put_in_force(changed, self.state.global_step)
        logger.warning(
            f"The checkpoint's optimization was another; in force from update {self.state.global_step + 1} on is: "
            f"{describe_changes(changed)}. The learning rate is {self._get_learning_rate():.4g} now."
        )


def check_covers(optimizer: Optimizer, model: nn.Module) -> None:
    """Check that an optimizer holds every trainable parameter of a model, and none of another.

    Args:
        optimizer: The optimizer.
        model: The prepared `PolicyAndValue`.

    Raises:
        ValueError: It does not; the message names a few parameters.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = _trainable(model)
    missing = [name for name, parameter in trained if id(parameter) not in held]
    num_foreign = len(held - {id(parameter) for parameter in model.parameters()})
    faults = []
    if missing:
        faults.append(
            f"lacks {len(missing)} of the {len(trained)} tensors that are to be trained, which would never change: "
            f"{_few(missing)}"
        )
    if num_foreign:
        faults.append(f"holds {num_foreign} tensors that are none of the trainer's models")
    if faults:
        raise ValueError(f"the optimizer ({type(optimizer).__name__}) {' and '.join(faults)}; {_FIX}")


def _trainable(model: nn.Module) -> list[tuple[str, Parameter]]:
    own = "policy.", "value_model."  # wrappers put more before it
    return [
        (name[min((name.index(part) for part in own if part in name), default=0) :], parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Optimizer)


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, torch.optim.lr_scheduler.LRScheduler | GreedyLR)


def checked_pair(optimizers: Any) -> tuple[Any, Any]:
    """Return optimizer and scheduler, each an instance, a function that makes one, or None.

    Raises:
        TypeError: It is no pair, or holds something else.
        ValueError: The scheduler is of another optimizer.
    """
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        raise TypeError(f"optimizers must be a pair (optimizer, scheduler), got {optimizers!r}")
    optimizer, scheduler = optimizers
    for index, value in enumerate(optimizers):
        if value is not None and not callable(value) and not (_is_optimizer, _is_scheduler)[index](value):
            kind = ("an optimizer", "a scheduler")[index]
            raise TypeError(f"optimizers[{index}] must be {kind}, a function that makes one, or None, got {value!r}")
    if _is_scheduler(scheduler) and getattr(scheduler, "optimizer", None) is not optimizer:
        raise ValueError(
            f"optimizers[1] is a {type(scheduler).__name__} of another optimizer than optimizers[0], so it would "
            "change no learning rate; pass both, or a function that takes the optimizer and the number of updates and "
            "returns the scheduler"
        )
    return optimizer, scheduler
