"""Environments of AITraining's `rl_env_type` and `rl_env_config`.

An environment of one turn scores responses and determines their end: `make_environment` returns reward functions for
`PPOTrainer` and settings for `PPOConfig`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_ppo.config.validation import parse_object, parse_weights, suggestion
from rlhf_ppo.rewards.builtin import BUILTIN_REWARDS, TRL_REWARDS, builtin_reward
from rlhf_ppo.rewards.functions import function_name
from rlhf_ppo.rewards.judges import FeedbackJudge, PreferenceReward, RewardModelJudge
from rlhf_ppo.rewards.resolve import resolve_reward
from rlhf_ppo.terminal import redacted

_STOPS = ("stop_strings", "stop_sequences")
_JUDGES = ("judge", "preference_model", "human_feedback_fn")
KEYS: dict[str, tuple[str, ...]] = {
    "text_generation": (*_STOPS, "reward_fn"),
    "multi_objective": (*_STOPS, "reward_fn", "reward_components", "reward_weights"),
    "preference_comparison": (*_STOPS, "reward_fn", *_JUDGES, "opponent", "column"),
}
"""Configuration keys of each environment type; `stop_sequences` is AITraining's name for `stop_strings`."""

_NAMES = [*BUILTIN_REWARDS, *TRL_REWARDS]

REWARD_MODEL = "reward_model"
"""Name of the reward model's weight; it is not a reward function."""


@dataclass(frozen=True)
class Environment:
    """Rewards and settings of an environment.

    Attributes:
        reward_funcs: For `PPOTrainer(reward_funcs=...)`; empty if only a reward model scores.
        reward_weights: For `PPOConfig(reward_weights=...)`, by name; None: all 1.
        settings: Other arguments of `PPOConfig`, such as `stop_strings`.
    """

    reward_funcs: list[Callable[..., Any]]
    reward_weights: dict[str, float] | None
    settings: dict[str, Any]


def make_environment(
    env_type: str,
    config: Mapping[str, Any] | str | None = None,
    *,
    reward_weights: Mapping[str, float] | str | None = None,
    reward_fn: str | Callable[..., Any] | Mapping[str, Any] | None = None,
) -> Environment:
    """Return an environment's rewards and settings.

    Args:
        env_type: "text_generation": responses end at `stop_strings`. "multi_objective": the weighted sum of
            `reward_components`, a dict of rewards by name, or else of the rewards that `reward_weights` names.
            "preference_comparison": a `judge`, `preference_model` or `human_feedback_fn` compares each response with
            an `opponent` ("reference", "self", or "dataset" with the `column` to take), see `PreferenceReward`.
        config: A dict, or its JSON text, with the keys of `KEYS[env_type]`. A reward is given as in
            `resolve_reward`, or as a dict with its `type`, `weight` and other settings.
        reward_weights: Weights by name, or their JSON text; may also be in the config. `reward_model` is the weight of
            the reward model.
        reward_fn: An additional reward; may also be in the config.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: The type, a key or a value is unknown, missing or given twice.
    """
    if env_type not in KEYS:
        raise ValueError(f"env_type={env_type!r} must be one of {list(KEYS)}{suggestion(env_type, KEYS)}")
    given = json_object("config", config)
    if unknown := [key for key in given if key not in KEYS[env_type]]:
        key = unknown[0]
        raise ValueError(
            f"config has {key}={redacted(given[key], key)!r}, which {env_type} does not know; its keys are "
            f"{list(KEYS[env_type])}{suggestion(key, KEYS[env_type])}"
        )
    fn = _given_once("reward_fn", given.get("reward_fn"), reward_fn)
    weights = _given_once(
        "reward_weights",
        _weights("config['reward_weights']", given.get("reward_weights")),
        _weights("reward_weights", reward_weights),
    )
    rewards: list[Callable[..., Any]] = []
    if env_type == "multi_objective":
        rewards, weights = _components(given.get("reward_components"), weights, has_more=fn is not None)
    if env_type == "preference_comparison":
        rewards = [_preference(given)]
    if fn is not None:
        rewards.append(_reward("reward_fn", fn))
    return Environment(rewards, weights, _settings(given))


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    strings = _given_once(" and ".join(_STOPS), *(config.get(name) for name in _STOPS))
    if strings in (None, []):  # an empty list is AITraining's default
        return {}
    texts = [strings] if isinstance(strings, str) else strings
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"config: stop_strings={strings!r} must be a list of texts, such as ['\\n\\n', 'Question:']")
    return {"stop_strings": texts}


