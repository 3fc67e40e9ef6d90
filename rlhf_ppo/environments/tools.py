"""Tools and environments where they run: discovery, calls, and answers as plain data.

`text_environment` adapts objects of Gymnasium, old Gym, RAGEN, SkyRL-gym, OpenRLHF and OpenEnv. It recognizes them by
their methods and by what these return, and imports none of the packages.
`Host` holds one environment, or the standalone tools. It runs in a thread of this process or in a process of its own
(`isolation.py`); its replies are texts, numbers, lists and dicts, which cross a pipe as JSON. The file imports neither
torch nor transformers at its top: every worker process loads it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
import traceback
import types
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeGuard

# ---- Environments that take the policy's whole message as their action ----

Render = Callable[[Any, Any], str]
Actions = Mapping[str, Any] | Callable[[str], Any]


class AdapterError(TypeError):
    """An adapted environment returned something that an adapter cannot take; it ends the run."""


def text_environment(
    factory: Callable[..., Any],
    render: Render | None = None,
    actions: Actions | None = None,
    invalid: str = "Invalid action.",
) -> Callable[[], TextEnvironment]:
    """Return an `environment_factory` for environments that take the policy's whole message as their action.

    The factory makes objects of one of these kinds:

    - Gymnasium: `reset(seed=) -> (observation, info)`, `step -> (observation, reward, terminated, truncated, info)`.
    - old Gym and RAGEN: `reset(...) -> observation`, `step -> (observation, reward, done, info)`.
    - SkyRL-gym: `init(prompt) -> (conversation, info)`, `step -> {observations, reward, done, metadata}`. A factory
      with a parameter `extras` makes a new object for each episode, and gets the row with its seed.
    - OpenRLHF: async `reset({observation, label})`, `step(...) -> {rewards, environment_feedback, done, ...}`.
    - OpenEnv clients, sync or async: `reset()` and `step(action)` return objects with `observation`, `reward`, `done`.

    Args:
        factory: Makes an environment.
        render: `render(observation, environment) -> text`. None takes observations that are texts or numbers.
        actions: Actions by text, such as `{"left": 0}`, or a function of the text that returns None if there is no
            such action. None passes the text.
        invalid: Observation after a text that is not an action; the environment does not step. `{observation}` in it
            stands for the observation before.
    """
    return functools.partial(TextEnvironment, factory, render, actions, invalid)


class TextEnvironment:
    """An environment that takes whole messages; made by `text_environment`.

    Attributes:
        inner: The adapted environment.
        turn_rewards: Reward of each step.
        done: Whether the episode ended.
        truncated: Whether the environment cut it.
        is_invalid: Whether the last message was no action.
        observation: The last observation's text.
        info: The last step's `info`, `metadata` or `extra_logs`.
        score: OpenRLHF's `scores` of the last step, which are not paid.
    """

    adapts_text = True

    def __init__(
        self, factory: Callable[..., Any], render: Render | None, actions: Actions | None, invalid: str
    ) -> None:
        self.factory, self.render, self.actions, self.invalid = factory, render, actions, invalid
        self.is_made_for_row = "extras" in _parameters(factory)
        self.inner: Any = None if self.is_made_for_row else factory()
        unwrapped = getattr(self.inner, "unwrapped", self.inner)
        self.adapted_class = factory if self.inner is None and isinstance(factory, type) else type(unwrapped)
        if self.inner is not None and not callable(getattr(self.inner, "step", None)):
            raise AdapterError(
                f"text_environment takes objects with `step` and `reset` or `init`, not {type(self.inner).__name__}"
            )
        self.turn_rewards: list[float | None] = []
        self.done = self.truncated = self.is_invalid = False
        self.info: Any = {}
        self.score: Any = None
        self.observation = ""

    def reset(self, seed: int | None = None, **row: Any) -> Any:
        """Begin an episode; return the first observation's text, or a coroutine that returns it."""
        self.turn_rewards, self.info, self.score = [], {}, None
        self.done = self.truncated = self.is_invalid = False
        self.prompt, self.label = row.get("prompt", [{"role": "user", "content": ""}]), row.get("label")
        if self.is_made_for_row:
            if callable(close := getattr(self.inner, "close", None)):
                close()
            self.inner = self.factory(extras=row if seed is None else row | {"seed": seed})
        return _then(self._begin(seed), self._first_text)

    def _begin(self, seed: int | None) -> Any:
        inner = self.inner
        if callable(init := getattr(inner, "init", None)):
            return init(self.prompt)
        if not callable(getattr(inner, "reset", None)):
            raise AdapterError(f"{type(inner).__name__} has neither `reset` nor `init`, which begin an episode")
        if self._takes_states():
            return inner.reset({"observation": _text_of_prompt(self.prompt), "label": self.label})
        parameters = _parameters(inner.reset)
        takes_seed = "seed" in parameters or any(kind is inspect.Parameter.VAR_KEYWORD for kind in parameters.values())
        return inner.reset(seed=seed) if takes_seed and seed is not None else inner.reset()

    def _takes_states(self) -> bool:
        """Return whether the environment is OpenRLHF's: `reset` takes a dict by position."""
        parameters = [*_parameters(self.inner.reset).items()]
        return any(base.__name__ == "AgentInstanceBase" for base in type(self.inner).__mro__) or (
            bool(parameters) and parameters[0][0] == "states"
        )

    def _first_text(self, returned: Any) -> str | None:
        if callable(getattr(self.inner, "init", None)):
            conversation, self.info = returned
            return self._remembered(_added(self.prompt, conversation, type(self.inner).__name__))
        if self._takes_states():
            self.history, given = returned["observation"], _text_of_prompt(self.prompt)
            if not self.history.startswith(given):
                raise AdapterError("reset of the OpenRLHF agent changed the prompt; it can only append to it")
            return self._remembered(self.history[len(given) :] or None)
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
            returned, self.info = returned
        return self._text(returned.observation if _is_step_result(returned) else returned)

    def _remembered(self, text: str | None) -> str | None:
        self.observation = text or ""
        return text

    def respond(self, text: str) -> Any:
        """Pass a message to the environment; return the observation's text, or a coroutine that returns it."""
        action = text if self.actions is None else self._action(text.strip())
        self.is_invalid = action is None
        if self.is_invalid:
            self.turn_rewards.append(0.0)
            return self.invalid.replace("{observation}", self.observation)
        if not hasattr(self.inner, "init") and self._takes_states():
            action = {"observation_text": self.history, "action_text": text, "label": self.label}
            action["sampling_params"] = None
        return _then(self.inner.step(action), functools.partial(self._stepped, text))

    def _action(self, text: str) -> Any:
        assert self.actions is not None
        return self.actions(text) if callable(self.actions) else self.actions.get(text)

    def _stepped(self, text: str, result: Any) -> str:
        """Store a step's reward and end, whichever package it comes from; return the observation's text."""
        if isinstance(result, tuple) and len(result) == 5:
            observation, reward, self.done, self.truncated, self.info = result
        elif isinstance(result, tuple) and len(result) == 4:
            observation, reward, self.done, self.info = result
            if isinstance(self.info, Mapping) and self.info.get("TimeLimit.truncated"):
                self.done, self.truncated = False, True
        elif isinstance(result, Mapping) and "observations" in result:
            observation, reward = self._skyrl(text, result)
        elif isinstance(result, Mapping) and "environment_feedback" in result:
            observation, reward = self._openrlhf(text, result)
        elif _is_step_result(result):
            observation, reward, self.done = result.observation, result.reward, result.done
            self.info = getattr(result, "metadata", None) or {}
        else:
            raise AdapterError(
                f"step of {type(self.inner).__name__} returned {type(result).__name__}, which is not a step of "
                "Gymnasium, Gym, SkyRL-gym, OpenRLHF or OpenEnv"
            )
        self.done, self.truncated = bool(self.done), bool(self.truncated)
        self.turn_rewards.append(None if reward is None else float(reward))
        return self._text(observation)

    def _skyrl(self, text: str, result: Mapping[str, Any]) -> tuple[str, Any]:
        changed = result.get("postprocessed_action")
        if changed is not None and changed != text:
            raise AdapterError(
                "the SkyRL-gym environment returned `postprocessed_action`: the policy's tokens cannot change after "
                "they were sampled; use stop_strings"
            )
        self.done, self.info = result["done"], result.get("metadata") or {}
        return "\n".join(_text_of_prompt([message]) for message in result["observations"]), result["reward"]

    def _openrlhf(self, text: str, result: Mapping[str, Any]) -> tuple[str, Any]:
        if result.get("sampling_params") is not None:
            raise AdapterError("the OpenRLHF agent returned `sampling_params`, which cannot change within an episode")
        feedback = result["environment_feedback"]
        self.history += text + feedback
        self.done, self.info, self.score = result["done"], result.get("extra_logs") or {}, result.get("scores")
        return feedback, result["rewards"]

    def _text(self, observation: Any) -> str:
        if self.render is not None:
            self.observation = self.render(observation, self.inner)
            return self.observation
        if isinstance(observation, str | int | float):
            self.observation = str(observation)
            return self.observation
        raise AdapterError(
            f"{type(self.inner).__name__} observes {type(observation).__name__}, which is not a text; pass "
            "render=function(observation, environment) to text_environment"
        )


