"""Tools and environments where they run: discovery, calls, and answers as plain data.

`Host` holds one environment, or the standalone tools. It runs in a thread of this process or in a process of its own
(`isolation.py`); its replies are texts, numbers, lists and dicts, which cross a pipe as JSON. The file imports neither
torch nor transformers at its top: every worker process loads it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import traceback
import types
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlhf_ppo.environments.text import AdapterError

Reply = dict[str, Any]
Answered = dict[str, Any]
"""One answered call: `content`, `failed`, `timed_out`, `seconds`, and `early` if the call failed before it ran."""

NO_TOOLS = ("reset", "get_reward")
"""Public methods of an environment that the policy cannot call."""

MARK = "...(truncated)..."
"""Stands where the middle of a long answer was removed."""

_EXACT = (bool, int, float, type(None))


class Host:
    """One environment, or the standalone tools, in the thread or process in which they run.

    Args:
        factory: Makes the environment; None for standalone tools.
        tools: The standalone tools.
        longest: Characters that an answer keeps; None keeps all.
        run: Runs a coroutine and returns its result.
    """

    def __init__(
        self,
        factory: Callable[[], Any] | None,
        tools: Sequence[Callable[..., Any]],
        longest: int | None,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        self.factory, self.longest, self.run = factory, longest, run
        self.environment: Any = None
        self.functions: dict[str, Callable[..., Any]] = {tool.__name__: tool for tool in tools}
        self._paid = 0

    def perform(self, request: str, *arguments: Any) -> Reply:
        """Carry out a request; whatever it raises becomes part of the reply.

        Args:
            request: Name of one of this class's methods below.
            *arguments: Its arguments.

        Returns:
            `value` or `raised` (text) with `trace`, and `report` of the environment afterwards.
        """
        try:
            reply: Reply = {"value": getattr(self, request)(*arguments)}
            if self.environment is not None and request != "describe":
                reply["report"] = self.report()
        except BaseException as error:
            return {"raised": named_text_of(error), "trace": _trace(error)}
        return reply

    def make(self) -> Any:
        """Make the environment if there is none, and find its tools."""
        if self.environment is None and self.factory is not None:
            environment = self.factory()
            if not is_text_environment(type(environment)):
                self.functions = {name: getattr(environment, name) for name in tool_names(type(environment))}
            self.environment = environment
        return self.environment

    def describe(self) -> Reply:
        """Make the environment and name its class, and the class that a text environment adapts."""
        cls = type(self.make())
        inner = getattr(self.environment, "adapted_class", cls)
        return {
            "module": cls.__module__,
            "qualname": cls.__qualname__,
            "class_name": inner.__name__,
            "class_key": f"{inner.__module__}.{inner.__qualname__}",
        }

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin an episode; return the observation: a text, content blocks or None.

        Raises:
            TypeError: `reset` returned something else.
            ValueError: It returned an image.
        """
        observation = self._finished(self.make().reset(**row))
        self._paid = len(self._turn_rewards())
        if observation is None:
            return None
        if not isinstance(observation, str | list):
            raise TypeError(f"reset returned {type(observation).__name__}; return a text or None")
        return _without_images(plain(observation), "reset")

    def call(self, name: str, arguments: Any) -> Answered:
        """Call one sync tool."""
        return self._answered(time.perf_counter(), lambda: self.functions[name](**arguments))

    def call_async(self, calls: Sequence[tuple[str, Any]], seconds: float | None) -> list[Answered]:
        """Call async tools side by side; those that do not return in time are cancelled."""
        return self.run(self._call_async(calls, seconds))

    def act(self, text: str) -> Answered:
        """Pass a whole message to a text environment; the answer is its observation.

        Raises:
            AdapterError: The environment does something that the adapter cannot take.
        """
        start = time.perf_counter()
        reply = self._answered(start, lambda: self._finished(self.environment.respond(text)), AdapterError)
        return reply | {"failed": reply["failed"] or self.environment.is_invalid}

    def read(self) -> None:
        """Do nothing: the reply holds the report."""

    def reward(self) -> float | None:
        """Return the episode's reward.

        Raises:
            ValueError: It is neither None nor a finite number.
        """
        value = self._finished(self.environment.get_reward())
        return None if value is None else _number("get_reward returned", value)

    def attribute(self, name: str) -> Reply:
        """Return a public attribute as plain data; of a method, only whether it is async."""
        value = getattr(self.environment, name)
        if callable(value):
            return {"is_async": inspect.iscoroutinefunction(value)}
        return {"data": plain(value, name)}

    def method(self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Call a public method for a reward function; return its result as plain data."""
        return plain(self._finished(getattr(self.environment, name)(*arguments, **keywords)), name)

    def report(self) -> Reply:
        """Return the rewards of turns that were added since the last report, and how the episode stands.

        Raises:
            TypeError: `turn_rewards` is not a list, or `done` or `truncated` no bool.
            ValueError: A reward is not a finite number, or `turn_rewards` became shorter within an episode.
        """
        listed = self._turn_rewards()
        if len(listed) < self._paid:
            raise ValueError("turn_rewards became shorter within an episode; only append to it, and clear it in reset")
        new, self._paid = listed[self._paid :], len(listed)
        rewards = [0.0 if value is None else _number("turn_rewards holds", value) for value in new]
        flags = {name: _flag(name, self._attribute(name)) for name in ("done", "truncated")}
        return {"rewards": rewards, **flags}

    def _turn_rewards(self) -> list[Any]:
        value = self._attribute("turn_rewards")
        if value is None:
            return []
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise TypeError(f"turn_rewards is {type(value).__name__}; make it a list of numbers")
        return list(value)

    def _attribute(self, name: str) -> Any:
        if name in self.functions:  # a tool of this name
            return None
        return getattr(self.environment, name, None)

    def _finished(self, returned: Any) -> Any:
        return self.run(_settled(returned)).result() if inspect.iscoroutine(returned) else returned

    def _answered(self, start: float, call: Callable[[], Any], raised: type[Exception] | tuple[()] = ()) -> Answered:
        try:
            content, failed = content_of(call(), self.longest), False
        except raised:
            raise
        except BaseException as error:
            content, failed = error_answer(text_of(error), self.longest), True
        return answered(content, time.perf_counter() - start, failed=failed)

    async def _call_async(self, calls: Sequence[tuple[str, Any]], seconds: float | None) -> list[Answered]:
        answers: dict[int, Answered] = {}
        tasks: dict[asyncio.Task[Answered], int] = {}
        start = time.perf_counter()
        for number, (name, arguments) in enumerate(calls):
            try:
                coroutine = self.functions[name](**arguments)
            except BaseException as error:
                content = error_answer(text_of(error), self.longest)
                answers[number] = answered(content, 0.0, failed=True) | {"early": True}
            else:
                tasks[asyncio.ensure_future(self._awaited(coroutine))] = number
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task, number in tasks.items():
            if task.done():
                answers[number] = task.result()
            else:
                task.cancel()
                text = timeout_text(calls[number][0], seconds)
                answers[number] = answered(text, time.perf_counter() - start, failed=True, timed_out=True)
        return [answers[number] for number in range(len(calls))]

    async def _awaited(self, coroutine: Any) -> Answered:
        start = time.perf_counter()
        return self._answered(start, (await _settled(coroutine)).result)


async def _settled(coroutine: Any) -> Future[Any]:
    """Await a coroutine; return what it returned or raised: `SystemExit` would end the event loop."""
    outcome: Future[Any] = Future()
    try:
        outcome.set_result(await coroutine)
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        outcome.set_exception(error)
    return outcome


# Discovery


def tool_names(cls: type[Any]) -> list[str]:
    """Return the names of the tools of an environment's class: its public functions but `reset` and `get_reward`.

    Inherited and static ones count. Attributes and properties are never evaluated.
    """
    return [name for name in _functions(cls) if name not in NO_TOOLS and not name.startswith("_")]


def _functions(cls: type[Any]) -> dict[str, Callable[..., Any]]:
    return dict(inspect.getmembers(cls, inspect.isfunction))


def is_text_environment(cls: type[Any]) -> bool:
    """Return whether a class was made by `text_environment`, which takes whole messages in place of calls."""
    return getattr(cls, "adapts_text", False) is True


def describe_class(cls: type[Any]) -> Reply:
    """Return the tools of an environment's class and its optional parts.

    Raises:
        TypeError: The class has no `reset`, or transformers cannot describe a tool.
    """
    functions, is_text = _functions(cls), is_text_environment(cls)
    if "reset" not in functions:
        raise TypeError(
            f"{cls.__name__} has no method `reset`, which begins an episode; define "
            "`def reset(self, **row) -> str | None`"
        )
    declared = {name for base in cls.__mro__ for name in (*vars(base), *inspect.get_annotations(base))}
    named = {name for function in functions.values() for name in inspect.unwrap(function).__code__.co_names}
    return {
        "tools": [] if is_text else [describe_tool(name, _bound(cls, name)) for name in tool_names(cls)],
        "has_reward": "get_reward" in functions,
        "has_turn_rewards": is_text or "turn_rewards" in declared | named,
        "is_text": is_text,
        "reset": inspect.signature(_bound(cls, "reset")),
    }


def _bound(cls: type[Any], name: str) -> Callable[..., Any]:
    """Return a method without its first parameter, as an instance has it."""
    function = _functions(cls)[name]
    is_static = isinstance(inspect.getattr_static(cls, name), staticmethod)
    return function if is_static else types.MethodType(function, cls)


def describe_tool(name: str, function: Callable[..., Any]) -> Reply:
    """Return a tool's name, JSON schema and whether it is async.

    Raises:
        TypeError: transformers cannot describe it.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:
        raise TypeError(
            f"the tool {name!r} cannot be described for the chat template: {text_of(error)}; give each parameter a "
            "type hint and an entry under `Args:` in a Google docstring, or begin the name of a helper with `_`"
        ) from error
    return {"name": name, "schema": plain(schema), "is_async": inspect.iscoroutinefunction(function)}


# Plain data


def answered(content: Any, seconds: float, *, failed: bool = False, timed_out: bool = False) -> Answered:
    """Return an answered call."""
    return {"content": content, "failed": failed, "timed_out": timed_out, "seconds": seconds}


def content_of(result: Any, longest: int | None) -> Any:
    """Return the content of a tool's answer: a list stays a list, everything else becomes a text.

    Raises:
        ValueError: The result holds an image.
    """
    if isinstance(result, list):
        return [_shortened_block(block, longest) for block in _without_images(plain(result), "the tool")]
    return shortened(clean(str(result)), longest)


def _without_images(content: Any, source: str) -> Any:
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    if any(str(block.get("type")).startswith("image") for block in blocks):
        raise ValueError(f"{source} returned an image, which the policy cannot read; return text")
    return content


def error_answer(text: str, longest: int | None = None) -> str:
    """Return the text of a failed call, in TRL's form."""
    return shortened(str({"error": text}), longest)


def timeout_text(name: str, seconds: float | None) -> str:
    """Return the answer of a call that took too long."""
    return error_answer(f"{name} did not return within {seconds} seconds.")


def text_of(error: BaseException) -> str:
    """Return an error's message; of one that would end the program also the type."""
    try:
        text = clean(str(error))
    except BaseException:
        return f"{type(error).__name__}, whose message cannot be read"
    return text if isinstance(error, Exception) else f"{type(error).__name__}: {text}".removesuffix(": ")


def named_text_of(error: BaseException) -> str:
    """Return an error's type and message."""
    return f"{type(error).__name__}: {text_of(error)}" if isinstance(error, Exception) else text_of(error)


def _trace(error: BaseException) -> str:
    try:
        return clean("".join(traceback.format_tb(error.__traceback__)))
    except Exception:
        return ""


def clean(text: str) -> str:
    """Return a text as an exact `str`, with `?` for lone surrogates, which no tokenizer and no file takes."""
    return str.encode(text, "utf-8", "replace").decode()


def shortened(text: str, longest: int | None) -> str:
    """Return a text of at most `longest` characters and a mark where its middle was removed."""
    if longest is None or len(text) <= longest:
        return text
    tail = longest // 2
    return text[: longest - tail] + MARK + text[len(text) - tail :]


def _shortened_block(block: Any, longest: int | None) -> Any:
    if isinstance(block, dict) and isinstance(block.get("text"), str):
        return block | {"text": shortened(block["text"], longest)}
    return shortened(block, longest) if isinstance(block, str) else block


def plain(value: Any, name: str | None = None) -> Any:
    """Return a value as JSON's types; other objects become texts.

    Args:
        value: Any object.
        name: Name of an attribute whose value must be data; None allows any object.

    Raises:
        TypeError: `name` is given and the value holds an object that is not data.
    """
    if isinstance(value, str):
        return clean(value)
    if type(value) in _EXACT:
        return value
    if isinstance(value, Mapping):
        return {clean(str(key)): plain(entry, name) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, name) for entry in value]
    if name is None:
        return clean(str(value))
    if callable(convert := getattr(value, "tolist", None)):  # arrays, tensors and their numbers
        return plain(convert(), name)
    raise TypeError(
        f"{name} holds {type(value).__name__}, which does not cross the pipe from an environment's process; "
        "return numbers, texts, lists and dicts, or use tool_isolation='thread'"
    )


def _number(what: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} {value!r:.60}; use a finite number or None")
    return number


def _flag(name: str, value: Any) -> bool:
    if value is None or callable(value):
        return False
    if type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} is {type(value).__name__}; set it to True or False")
    return bool(value)
