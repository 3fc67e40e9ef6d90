"""A reward from comparisons: does a judge prefer the policy's response to an opponent's?"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from rlhf_ppo.rewards.builtin import prompt_text, response_texts

OPPONENTS = ("reference", "self", "dataset")
"""Who answers the same prompt: the reference model, the policy once more, or a column of the data set."""

OPPONENT_COLUMNS: dict[str, str] = {"reference": "opponent_reference", "self": "opponent_self"}
"""The columns in which the trainer passes the responses of the opponents that it samples."""


class Judge(Protocol):
    """What compares responses: called with prompts and pairs of responses, all texts."""

    def __call__(self, prompts: list[str], pairs: list[list[str]]) -> Sequence[float | None]:
        """Return for each pair 0 where the first response is better and 1 where the second is.

        Numbers in between are how likely the second is better, 0.5 a tie; -1 or None is a failed verdict.
        """
        ...


class PreferenceReward:
    """How much a judge prefers the response `y` to an opponent's `z`, asked in both orders, in one call.

        reward = v(z, y) - v(y, z),    from -1 (`z` is better) over 0 (a tie) to 1 (`y` is better)

    with `v(first, second)` the judge's verdict, 0 for the first, 1 for the second: what a judge gives to a position
    alone cancels. The response `z` itself scores 0 without being judged. A row of which a verdict failed is not
    scored. Logged are `<name>/win_rate`, the share of scored rows won, a tie counting half, and `<name>/failed`,
    the number of failed rows.

    Args:
        judge: A `Judge`, or an object with TRL's `judge(prompts, completions, shuffle_order)`.
        opponent: One of `OPPONENTS`; the trainer samples the first two, at the policy's temperature.
        column: With `opponent="dataset"`, the column of the responses to compare with.
        name: Name in metrics and weights.

    Raises:
        TypeError: `judge` cannot be called.
        ValueError: `opponent` is none of these, or is not what `column` is for.
    """

    def __init__(
        self, judge: Any, opponent: str = "reference", column: str = "chosen", name: str = "preference"
    ) -> None:
        if not callable(judge) and not callable(getattr(judge, "judge", None)):
            raise TypeError(f"judge={judge!r} cannot be called; pass a function of prompts and pairs, or TRL's judge")
        if opponent not in OPPONENTS:
            raise ValueError(f"opponent={opponent!r} must be one of {list(OPPONENTS)}")
        if column != "chosen" and opponent != "dataset":
            raise ValueError(f"column={column!r} is read with opponent='dataset' only, not with {opponent!r}")
        self.judge, self.opponent, self.__name__ = judge, opponent, name
        self.column = OPPONENT_COLUMNS.get(opponent, column)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Compare every response with its opponent.

        Raises:
            TypeError: The judge returned something that is no number.
            ValueError: The opponents' column is missing, or the judge returned another number of verdicts, or one that
                is not in [0, 1].
        """
        if self.column not in columns:
            fix = "add it to the data set, or name another" if self.opponent == "dataset" else "PPOTrainer makes it"
            raise ValueError(f"{self.__name__} finds no column {self.column!r} with the opponents' responses; {fix}")
        ours = response_texts(completions)
        theirs = [None if other is None else response_texts([other])[0] for other in columns[self.column]]
        rewards: list[float | None] = [0.0 if a == b else None for a, b in zip(ours, theirs, strict=True)]
        judged = [row for row, reward in enumerate(rewards) if reward is None and theirs[row] is not None]
        texts = [prompt_text(prompts[row]) for row in judged]
        pairs = [[ours[row], str(theirs[row])] for row in judged]
        verdicts = self._verdicts(texts * 2, pairs + [pair[::-1] for pair in pairs])
        for row, first, second in zip(judged, verdicts[: len(judged)], verdicts[len(judged) :], strict=True):
            rewards[row] = None if first is None or second is None else second - first
        if log_metric is not None:
            scored = [reward for reward in rewards if reward is not None]
            if scored:
                log_metric(f"{self.__name__}/win_rate", (1 + sum(scored) / len(scored)) / 2)
            log_metric(f"{self.__name__}/failed", sum(rewards[row] is None for row in judged))
        return rewards

    def _verdicts(self, prompts: list[str], pairs: list[list[str]]) -> list[float | None]:
        if not pairs:
            return []
        judge = self.judge
        returned: Any = (
            # TRL's would else swap pairs at random, and one order could be judged twice.
            judge.judge(prompts, pairs, shuffle_order=False) if hasattr(judge, "judge") else judge(prompts, pairs)
        )
        verdicts = list(returned)
        if len(verdicts) != len(pairs):
            raise ValueError(
                f"the judge of {self.__name__} returned {len(verdicts)} verdicts for {len(pairs)} pairs; return one "
                "for each, -1 or None where it has none"
            )
        return [_verdict(value, self.__name__) for value in verdicts]


