"""Functions given as text: a built-in reward's name, a dotted name, a function in a file, or an endpoint's address."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from rlhf_ppo.config.checks import suggestion
from rlhf_ppo.rewards.builtin import BUILTIN_REWARDS, TRL_REWARDS, builtin_reward
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.terminal import redacted

RewardSpec = Callable[..., Any] | str
"""A reward function, its name, or a `RewardSource`."""


def resolve_rewards(specs: RewardSpec | Sequence[RewardSpec] | None) -> list[Callable[..., Any]]:
    """Return a list of reward functions.

    Args:
        specs: None, or one or several arguments of `resolve_reward`.
    """
    if specs is None:
        return []
    is_one = isinstance(specs, str) or callable(specs) or not isinstance(specs, Sequence)
    listed: Any = [specs] if is_one else specs
    return [resolve_reward(spec) for spec in listed]


def resolve_reward(spec: RewardSpec, argument: str = "reward_funcs") -> Callable[..., Any]:
    """Return the reward function, or the judge, that a user named.

    Args:
        spec: A callable, which is returned as it is; or the name of a built-in or of one of TRL's rewards; or
            `"http://host/path"`, also `https`; or a text for `load_object`.
        argument: Name of the argument, for errors.

    Raises:
        ValueError: It is neither callable nor a text, or a model, or the text names nothing, or a reward that needs
            settings.
    """
    if isinstance(spec, nn.Module) and hasattr(spec, "config"):
        raise ValueError(f"{argument} holds a {type(spec).__name__}, which is a model: pass it as reward_model")
    if callable(spec):
        return spec
    name = str(spec)
    if name in BUILTIN_REWARDS or name in TRL_REWARDS:
        try:
            return builtin_reward(name)
        except TypeError as error:
            raise ValueError(
                f"{argument} holds {name!r}, which needs settings ({error}): call builtin_reward({name!r}, ...) of "
                "rlhf_ppo.rewards.builtin in a file of your own, as reward = ..., and give file.py:reward"
            ) from error
    parts = urllib.parse.urlsplit(name)
    if parts.scheme in ("http", "https") and parts.hostname:
        return RewardEndpoint(name)
    others = f", or one of {[*BUILTIN_REWARDS, *TRL_REWARDS]} or 'http://host/path'"
    is_reward = argument == "reward_funcs"
    return load_object(name, argument, f"{others}; pass a reward model as reward_model" if is_reward else others)


def resolve_tools(specs: str | Sequence[str] | None) -> list[Callable[..., Any]] | None:
    """Return the tools that a command names, each a text for `load_object`; one may stand without a list."""
    return None if specs is None else [load_object(spec, "tools") for spec in _listed(specs)]


def _listed(specs: str | Sequence[str]) -> Sequence[str]:
    return [specs] if isinstance(specs, str) else specs


def resolve_environments(specs: str | Sequence[str] | None) -> Any:
    """Return the environments that a command names: a factory, or several by name.

    Args:
        specs: One 'path/file.py:Class' (or function that makes an environment), or several 'name=path/file.py:Class';
            one may stand without a list.

    Raises:
        ValueError: One of several has no name.
    """
    if not specs:
        return None
    specs = _listed(specs)
    if len(specs) == 1 and "=" not in specs[0]:
        return load_object(specs[0], "environment")
    named = [spec.partition("=") for spec in specs]
    if without := [spec for spec, equals, _ in named if not equals]:
        raise ValueError(
            f"environment holds {without[0]!r} without a name: write name={without[0]} for each of several"
        )
    return {name: load_object(place, "environment") for name, _, place in named}


def load_object(spec: str, argument: str, others: str = "") -> Any:
    """Return the object that a text names.

    Args:
        spec: `"path/file.py:name"`, the path relative to the working directory, or `"package.module.name"`. Modules
            are also searched in the working directory, and imports of a file beside it.
        argument: Name of the argument, for the error.
        others: Other forms that the argument takes, for the error.

    Raises:
        ValueError: The text has neither form, its file or module cannot be imported, or it has no such function.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        path, _, name = spec.rpartition(".")
    is_file, cause = path.endswith(".py"), None
    if not is_file and (name == "py" or not path or not all(part.isidentifier() for part in [*path.split("."), name])):
        problem = f": write 'path/file.py:name' or 'package.module.name'{others}"
    else:
        try:
            module = _load_file(Path(path).expanduser().resolve()) if is_file else _import(path)
        except Exception as error:
            cause, problem = error, f", but {path} cannot be imported: {_shown(error, path)}"
        else:
            loaded = getattr(module, name, None)
            if callable(loaded) or hasattr(loaded, "judge"):  # an object of TRL's judges is not callable
                return loaded
            has = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            problem = f", but {path} has no function or class {name!r}{suggestion(name, has) or f': it has {has}'}"
    raise ValueError(f"{argument} holds {redacted(spec)!r}{problem}") from cause


def _shown(error: Exception, path: str) -> str:
    """Return an error of an import in one line, with the line of the file in which it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(path)]
    where = f" in line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {error}"


def _import(name: str) -> ModuleType:
    _look_into(os.getcwd())
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    """Run a Python file as a module, once per process."""
    # A unique name: two files may have the same name, and neither may hide an installed package.
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
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _look_into(directory: str) -> None:
    """Search modules in a directory too, after all other directories, so that it hides none."""
    if directory not in sys.path:
        sys.path.append(directory)
