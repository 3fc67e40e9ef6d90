"""Reward functions that are named by a text instead of passed as an object."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def resolve_reward(
    spec: Callable[..., Any] | str, named: Mapping[str, Callable[..., Any]] | None = None
) -> Callable[..., Any]:
    """Return the reward function that is meant.

    Args:
        spec: A callable, which comes back as it is; `"package.module.function"`; `"path/file.py:function"`, the path
            relative to the working directory; or a key of `named`.
        named: Reward functions that a text without dot and colon may name.

    Returns:
        Something with the signature of `GRPOTrainer`'s reward functions.

    Raises:
        TypeError: `spec` is neither callable nor a text, or what it names cannot be called.
        ValueError: There is no such file, module, function or name.
    """
    if not isinstance(spec, str):
        if not callable(spec):
            raise TypeError(f"reward_funcs holds {spec!r}, which cannot be called; pass a Python function or its name")
        return spec
    path, colon, name = spec.rpartition(":")
    if colon and path.endswith(".py"):
        return _function(_load_file(spec, Path(path).expanduser()), name, spec)
    module, dot, name = spec.rpartition(".")
    if dot and not colon and all(part.isidentifier() for part in spec.split(".")):
        return _function(_import_module(spec, module), name, spec)
    if named and spec in named:
        return named[spec]
    raise ValueError(
        f"reward_funcs holds {spec!r}, which names no reward function; write 'package.module.function' or "
        f"'path/file.py:function'{f', or one of {sorted(named)}' if named else ''}"
    )


def _load_file(spec: str, path: Path) -> ModuleType:
    """Run a Python file as a module, once in a process."""
    if not path.is_file():
        raise ValueError(f"reward_funcs holds {spec!r}, but there is no file {str(path)!r} in {Path.cwd()}")
    path = path.resolve()
    # A name of its own: two files may share theirs, and neither may hide an installed package.
    name = f"reward_file_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    import_spec = importlib.util.spec_from_file_location(name, path)
    assert import_spec is not None and import_spec.loader is not None  # a file that ends in .py has a loader
    module = importlib.util.module_from_spec(import_spec)
    sys.modules[name] = module  # before it runs, as `import` does: dataclasses and pickle look it up
    try:
        import_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        error.add_note(f"raised while loading {spec!r} of reward_funcs")
        raise
    return module


def _import_module(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise ValueError(
                f"reward_funcs holds {spec!r}, but Python finds no module {missing!r}; check the spelling, put its "
                "folder on PYTHONPATH, or write 'path/file.py:function'"
            ) from error
        error.add_note(f"raised while loading {spec!r} of reward_funcs")
        raise


def _function(module: ModuleType, name: str, spec: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"reward_funcs holds {spec!r}, but {module.__file__} has no {name!r}; it has {sorted(own)}")
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"reward_funcs holds {spec!r}, which is {function!r:.60} and cannot be called")
    return function
