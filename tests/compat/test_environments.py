"""AITraining's environments: the rewards, weights and settings of each type."""

from typing import Any

import pytest

from rlhf_ppo.compat.environments import make_environment
from rlhf_ppo.rewards.builtin import Correctness, Default, Formatting, Length
from rlhf_ppo.rewards.functions import function_name
from rlhf_ppo.rewards.judges import FeedbackJudge, PreferenceReward, RewardModelJudge

SCORED = {"prompts": ["a", "b"], "completions": ["Answer: 4", "one two three"], "answer": ["4", "4"]}


def scores(function: Any, **columns: Any) -> Any:
    return function(**SCORED | columns)


def test_the_reward_by_name_or_with_settings() -> None:
    assert make_environment("text_generation", reward_fn="default").reward_funcs == [Default()]
    (reward,) = make_environment("text_generation", '{"reward_fn": {"type": "length", "unit": 5}}').reward_funcs
    assert reward == Length(unit=5) and scores(reward) == [0.4, 0.6]


@pytest.mark.parametrize(
    ("components", "weights", "reward_fn", "functions"),
    [
        (None, {"correctness": 1.0, "formatting": 0.1}, None, [Correctness(), Formatting()]),
        ({"length": {}, "formatting": {}}, None, None, [Length(), Formatting()]),
        (None, {"reward_model": 2.0, "length": 1.0}, None, [Length()]),  # the model's weight is no component
        ({"length": {}}, {"length": 1.0, "default": 3.0}, "default", [Length(), Default()]),
    ],
)
def test_components_and_weights(components: Any, weights: Any, reward_fn: Any, functions: list[Any]) -> None:
    config = {"reward_components": components} if components else None
    environment = make_environment("multi_objective", config, reward_weights=weights, reward_fn=reward_fn)
    assert environment.reward_funcs == functions and environment.reward_weights == weights


def test_a_component_without_a_weight_has_1_beside_others() -> None:
    config = {"reward_components": {"length": "length", "formatting": {"weight": 0.5}, "default": {}}}
    assert make_environment("multi_objective", config, reward_weights={"default": 2.0}).reward_weights == {
        "length": 1.0, "formatting": 0.5, "default": 2.0,
    }  # fmt: skip


def test_components_as_aitraining_writes_them() -> None:
    config = """{"reward_components": {"correctness": {"type": "keyword", "keywords": ["4", "yes"]},
                                       "formatting": {"type": "keyword", "keywords": ["Answer:"], "weight": 0.1},
                                       "long": {"type": "length"}},
                 "reward_weights": {"correctness": 1.0, "long": -2}}"""
    environment = make_environment("multi_objective", config)
    assert [function_name(function) for function in environment.reward_funcs] == ["correctness", "formatting", "long"]
    assert [scores(function) for function in environment.reward_funcs] == [[1.0, 0.0], [1.0, 0.0], [0.02, 0.03]]
    assert environment.reward_weights == {"correctness": 1.0, "formatting": 0.1, "long": -2.0}


def judge(prompts: list[str], pairs: list[list[str]]) -> list[int]:
    """Prefers the longer response."""
    return [0 if len(first) >= len(second) else 1 for first, second in pairs]


def test_judges_and_opponents() -> None:
    def feedback(prompt: str, first: str, second: str) -> float:
        return 1.0 if len(first) > len(second) else -1.0

    made = [
        make_environment("preference_comparison", config).reward_funcs[0]
        for config in (
            {"judge": judge},
            {"preference_model": "models/reward", "opponent": "self"},
            {"human_feedback_fn": feedback, "opponent": "dataset", "column": "gold"},
        )
    ]
    own, model, people = [reward for reward in made if isinstance(reward, PreferenceReward)]
    assert (own.judge, own.opponent, model.opponent) == (judge, "reference", "self")
    assert isinstance(model.judge, RewardModelJudge) and model.judge.path == "models/reward"
    assert isinstance(people.judge, FeedbackJudge)
    assert scores(people, gold=["Answer: four", "one"]) == [-1.0, 1.0]
