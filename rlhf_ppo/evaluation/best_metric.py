"""The metric that models are compared by, looked for before training, or at the latest in the first evaluation."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.reporting.metrics import EVALUATED
from rlhf_ppo.rewards.functions import called_code, named_parameters, takes_any_argument

_SPEED = ("runtime", "samples_per_second", "steps_per_second")


def check_best_metric(
    args: PPOConfig,
    names: Sequence[str],
    functions: Iterable[Callable[..., Any]],
    eval_dataset: Any,
    has_reference: bool = True,
    callbacks_may_log: bool = False,
) -> None:
    """Check `metric_for_best_model`, which Trainer looks for in every evaluation of a run, and `health_judge`.

    Reward functions may log metrics of any name. Where one names `log_metric`, in its signature or its code, what
    evaluation gives is known only after the first one: `missing_best_metric` looks there.

    Args:
        args: The arguments.
        names: The names of the rewards.
        functions: The reward functions.
        eval_dataset: The evaluation set, or a dict of them, whose names are then part of the metrics'.
        has_reference: Whether there is a KL.
        callbacks_may_log: Whether the user's callbacks may log a judge of their own.

    Raises:
        ValueError: Evaluation gives no such metric.
    """
    if any(map(_may_log, functions)):
        return
    parts = [f"{name}_" for name in eval_dataset] if isinstance(eval_dataset, Mapping) else [""]
    rewards = [f"rewards/{name}/{what}" for name in names for what in ("mean", "std")]
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
    """Say what is wrong where an evaluation did not give the metric by which models are compared.

    Args:
        args: The arguments.
        metrics: What the evaluation gave.

    Returns:
        A sentence, or None if the metric is there, or none is wanted.
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
    """Return the name that a metric has among those of an evaluation."""
    return f"eval_{metric.removeprefix('eval_')}"


def _may_log(function: Callable[..., Any]) -> bool:
    if "log_metric" in named_parameters(function):
        return True
    code = called_code(function)
    return takes_any_argument(function) and (code is None or _mentions_log_metric(code))


def _mentions_log_metric(code: types.CodeType) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return "log_metric" in code.co_consts or any(map(_mentions_log_metric, inner))
