"""The metric that models are compared by, looked for among those of evaluation before anything is trained."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.reporting.metrics import EVALUATED
from rlhf_ppo.rewards.functions import called_code, named_parameters, takes_any_argument

_SPEED = ("runtime", "samples_per_second", "steps_per_second")


def check_best_metric(
    args: PPOConfig, names: Sequence[str], functions: Iterable[Callable[..., Any]], eval_dataset: Any
) -> None:
    """Check `metric_for_best_model` where something compares models by it.

    Reward functions may log metrics of any name. Where one names `log_metric`, in its signature or its code, what
    evaluation gives is known only after the first one.

    Args:
        args: The arguments.
        names: The names of the rewards.
        functions: The reward functions.
        eval_dataset: The evaluation set, or a dict of them, whose names are then part of the metrics'.

    Raises:
        ValueError: Evaluation gives no such metric.
    """
    if not args.compares_models() or args.metric_for_best_model is None or any(map(_may_log, functions)):
        return
    parts = [f"{name}_" for name in eval_dataset] if isinstance(eval_dataset, Mapping) else [""]
    rewards = [f"rewards/{name}/{what}" for name in names for what in ("mean", "std")]
    known = [f"{part}{name}" for part in parts for name in (*EVALUATED.values(), *rewards, *_SPEED)]
    if args.metric_for_best_model.removeprefix("eval_") not in known:
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} is no metric of evaluation, which gives {known}; "
            "a reward function that logs another one must name log_metric in its signature"
        )


def _may_log(function: Callable[..., Any]) -> bool:
    if "log_metric" in named_parameters(function):
        return True
    code = called_code(function)
    return takes_any_argument(function) and (code is None or _mentions_log_metric(code))


def _mentions_log_metric(code: types.CodeType) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return "log_metric" in code.co_consts or any(map(_mentions_log_metric, inner))
