"""Adapters: environments that take the policy's whole message as their action.

`text_environment` adapts objects of Gymnasium, old Gym, RAGEN, SkyRL-gym, OpenRLHF and OpenEnv. It recognizes them by
their methods and by what these return, and imports none of the packages.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

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
            return _added(self.prompt, conversation, type(self.inner).__name__)
        if self._takes_states():
            self.history, given = returned["observation"], _text_of_prompt(self.prompt)
            if not self.history.startswith(given):
                raise AdapterError("reset of the OpenRLHF agent changed the prompt; it can only append to it")
            return self.history[len(given) :] or None
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
            returned, self.info = returned
        return self._text(returned.observation if _is_step_result(returned) else returned)

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
