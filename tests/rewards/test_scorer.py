"""The weighted sum of reward sources."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TrainerState

from rlhf_ppo.rewards import RewardFunction, Scorer, ScoringBatch

NAN = float("nan")


class Fixed:
    def __init__(self, name: str, scores: Sequence[Any]) -> None:
        self.name, self.scores = name, torch.tensor(scores, dtype=torch.float64, requires_grad=True)

    def __call__(self, batch: ScoringBatch) -> Tensor:
        return self.scores * 1


def make_batch(rows: int = 3, **columns: list[Any]) -> ScoringBatch:
    ids = torch.full((rows, 4), 3)
    return ScoringBatch(ids, torch.ones(rows, 4).bool(), torch.ones(rows, 2).bool(), columns, torch.ones(rows).bool())


def test_total_is_the_weighted_sum_over_the_sources_that_scored_the_row() -> None:
    a, b = Fixed("a", [1.0, NAN, -3.0]), Fixed("b", [10.0, 20.0, NAN])
    scores = Scorer([a, b], [2.0, 0.5])(make_batch())
    assert scores.total.tolist() == [2 * 1 + 0.5 * 10, 0.5 * 20, 2 * -3]
    assert scores.total.dtype == torch.float32 and not scores.total.requires_grad
    assert list(scores.by_source) == ["a", "b"]
    assert scores.by_source["b"][:2].tolist() == [10.0, 20.0] and scores.by_source["b"][2].isnan()


def test_a_source_with_the_weight_0_is_only_logged() -> None:
    a, b = Fixed("a", [1.0, NAN, NAN]), Fixed("b", [10.0, 20.0, NAN])
    scores = Scorer([a, b], [2.0, 0.0])(make_batch())
    assert scores.total.tolist() == pytest.approx([2.0, NAN, NAN], nan_ok=True)
    assert scores.by_source["b"].tolist() == pytest.approx([10.0, 20.0, NAN], nan_ok=True)
    assert Scorer([a, b], [0.0, 0.0])(make_batch()).total.tolist() == pytest.approx([0.0, 0.0, NAN], nan_ok=True)


def test_weights_default_to_one_and_may_be_zero_or_negative() -> None:
    a, b = Fixed("a", [1.0, 2.0, 3.0]), Fixed("b", [10.0, 20.0, 30.0])
    assert Scorer([a, b], None)(make_batch()).total.tolist() == [11.0, 22.0, 33.0]
    assert Scorer([a, b], [0.0, -1.0])(make_batch()).total.tolist() == [-10.0, -20.0, -30.0]
    assert Scorer([a], None)(make_batch()).total.tolist() == [1.0, 2.0, 3.0]


def test_rewards_per_token_are_added_token_by_token_beside_the_scores() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]]).bool()
    ids = torch.full((3, 4), 3)
    batch = ScoringBatch(ids, torch.ones(3, 4).bool(), mask, {}, torch.ones(3).bool())
    a, b = Fixed("a", [1.0, NAN, NAN]), Fixed("b", [[1.0, 2.0], [4.0, 99.0], [NAN, NAN]])
    c = Fixed("c", [[0.5, 0.25], [NAN, NAN], [NAN, NAN]])
    scores = Scorer([a, b, c], {"c": 2.0, "b": -1.0, "a": 10.0})(batch)
    assert scores.per_token.tolist() == [[-1 + 1.0, -2 + 0.5], [-4.0, 0.0], [0.0, 0.0]]
    assert scores.final.tolist() == pytest.approx([10.0, 0.0, NAN], nan_ok=True)
    assert scores.by_source["b"].tolist() == pytest.approx([3.0, 4.0, NAN], nan_ok=True)
    assert scores.by_source["c"].tolist() == pytest.approx([0.75, NAN, NAN], nan_ok=True)
    assert scores.total.tolist() == pytest.approx([8.5, -4.0, NAN], nan_ok=True)


def test_rewards_of_tokens_that_the_policy_did_not_write_are_not_paid() -> None:
    """Whatever stands there: NaN at a response's first token says nothing if a tool wrote that."""
    mask = torch.tensor([[False, True, True], [True, False, True], [False, True, False]])
    batch = ScoringBatch(torch.full((3, 4), 3), torch.ones(3, 4).bool(), mask, {}, torch.ones(3).bool())
    scores = Scorer([Fixed("a", [[NAN, 1.0, 2.0], [3.0, 999.0, 4.0], [5.0, NAN, 6.0]])])(batch)
    assert scores.per_token.tolist() == [[0.0, 1.0, 2.0], [3.0, 0.0, 4.0], [0.0, 0.0, 0.0]]
    assert scores.total.tolist() == pytest.approx([3.0, 7.0, NAN], nan_ok=True)
    assert batch.response_ids() == [[3, 3, 3]] * 3