def _components(
    components: Any, weights: dict[str, float] | None, has_more: bool
) -> tuple[list[Callable[..., Any]], dict[str, float] | None]:
    """Return the rewards of a multi-objective environment, and their weights by name."""
    if components is None and weights is not None:
        components = {name: {} for name in weights if name != REWARD_MODEL}
    if not isinstance(components, Mapping) or not components:
        raise ValueError(
            f"multi_objective: reward_components={redacted(components)!r} must be a dict of rewards by name, such as "
            """{"correctness": {"weight": 1.0}, "brief": {"type": "length_penalty"}}; or give reward_weights by the """
            f"names of rewards: {_NAMES}"
        )
    own = {name: spec["weight"] for name, spec in components.items() if isinstance(spec, Mapping) and "weight" in spec}
    rewards = [_component(name, spec) for name, spec in components.items()]
    if weights is None and not own:
        return rewards, None
    own = _weights("config['reward_components']", own) or {}
    for name in own.keys() & (weights or {}).keys():
        raise ValueError(
            f"multi_objective: {name!r} has a weight in reward_components and in reward_weights; keep one"
        )
    by_name = own | (weights or {})
    for name in by_name.keys() - components.keys() - {REWARD_MODEL}:
        if not has_more:
            raise ValueError(
                f"multi_objective: reward_weights has {name!r}, which is not a key of reward_components "
                f"{list(components)}{suggestion(name, components)}"
            )
    for name in components.keys() - by_name.keys():
        raise ValueError(f"multi_objective: the component {name!r} has no weight, but others have; give it one, or 0")
    return rewards, by_name


def _component(name: str, spec: Any) -> Callable[..., Any]:
    if isinstance(spec, Mapping):
        spec = {"type": name} | {key: value for key, value in spec.items() if key != "weight"}
    reward = _reward(f"reward_components[{name!r}]", spec)
    if function_name(reward) == name:
        return reward
    named = functools.partial(reward)
    named.__name__ = name  # pyright: ignore[reportAttributeAccessIssue]  (the name of its metrics and weight)
    return named


def _preference(config: Mapping[str, Any]) -> PreferenceReward:
    named = [name for name in _JUDGES if config.get(name) is not None]
    if len(named) != 1:
        raise ValueError(
            f"preference_comparison: config has {named or 'no judge'}; give one of {list(_JUDGES)}: a judge that is "
            "called with prompts and pairs of responses, the path of a reward model, or a function of one prompt and "
            "two responses"
        )
    name, judge = named[0], config[named[0]]
    if name == "preference_model" and isinstance(judge, str):
        judge = RewardModelJudge(judge)
    elif not hasattr(judge, "judge"):
        judge = _reward(name, judge)
        judge = FeedbackJudge(judge) if name == "human_feedback_fn" else judge
    opponent = config.get("opponent", "reference")
    return PreferenceReward(judge, opponent, **{key: config[key] for key in ("column",) if key in config})


def _reward(key: str, spec: Any) -> Callable[..., Any]:
    """Return a reward; errors name its key in the config."""
    try:
        if not isinstance(spec, Mapping):
            return resolve_reward(spec)
        settings = dict(spec)
        name = settings.pop("type", None)
        if name not in _NAMES:
            if not isinstance(name, str) or settings:
                hint = suggestion(str(name), _NAMES)
                raise ValueError(f"type={name!r} must be one of {_NAMES}{hint}; only these take settings")
            return resolve_reward(name)
        if isinstance(settings.get("function"), str):
            settings["function"] = resolve_reward(settings["function"])
        return builtin_reward(name, **settings)
    except (TypeError, ValueError) as error:
        raise type(error)(f"config: {key}={redacted(spec)!r}: {error}") from error


def json_object(name: str, given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return a dict that may be given as JSON text; an empty one for None.

    Args:
        name: Name of the argument, for error messages.
        given: The dict or its text.

    Raises:
        TypeError: It is not an object.
        ValueError: The text is not JSON.
    """
    return parse_object(name, given, '{"length": 1}') or {}


def _weights(name: str, given: Mapping[str, Any] | str | None) -> dict[str, float] | None:
    if given is None:
        return None
    weights = json_object(name, given)
    return parse_weights(name, weights) if weights else None


def _given_once(name: str, first: Any, second: Any) -> Any:
    if first is not None and second is not None and first != second:
        raise ValueError(f"{name} is given twice, as {redacted(first)!r} and as {redacted(second)!r}; leave one out")
    return second if first is None else first
