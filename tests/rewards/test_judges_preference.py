"""Comparisons: both orders, identical answers, failed verdicts, and a reward model as the judge."""

import math
import pickle
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification, TrainerState

from rlhf_ppo.rewards.functions import LoggedByFunctions, RewardFunction
from rlhf_ppo.rewards.judges import FeedbackJudge, PreferenceReward, RewardModelJudge
from rlhf_ppo.rewards.scorer import Answer
from tests.conftest import make_tokenizer, save_models, scoring_batch, tiny_scorer


class Recorder:
    """A judge that notes what it is asked and answers from a function of one pair."""

    def __init__(self, verdict: Any) -> None:
        self.verdict, self.calls = verdict, []

    def __call__(self, prompts: list[str], pairs: list[list[str]]) -> list[Any]:
        self.calls.append((prompts, pairs))
        return [self.verdict(prompt, *pair) for prompt, pair in zip(prompts, pairs, strict=True)]


def longer(prompt: str, first: str, second: str) -> int:
    return 0 if len(first) >= len(second) else 1


def compare(judge: Any, ours: list[Any], theirs: list[Any], **arguments: Any) -> list[float | None]:
    reward = PreferenceReward(judge, opponent="dataset", column="gold")
    prompts = [f"p{row}" for row in range(len(ours))]
    return reward(**{"prompts": prompts, "completions": ours, "gold": theirs} | arguments)


@pytest.mark.parametrize("first", [0, 0.25, 0.5, 1])
@pytest.mark.parametrize("second", [0, 0.5, 0.75, 1])
def test_the_mean_of_both_orders(first: float, second: float) -> None:
    """In this order the response wins by `1 - 2 first`, in the other by `2 second - 1`."""
    judge = Recorder(lambda prompt, one, other: first if one == "ours" else second)
    assert compare(judge, ["ours"], ["theirs"]) == [pytest.approx(((1 - 2 * first) + (2 * second - 1)) / 2)]


def test_a_judge_with_too_few_verdicts_is_named() -> None:
    def first_alone(prompts: list[str], pairs: list[list[str]]) -> list[int]:
        return [0]

    with pytest.raises(ValueError, match="gave 1 verdicts for 4 pairs: give one for each"):
        compare(first_alone, ["ours", "and ours"], ["theirs", "and theirs"])


def test_feedback_that_is_not_a_number_is_no_tie() -> None:
    with pytest.raises(ValueError, match="nan"):
        compare(FeedbackJudge(lambda *_: math.nan), ["ours"], ["theirs"])


@pytest.mark.parametrize("failure", [-1, None, torch.tensor(-1)])
@pytest.mark.parametrize("order", [0, 1, 2], ids=["first", "second", "both"])
def test_a_failed_verdict_leaves_the_row_unscored_and_is_counted(failure: Any, order: int) -> None:
    def verdict(prompt: str, first: str, second: str) -> Any:
        fails = prompt == "p1" and (order == 2 or order == (first == "theirs"))
        return failure if fails else longer(prompt, first, second)

    logged: list[tuple[str, float]] = []
    ours = ["x" * 9, "ours", "same", "c"]
    rewards = compare(
        Recorder(verdict), ours, ["theirs", "theirs", "same", "theirs"], log_metric=lambda *entry: logged.append(entry)
    )
    assert rewards == [1.0, None, 0.0, -1.0]
    assert dict(logged) == {"preference/win_rate": 0.5, "preference/failed_frac": 0.25}


def test_the_win_rate_of_a_judge_of_probabilities_counts_wins() -> None:
    """As `rlhf-ppo judge` counts: 0.9, 0.6 and 0.2 are two wins of three, not 0.57."""
    likely = {"a": 0.9, "b": 0.6, "c": 0.2}
    judge = Recorder(lambda prompt, first, second: 1 - likely[first] if second == "theirs" else likely[second])
    logged: dict[str, float] = {}
    compare(judge, [*likely], ["theirs"] * 3, log_metric=logged.__setitem__)
    assert logged == {"preference/win_rate": pytest.approx(2 / 3), "preference/failed_frac": 0.0}


def test_two_comparisons_in_a_run_need_two_names(make_trainer: Any) -> None:
    def compared(**name: str) -> PreferenceReward:
        return PreferenceReward(Recorder(longer), opponent="self", **name)

    with pytest.raises(ValueError, match=r"two comparisons called 'preference'.*: give each a name="):
        make_trainer(reward_funcs=[compared(), compared()])
    make_trainer(reward_funcs=[compared(), compared(name="other")])


def test_the_win_rate_is_a_share_of_the_scored_rows_of_all_calls() -> None:
    """Not the mean over calls: an opponent is missing where the one response loses."""
    judge = Recorder(lambda prompt, first, second: float(first == "worse" or second == "better"))
    logged, reward = LoggedByFunctions(), PreferenceReward(judge, opponent="dataset", column="gold")
    function = RewardFunction(reward, TrainerState, logged.log_metric)
    ids = torch.full((4, 2), 5)
    for theirs in (["worse"] * 4, ["better", None, None, None]):
        function(
            scoring_batch(ids, ids > 0, ids[:, 1:] > 0, {"gold": theirs}, ids[:, 0] > 0, tokenizer=make_tokenizer())
        )
    assert logged.drain() == {"preference/win_rate": 0.8, "preference/failed_frac": 0.0}


def test_feedback_on_one_pair() -> None:
    judge = FeedbackJudge(lambda prompt, first, second: {"a": 1.0, "b": -7.0, "c": 0.0, "d": 0.5}.get(first))
    pairs = [[first, "x"] for first in "abcde"]
    assert judge(["p"] * 5, pairs) == [0.0, 1.0, 0.5, 0.25, None]


@pytest.fixture
def model_path(tmp_path: Any) -> str:
    save_models(tmp_path, judge=tiny_scorer())
    return str(tmp_path / "judge")


@torch.no_grad()
def test_a_reward_model_judges_by_the_difference_of_its_scores(model_path: str) -> None:
    """Its scores from transformers alone, one text at a time; the two orders together give tanh(difference / 2)."""
    model, tokenizer = LlamaForSequenceClassification.from_pretrained(model_path), make_tokenizer()

    def score(text: str) -> float:
        return float(model(**tokenizer(text + " <eos>", return_tensors="pt")).logits)

    judge = RewardModelJudge(model_path, batch_size=2)
    prompts, pairs = ["w1 ", "w2 w3 "], [["w4", "w5 w6 w7"], ["w8", "w9"]]
    expected = [
        torch.tensor(score(prompt + second) - score(prompt + first)).sigmoid().item()
        for prompt, (first, second) in zip(prompts, pairs, strict=True)
    ]
    answers = [(Answer(asked, one), Answer(asked, two)) for asked, (one, two) in zip(prompts, pairs, strict=True)]
    assert judge.judge_answers(answers, {}) == pytest.approx(expected, abs=1e-6)
    rewards = compare(judge, ["w4", "w8"], ["w5 w6 w7", "w9"], prompts=prompts)
    differences = [
        score(prompt + pair[0]) - score(prompt + pair[1]) for prompt, pair in zip(prompts, pairs, strict=True)
    ]
    assert rewards == pytest.approx([math.tanh(difference / 2) for difference in differences], abs=1e-5)
    assert pickle.loads(pickle.dumps(judge)).judge_answers(answers, {}) == pytest.approx(expected, abs=1e-6)
