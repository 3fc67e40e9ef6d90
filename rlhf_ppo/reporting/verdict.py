"""The verdict on a policy: better or worse than the model it started from, the likely reasons, and the next step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rlhf_ppo.checkpoints.files import write_json
from rlhf_ppo.reporting.judgements import (
    Judgement,
    RewardAccuracy,
    SeedWinRates,
    found_judgements,
    percent,
    read_accuracy,
)
from rlhf_ppo.reporting.run_log import RecordedRun, read_runs
from rlhf_ppo.terminal import visible

VERDICT = "verdict.json"
"""The file with `Verdict.as_json()`, beside the judge's tables and in the directory of a pipeline."""

Outcome = Literal["better", "worse", "undecided", "not judged"]

KL_PER_TOKEN_LARGE = 0.5
"""KL to the reference, nats per token, above which a policy has moved far from it."""
KL_SMALL = 0.2
"""KL to the reference, nats per response, below which a judge can hardly see a difference."""
FEW_UPDATES, FEW_PROMPTS = 50, 100
FEW_ENDED = 0.5
"""Share of responses that end by themselves."""
ENTROPY_COLLAPSED = 0.3
"""Share of the first entropy."""


@dataclass(frozen=True)
class Verdict:
    """A verdict on the policies of one experiment, which differ only in PPO's seed.

    Attributes:
        outcome: "better" and "worse" only if the interval excludes 50%.
        sentence: The verdict with the win rate and its interval.
        reasons: Likely reasons, or doubts of a better policy, one sentence each, the most likely first.
        next: The next step, one sentence.
        win_rate: Mean over seeds of the share of prompts won, with a tie as half; None if nothing was judged.
        interval: Its 95% interval, over prompts and, with several seeds, over seeds.
        num_prompts: Number of judged prompts of the first seed.
        seeds: Seeds of the judged policies.
        opponent: The name of the opponent.
        judge: The name of the judge.
        accuracy: The accuracy of PPO's reward model on held-out pairs, if it was measured.
    """

    outcome: Outcome
    sentence: str
    reasons: tuple[str, ...]
    next: str
    win_rate: float | None = None
    interval: tuple[float, float] | None = None
    num_prompts: int | None = None
    seeds: tuple[int | None, ...] = ()
    opponent: str = ""
    judge: str = ""
    accuracy: RewardAccuracy | None = None

    def lines(self) -> Iterator[str]:
        """Yield the verdict, then "Why:" with the reasons ("But:" with doubts of a better policy), then "Next:"."""
        yield self.sentence
        if self.reasons:
            yield f"{'But' if self.outcome == 'better' else 'Why'}: {' '.join(self.reasons)}"
        yield f"Next: {self.next}"

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return asdict(self)

    def save(self, folder: Path) -> None:
        """Write `verdict.json` into a directory."""
        write_json(folder / VERDICT, self.as_json())


def recorded_runs(directories: Sequence[str | Path]) -> list[RecordedRun]:
    """Read the runs of PPO among directories of models; others, and runs with a damaged file, are left out."""
    found = []
    for directory in directories:
        try:
            found += read_runs([directory])
        except (ValueError, OSError):
            continue
    return found


def verdict_of(runs: Sequence[RecordedRun], judgements: Sequence[Judgement] | None = None) -> Verdict:
    """Make the verdict on runs that differ only in their seed.

    Args:
        runs: The runs; empty for a model that PPO did not train.
        judgements: A judgement of each policy; None takes the newest of each run, those against its SFT model first.
    """
    accuracy = next(filter(None, map(_accuracy_of, runs)), None)
    figures = _Figures.of(runs)
    if judgements is None:
        judged = [(run, found) for run in runs if (found := _newest_judgement(run)) is not None]
        judgements = [found for _, found in judged]
        seeds = tuple(run.settings.arguments.get("seed") for run, _ in judged)
    else:
        seeds = tuple(run.settings.arguments.get("seed") for run in runs) or (None,) * len(judgements)
    if not judgements:
        reasons, advice = _explained("not judged", accuracy, figures, None)
        sentence = "Not judged: no judge has compared the policy with the SFT model."
        judge_them = "Compare them with `rlhf-ppo judge`, on prompts that training has not seen."
        return Verdict("not judged", sentence, reasons, advice or judge_them, accuracy=accuracy)
    rates = SeedWinRates(
        [0 if seed is None else seed for seed in seeds],
        [each.win_rate for each in judgements],
        [each.interval for each in judgements],
        [each.length_controlled for each in judgements],
    )
    first = judgements[0]
    low, high = rates.interval
    judge = next(filter(None, (_accuracy_at(first.judge, run.directory.parent) for run in runs)), None)
    blind = judge if judge is not None and judge.is_at_chance else None
    outcome: Outcome = "undecided" if blind or low <= 0.5 <= high else "better" if low > 0.5 else "worse"
    opponent = "the SFT model" if any(_is_sft(run, first) for run in runs) else visible(first.opponent, one_line=True)
    is_own = any(first.judge in run.settings.made_of.get("rewards", ()) for run in runs)
    reasons, advice = _explained(outcome, accuracy, figures, _Judged(rates, first.num_prompts, is_own))
    return Verdict(
        outcome,
        _sentence(outcome, rates, first.num_prompts, opponent, "the policy" if runs else "the model", blind),
        reasons,
        advice,
        rates.mean,
        (low, high),
        first.num_prompts,
        seeds,
        opponent,
        visible(first.judge, one_line=True),
        accuracy,
    )


