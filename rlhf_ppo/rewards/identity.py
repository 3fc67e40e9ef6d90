"""Identities of rewards and judges, which a copy of the model or of the function shares."""

from __future__ import annotations

import hashlib
import inspect
import tokenize
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlhf_ppo.models.unwrapping import gathered
from rlhf_ppo.rewards.functions import unwrapped
from rlhf_ppo.rewards.judges import ChatJudge, PreferenceReward, RewardModelJudge
from rlhf_ppo.rewards.resolve import RewardSpec, resolve_rewards


@torch.no_grad()
def model_identity(model: nn.Module) -> str:
    """Return a hash of a reward model's head in bfloat16: two trainings differ there, copies and merged copies do not.

    Args:
        model: The model; every rank calls this if it is sharded.
    """
    matrices = [parameter for parameter in model.parameters() if len(parameter.shape) > 1]
    if not matrices:  # a rule with TRL's interface
        return str(model)
    head = matrices[-1]
    with gathered([head]):
        whole: Any = getattr(head, "full_tensor", lambda: head)()
        values = whole.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8)
        return f"weights {hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]}"


def function_identities(function: Any) -> list[str]:
    """Return a function's name and a hash of its source, wherever the file is; for a preference reward, its judge's.

    Args:
        function: A reward function, or an object that holds one as `function`.
    """
    while not inspect.isroutine(function) and hasattr(unwrapped(function), "function"):
        function = unwrapped(function).function
    function = unwrapped(function)
    if isinstance(function, PreferenceReward):
        return judge_identities(function.judge)
    named = function.model if isinstance(function, ChatJudge) else getattr(function, "name", "")
    label = getattr(function, "display_url", None) or named
    code: Any = function if hasattr(function, "__qualname__") else type(function)
    try:
        source = f"source {hashlib.sha256(inspect.getsource(code).encode()).hexdigest()[:16]}"
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # it has no file, or that has changed since
        source = f"of {code.__module__}"
    return [f"{code.__qualname__} {source} {label}"]


def reward_identities(models: Sequence[nn.Module], functions: RewardSpec | Sequence[RewardSpec] | None) -> list[str]:
    """Return the identities of all rewards of a run."""
    of_functions = (identity for function in resolve_rewards(functions) for identity in function_identities(function))
    return [*map(model_identity, models), *of_functions]


def judge_identities(judge: object) -> list[str]:
    """Return the identities of a judge."""
    return [model_identity(judge.model.scorer)] if isinstance(judge, RewardModelJudge) else function_identities(judge)
