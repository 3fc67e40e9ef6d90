"""Environments: what each type and key amounts to, and errors that name the key, its value and the fix."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.compat.environments import KEYS, make_environment
from rlhf_ppo.rewards.builtin import Correctness, Default, Formatting, Length
from rlhf_ppo.rewards.functions import RewardFunction, function_name
from rlhf_ppo.rewards.judges import FeedbackJudge, PreferenceReward, RewardModelJudge

SCORED = {"prompts": ["a", "b"], "completions": ["Answer: 4", "one two three"], "answer": ["4", "4"]}


def scores(function: Any, **columns: Any) -> Any:
    return function(**SCORED | columns)


def write_module(folder: Path, text: str) -> str:
    path = folder / "rewards_here.py"
    path.write_text(text)
    return str(path)


# ---- text_generation ----


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (None, {}),
        ('{"stop_sequences": []}', {}),
        ({"stop_strings": ["\n", "END"]}, {"stop_strings": ["\n", "END"]}),
        ({"stop_sequences": "END"}, {"stop_strings": ["END"]}),
    ],
)
def test_stop_strings_become_a_setting(config: Any, settings: dict[str, list[str]]) -> None:
    environment = make_environment("text_generation", config)
    assert environment.settings == settings
    assert (environment.reward_funcs, environment.reward_weights) == ([], None)


@pytest.mark.parametrize("env_type", list(KEYS))
def test_every_type_may_end_responses(env_type: str) -> None:
    config: dict[str, Any] = {"stop_strings": ["."]}
    if env_type == "preference_comparison":
        config["judge"] = len
    environment = make_environment(env_type, config, reward_weights={"length": 1.0})
    assert environment.settings == {"stop_strings": ["."]}


def test_the_reward_by_name_or_with_settings() -> None:
    assert make_environment("text_generation", reward_fn="default").reward_funcs == [Default()]
    assert make_environment("text_generation", {"reward_fn": "default"}).reward_funcs == [Default()]
    config = '{"reward_fn": {"type": "length", "unit": 5}}'
    (reward,) = make_environment("text_generation", config).reward_funcs
    assert reward == Length(unit=5) and scores(reward) == [0.4, 0.6]


def test_a_function_in_a_file_with_either_signature(tmp_path: Path) -> None:
    path = write_module(
        tmp_path,
        "def long(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n"
        "def custom(prompt, generated, full_text):\n    return len(full_text)\n",
    )
    (reward,) = make_environment("text_generation", reward_fn=f"{path}:long").reward_funcs
    assert scores(reward) == [9.0, 13.0]
    (reward,) = make_environment(
        "text_generation", {"reward_fn": {"type": "custom", "function": f"{path}:custom"}}
    ).reward_funcs
    assert scores(reward) == [10, 14]


# ---- multi_objective ----


@pytest.mark.parametrize(
    ("components", "weights", "reward_fn", "functions"),
    [
        (None, '{"correctness": 1.0, "formatting": 0.1}', None, [Correctness(), Formatting()]),
        ({"length": {}, "formatting": {}}, None, None, [Length(), Formatting()]),
        (None, '{"reward_model": 2.0, "length": 1.0}', None, [Length()]),  # the model's weight is no component
        ({"length": {}}, '{"length": 1.0, "default": 3.0}', "default", [Length(), Default()]),
    ],
)
def test_components_and_weights(components: Any, weights: str | None, reward_fn: Any, functions: list[Any]) -> None:
    config = {"reward_components": components} if components else None
    environment = make_environment("multi_objective", config, reward_weights=weights, reward_fn=reward_fn)
    assert environment.reward_funcs == functions
    assert environment.reward_weights == (json.loads(weights) if weights else None)


def test_components_as_aitraining_writes_them() -> None:
    config = """{"reward_components": {"correctness": {"type": "keyword", "keywords": ["4", "yes"]},
                                       "formatting": {"type": "keyword", "keywords": ["Answer:"]},
                                       "long": {"type": "length"}},
                 "reward_weights": {"correctness": 1.0, "formatting": 0.1, "long": -2}}"""
    environment = make_environment("multi_objective", config)
    assert [function_name(function) for function in environment.reward_funcs] == ["correctness", "formatting", "long"]
    assert [scores(function) for function in environment.reward_funcs] == [[1.0, 0.0], [1.0, 0.0], [0.02, 0.03]]
    assert environment.reward_weights == {"correctness": 1.0, "formatting": 0.1, "long": -2.0}


def test_weights_beside_the_components_and_in_them() -> None:
    components = {"a": {"type": "length", "weight": 0.7}, "length_penalty": {}, "b": "formatting"}
    environment = make_environment(
        "multi_objective", {"reward_components": components}, reward_weights={"length_penalty": 1, "b": 0}
    )
    assert environment.reward_weights == {"a": 0.7, "length_penalty": 1.0, "b": 0.0}


def test_a_named_component_keeps_columns_and_async(tokenizer: Any) -> None:
    async def slowly(completions: Any, answer: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(value) for value in answer]

    (named,) = make_environment("multi_objective", {"reward_components": {"mine": slowly}}).reward_funcs
    source = RewardFunction(named, tokenizer, lambda: None)  # pyright: ignore[reportArgumentType]
    assert source.name == "mine" and source.is_async
    assert asyncio.run(named(completions=["x"], answer=["2"])) == [2.0]


# ---- preference_comparison ----


def judge(prompts: list[str], pairs: list[list[str]]) -> list[int]:
    """Prefers the longer response."""
    return [0 if len(first) >= len(second) else 1 for first, second in pairs]


def test_judge_and_opponent() -> None:
    (reward,) = make_environment("preference_comparison", {"judge": judge, "opponent": "self"}).reward_funcs
    assert isinstance(reward, PreferenceReward)
    assert (reward.judge, reward.opponent, function_name(reward)) == (judge, "self", "preference")
    (reward,) = make_environment("preference_comparison", {"judge": judge}).reward_funcs
    assert isinstance(reward, PreferenceReward) and reward.opponent == "reference"


def test_a_judge_by_name_and_the_opponents_column(tmp_path: Path) -> None:
    path = write_module(tmp_path, "def judge(prompts, pairs):\n    return [int(len(b) > len(a)) for a, b in pairs]\n")
    config = {"judge": f"{path}:judge", "opponent": "dataset", "column": "gold"}
    (reward,) = make_environment("preference_comparison", config).reward_funcs
    assert scores(reward, gold=["Answer: four", "one"]) == [-1.0, 1.0]


def test_aitrainings_names_for_judges() -> None:
    (reward,) = make_environment("preference_comparison", '{"preference_model": "models/reward"}').reward_funcs
    assert isinstance(reward, PreferenceReward) and isinstance(reward.judge, RewardModelJudge)
    assert reward.judge.path == "models/reward"

    def feedback(prompt: str, first: str, second: str) -> float:
        return 1.0 if len(first) > len(second) else -1.0

    config = {"human_feedback_fn": feedback, "opponent": "dataset", "column": "gold"}
    (reward,) = make_environment("preference_comparison", config).reward_funcs
    assert isinstance(reward, PreferenceReward) and isinstance(reward.judge, FeedbackJudge)
    assert scores(reward, gold=["Answer: four", "one"]) == [-1.0, 1.0]


def test_a_further_reward_beside_the_comparison() -> None:
    environment = make_environment(
        "preference_comparison",
        {"judge": judge},
        reward_fn="length_penalty",
        reward_weights={"preference": 1, "length_penalty": 2},
    )
    assert [function_name(function) for function in environment.reward_funcs] == ["preference", "length_penalty"]
    assert environment.reward_weights == {"preference": 1.0, "length_penalty": 2.0}


# ---- Errors ----


T, M, P = "text_generation", "multi_objective", "preference_comparison"
WITH_ALL = {"config": {"reward_components": {"length": {}, "formatting": {}}}}


@pytest.mark.parametrize(
    ("env_type", "arguments", "message"),
    [
        ("text-generation", {}, r"env_type='text-generation' must be .*did you mean 'text_generation'"),
        (T, {"config": '{"a'}, r"config='\{\"a' is not JSON: .*double quotes"),
        (T, {"config": "[1]"}, r"config='\[1\]' must be a dict"),
        (T, {"config": {"stop_string": ["a"]}}, r"stop_string=\['a'\], which .*did you mean 'stop_strings'"),
        (T, {"config": {"opponent": "self"}}, r"opponent='self', which text_generation does not know"),
        (T, {"config": {"stop_strings": [""]}}, r"stop_strings=\[''\] must be a list of texts"),
        (T, {"config": {"stop_sequences": 3}}, r"stop_strings=3 must be a list of texts"),
        (T, {"config": {"stop_strings": ["a"], "stop_sequences": ["b"]}}, r"given twice, as \['a'\] and as \['b'\]"),
        (T, {"reward_fn": "defualt"}, r"reward_fn='defualt': .*'default'"),
        (T, {"reward_fn": "length", "config": {"reward_fn": "default"}}, r"reward_fn is given twice, as 'default'"),
        (M, {}, r"reward_components=None must be a dict of rewards .*or give reward_weights.*correctness"),
        (M, {"config": {"reward_components": ["length"]}}, r"reward_components=\['length'\] must be"),
        (M, {"reward_weights": {"corectness": 1}}, r"reward_components\['corectness'\].*'correctness'"),
        (M, {"reward_weights": {"length": "1"}}, r"reward_weights\['length'\]='1' is not float"),
        (M, {"reward_weights": "[1, 2]"}, r"reward_weights='\[1, 2\]' must be a dict or the JSON"),
        (M, {**WITH_ALL, "reward_weights": {"formating": 1}}, r"has 'formating', which .*did you mean 'formatting'"),
        (M, {**WITH_ALL, "reward_weights": {"length": 1}}, r"the component 'formatting' has no weight"),
        (M, {"config": {"reward_components": {"length": {"weight": 2}}}, "reward_weights": {"length": 1}}, "keep one"),
        (M, {"config": {"reward_components": {"length": {"weight": "2"}}}}, r"\['length'\]='2' is not float"),
        (
            M,
            {"config": {"reward_components": {"a": {"type": "keyword", "x": 1}}}},
            r"'a'\]=.*unexpected keyword argument 'x'",
        ),
        (P, {}, r"config has no judge; give one of \['judge', 'preference_model'"),
        (P, {"config": {"judge": judge, "preference_model": "x"}}, r"has \['judge', 'preference_model'\]; give"),
        (P, {"config": {"judge": judge, "opponent": "me"}}, r"opponent='me' must be one of"),
    ],
)
def test_errors_name_the_key_the_value_and_the_fix(env_type: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make_environment(env_type, **arguments)
