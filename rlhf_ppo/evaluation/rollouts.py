"""Evaluation in training: rollouts on held-out prompts, prompts of sample tables, and the metric of the best model."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import gathered
from rlhf_ppo.reporting.metrics import EVALUATED, gather_columns, warn_of_unscored
from rlhf_ppo.rewards.functions import called_code, named_parameters, takes_any_argument


def evaluated(
    batches: Iterable[Mapping[str, object]],
    evaluate: Callable[[Prompts], Mapping[str, Tensor]],
    gather: Callable[[Tensor], Tensor],
    device: torch.device,
    after_batch: Callable[[], None],
) -> dict[str, Tensor]:
    """Evaluate held-out prompts batch by batch.

    Args:
        batches: Collated batches of this process.
        evaluate: Takes a batch's prompts, and returns the `evaluation_columns` of their rollout.
        gather: Concatenates over ranks, without the rows that pad the last batch.
        device: Device of the prompts.
        after_batch: Called after each batch.

    Returns:
        By name, one value per episode of all ranks.
    """
    parts: list[dict[str, Tensor]] = []
    for batch in batches:
        parts.append(gather_columns(evaluate(Prompts.from_collated(batch, device)), gather))
        after_batch()
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    warn_of_unscored(columns["scores"])
    return columns


@contextmanager
def runnable(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Yield the prepared model, or, before training, the plain model with all parameters on a device.

    Args:
        model: The `PolicyAndValue`, prepared or not.
        device: This rank's device.
    """
    if isinstance(model, PolicyAndValue) and not isinstance(model, FSDPModule):
        with gathered(model.parameters()):
            yield model.to(device)
    else:
        yield model


def held_out_prompts(
    eval_dataset: Any, loader_of: Callable[[str | None], Iterable[Mapping[str, Any]]], device: torch.device
) -> Iterator[Prompts]:
    """Yield all held-out prompts of this process in batches.

    Args:
        eval_dataset: The evaluation set, or a dict of them.
        loader_of: Takes the name of a set, or None for the only one; returns collated batches.
        device: Device of the prompts.
    """
    names = list(eval_dataset) if isinstance(eval_dataset, dict) else [None]
    for name in names:
        for batch in loader_of(name):
            yield Prompts.from_collated(batch, device)


def first_prompts(
    rows: Sequence[Any],
    num_rows: int,
    collate: Callable[[list[Any]], Mapping[str, Any]],
    accelerator: Accelerator,
    device: torch.device,
) -> Prompts:
    """Return this process' share of the first training prompts.

    Args:
        rows: The training set.
        num_rows: Rows of each process, at most as many as the data has.
        collate: Makes a batch.
        accelerator: The accelerator.
        device: Device of the prompts.
    """
    num_rows = min(num_rows, len(rows) // accelerator.num_processes)
    first = num_rows * accelerator.process_index
    batch = collate([rows[index] for index in range(first, first + num_rows)])
    return Prompts.from_collated(batch, device)


# The metric that models are compared by

_SPEED = ("runtime", "samples_per_second", "steps_per_second")


def check_best_metric(
    args: PPOConfig,
    names: Sequence[str],
    functions: Iterable[Callable[..., Any]],
    eval_dataset: Any,
    has_reference: bool = True,
    callbacks_may_log: bool = False,
) -> None:
    """Check that `metric_for_best_model` and `health_judge` are metrics of evaluation, before training.

    Reward functions may log metrics of any name. If a function names `log_metric`, in its signature or its code, the
    metrics are known only after the first evaluation; `missing_best_metric` checks them then.

    Args:
        args: The arguments.
        names: The names of the rewards.
        functions: The reward functions.
        eval_dataset: The evaluation set, or a dict of them, whose names are then part of the metrics' names.
        has_reference: Whether there is a KL.
        callbacks_may_log: Whether the user's callbacks may log their own judge.

    Raises:
        ValueError: Evaluation does not have the metric.
    """
    if any(map(_may_log, functions)):
        return
    parts = [f"{name}_" for name in eval_dataset] if isinstance(eval_dataset, Mapping) else [""]
    rewards = [f"rewards/{name}/{kind}" for name in names for kind in ("mean", "std")]
    of_episodes = [name for name in EVALUATED.values() if has_reference or name != "kl"]
    known = [f"{part}{name}" for part in parts for name in (*of_episodes, *rewards)]
    evaluates, best = args.eval_strategy != "no" or args.eval_on_start, args.metric_for_best_model
    with_speed = [*known, *(f"{part}{name}" for part in parts for name in _SPEED)]
    if evaluates and best is not None and best.removeprefix("eval_") not in with_speed:
        raise ValueError(
            f"metric_for_best_model={best!r} is no metric of evaluation, which gives {with_speed}; a reward function "
            "that logs another one must name log_metric in its signature"
        )
    judges = [evaluated_name(name) for name in known]
    is_known = args.health_judge in (PPOConfig.health_judge, *judges) or callbacks_may_log
    if args.health_checks and not is_known:
        raise ValueError(
            f"health_judge={args.health_judge!r} is no metric of evaluation: name one of {judges}, or set "
            "health_checks=False; a reward function that logs another one must name log_metric in its signature, and "
            "a callback that does must be in callbacks"
        )


def missing_best_metric(args: PPOConfig, metrics: Mapping[str, float]) -> str | None:
    """Return an error message if an evaluation lacks `metric_for_best_model`.

    Args:
        args: The arguments.
        metrics: The evaluation's metrics.

    Returns:
        The message, or None if the metric exists or is not set.
    """
    wanted = args.metric_for_best_model
    if wanted is None or evaluated_name(wanted) in metrics:
        return None
    known = [name.removeprefix("eval_") for name in metrics if name.startswith("eval_")]
    return (
        f"metric_for_best_model={wanted!r} is none of the metrics that the evaluation gave, {known}: name one of "
        "them, or let a reward function log it, log_metric(name, value), in evaluations too"
    )


def evaluated_name(metric: str) -> str:
    """Return a metric's name in an evaluation."""
    return f"eval_{metric.removeprefix('eval_')}"


def _may_log(function: Callable[..., Any]) -> bool:
    if "log_metric" in named_parameters(function):
        return True
    code = called_code(function)
    return takes_any_argument(function) and (code is None or _mentions_log_metric(code))


def _mentions_log_metric(code: types.CodeType) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return "log_metric" in code.co_consts or any(map(_mentions_log_metric, inner))
