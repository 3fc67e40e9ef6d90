"""Reward functions given as text: a built-in's name, a dotted name, a function in a file, or an endpoint's address."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_ppo.rewards.builtin import BUILTIN_REWARDS, TRL_REWARDS, builtin_reward
from rlhf_ppo.rewards.endpoint import RewardEndpoint

RewardSpec = Callable[..., Any] | str
"""A reward function, or where it is to be found."""


def resolve_rewards(specs: RewardSpec | Sequence[RewardSpec] | None) -> list[Callable[..., Any]]:
    """Return reward functions as a list, each ready to be called.

    Args:
        specs: None, one, or several of what `resolve_reward` takes.

    Raises:
        TypeError: One of them can neither be called nor is a text.
        ValueError: A text leads to no reward function.
    """
    if specs is None:
        return []
    return [resolve_reward(spec) for spec in ([specs] if isinstance(specs, str) or callable(specs) else specs)]


def resolve_reward(spec: RewardSpec) -> Callable[..., Any]:
    """Turn what a user wrote into a callable with `GRPOTrainer`'s signature.

    Args:
        spec: A callable, which is returned; or the name of a built-in or of one of TRL's rewards; or
            `"package.module.function"`; or `"path/to/file.py:function"`; or `"http://host/path"`, also `https`.
            Modules are looked for in the working directory too, and a file's own imports beside it.

    Raises:
        TypeError: It can neither be called nor is a text.
        ValueError: There is no such reward.
    """
    if not isinstance(spec, str):
        if not callable(spec):
            raise TypeError(f"reward_funcs holds {spec!r}, which cannot be called; pass a function, or its name")
        return spec
    if spec.startswith(("http://", "https://")):
        return RewardEndpoint(spec)
    path, colon, function = spec.rpartition(":")
    if colon and path.endswith(".py"):
        return _member(spec, _module_of_file(spec, path), function)
    if spec in BUILTIN_REWARDS or spec in TRL_REWARDS:
        return builtin_reward(spec)
    module, dot, function = spec.rpartition(".")
    if dot and all(part.isidentifier() for part in spec.split(".")):
        return _member(spec, _module(spec, module), function)
    raise ValueError(
        f"reward_funcs holds {spec!r}, which is no reward: give 'package.module.function', 'file.py:function', "
        f"'http://host/path' or a built-in, one of {[*BUILTIN_REWARDS, *TRL_REWARDS]}; a reward model is passed as "
        "reward_model"
    )


def _module(spec: str, name: str) -> ModuleType:
    _import_from(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise ValueError(
            f"reward_funcs holds {spec!r}, but there is no module {error.name!r}: check the name, install it, or "
            "start from the directory that holds it"
        ) from error


def _module_of_file(spec: str, path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"reward_funcs holds {spec!r}, but there is no file {str(file)!r}")
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"  # files of one name are told apart
    if name not in sys.modules:
        _import_from(str(file.parent))
        found = importlib.util.spec_from_file_location(name, file)
        assert found is not None and found.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(found)
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _import_from(directory: str) -> None:
    """Look for modules in a directory too, after all other places, so that nothing is hidden by it."""
    if directory not in sys.path:
        sys.path.append(directory)


def _member(spec: str, module: ModuleType, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if found is None:
        raise ValueError(f"reward_funcs holds {spec!r}, but {module.__file__} has no {name!r}")
    if isinstance(found, type) or not callable(found):
        raise ValueError(
            f"reward_funcs holds {spec!r}, which is {'a class' if isinstance(found, type) else type(found).__name__}: "
            "name a function, or an object that can be called"
        )
    return found