def _then(result: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to a result; of a coroutine, return a coroutine of the function's result."""
    if not inspect.isawaitable(result):
        return function(result)

    async def later() -> Any:
        return function(await result)

    return later()


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the kinds of a function's parameters by name; empty if Python cannot read them."""
    try:
        return {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}
    except (TypeError, ValueError):
        return {}


def _is_step_result(value: Any) -> TypeGuard[Any]:
    return all(hasattr(value, name) for name in ("observation", "reward", "done"))


def _text_of_prompt(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1]["content"]
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)


def _added(prompt: Any, conversation: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """Return the text that `init` appended to the prompt."""
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    last = _text_of_prompt(given)
    begins_alike = list(conversation[: len(given) - 1]) == given[:-1] and len(conversation) >= len(given)
    text = "".join(_text_of_prompt([message]) for message in conversation[len(given) - 1 :])
    if not begins_alike or not text.startswith(last):
        raise AdapterError(f"init of {name} changed the prompt; it can only append to it")
    return text[len(last) :] or None


# ---- Tools and environments where they run ----

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
    try:
        tools = [] if is_text else [describe_tool(name, _bound(cls, name)) for name in tool_names(cls)]
    except TypeError as error:
        if "step" not in functions:
            raise
        raise TypeError(
            f"{error}; wrap an environment whose `step` takes the policy's whole message, such as Gymnasium's, in "
            "text_environment"
        ) from error
    return {
        "tools": tools,
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