def _sentence(
    outcome: Outcome, rates: SeedWinRates, num_prompts: int, opponent: str, subject: str, blind: RewardAccuracy | None
) -> str:
    low, high = rates.interval
    of_seeds = f" over prompts and {len(rates.rates)} seeds" if len(rates.rates) > 1 else ""
    interval = f"95% interval{of_seeds} {100 * low:.1f} to {percent(high)}"
    figures = f"{percent(rates.mean)} of {num_prompts} prompts ({interval})"
    if blind is not None:
        return f"Undecided against {opponent}: {subject} wins {figures}, but the judge is {blind.state}: {blind}."
    if outcome == "undecided":
        return f"Undecided against {opponent}: {subject} wins {figures}, and the interval includes 50%."
    return f"{outcome.capitalize()} than {opponent}: {subject} wins {figures}."


def _newest_judgement(run: RecordedRun) -> Judgement | None:
    found = found_judgements(run.directory)
    against_sft = [each for each in found if _is_sft(run, each)]
    return (against_sft or found or [None])[-1]


def _is_sft(run: RecordedRun, judgement: Judgement) -> bool:
    return judgement.opponent in (run.settings.arguments.get("sft_model_path"), run.settings.made_of.get("policy"))


def _accuracy_of(run: RecordedRun) -> RewardAccuracy | None:
    """Return the accuracy of a run's reward model, which may have moved with the run's directory."""
    names = run.settings.made_of.get("rewards", ())
    return next(filter(None, (_accuracy_at(name, run.directory.parent) for name in names)), None)


def _accuracy_at(name: str, folder: Path) -> RewardAccuracy | None:
    """Return the accuracy of a reward model at a path, or in a folder to which it has moved."""
    return read_accuracy(Path(name)) or read_accuracy(folder / Path(name).name)


@dataclass(frozen=True)
class _Judged:
    """The judge's figures.

    Attributes:
        rates: The win rates.
        num_prompts: Number of judged prompts.
        is_own: Whether the judge is a reward that PPO was trained with.
    """

    rates: SeedWinRates
    num_prompts: int
    is_own: bool


@dataclass(frozen=True)
class _Figures:
    """Figures of training: means over runs of the first and the last values; None if they were not logged.

    Attributes:
        updates: Number of updates.
        kl: First and last KL to the reference, nats per response.
        length: First and last length of a response, tokens.
        entropy: First and last entropy, nats per token.
        ended: First and last share of responses that ended; None if nothing can end them.
        score: First and last score, in the reward's unit.
        score_spread: Standard deviation of the score between responses, at first.
    """

    updates: int
    kl: tuple[float, float] | None
    length: tuple[float, float] | None
    entropy: tuple[float, float] | None
    ended: tuple[float, float] | None
    score: tuple[float, float] | None
    score_spread: float

    @classmethod
    def of(cls, runs: Sequence[RecordedRun]) -> _Figures:
        """Read the figures of runs."""
        updates = max((int(entry.get("step", 0)) for run in runs for entry in run.log), default=0)
        spreads = [
            value
            for run in runs
            for name, value in next((entry for entry in run.log if "loss" in entry), {}).items()
            if name.startswith("rewards/") and name.endswith("/std")
        ]
        return cls(
            updates,
            _ends(runs, "objective/kl"),
            _ends(runs, "response/length_mean"),
            _ends(runs, "policy/entropy_avg"),
            _ends([run for run in runs if _has_stop(run)], "response/ended_frac"),
            _ends(runs, "objective/raw_scores") or _ends(runs, "objective/scores"),
            fmean(spreads) if spreads else 0.0,
        )


def _has_stop(run: RecordedRun) -> bool:
    return any(run.settings.arguments.get(name) for name in ("stop_token", "stop_token_id", "stop_strings"))