@pytest.mark.parametrize(
    ("names", "weights", "problem"),
    [
        ("", None, "pass a reward_model, reward_funcs, or both"),
        ("ab", [1.0], r"has 1 numbers \(\[1.0\]\) for 2 rewards \(\['a', 'b'\]\)"),
        ("ab", [1.0, 2.0, 3.0], "has 3 numbers .*for 2 rewards"),
        ("ab", {"a": 1.0, "B": 1.0}, r"names \['B'\] and has no weight for \['b'\]: the rewards are \['a', 'b'\]"),
        ("ab", {"a": 1.0, "b": 1.0, "c": 1.0}, r"names \['c'\]: the rewards are"),
        ("ab", {}, r"has no weight for \['a', 'b'\]: the rewards are"),
        (["a", "correctness"], {"a": 1.0, "correctnes": 1.0}, r"are \['a', 'corr.* \(did you mean 'correctness'\?\)"),
        ("a", [NAN], r"^reward_weights\['a'\]=nan must be in"),
        ("a", {"a": float("inf")}, r"^reward_weights\['a'\]=inf must be in"),
    ],
)
def test_wrong_weights_are_errors_that_name_the_rewards(names: Sequence[str], weights: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Scorer([Fixed(name, []) for name in names], weights)


def test_sources_of_one_name_are_told_apart_and_keep_their_weights() -> None:
    sources = [Fixed("f", [1.0]), Fixed("f_2", [10.0]), Fixed("f", [100.0]), Fixed("f", [1000.0])]
    scores = Scorer(sources, [1.0, 2.0, 3.0, 4.0])(make_batch(rows=1))
    by_source = {name: float(score) for name, score in scores.by_source.items()}
    assert by_source == {"f": 1.0, "f_2": 10.0, "f_3": 100.0, "f_4": 1000.0}
    assert float(scores.total) == 1 + 20 + 300 + 4000


def test_a_source_of_another_shape_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"'short' has shape \(2,\), expected \(3,\), or \(3, 2\)"):
        Scorer([Fixed("a", [1.0, 2.0, 3.0]), Fixed("short", [1.0, 2.0])], None)(make_batch())


class Decoder:
    """Stands in for a tokenizer."""

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return ["w"] * len(rows)


def test_async_functions_run_side_by_side_while_the_others_compute() -> None:
    both_started = threading.Event()
    started: list[asyncio.Event] = []

    def meeting(name: str, own: int, other: int) -> RewardFunction:
        async def reward(completions: list[str]) -> list[float]:
            if started:
                both_started.set()
            else:
                started.extend([asyncio.Event(), asyncio.Event()])
            started[own].set()
            await asyncio.wait_for(started[other].wait(), timeout=30)  # in sequence, this never comes
            return [float(own + 1)] * len(completions)

        tokenizer: Any = Decoder()
        return RewardFunction(reward, tokenizer, TrainerState, name=name)

    class Slow(Fixed):
        def __call__(self, batch: ScoringBatch) -> Tensor:
            assert both_started.wait(timeout=30), "the async functions were not started before this one"
            return super().__call__(batch)

    scores = Scorer([Slow("slow", [10.0]), meeting("a", 0, 1), meeting("b", 1, 0)], [1.0, 1.0, 2.0])(make_batch(1))
    assert float(scores.total) == 10 + 1 + 2 * 2
    assert list(scores.by_source) == ["slow", "a", "b"]


def test_slow_sources_run_between_start_and_the_call_and_are_asked_once(tokenizer: PreTrainedTokenizerFast) -> None:
    entered, go_on, calls = threading.Event(), threading.Event(), []

    async def slow(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        entered.set()
        while not go_on.is_set():
            await asyncio.sleep(0.001)
        return [5.0] * len(completions)

    scorer, batch, other = Scorer([RewardFunction(slow, tokenizer, TrainerState)]), make_batch(3), make_batch(2)
    scorer.start(batch)
    assert entered.wait(timeout=30)  # it runs while nobody waits for it
    go_on.set()
    assert scorer(batch).total.tolist() == [5.0] * 3 and calls == [3]
    scorer.start(batch)
    assert scorer(other).total.tolist() == [5.0] * 2 and calls == [3, 3, 2]  # another batch's answers are not taken
    assert scorer(batch).total.tolist() == [5.0] * 3 and calls == [3, 3, 2, 3]


class Endless:
    """An async reward that never ends; it tells when it began and when it was given up."""

    def __init__(self) -> None:
        self.began, self.given_up = threading.Event(), threading.Event()

    async def __call__(self, **_: Any) -> list[float]:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        return []


async def broken_async(**_: Any) -> list[float]:
    raise RuntimeError("no answer")


def broken(**_: Any) -> list[float]:
    raise RuntimeError("no answer")


@pytest.mark.parametrize("function", [broken, broken_async])
def test_when_one_source_fails_those_that_still_run_are_given_up(
    function: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    endless = Endless()
    scorer = Scorer([RewardFunction(each, tokenizer, TrainerState) for each in (function, endless)])
    scorer.start(batch := make_batch(3))
    assert endless.began.wait(timeout=30)
    with pytest.raises(RuntimeError, match="no answer"):
        scorer(batch)
    assert endless.given_up.wait(timeout=30)


@pytest.mark.parametrize("then", ["stop", "start", "another batch"])
def test_answers_that_nobody_came_for_are_given_up(then: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """The models failed between `start` and the call; the next update starts anew."""
    endless, calls = Endless(), []

    async def first_endless(completions: list[str], **columns: Any) -> list[float]:
        calls.append(len(completions))
        return await endless() if len(calls) == 1 else [5.0] * len(completions)

    scorer = Scorer([RewardFunction(first_endless, tokenizer, TrainerState)])
    scorer.start(batch := make_batch(3))
    assert endless.began.wait(timeout=30)
    if then == "stop":
        scorer.stop()
    elif then == "start":
        scorer.start(batch)
    else:
        assert scorer(make_batch(2)).total.tolist() == [5.0] * 2
    assert endless.given_up.wait(timeout=30)
    assert scorer(batch).total.tolist() == [5.0] * 3


def test_prompt_and_response_ids_follow_the_masks() -> None:
    batch = ScoringBatch(
        torch.tensor([[0, 5, 0, 1, 0], [1, 1, 7, 0, 8]]),
        torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool(),
        torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(),
        {},
        torch.ones(2).bool(),
    )
    assert batch.prompt_ids() == [[5], [1, 1]]
    assert batch.response_ids() == [[0, 1], [7, 0, 8]]
