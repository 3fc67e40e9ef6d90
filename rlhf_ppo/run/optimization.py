"""Optimizer and schedule; a resumed run uses the settings of its own arguments."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import Trainer
from transformers.optimization import GreedyLR

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.ranks.processes import get_logger, is_fsdp, zero_stage

logger = get_logger(__name__)

_SCHEDULERS = (LRScheduler, GreedyLR)


MakeOptimizer = Callable[[list[tuple[str, Parameter]]], Optimizer]
"""Takes names (`policy...`, `value_model...`) and trainable parameters; returns the optimizer."""

MakeScheduler = Callable[[Optimizer, int], Any]
"""Takes the optimizer and the number of PPO updates; returns the scheduler."""

Optimizers = tuple[Optimizer | MakeOptimizer | None, Any]
"""Optimizer and scheduler, or functions that make them."""

_FIX = (
    "pass optimizers=(make_optimizer, None), where make_optimizer takes the trainer's own list of (name, parameter) "
    "and returns the optimizer; to leave parameters untrained, call requires_grad_(False) before you make the trainer"
)


class Optimization:
    """The optimizer over all trainable parameters, and the schedule.

    Args:
        optimizers: The trainer's argument: optimizer and scheduler, or functions that make them.

    Attributes:
        instances: Those of both that are not functions, for Trainer.
        policy_groups: Indices of the policy's parameter groups, if critic warm-up holds them under DeepSpeed.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        optimizer, scheduler = optimizers
        self._make_optimizer: MakeOptimizer | None = None if isinstance(optimizer, Optimizer) else optimizer
        self._make_scheduler: MakeScheduler | None = None if isinstance(scheduler, _SCHEDULERS) else scheduler
        self.instances: tuple[Any, Any] = (
            None if self._make_optimizer else optimizer,
            None if self._make_scheduler else scheduler,
        )
        self._scheduler: Any = None
        self._is_deepspeed, self.policy_groups = False, list[int]()

    def check(self, model: nn.Module, accelerator: Accelerator) -> None:
        """Check the user's optimizer, and that DeepSpeed neither replaces it nor steps the scheduler.

        Args:
            model: The `PolicyAndValue`.
            accelerator: Gives DeepSpeed's configuration.

        Raises:
            ValueError: The optimizer does not hold the model's parameters, or DeepSpeed has its own.
        """
        optimizer = self.instances[0]
        if optimizer is not None:
            check_covers(optimizer, model)
        plugin = getattr(accelerator.state, "deepspeed_plugin", None)
        self._is_deepspeed = plugin is not None
        if plugin is None:
            return
        if "scheduler" in plugin.deepspeed_config or "optimizer" in plugin.deepspeed_config:
            raise ValueError(
                "the DeepSpeed configuration has an `optimizer` or a `scheduler`, with which DeepSpeed would step the "
                "schedule at every optimizer step; remove both and set optim, learning_rate, lr_scheduler_type and "
                "warmup_steps, which count PPO updates"
            )
        if optimizer is not None:
            raise ValueError(
                f"optimizers[0] is a {type(optimizer).__name__}, but DeepSpeed needs one that is made when training "
                f"starts; {_FIX}"
            )

    def make_optimizer(self, model: nn.Module) -> Optimizer | None:
        """Make the optimizer with the user's function; return None without one."""
        if self._make_optimizer is None:
            return None
        optimizer = self._make_optimizer(_trainable(model))
        check_covers(optimizer, model)
        return optimizer

    def rated(self, optimizer: Optimizer, model: nn.Module, args: PPOConfig) -> Optimizer:
        """Apply `args.critic_learning_rate` to the value model's parameters.

        The trainer's own optimizer has separate groups without it too, so that a resumed run may set or drop it. Under
        DeepSpeed, which flattens each group, only where they are needed: also by a value model that learns alone.
        """
        is_held = self._is_deepspeed and args.critic_warmup_steps > 0
        is_own = self._make_optimizer is None and not self._is_deepspeed
        if is_own or is_held or args.critic_learning_rate is not None:
            optimizer = with_critic_groups(optimizer, model, args.critic_learning_rate)
        if is_held:
            critic = _critic_parameters(model)
            groups = enumerate(group for group in optimizer.param_groups if group["params"])  # it drops the others
            self.policy_groups = [index for index, group in groups if critic.isdisjoint(map(id, group["params"]))]
        return optimizer

    def make_scheduler(self, optimizer: Optimizer, num_updates: int) -> Any:
        """Make the scheduler with the user's function; return None without one."""
        return None if self._make_scheduler is None else self._make_scheduler(optimizer, num_updates)

    def record(self, scheduler: Any, args: PPOConfig, num_updates: int) -> None:
        """Record the settings of a new scheduler and its optimizer, before a checkpoint is loaded."""
        if self._scheduler is not scheduler:
            self._scheduler, self._state = scheduler, copy.deepcopy(scheduler.state_dict())
            self._groups = [
                {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}
                for group in scheduler.optimizer.param_groups
            ]
            self._rates = [float(group.get("initial_lr", group["lr"])) for group in self._groups]
        self._arguments = {
            "num_total_batches": num_updates,
            "lr_scheduler_type": str(args.lr_scheduler_type),
            "lr_scheduler_kwargs": args.lr_scheduler_kwargs,
            "warmup_steps": args.warmup_steps,
        }

    def recorded(self) -> dict[str, Any]:
        """Return all settings by name, for checkpoints, as JSON values; those of parameter groups are lists."""
        names = {name for group in self._groups for name in group} - {"lr", "initial_lr"}
        of_groups = {name: [group.get(name) for group in self._groups] for name in sorted(names)}
        counted = "last_epoch", "base_lrs"
        constants = {name: self._state[name] for name in self._state if name[0] != "_" and name not in counted}
        settings = {**constants, **of_groups, "learning_rate": self._rates, **self._arguments}
        return {name: json.loads(json.dumps(value)) for name, value in settings.items() if _is_json(value)}

    def put_in_force(self, before: Mapping[str, Any], num_updates: int) -> str | None:
        """Apply this run's settings where a loaded checkpoint has others.

        A schedule continues as if it had these settings from the start. A schedule that follows a metric keeps its
        state; its learning rates are scaled by the ratio of the initial ones.

        Args:
            before: Settings in the checkpoint; empty if unknown.
            num_updates: Number of completed updates.

        Returns:
            A description of the changes, or None.
        """
        now = self.recorded()
        changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        if not before or not changed:
            return None
        groups = self._scheduler.optimizer.param_groups
        for group, settings in zip(groups, self._groups, strict=True):
            group.update({name: copy.deepcopy(settings[name]) for name in changed if name in settings})
        if follows_metric(self._scheduler):
            vars(self._scheduler).update({name: self._state[name] for name in changed if name in self._state})
            for group, old, new in zip(groups, before["learning_rate"], self._rates, strict=True):
                if old != new:
                    _set_rate(group, float(group["lr"]) * new / old if old > 0 else new)
        elif {*changed} - {name for group in self._groups for name in group}:
            self._replay(num_updates)
        return ", ".join(f"{name}={_short(now.get(name))} (was {_short(before.get(name))})" for name in changed)

    def _replay(self, num_updates: int) -> None:
        self._scheduler.load_state_dict(copy.deepcopy(self._state))
        for group, settings in zip(self._scheduler.optimizer.param_groups, self._groups, strict=True):
            _set_rate(group, settings["lr"])
            if "initial_lr" in settings:
                group["initial_lr"] = copy.deepcopy(settings["initial_lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the optimizer's steps were taken in another process
            for _ in range(num_updates):
                self._scheduler.step()


def _set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    if isinstance(group["lr"], Tensor):  # captured by a CUDA graph
        group["lr"].fill_(float(rate))
    else:
        group["lr"] = float(rate)


def _short(value: object) -> object:
    """Return one value if all parameter groups agree."""
    return value[0] if isinstance(value, list) and value and all(item == value[0] for item in value) else value


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def follow_metric(args: PPOConfig) -> None:
    """Set the mode of a schedule that follows a metric: max if greater is better."""
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        mode = "max" if args.greater_is_better else "min"
        given: Any = args.lr_scheduler_kwargs  # parsed by `TrainingArguments`
        args.lr_scheduler_kwargs = {"mode": mode} | (given or {})


def follows_metric(scheduler: object) -> bool:
    """Return whether a scheduler steps after each evaluation instead of after each update."""
    return isinstance(scheduler, ReduceLROnPlateau | GreedyLR)


def step_by_metric(scheduler: Any, args: PPOConfig, metrics: Mapping[str, float]) -> None:
    """Step a schedule that follows a metric.

    Args:
        scheduler: The schedule.
        args: Gives `metric_for_best_model`; `score` if it is not set.
        metrics: Those of an evaluation.

    Raises:
        ValueError: The metric is not among them, such as `score` if no response has a score.
    """
    name = _metric_of_best_model(args)
    if name not in metrics:
        raise ValueError(
            f"the schedule follows metric_for_best_model={args.metric_for_best_model!r}, but the evaluation has no "
            f"{name}, only {sorted(metrics)}: name one of these, or see why no response has a score"
        )
    scheduler.step(metrics[name])


def _metric_of_best_model(args: Any) -> str:
    """Return the key of `metric_for_best_model` in an evaluation."""
    return f"eval_{(args.metric_for_best_model or 'score').removeprefix('eval_')}"


def has_best_metric(trainer: Trainer, metrics: Mapping[str, float]) -> bool:
    """Return False, with a warning, if an evaluation lacks the metric of the best model, which an earlier one had.

    If no earlier evaluation had it either, the name may be wrong: Trainer then raises its error.

    Args:
        trainer: Gives `metric_for_best_model` and the log of earlier evaluations.
        metrics: Those of the evaluation.
    """
    name, state = _metric_of_best_model(trainer.args), trainer.state
    if name in metrics or not any(name in log for log in state.log_history):
        return True
    logger.warning(
        f"The evaluation after update {state.global_step} has no {name}, so it is not the best: check the rewards, "
        "which may have scored no response."
    )
    return False


def with_critic_groups(optimizer: Optimizer, model: nn.Module, rate: float | None) -> Optimizer:
    """Move the value model's parameters into separate groups, with the same schedule.

    Args:
        optimizer: A new optimizer over both models.
        model: The prepared `PolicyAndValue`.
        rate: The value model's learning rate; None keeps the current one.
    """
    critic = _critic_parameters(model)
    for group in list(optimizer.param_groups):
        parts = [[p for p in group["params"] if (id(p) in critic) is of_critic] for of_critic in (False, True)]
        if all(parts):
            group["params"] = parts[0]
            optimizer.add_param_group({**group, "params": parts[1]})
    if rate is not None:
        for group in optimizer.param_groups:
            if critic.issuperset(map(id, group["params"])):
                group["lr"] = rate
    return optimizer


def check_prepared(optimizer: Optimizer, model: nn.Module, accelerator: Accelerator) -> None:
    """Check the prepared optimizer with `check_covers`, unless DeepSpeed or FSDP have replaced its tensors."""
    if zero_stage(accelerator) is None and not is_fsdp(accelerator):
        check_covers(optimizer, model)


def check_covers(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise a `ValueError` if an optimizer lacks a trainable parameter of a model: it would never change.

    Args:
        optimizer: The optimizer.
        model: The prepared `PolicyAndValue`.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = _trainable(model)
    missing = [name for name, parameter in trained if id(parameter) not in held]
    if missing:
        raise ValueError(
            f"the optimizer ({type(optimizer).__name__}) lacks {len(missing)} of the {len(trained)} trained tensors, "
            f"which would never change: {', '.join(missing[:3])}; {_FIX}"
        )


def _critic_parameters(model: nn.Module) -> set[int]:
    return {id(parameter) for name, parameter in _trainable(model) if name.startswith("value_model.")}


def _trainable(model: nn.Module) -> list[tuple[str, Parameter]]:
    """Return the trained parameters with their names, without the prefixes of wrappers."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [(re.sub(r"^.*?((?:policy|value_model)\.)", r"\1", name), parameter) for name, parameter in named]