def _ends(runs: Sequence[RecordedRun], key: str) -> tuple[float, float] | None:
    """Return the mean over runs of a metric's first tenth of logs and of its last tenth."""
    ends = []
    for run in runs:
        values = [entry[key] for entry in run.log if "loss" in entry and math.isfinite(entry.get(key, math.nan))]
        if values:
            tenth = max(1, len(values) // 10)
            ends.append((fmean(values[:tenth]), fmean(values[-tenth:])))
    return (fmean(first for first, _ in ends), fmean(last for _, last in ends)) if ends else None


_Found = tuple[str, str]
"""A reason, and what to do about it."""


def _explained(
    outcome: Outcome, accuracy: RewardAccuracy | None, figures: _Figures, judged: _Judged | None
) -> tuple[tuple[str, ...], str]:
    """Return the likely reasons, and what to do about the first of them."""
    found = [
        *_of_reward_model(outcome, accuracy),
        *_of_training(outcome, figures),
        *(_of_judge(outcome, judged) if judged is not None else ()),
    ]
    return tuple(reason for reason, _ in found if reason), next((advice for _, advice in found if advice), "")


def _of_reward_model(outcome: Outcome, accuracy: RewardAccuracy | None) -> Iterator[_Found]:
    if accuracy is not None and accuracy.state is not None:
        yield f"The reward model is {accuracy.state}: {accuracy}.", accuracy.advice


def _of_training(outcome: Outcome, figures: _Figures) -> Iterator[_Found]:
    kl, length, score = figures.kl, figures.length, figures.score
    per_token = kl[1] / length[1] if kl and length and length[1] > 0 else 0.0
    if figures.ended and figures.ended[1] < FEW_ENDED:
        yield (
            f"Only {figures.ended[1]:.0%} of the responses end by themselves: the reward is that of beginnings.",
            "Raise response_length, or train the SFT model on shorter texts.",
        )
    if per_token > KL_PER_TOKEN_LARGE and kl:
        yield (
            f"The policy has moved far from the SFT model: the KL is {kl[1]:.1f} nats per response, {per_token:.2f} "
            "per token.",
            "Raise kl_coef, or lower learning_rate.",
        )
    if length and not 0.5 <= length[1] / max(length[0], 1e-9) <= 2:
        change = "shrunk" if length[1] < length[0] else "grown"
        yield (
            f"Responses have {change} from {length[0]:.1f} to {length[1]:.1f} tokens.",
            "Raise kl_coef, or change how the end of a response is paid (missing_eos_penalty).",
        )
    if (entropy := figures.entropy) and entropy[1] < ENTROPY_COLLAPSED * entropy[0]:
        yield (
            f"The entropy has fallen from {entropy[0]:.2f} to {entropy[1]:.2f} nats per token: the policy repeats "
            "itself.",
            "Raise kl_coef, or lower learning_rate.",
        )
    if outcome == "better":
        return
    rise = score[1] - score[0] if score else 0.0
    has_risen = rise > 0.1 * figures.score_spread
    is_still = kl is not None and abs(kl[1]) < KL_SMALL
    if outcome == "worse" and score and has_risen and not is_still:
        yield (
            f"The score rose from {score[0]:.2f} to {score[1]:.2f}, but the judge does not agree: the policy exploits "
            "the reward.",
            "Raise kl_coef, or train the reward model on more pairs.",
        )
    if score and not has_risen:
        yield (
            f"The score has not risen: {score[0]:z.2f} at first, {score[1]:z.2f} at the end.",
            "Raise total_episodes or learning_rate.",
        )
    if kl and is_still:
        yield (
            f"The policy has hardly changed: the KL to the SFT model is {kl[1]:z.2f} nats per response.",
            "Raise learning_rate or total_episodes, or lower kl_coef.",
        )
    if 0 < figures.updates < FEW_UPDATES:
        yield f"Training was short: {figures.updates} updates.", "Raise total_episodes."


def _of_judge(outcome: Outcome, judged: _Judged) -> Iterator[_Found]:
    rates = judged.rates
    controlled = [rate for rate in rates.length_controlled if rate is not None]
    if outcome == "better" and controlled and fmean(controlled) <= 0.5:
        yield (
            f"At equal length the policy wins {percent(fmean(controlled))}: the judge may only like long responses.",
            "Read the judged pairs in the report, or raise kl_coef.",
        )
    if judged.is_own:
        yield (
            "The judge is PPO's own reward: a policy wins its judgement long after it has stopped to improve.",
            "Judge with a reward model that PPO has not seen (the section judge_reward), or with a chat model.",
        )
    if outcome == "undecided" and (rates.interval[0] > 0.5 or rates.interval[1] < 0.5):
        yield "", "Judge again with a chat model, or with a reward model that is right on held-out pairs."
    elif outcome == "undecided":
        margin = abs(rates.mean - 0.5)
        enough = round((1.96 * 0.5 / max(margin, 1e-9)) ** 2, -1)
        if judged.num_prompts < enough <= 2000:
            yield "", f"Judge more prompts: about {enough:.0f} would decide a win rate of {percent(rates.mean)}."
        elif judged.num_prompts < FEW_PROMPTS:
            yield "", f"Judge more prompts: {judged.num_prompts} are too few; take at least {FEW_PROMPTS}."
        else:
            yield "", "Train longer (total_episodes), or with a larger learning_rate."
    elif len(rates.rates) == 1:
        yield "", "Train more seeds (`seeds: [0, 1, 2]`) to see whether others agree."
    else:
        yield "", "Read the judged pairs in the report."
