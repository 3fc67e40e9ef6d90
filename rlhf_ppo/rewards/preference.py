"""A reward from comparisons: does a judge prefer the policy's response to an opponent's?"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_ppo.rewards.builtin import prompt_text, response_texts
from rlhf_ppo.rewards.functions import finished
from rlhf_ppo.rewards.judges import Pair, ScoringJudge, as_judge, select
from rlhf_ppo.rewards.reading import Answer

OPPONENTS = ("reference", "self", "dataset")
"""Who answers the same prompt: the reference model, the policy once more, or a column of the data set."""

OPPONENT_COLUMNS: dict[str, str] = {"reference": "opponent_reference", "self": "opponent_self"}
"""The columns in which the trainer passes the responses of the opponents that it samples."""


class Compared(NamedTuple):
    """What a judge said of a response `y` and an opponent's `z`, from 0 to 1; None where it failed.

    Attributes:
        first: `v(y, z)`, above 0.5 where the second, `z`, is better.
        second: `v(z, y)`, above 0.5 where the second, `y`, is better.
    """

    first: float | None
    second: float | None

    @property
    def reward(self) -> float | None:
        """`v(z, y) - v(y, z)`, or None where a verdict failed."""
        first, second = self
        return None if first is None or second is None else second - first


class PreferenceReward:
    """How much a judge prefers the response `y` to an opponent's `z`, asked in both orders, in one call.

        reward = v(z, y) - v(y, z),    from -1 (`z` is better) over 0 (a tie) to 1 (`y` is better)

    with `v(first, second)` the judge's verdict, 0 for the first, 1 for the second: what a judge gives to a position
    alone cancels. The response `z` itself scores 0 without being judged. A row of which a verdict failed is not
    scored. Logged are `<name>/win_rate`, the share of scored rows won, a tie counting half, and `<name>/failed`,
    the number of failed rows.

    Args:
        judge: What `rlhf_ppo.rewards.judges.as_judge` takes.
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
        self.judge = as_judge(judge)
        if opponent not in OPPONENTS:
            raise ValueError(f"opponent={opponent!r} must be one of {list(OPPONENTS)}")
        if column != "chosen" and opponent != "dataset":
            raise ValueError(f"column={column!r} is read with opponent='dataset' only, not with {opponent!r}")
        self.opponent, self.__name__ = opponent, name
        self.column = OPPONENT_COLUMNS.get(opponent, column)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        policy_answers: Sequence[Answer] | None = None,
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
        ours = policy_answers or [Answer(*row) for row in zip(prompts, response_texts(completions), strict=True)]
        theirs = [self._opponents_answer(answer, row, columns) for row, answer in enumerate(ours)]
        rewards = [each.reward for each in self.compare(ours, theirs, columns)]
        if log_metric is not None:
            scored = [reward for reward in rewards if reward is not None]
            if scored:
                log_metric(f"{self.__name__}/win_rate", (1 + sum(scored) / len(scored)) / 2)
            failed = [reward is None and other is not None for reward, other in zip(rewards, theirs, strict=True)]
            log_metric(f"{self.__name__}/failed", sum(failed))
        return rewards

    def compare(
        self, ours: Sequence[Answer | None], theirs: Sequence[Answer | None], columns: Mapping[str, Any]
    ) -> list[Compared]:
        """Compare pairs of answers to the same prompts.

        Args:
            ours: `B` answers, None where there is none.
            theirs: The opponents', likewise.
            columns: The data set's other columns, `B` values each, which reward functions read.

        Returns:
            The verdicts on each pair; equal responses tie.
        """
        found = [Compared(None, None)] * len(ours)
        compared: dict[int, Pair] = {}
        for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one is None or other is None:
                continue
            if one.response == other.response:
                found[row] = Compared(0.5, 0.5)
            else:
                compared[row] = one, other
        judged, chosen = list(compared), list(compared.values())
        both_orders = chosen + [(other, one) for one, other in chosen]
        verdicts = self._verdicts(both_orders, select(columns, judged * 2))
        for row, first, second in zip(judged, verdicts[: len(judged)], verdicts[len(judged) :], strict=True):
            found[row] = Compared(first, second)
        return found

    def _opponents_answer(self, ours: Answer, row: int, columns: Mapping[str, Any]) -> Answer | None:
        given = columns[self.column][row]
        if given is None:
            return None
        (text,) = response_texts([given])
        if self.opponent == "dataset" or f"{self.column}_ids" not in columns:
            return Answer(ours.prompt, text, tokenizer=ours.tokenizer, prompt_ids=ours.prompt_ids)
        ids, ended, written = (columns[f"{self.column}_{what}"][row] for what in ("ids", "ended", "written"))
        return dataclasses.replace(ours, response=text, response_ids=ids, ended=ended, written=written)

    def _verdicts(self, pairs: Sequence[tuple[Answer, Answer]], columns: Mapping[str, Any]) -> list[float | None]:
        if not pairs:
            return []
        verdicts = list(self._asked(pairs, columns))
        if len(verdicts) != len(pairs):
            raise ValueError(
                f"the judge of {self.__name__} returned {len(verdicts)} verdicts for {len(pairs)} pairs; return one "
                "for each, -1 or None where it has none"
            )
        return [_verdict(value, self.__name__) for value in verdicts]

    def _asked(self, pairs: Sequence[Pair], columns: Mapping[str, Any]) -> Any:
        if isinstance(self.judge, ScoringJudge):
            return self.judge.judge_answers(pairs, columns)
        prompts = [prompt_text(first.asked) for first, _ in pairs]
        texts = [[first.response, second.response] for first, second in pairs]
        if hasattr(self.judge, "judge"):
            # TRL's would else swap pairs at random, and one order could be judged twice.
            return self.judge.judge(prompts, texts, shuffle_order=False)
        return finished(self.judge(prompts, texts))


def opponent_of(function: Callable[..., Any]) -> str | None:
    """Return the opponent that a reward function has its responses compared with, or None."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "opponent", None)


def _verdict(value: Any, name: str) -> float | None:
    number = value.tolist() if hasattr(value, "tolist") else value
    if number is None or number == -1:
        return None
    if not isinstance(number, int | float):
        raise TypeError(f"the judge of {name} returned {value!r:.60}; return 0, 1, or -1 for a failed verdict")
    if not 0 <= number <= 1:
        raise ValueError(f"the judge of {name} returned {value!r}; return 0, 1 or between, or -1 for a failed verdict")
    return float(number)
