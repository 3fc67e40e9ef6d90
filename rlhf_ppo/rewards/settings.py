"""Settings of a reward that is given as text, as in a call: `keyword(keywords=["yes", "no"])`."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from rlhf_ppo.config.redaction import shown

_CALL = re.compile(r"(?P<place>[^()]+)\((?P<settings>.*)\)\s*", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None}


def split_settings(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a reward's text into what it names and its settings.

    Args:
        spec: A text such as `length_penalty(max_words=20, penalty=0.1)`. Values are numbers, texts in quotes (as
            in Python: r"..." keeps backslashes) or of one word, lists, dicts, and None, True, False, also as JSON
            writes them. Nothing is executed.

    Returns:
        The name, path or address, and the settings; an address may itself hold parentheses.

    Raises:
        ValueError: What stands in the parentheses are no settings.
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
            f"reward_funcs holds {shown(spec)!r}, whose settings cannot be read; write them as name=value, such as "
            """'keyword(keywords=["yes", "no"])' or 'length_penalty(max_words=20)'"""
        ) from error
    return found["place"].strip(), settings


def make_with(make: Callable[..., Any], given: tuple[Any, ...], settings: dict[str, Any], place: str) -> Any:
    """Call `make` with the settings.

    Args:
        make: What makes the reward: a class, or `functools.partial` for a function.
        given: Arguments that come first; the function, for `functools.partial`.
        settings: The settings.
        place: What was given as text, for the error message.

    Raises:
        ValueError: There is no such setting.
    """
    function = given[0] if make is functools.partial else make
    taken = () if make is functools.partial else given
    try:
        inspect.signature(function).bind_partial(*taken, **settings)
    except TypeError as error:
        raise ValueError(
            f"reward_funcs holds {shown(place)!r} with the settings {shown(settings)}, but {error}; it takes "
            f"{[name for name in inspect.signature(function).parameters if name != 'url']}"
        ) from error
    return make(*given, **settings)


class _Words(ast.NodeTransformer):
    """Reads a bare word as a text, and JSON's constants."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_WORDS.get(node.id, node.id))