def opponent_of(function: Callable[..., Any]) -> str | None:
    """Return the opponent that a reward function has its responses compared with, or None."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "opponent", None)


class RewardModelJudge:
    """Judges by a reward model's scores, as it was trained to (Bradley and Terry): `sigmoid(score_2 - score_1)`.

    Texts end with the tokenizer's EOS, as they do in TRL's RewardTrainer. The model is loaded in float32 at the first
    verdict, on every rank, and not sharded.

    Args:
        path: Directory or hub name of a sequence-classification model with one label, with its tokenizer.
        batch_size: Texts in one forward pass.
    """

    def __init__(self, path: str, batch_size: int = 32) -> None:
        self.path, self.batch_size = path, batch_size
        self._loaded: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}

    @torch.no_grad()
    def __call__(self, prompts: list[str], pairs: list[list[str]]) -> list[float]:
        """Judge pairs."""
        texts = [prompt + text for prompt, pair in zip(prompts, pairs, strict=True) for text in pair]
        # Both orders are asked for, so that every text comes twice.
        unique = list(dict.fromkeys(texts))
        scores = dict(zip(unique, self._scores(unique), strict=True))
        return [
            1 / (1 + math.exp(min(scores[prompt + first] - scores[prompt + second], 700.0)))
            for prompt, (first, second) in zip(prompts, pairs, strict=True)
        ]

    def _scores(self, texts: list[str]) -> list[float]:
        scorer, tokenizer = self._load()
        device = next(scorer.parameters()).device
        end = tokenizer.eos_token or ""
        whole = [text.removesuffix(end) + end for text in texts]
        scores: list[float] = []
        for start in range(0, len(whole), self.batch_size):
            rows = [tokenizer(text)["input_ids"] for text in whole[start : start + self.batch_size]]
            width = max(map(len, rows))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
            lengths = torch.tensor([len(row) for row in rows], device=device)
            scores += scorer(ids, torch.arange(width, device=device) < lengths[:, None]).tolist()
        return scores

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            from accelerate import PartialState
            from transformers import AutoTokenizer

            from rlhf_ppo.models.heads import FrozenScorer
            from rlhf_ppo.models.loading import load_scalar_model

            model = load_scalar_model(self.path, "preference_model")
            self._loaded = FrozenScorer(model.to(PartialState().device)), AutoTokenizer.from_pretrained(self.path)
        return self._loaded


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


def _verdict(value: Any, name: str) -> float | None:
    number = value.tolist() if hasattr(value, "tolist") else value
    if number is None or number == -1:
        return None
    if not isinstance(number, int | float):
        raise TypeError(f"the judge of {name} returned {value!r:.60}; return 0, 1, or -1 for a failed verdict")
    if not 0 <= number <= 1:
        raise ValueError(f"the judge of {name} returned {value!r}; return 0, 1 or between, or -1 for a failed verdict")
    return float(number)
