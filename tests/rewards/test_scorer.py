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
from rlhf_ppo.rewards.scorer import WrongRewardError
from tests.conftest import scoring_batch

NAN = float("nan")


class Fixed:
    def __init__(self, name: str, scores: Sequence[Any]) -> None:
        self.name, self.scores = name, torch.tensor(scores, dtype=torch.float64, requires_grad=True)

    def __call__(self, batch: ScoringBatch) -> Tensor:
        return self.scores * 1


def make_batch(rows: int = 3, mask: Any = None, tokenizer: Any = None) -> ScoringBatch:
    ids, mask = torch.full((rows, 4), 3), torch.ones(rows, 2) if mask is None else torch.tensor(mask)
    real, ended = torch.ones(rows, 4).bool(), torch.ones(rows).bool()
    return scoring_batch(ids, real, mask.bool(), {}, ended, tokenizer=tokenizer)


def test_rewards_per_token_are_added_token_by_token_beside_the_scores() -> None:
    batch = make_batch(mask=[[1, 1], [1, 0], [1, 1]])
    a, b = Fixed("a", [1.0, NAN, NAN]), Fixed("b", [[1.0, 2.0], [4.0, 99.0], [NAN, NAN]])
    c = Fixed("c", [[0.5, 0.25], [NAN, NAN], [NAN, NAN]])
    scores = Scorer([a, b, c], {"c": 2.0, "b": -1.0, "a": 10.0})(batch)
    assert scores.token_scores.tolist() == [[-1 + 1.0, -2 + 0.5], [-4.0, 0.0], [0.0, 0.0]]
    assert scores.scores.tolist() == pytest.approx([10.0, 0.0, NAN], nan_ok=True)
    assert scores.by_source["b"].tolist() == pytest.approx([3.0, 4.0, NAN], nan_ok=True)
    assert scores.by_source["c"].tolist() == pytest.approx([0.75, NAN, NAN], nan_ok=True)
    assert scores.total.tolist() == pytest.approx([8.5, -4.0, NAN], nan_ok=True)


def test_rewards_of_tokens_that_the_policy_did_not_write_are_not_paid() -> None:
    """Whatever stands there: NaN at a response's first token says nothing if a tool wrote that."""
    batch = make_batch(mask=[[0, 1, 1], [1, 0, 1], [0, 1, 0]])
    scores = Scorer([Fixed("a", [[NAN, 1.0, 2.0], [3.0, 999.0, 4.0], [5.0, NAN, 6.0]])])(batch)
    assert scores.token_scores.tolist() == [[0.0, 1.0, 2.0], [3.0, 0.0, 4.0], [0.0, 0.0, 0.0]]
    assert scores.total.tolist() == pytest.approx([3.0, 7.0, NAN], nan_ok=True)
    assert batch.response_ids() == [[3, 3, 3]] * 3


def test_a_source_with_the_weight_0_is_only_logged_whatever_it_gives() -> None:
    a, b = Fixed("a", [1.0, NAN, NAN]), Fixed("b", [float("inf"), 20.0, NAN])
    tokens = Fixed("c", [[float("-inf"), 0.0]] * 3)
    scores = Scorer([a, b, tokens], [2.0, 0.0, 0.0])(make_batch())
    assert scores.total.tolist() == pytest.approx([2.0, NAN, NAN], nan_ok=True)
    assert scores.by_source["b"].tolist() == pytest.approx([float("inf"), 20.0, NAN], nan_ok=True)
    with pytest.raises(WrongRewardError, match="the weighted sum of the rewards of row 0 is beyond"):
        Scorer([a, b])(make_batch())


def test_sources_of_one_name_are_told_apart_and_keep_their_weights() -> None:
    sources = [Fixed("f", [1.0]), Fixed("f_2", [10.0]), Fixed("f", [100.0]), Fixed("f", [1000.0])]
    scores = Scorer(sources, [1.0, 2.0, 3.0, 4.0])(make_batch(rows=1))
    by_source = {name: float(score) for name, score in scores.by_source.items()}
    assert by_source == {"f": 1.0, "f_2": 10.0, "f_3": 100.0, "f_4": 1000.0}
    assert float(scores.total) == 1 + 20 + 300 + 4000


# ---- Asynchronous sources ----


def test_async_functions_run_side_by_side_from_start_and_are_asked_once(tokenizer: PreTrainedTokenizerFast) -> None:
    """Each of the two waits until the other has begun."""
    began, calls = [threading.Event(), threading.Event()], []

    def meeting(own: int) -> RewardFunction:
        async def reward(completions: list[str]) -> list[float]:
            calls.append(len(completions))
            began[own].set()
            while not began[1 - own].is_set():
                await asyncio.sleep(0.001)
            return [float(own + 1)] * len(completions)

        return RewardFunction(reward, TrainerState, name="ab"[own])

    class Last(Fixed):
        def __call__(self, batch: ScoringBatch) -> Tensor:
            assert all(each.is_set() for each in began)
            return self.scores[: len(batch)]

    scorer = Scorer([Last("plain", [10.0] * 3), meeting(0), meeting(1)], [1.0, 1.0, 2.0])
    with scorer.start(make_batch(3, tokenizer=tokenizer)) as pending:
        assert all(each.wait(timeout=30) for each in began)
        assert pending.result().total.tolist() == [15.0] * 3 and calls == [3, 3]
    assert scorer(make_batch(2, tokenizer=tokenizer)).total.tolist() == [15.0] * 2 and calls == [3, 3, 2, 2]


def test_answers_that_nobody_comes_for_are_given_up(tokenizer: PreTrainedTokenizerFast) -> None:
    began, ended = threading.Event(), threading.Event()

    async def endless(completions: list[str]) -> list[float]:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return []

    with Scorer([RewardFunction(endless, TrainerState)]).start(make_batch(tokenizer=tokenizer)):
        assert began.wait(timeout=30)
    assert ended.wait(timeout=30)
