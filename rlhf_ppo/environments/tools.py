"""Tools and environments as the policy sees them: which functions it can call, and how their results become text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

NO_TOOLS = ("reset", "get_reward")
"""Public methods of an environment that the policy cannot call."""


@dataclass(frozen=True)
class Tool:
    """A tool that the policy can call.

    Attributes:
        name: Its name.
        schema: JSON schema for the chat template.
        is_async: Whether it is a coroutine function.
        function: The function; None for a method of the environment.
    """

    name: str
    schema: dict[str, Any]
    is_async: bool
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Kind:
    """An environment class and its tools; without environments, the tools alone.

    Attributes:
        cls: The class, as found on its first instance; None without an environment.
        tools: Tools by name: standalone ones first.
        has_reward: Whether it defines `get_reward`.
        has_turn_rewards: Whether its code or attributes name `turn_rewards`.
        takes_messages: Whether `respond` takes whole messages in place of calls.
        takes_seed: Whether `reset` names `seed`.
    """

    cls: type[Any] | None = None
    tools: dict[str, Tool] = field(default_factory=dict)
    has_reward: bool = False
    has_turn_rewards: bool = False
    takes_messages: bool = False
    takes_seed: bool = False

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """JSON schemas of the tools; None without tools, because some templates write a heading for an empty list."""
        return [tool.schema for tool in self.tools.values()] or None


def standalone(tools: Sequence[Callable[..., object]]) -> dict[str, Tool]:
    """Return functions as tools by name."""
    return {tool.__name__: _tool(tool.__name__, tool, tool) for tool in tools}


def kind_of_class(cls: type, tools: dict[str, Tool]) -> Kind:
    """Find the tools and the optional parts of an environment's class.

    All public methods but `reset` and `get_reward` are tools, unless the class sets `takes_messages = True`.

    Args:
        cls: The class.
        tools: Standalone tools, which the policy can call too, unless the environment takes whole messages.
    """
    functions = dict(inspect.getmembers(cls, inspect.isfunction))
    takes_messages = getattr(cls, "takes_messages", False)
    methods = [] if takes_messages else [key for key in functions if key not in NO_TOOLS and not key.startswith("_")]
    own = [part for base in cls.__mro__ for part in vars(base).values() if inspect.isfunction(part)]
    written = {word for function in own for word in inspect.unwrap(function).__code__.co_names}
    return Kind(
        cls,
        ({} if takes_messages else tools) | {key: _tool(key, functions[key]) for key in methods},
        has_reward="get_reward" in functions,
        has_turn_rewards="turn_rewards" in written or hasattr(cls, "turn_rewards"),
        takes_messages=takes_messages,
        takes_seed="seed" in inspect.signature(cls.reset).parameters,
    )


def _tool(name: str, described: Callable[..., object], function: Callable[..., object] | None = None) -> Tool:
    from transformers.utils.chat_template_utils import get_json_schema

    return Tool(name, get_json_schema(described), inspect.iscoroutinefunction(described), function)


def content_of(result: object) -> Any:
    """Return the content of a tool's answer: a list of blocks of text stays one, everything else becomes a text.

    Lone surrogates, which no tokenizer takes, become `?`.

    Raises:
        ValueError: The result holds an image.
    """
    if isinstance(result, list):
        if any(isinstance(block, dict) and str(block.get("type")).startswith("image") for block in result):
            raise ValueError("an image was returned, which the policy cannot read; return text")
        if result and all(isinstance(block, dict) and block.get("type") == "text" for block in result):
            return [{**block, "text": _encodable(block.get("text"))} for block in result]
    return _encodable(result)


def _encodable(text: object) -> str:
    return str(text).encode("utf-8", "replace").decode()


def error_answer(text: object) -> str:
    """Return the text of a failed call, in TRL's form."""
    return content_of({"error": str(text)})
