"""Reward functions given as text: a built-in's name, a dotted name, a function in a file, or an endpoint's address."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_ppo.config.redaction import shown
from rlhf_ppo.rewards.builtin import BUILTIN_REWARDS, TRL_REWARDS, builtin_reward
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.rewards.settings import make_with, split_settings

RewardSpec = Callable[..., Any] | str
"""A reward function, where it is to be found, or a `RewardSource`."""


def resolve_rewards(specs: RewardSpec | Sequence[RewardSpec] | None) -> list[Callable[..., Any]]:
    """Return reward functions as a list, each ready to be called.

    Args:
        specs: None, one, or several of what `resolve_reward` takes.

    Raises:
        TypeError: One of them, or what it names, cannot be called.
        ValueError: A text leads to no reward function.
    """
    if specs is None:
        return []
    if (not isinstance(specs, Sequence) and not callable(specs)) or isinstance(specs, bytes):
        raise TypeError(f"reward_funcs={specs!r:.60} must be a function, its name, or a list of these")
    return [resolve_reward(spec) for spec in ([specs] if isinstance(specs, str) or callable(specs) else specs)]


def resolve_reward(spec: RewardSpec, argument: str = "reward_funcs") -> Callable[..., Any]:
    """Turn what a user wrote into a callable with `GRPOTrainer`'s signature, or into a judge.

    Args:
        spec: A callable, which comes back as it is; or the name of a built-in or of one of TRL's rewards; or
            `"package.module.function"`; or `"path/file.py:function"`, the path relative to the working directory; or
            `"http://host/path"`, also `https`; each with settings behind it, such as `"keyword(keywords=['yes'])"`,
            see `rlhf_ppo.rewards.settings`. Modules are looked for in the working directory too, and what a file
            imports beside it. An object with TRL's `judge` counts as callable.
        argument: The argument that holds it, for errors.

    Raises:
        TypeError: `spec` is neither callable nor a text, or what it names cannot be called.
        ValueError: There is no such file, module, function, name or setting.
    """
    if not isinstance(spec, str):
        if not callable(spec):
            raise TypeError(
                f"{argument} holds {shown(spec)!r}, which cannot be called; pass a Python function or its name"
            )
        if isinstance(spec, type):
            raise TypeError(f"{argument} holds the class {spec.__name__}; pass an object of it, or a function")
        return spec
    place, settings = split_settings(spec)
    if place.startswith(("http://", "https://")):
        return make_with(RewardEndpoint, (place,), settings, place)
    if place in BUILTIN_REWARDS or place in TRL_REWARDS:
        if isinstance(settings.get("function"), str):
            settings["function"] = resolve_reward(settings["function"], argument)
        return builtin_reward(place, **settings)
    function = found_function(place, argument)
    if function is None:
        raise ValueError(
            f"{argument} holds {shown(place)!r}, which names no reward; write 'package.module.function', "
            f"'path/file.py:function', 'http://host/path' or one of {[*BUILTIN_REWARDS, *TRL_REWARDS]}; a reward "
            f"model is passed as {'judge_model' if argument == 'judge' else 'reward_model'}"
        )
    return make_with(functools.partial, (function,), settings, place) if settings else function


def check_reward_name(spec: str, argument: str = "reward_funcs") -> None:
    """Refuse a text that names no reward; a file that it names must be there, and neither file nor module is run.

    Args:
        spec: A text that `resolve_reward` takes.
        argument: The argument that holds it, for errors.

    Raises:
        ValueError: There is no such file, name or setting.
    """
    place, _ = split_settings(spec)
    if (path := _path_in(place)) is not None:
        _check_file(place, path, argument)
    elif not _is_dotted(place):
        resolve_reward(spec, argument)


def found_function(spec: str, argument: str) -> Callable[..., Any] | None:
    """Return the function that a text names, or None where it is no name of one.

    Args:
        spec: 'path/file.py:function' or 'package.module.function'.
        argument: The argument that holds it, for errors.

    Raises:
        TypeError: It cannot be called.
        ValueError: There is no such file, module or function.
    """
    if (path := _path_in(spec)) is not None:
        return _function(_load_file(spec, path, argument), spec.rpartition(":")[2], spec, argument)
    if _is_dotted(spec):
        module, _, name = spec.rpartition(".")
        return _function(_import_module(spec, module, argument), name, spec, argument)
    return None


def _path_in(spec: str) -> Path | None:
    path, _, _ = spec.rpartition(":")
    return Path(path).expanduser() if path.endswith(".py") else None


def _is_dotted(spec: str) -> bool:
    return "." in spec and all(part.isidentifier() for part in spec.split("."))


def _check_file(spec: str, path: Path, argument: str) -> None:
    if not path.is_file():
        raise ValueError(f"{argument} holds {shown(spec)!r}, but there is no file {str(path)!r} in {Path.cwd()}")


def _load_file(spec: str, path: Path, argument: str) -> ModuleType:
    """Run a Python file as a module, once in a process."""
    _check_file(spec, path, argument)
    path = path.resolve()
    # A name of its own: two files may share theirs, and neither may hide an installed package.
    name = f"reward_file_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    _look_into(str(path.parent))
    import_spec = importlib.util.spec_from_file_location(name, path)
    assert import_spec is not None and import_spec.loader is not None  # a file that ends in .py has a loader
    module = importlib.util.module_from_spec(import_spec)
    sys.modules[name] = module  # before it runs, as `import` does: dataclasses and pickle look it up
    try:
        import_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        error.add_note(f"raised while loading {shown(spec)!r} of {argument}")
        raise
    return module


def _import_module(spec: str, name: str, argument: str) -> ModuleType:
    _look_into(os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise ValueError(
                f"{argument} holds {shown(spec)!r}, but Python finds no module {missing!r}; check the spelling, put "
                "its folder on PYTHONPATH, or write 'path/file.py:function'"
            ) from error
        error.add_note(f"raised while loading {shown(spec)!r} of {argument}")
        raise


def _look_into(directory: str) -> None:
    """Look for modules in a directory too, after all other places, so that nothing is hidden by it."""
    if directory not in sys.path:
        sys.path.append(directory)


def _function(module: ModuleType, name: str, spec: str, argument: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(
            f"{argument} holds {shown(spec)!r}, but {module.__file__} has no {name!r}; it has {sorted(own)}"
        )
    function = getattr(module, name)
    is_judge = callable(getattr(function, "judge", None))
    if isinstance(function, type) or not (callable(function) or is_judge):
        problem = "is a class, not" if isinstance(function, type) else "cannot be called; name"
        raise TypeError(
            f"{argument} holds {shown(spec)!r}, which is {function!r:.60} and {problem} a function or an object "
            "that can be called"
        )
    return function
