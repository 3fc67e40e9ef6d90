"""Judges: what tells which of two responses to a prompt is better."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, cast

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from rlhf_ppo.data.encoding import is_conversation
from rlhf_ppo.models.finite import check_finite
from rlhf_ppo.models.heads import FrozenScorer, check_classifier
from rlhf_ppo.models.loading import load_reward_model
from rlhf_ppo.models.positions import positions
from rlhf_ppo.rewards.builtin import BUILTIN_REWARDS, TrlReward
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.rewards.functions import (
    accepted_arguments,
    finished,
    function_name,
    named_parameters,
    naming,
    takes_any_argument,
)
from rlhf_ppo.rewards.reading import Answer, shares_tokens, tokenizer_beside
from rlhf_ppo.rewards.returned import check_scores, described
from rlhf_ppo.rewards.reward_model import RewardModel

Pair = tuple[Answer, Answer]


class Judge(Protocol):
    """What compares responses: called with prompts and pairs of responses, all texts."""

    def __call__(self, prompts: list[str], pairs: list[list[str]]) -> Sequence[float | None]:
        """Return for each pair 0 where the first response is better and 1 where the second is.

        Numbers in between are how likely the second is better, 0.5 a tie; -1 or None is a failed verdict.
        """
        ...


class ScoringJudge(ABC):
    """A judge that scores answers one by one, each once, and reads more of them than their texts."""

    @abstractmethod
    def scores(self, answers: Sequence[Answer], columns: Mapping[str, Any]) -> Sequence[float | None]:
        """Score answers; None where there is no score.

        Args:
            answers: `B` answers.
            columns: The data set's other columns, `B` values each.
        """

    @abstractmethod
    def verdict(self, first: float, second: float) -> float:
        """Return from two answers' scores how likely the second is better, from 0 to 1."""

    def judge_answers(self, pairs: Sequence[Pair], columns: Mapping[str, Any]) -> list[float | None]:
        """Judge pairs of answers.

        Args:
            pairs: `B` pairs.
            columns: The data set's other columns, `B` values each.
        """
        # An answer comes up in both orders.
        rows = {id(answer): (row, answer) for row, pair in enumerate(pairs) for answer in pair}
        scored = self.scores(
            [answer for _, answer in rows.values()], select(columns, [row for row, _ in rows.values()])
        )
        by_answer = dict(zip(rows, scored, strict=True))
        return [self._verdict(by_answer[id(first)], by_answer[id(second)]) for first, second in pairs]

    def __call__(self, prompts: Sequence[Any], pairs: Sequence[Sequence[str]]) -> list[float | None]:
        """Judge pairs of texts, as they stand in a data set."""
        answers = [
            (Answer(prompt, first), Answer(prompt, second))
            for prompt, (first, second) in zip(prompts, pairs, strict=True)
        ]
        return self.judge_answers(answers, {})

    def _verdict(self, first: float | None, second: float | None) -> float | None:
        return None if first is None or second is None else self.verdict(first, second)


class RewardModelJudge(ScoringJudge):
    """Judges by a reward model's scores, as it was trained to (Bradley and Terry): `sigmoid(score_2 - score_1)`.

    The model scores an answer exactly as it does as `reward_model` in training. It is loaded in float32 at the first
    verdict, on every rank, and not sharded.

    Args:
        path: Directory or hub name of a sequence-classification model with one label, with its tokenizer.
        batch_size: Texts in one forward pass.
        trust_remote_code: Whether to run code that comes with the model.
    """

    def __init__(self, path: str, batch_size: int = 32, trust_remote_code: bool = False) -> None:
        self.path, self.batch_size, self.trust_remote_code = path, batch_size, trust_remote_code

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("path", "batch_size", "trust_remote_code")}

    def scores(self, answers: Sequence[Answer], columns: Mapping[str, Any]) -> list[float]:
        """Score answers."""
        return self.model.score_answers(answers, self._tokenizer_for).tolist()

    def verdict(self, first: float, second: float) -> float:
        """Return the probability that the second is better."""
        return 1 / (1 + math.exp(min(first - second, 700.0)))

    @functools.cached_property
    def model(self) -> RewardModel:
        """The reward model, loaded when it is first read.

        Raises:
            ValueError: Nothing loadable is there.
        """
        model = load_reward_model(self.path, "preference_model", None, trust_remote_code=self.trust_remote_code)
        check_finite(model, "preference_model")
        check_classifier(model, "preference_model")
        scorer = FrozenScorer(model.to(PartialState().device))
        return RewardModel(scorer, self.batch_size, max_positions=positions(model))

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        return tokenizer_beside(self.path, self.trust_remote_code)

    @functools.cached_property
    def _readers(self) -> dict[int, tuple[PreTrainedTokenizerBase, bool]]:
        """By its id, each policy's tokenizer that was met, and whether its tokens are the model's."""
        return {}

    def _tokenizer_for(self, answer: Answer) -> PreTrainedTokenizerBase | None:
        if answer.tokenizer is None or self._tokenizer is None:
            return self._tokenizer
        if id(answer.tokenizer) not in self._readers:
            shared = shares_tokens(answer.tokenizer, self._tokenizer)
            self._readers[id(answer.tokenizer)] = answer.tokenizer, shared
        return None if self._readers[id(answer.tokenizer)][1] else self._tokenizer


