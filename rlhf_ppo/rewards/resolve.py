"""Reward functions given as text: a built-in's name, a dotted name, a function in a file, or an endpoint's address."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_ppo.rewards.builtin import BUILTIN_REWARDS, TRL_REWARDS, builtin_reward
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.terminal import redacted

RewardSpec = Callable[..., Any] | str
"""A reward function, its name, or a `RewardSource`."""


def resolve_rewards(specs: RewardSpec | Sequence[RewardSpec] | None) -> list[Callable[..., Any]]:
    """Return a list of callable reward functions.

    Args:
        specs: None, or one or several arguments of `resolve_reward`.

    Raises:
        TypeError: A value, or the object that it names, cannot be called.
        ValueError: A text does not name a reward function.
    """
    if specs is None:
        return []
    if (not isinstance(specs, Sequence) and not callable(specs)) or isinstance(specs, bytes):
        raise TypeError(f"reward_funcs={specs!r:.60} must be a function, its name, or a list of these")
    return [resolve_reward(spec) for spec in ([specs] if isinstance(specs, str) or callable(specs) else specs)]


def resolve_reward(spec: RewardSpec, argument: str = "reward_funcs") -> Callable[..., Any]:
    """Return the reward function, or the judge, that a user named.

    Args:
        spec: A callable, which is returned as it is; or the name of a built-in or of one of TRL's rewards; or
            `"package.module.function"`; or `"path/file.py:function"`, the path relative to the working directory; or
            `"http://host/path"`, also `https`; each optionally with settings, such as `"keyword(keywords=['yes'])"`,
            see `split_settings`. Modules are also searched in the working directory, and imports of a file beside it.
            An object with TRL's `judge` counts as callable.
        argument: Name of the argument, for errors.

    Raises:
        TypeError: `spec` is neither callable nor a text, or the object that it names cannot be called.
        ValueError: The file, module, function, name or setting does not exist.
    """
    if not isinstance(spec, str):
        if not callable(spec):
            raise TypeError(
                f"{argument} holds {redacted(spec)!r}, which cannot be called; pass a Python function or its name"
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
            f"{argument} holds {redacted(place)!r}, which is not a reward's name; write 'package.module.function', "
            f"'path/file.py:function', 'http://host/path' or one of {[*BUILTIN_REWARDS, *TRL_REWARDS]}; a reward "
            f"model is passed as {'judge_model' if argument == 'judge' else 'reward_model'}"
        )
    return make_with(functools.partial, (function,), settings, place) if settings else function


def check_reward_name(spec: str, argument: str = "reward_funcs") -> None:
    """Raise a `ValueError` for a text that does not name a reward, without running its file or module.

    Args:
        spec: A text for `resolve_reward`.
        argument: Name of the argument, for errors.
    """
    place, _ = split_settings(spec)
    if (path := _path_in(place)) is not None:
        _check_file(place, path, argument)
        _definition(place, path, argument)
    elif not _is_dotted(place):
        resolve_reward(spec, argument)


def signature_in_file(spec: str) -> Callable[..., Any] | None:
    """Return an empty function with the parameters of a function in a file, without running the file.

    Args:
        spec: A text for `resolve_reward`.

    Returns:
        The function; None if the text names no file, or not a plain function in it.
    """
    place, settings = split_settings(spec)
    path = _path_in(place)
    found = None if path is None or not path.is_file() else _definition(place, path, "reward_funcs")
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) or found.decorator_list:
        return None
    given = found.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    for parameter in filter(None, every):
        parameter.annotation = None
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(None) for default in given.kw_defaults]
    found.body, found.returns = [ast.Pass()], None
    names: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(ast.Module([found], [])), "signature", "exec"), names)
    return functools.partial(names[found.name], **settings)


def _definition(spec: str, path: Path, argument: str) -> ast.stmt | None:
    """Find the definition of a name in a file; None if another statement may define it.

    Raises:
        ValueError: The file is not Python, or does not contain the name.
    """
    name = spec.rpartition(":")[2]
    try:
        with tokenize.open(path) as file:  # in the encoding that Python takes
            source = file.read()
        statements = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"{argument} holds {redacted(spec)!r}, but {path} cannot be read as Python: {error}"
        ) from None
    defined = {
        each.name: each
        for each in statements
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    if name not in defined and not re.search(rf"\b{re.escape(name)}\b|import \*|globals\(|__getattr__", source):
        raise ValueError(f"{argument} holds {redacted(spec)!r}, but {path} has no {name!r}; it defines {[*defined]}")
    return defined.get(name)


def resolve_tools(specs: Sequence[str] | None) -> list[Callable[..., Any]] | None:
    """Return the tools that a command names, as 'path/file.py:function' or 'package.module.function'.

    Raises:
        TypeError: An object is not a function.
        ValueError: A file, module or function does not exist.
    """
    return None if specs is None else [_named_object(spec, "tools") for spec in specs]


def resolve_environments(specs: Sequence[str] | None) -> Any:
    """Return the environments that a command names: a factory, or several by name.

    Args:
        specs: One 'path/file.py:Class' (or function that makes an environment), or several 'name=path/file.py:Class'.

    Raises:
        TypeError: An object cannot be called.
        ValueError: A file, module or class does not exist, or one of several has no name.
    """
    if not specs:
        return None
    named = [environment_name(spec) for spec in specs]
    if len(named) == 1 and named[0][0] is None:
        return _named_object(specs[0], "environment", allows_class=True)
    if without := [spec for name, spec in named if name is None]:
        raise ValueError(
            f"environment holds {without[0]!r} without a name: write name={without[0]} for each of several"
        )
    return {str(name): _named_object(spec, "environment", allows_class=True) for name, spec in named}


def environment_name(spec: str) -> tuple[str | None, str]:
    """Split 'name=path/file.py:Class' into name and place; the name is None without '='."""
    name, equals, place = spec.partition("=")
    return (name, place) if equals else (None, spec)


def _named_object(spec: str, argument: str, allows_class: bool = False) -> Callable[..., Any]:
    found = found_function(spec, argument, allows_class)
    if found is None:
        kind = "Class" if allows_class else "function"
        raise ValueError(
            f"{argument} holds {redacted(spec)!r}: write 'path/file.py:{kind}' or 'package.module.{kind}'"
        )
    return found


def found_function(spec: str, argument: str, allows_class: bool = False) -> Callable[..., Any] | None:
    """Return the function that a text names, or None if it does not have the form of such a name.

    Args:
        spec: 'path/file.py:function' or 'package.module.function'.
        argument: Name of the argument, for errors.
        allows_class: Whether a class will do.

    Raises:
        TypeError: The object cannot be called.
        ValueError: The file, module or function does not exist.
    """
    if (path := _path_in(spec)) is not None:
        return _function(_load_file(spec, path, argument), spec.rpartition(":")[2], spec, argument, allows_class)
    if _is_dotted(spec):
        module, _, name = spec.rpartition(".")
        return _function(_import_module(spec, module, argument), name, spec, argument, allows_class)
    return None


def _path_in(spec: str) -> Path | None:
    path, _, _ = spec.rpartition(":")
    return Path(os.path.expanduser(path)) if path.endswith(".py") else None


def _is_dotted(spec: str) -> bool:
    return "." in spec and all(part.isidentifier() for part in spec.split("."))


def _check_file(spec: str, path: Path, argument: str) -> None:
    if not path.is_file():
        raise ValueError(f"{argument} holds {redacted(spec)!r}, but there is no file {str(path)!r} in {Path.cwd()}")


def _load_file(spec: str, path: Path, argument: str) -> ModuleType:
    """Run a Python file as a module, once per process."""
    _check_file(spec, path, argument)
    path = path.resolve()
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
    except BaseException as error:
        del sys.modules[name]
        error.add_note(f"raised while loading {redacted(spec)!r} of {argument}")
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
                f"{argument} holds {redacted(spec)!r}, but Python finds no module {missing!r}; check the spelling, "
                "put its folder on PYTHONPATH, or write 'path/file.py:function'"
            ) from error
        error.add_note(f"raised while loading {redacted(spec)!r} of {argument}")
        raise


def _look_into(directory: str) -> None:
    """Search modules in a directory too, after all other directories, so that it hides none."""
    if directory not in sys.path:
        sys.path.append(directory)


def _function(
    module: ModuleType, name: str, spec: str, argument: str, allows_class: bool = False
) -> Callable[..., Any]:
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(
            f"{argument} holds {redacted(spec)!r}, but {module.__file__} has no {name!r}; it has {sorted(own)}"
        )
    function = getattr(module, name)
    is_judge = callable(getattr(function, "judge", None))
    if (isinstance(function, type) and not allows_class) or not (callable(function) or is_judge):
        problem = "is a class, not" if isinstance(function, type) else "cannot be called; name"
        raise TypeError(
            f"{argument} holds {redacted(spec)!r}, which is {function!r:.60} and {problem} a function or an object "
            "that can be called"
        )
    return function


# Settings, as in `keyword(keywords=["yes", "no"])`

_CALL = re.compile(r"(?P<place>(?:[^'\"]*\.py:)?[^()]+)\((?P<settings>.*)\)\s*", re.DOTALL)
"""A path may hold parentheses."""
_WORDS = {"true": True, "false": False, "null": None}


def split_settings(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a reward's text into its name and its settings.

    Args:
        spec: A text such as `length_penalty(max_words=20, penalty=0.1)`. Values are numbers, texts in quotes (as
            in Python: r"..." keeps backslashes) or of one word, lists, dicts, and None, True, False, or their JSON
            forms. Nothing is executed.

    Returns:
        The name, path or address, and the settings; an address may itself hold parentheses.

    Raises:
        ValueError: The parentheses do not hold settings.
    """
    found = _CALL.fullmatch(spec)
    if found is None:
        return spec, {}
    try:
        call = ast.parse(f"f({found['settings']})", mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("a value without a name")
        settings = {str(keyword.arg): ast.literal_eval(_Words().visit(keyword.value)) for keyword in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        if "://" in found["place"]:
            return spec, {}
        raise ValueError(
            f"reward_funcs holds {redacted(spec)!r}, whose settings cannot be read; write them as name=value, such as "
            """'keyword(keywords=["yes", "no"])' or 'length_penalty(max_words=20)'"""
        ) from error
    return found["place"].strip(), settings


def make_with(make: Callable[..., Any], given: tuple[Any, ...], settings: dict[str, Any], place: str) -> Any:
    """Call `make` with the settings; raise a `ValueError` for a setting that does not exist.

    Args:
        make: A class, or `functools.partial` for a function.
        given: The first arguments; the function, for `functools.partial`.
        settings: The settings.
        place: The reward's text, for the error message.
    """
    function = given[0] if make is functools.partial else make
    taken = () if make is functools.partial else given
    try:
        inspect.signature(function).bind_partial(*taken, **settings)
    except TypeError as error:
        raise ValueError(
            f"reward_funcs holds {redacted(place)!r} with the settings {redacted(settings)}, but {error}; it takes "
            f"{[name for name in inspect.signature(function).parameters if name != 'url']}"
        ) from error
    return make(*given, **settings)


class _Words(ast.NodeTransformer):
    """Reads bare words as texts, or as JSON's constants."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_WORDS.get(node.id, node.id))
