"""Environments of AITraining's `rl_env_type` and `rl_env_config`.

An environment of one turn scores responses and determines their end: `make_environment` returns reward functions for
`PPOTrainer` and settings for `PPOConfig`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_ppo.config.checks import parse_object, parse_weights, suggestion
from rlhf_ppo.rewards.builtin import BUILTIN_REWARDS, TRL_REWARDS, builtin_reward
from rlhf_ppo.rewards.functions import function_name
from rlhf_ppo.rewards.judges import FeedbackJudge, PreferenceReward, RewardModelJudge
from rlhf_ppo.rewards.resolve import RewardSpec, resolve_reward
from rlhf_ppo.terminal import redacted

_STOPS = ("stop_strings", "stop_sequences")
JUDGES = ("judge", "preference_model", "human_feedback_fn")
"""Keys of a preference environment's judge; without one the reward model is the judge."""
KEYS: dict[str, tuple[str, ...]] = {
    "text_generation": (*_STOPS, "reward_fn"),
    "multi_objective": (*_STOPS, "reward_fn", "reward_components", "reward_weights"),
    "preference_comparison": (*_STOPS, "reward_fn", *JUDGES, "opponent", "column"),
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
            `reward_components`, a dict of rewards by name, or else of the rewards that `reward_weights` names, and of
            `reward_fn`.
            "preference_comparison": a `judge`, `preference_model` or `human_feedback_fn` compares each response with
            an `opponent` ("reference", "self", or "dataset" with the `column` to take), see `PreferenceReward`.
        config: A dict, or its JSON text, with the keys of `KEYS[env_type]`. A reward is given as in
            `resolve_reward`, or as a dict with its `type`, `weight` (1 if left out) and other settings.
        reward_weights: Weights by name, or their JSON text; may also be in the config. `reward_model` is the weight of
            the reward model.
        reward_fn: An additional reward, of weight 1 unless the weights name it; may also be in the config.

    Raises:
        ValueError: The type, a key or a value is unknown or missing, or is given twice.
    """
    if env_type not in KEYS:
        raise ValueError(f"env_type={env_type!r} must be one of {list(KEYS)}{suggestion(env_type, KEYS)}")
    entries = json_object("config", config)
    _check_entries(entries, env_type, {"reward_fn": reward_fn, "reward_weights": reward_weights})
    fn = entries.get("reward_fn") if reward_fn is None else reward_fn
    further = [] if fn is None else [_reward("reward_fn", fn)]
    default_weights = {function_name(reward): 1.0 for reward in further}
    weights = json_object("reward_weights", reward_weights or entries.get("reward_weights"))
    rewards: list[Callable[..., Any]] = []
    if env_type == "multi_objective":
        named = {name: {} for name in weights if name not in (REWARD_MODEL, *default_weights)}
        components = entries.get("reward_components") or named
        if not isinstance(components, Mapping) or not (components or further):
            raise ValueError(
                f"multi_objective: reward_components={redacted(components)!r} must be a dict of rewards, such as "
                f"""{{"correctness": {{"weight": 1.0}}}}; or give reward_weights by the names of rewards: {_NAMES}"""
            )
        rewards = [_component(name, spec) for name, spec in components.items()]
        components_weights = {
            name: spec["weight"] for name, spec in components.items() if isinstance(spec, Mapping) and "weight" in spec
        }
        weights = components_weights | weights
        default_weights |= dict.fromkeys(components, 1.0)
    if env_type == "preference_comparison":
        rewards = [_preference(entries)]
    rewards += further
    weights = default_weights | weights if weights else {}
    stops = entries.get("stop_strings") or entries.get("stop_sequences")  # AITraining's default is an empty list
    settings = {"stop_strings": [stops] if isinstance(stops, str) else stops} if stops else {}
    return Environment(rewards, parse_weights(weights) if weights else None, settings)


def _check_entries(entries: Mapping[str, Any], env_type: str, arguments: Mapping[str, object]) -> None:
    """Raise a `ValueError` if a config has an unknown key, or one that is also an argument."""
    keys = KEYS[env_type]
    for key, value in entries.items():
        if key not in keys:
            raise ValueError(
                f"config has {key}={redacted(value, key)!r}, which {env_type} does not know; its keys are "
                f"{list(keys)}{suggestion(key, keys)}"
            )
        if value is not None and arguments.get(key) is not None:
            raise ValueError(
                f"{key} is given both in the environment's config and apart from it: leave one of them out"
            )


def _component(name: str, spec: RewardSpec | Mapping[str, Any]) -> Callable[..., Any]:
    if isinstance(spec, Mapping):
        spec = {"type": name} | {key: value for key, value in spec.items() if key != "weight"}
    reward = _reward(f"reward_components[{name!r}]", spec)
    if function_name(reward) == name:
        return reward
    named = functools.partial(reward)
    named.__name__ = name  # pyright: ignore[reportAttributeAccessIssue]  (the name of its metrics and weight)
    return named


def _preference(config: Mapping[str, Any]) -> PreferenceReward:
    named = [name for name in JUDGES if config.get(name) is not None]
    if len(named) != 1:
        raise ValueError(f"preference_comparison: config has {named or 'no judge'}; give one of {list(JUDGES)}")
    name, judge = named[0], config[named[0]]
    if name == "preference_model" and isinstance(judge, str):
        judge = RewardModelJudge(judge)
    elif not hasattr(judge, "judge"):
        judge = _reward(name, judge)
        judge = FeedbackJudge(judge) if name == "human_feedback_fn" else judge
    opponent = config.get("opponent", "reference")
    return PreferenceReward(judge, opponent, **({"column": config["column"]} if "column" in config else {}))


def _reward(key: str, spec: RewardSpec | Mapping[str, Any]) -> Callable[..., Any]:
    """Return a reward; errors name its key in the config."""
    try:
        if not isinstance(spec, Mapping):
            return resolve_reward(spec)
        settings = dict(spec)
        name = str(settings.pop("type", None))
        if name not in _NAMES:
            return resolve_reward(name)
        if isinstance(settings.get("function"), str):
            settings["function"] = resolve_reward(settings["function"])
        return builtin_reward(name, **settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config: {key}={redacted(spec)!r}: {error}") from error


def json_object(name: str, value: Mapping[str, object] | str | None) -> dict[str, Any]:
    """Return a dict that may be given as JSON text; an empty one for None.

    Args:
        name: Name of the argument, for error messages.
        value: The dict or its text.

    Raises:
        TypeError: It is neither.
    """
    return parse_object(name, value, '{"length": 1}') or {}