class FunctionJudge(ScoringJudge):
    """Judges by a reward function's scores: the higher one wins.

    Args:
        function: A function with `GRPOTrainer`'s signature, sync or async, such as a built-in or a `RewardEndpoint`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__name__ = function, function_name(function)

    def scores(self, answers: Sequence[Answer], columns: Mapping[str, Any]) -> list[float | None]:
        """Score answers; rewards per token are added up, over those that a policy wrote."""
        ids = [_token_ids(answer) for answer in answers]
        offered = {
            "trainer_state": TrainerState(),
            "log_metric": _drop,
            "log_extra": _drop,
            **columns,
            "prompts": [answer.asked for answer in answers],
            "completions": [_as_completion(answer) for answer in answers],
            "completion_ids": ids,
        }
        arguments = accepted_arguments(self.function, offered, self.__name__)
        with nullcontext() if isinstance(self.function, RewardEndpoint) else naming(self.__name__, len(ids)):
            returned = finished(self.function(**arguments))
        scores = check_scores(returned, described(self.function, self.__name__), list(map(len, ids)))
        if scores.dim() == 2:
            scores = torch.stack([_total(row, answer) for row, answer in zip(scores, answers, strict=True)])
        totals: list[float] = scores.tolist()
        return [None if math.isnan(score) else score for score in totals]

    def verdict(self, first: float, second: float) -> float:
        """Return 0 or 1, or 0.5 for a tie."""
        return 0.5 if first == second else float(second > first)


class FeedbackJudge:
    """Judges with AITraining's `human_feedback_fn(prompt, first, second)`: above 0 where the first is better, to 1.

    Args:
        function: The function; what it returns is cut to [-1, 1], None is a failed verdict.
    """

    def __init__(self, function: Callable[[str, str, str], float | None]) -> None:
        self.function = function

    def __call__(self, prompts: list[str], pairs: list[list[str]]) -> list[float | None]:
        """Judge pairs."""
        found = [self.function(prompt, *pair) for prompt, pair in zip(prompts, pairs, strict=True)]
        return [None if value is None else (1 - max(-1.0, min(1.0, value))) / 2 for value in found]


def as_judge(judge: Any) -> Any:
    """Return a judge: an object with TRL's `judge`, a `Judge`, or a reward function, whose higher score wins.

    A function is a reward function if it takes `completions` and `**kwargs` or `completion_ids`, as `GRPOTrainer`'s
    do; any other one is a `Judge`, or, if it requires three arguments, one for `FeedbackJudge`.

    Args:
        judge: What the user gave.

    Raises:
        TypeError: It is none of these.
    """
    if callable(getattr(judge, "judge", None)) or isinstance(judge, ScoringJudge):
        return judge
    if isinstance(judge, type) or not callable(judge):
        raise TypeError(f"judge={judge!r} cannot be called; pass a function of prompts and pairs, or TRL's judge")
    if _is_reward_function(judge):
        return FunctionJudge(judge)
    required = [p for p in named_parameters(judge).values() if p.default is p.empty]
    return FeedbackJudge(cast(Any, judge)) if len(required) == 3 else judge


def select(columns: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Choose rows of every column; what is no list stays."""
    return {
        name: [values[row] for row in rows] if isinstance(values, list) else values for name, values in columns.items()
    }


def _is_reward_function(function: Callable[..., Any]) -> bool:
    if isinstance(function, (*BUILTIN_REWARDS.values(), TrlReward, RewardEndpoint)):
        return True
    named = named_parameters(function)
    return "completion_ids" in named or (takes_any_argument(function) and ("completions" in named or not named))


def _as_completion(answer: Answer) -> Any:
    if is_conversation(answer.asked):
        return [{"role": "assistant", "content": answer.response}]
    return answer.response


def _token_ids(answer: Answer) -> list[int]:
    if answer.response_ids is not None:
        return list(answer.response_ids)
    return [] if answer.tokenizer is None else list(answer.tokenizer(answer.response)["input_ids"])


def _total(rewards: Tensor, answer: Answer) -> Tensor:
    if answer.written is None:
        return rewards.sum()
    return rewards[: len(answer.written)][torch.tensor(answer.written)].sum()


def _drop(*_: Any) -> None:
    """Take what nobody asked for."""
