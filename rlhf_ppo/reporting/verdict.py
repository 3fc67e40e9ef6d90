"""The verdict on a policy: better or worse than the model it started from, and up to three likely reasons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rlhf_ppo.data.files import write_json
from rlhf_ppo.reporting.health import deviation_weights
from rlhf_ppo.reporting.judgements import (
    FEW,
    Judgement,
    RewardAccuracy,
    SeedWinRates,
    percent,
    read_accuracy,
)
from rlhf_ppo.reporting.run_log import RecordedRun, read_runs
from rlhf_ppo.terminal import visible

VERDICT = "verdict.json"
"""The file with a `Verdict`, beside the judge's tables and in the directory of a pipeline."""

Outcome = Literal["better", "worse", "undecided", "not judged"]

KL_PER_TOKEN_LARGE = 0.5
"""KL to the reference, nats per token, above which a policy has moved far from it."""
KL_SMALL = 0.2
"""KL to the reference, nats per response, below which a judge can hardly see a difference."""
FEW_UPDATES = 50
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
        reasons: Up to three likely reasons, or doubts of a better policy, each with what to do.
        win_rate: Mean over seeds of the share of prompts won, with a tie as half; None if nothing was judged.
        interval: Its 95% interval, over prompts and, with several seeds, over seeds.
        seeds: Seeds of the judged policies.
        opponent: The model that the policy was compared with; None if nothing was judged.
    """

    outcome: Outcome
    sentence: str
    reasons: tuple[str, ...]
    win_rate: float | None = None
    interval: tuple[float, float] | None = None
    seeds: tuple[int | None, ...] = ()
    opponent: str | None = None

    def lines(self) -> Iterator[str]:
        """Yield the verdict, then "Why:" with the reasons ("But:" with doubts of a better policy)."""
        yield self.sentence
        if self.reasons:
            yield f"{'But' if self.outcome == 'better' else 'Why'}: {' '.join(self.reasons)}"

    def save(self, folder: Path) -> None:
        """Write `verdict.json` into a directory."""
        write_json(folder / VERDICT, asdict(self))


def recorded_runs(directories: Sequence[str | Path]) -> list[RecordedRun]:
    """Read the runs of PPO among directories of models; others, and runs with a damaged file, are left out."""
    runs = []
    for directory in directories:
        try:
            runs += read_runs([directory])
        except (ValueError, KeyError, OSError):
            continue
    return runs


def verdict_of(runs: Sequence[RecordedRun], judgements: Sequence[Judgement] | None = None) -> Verdict:
    """Make the verdict on runs that differ only in their seed.

    Args:
        runs: The runs; empty for a model that PPO did not train.
        judgements: A judgement of each policy; None takes the newest of the first run, those against the model it
            started from first, and the newest of each other run against the same opponent by the same judge.
    """
    judged = list(runs)
    if judgements is None:
        newest = _judged_alike(runs)
        judged, judgements = [run for run, _ in newest], [judgement for _, judgement in newest]
    names = [name for run in runs for name in run.settings.made_of.get("rewards", ())]
    reward = next(filter(None, (_accuracy_of(name, runs) for name in names)), None)
    if not judgements:
        sentence = "Not judged: let `rlhf-ppo judge` compare the policy with its start on unseen prompts."
        return Verdict("not judged", sentence, _first(_of_reward_model(reward), _of_training("not judged", runs)))
    first = judgements[0]
    rates = SeedWinRates(
        [judgement.win_rate for judgement in judgements],
        [judgement.interval for judgement in judgements],
        [judgement.length_controlled for judgement in judgements],
    )
    low, high = rates.interval
    judge = _accuracy_of(first.judge, runs)
    is_blind = judge is not None and judge.interval[0] <= 0.5
    outcome: Outcome = "undecided" if is_blind or low <= 0.5 <= high else "better" if low > 0.5 else "worse"
    opponent = visible(first.opponent, one_line=True)
    of_seeds = f" over prompts and {len(rates.rates)} seeds" if len(rates.rates) > 1 else ""
    sentence = (
        f"{outcome.capitalize()} {'against' if outcome == 'undecided' else 'than'} {opponent}: the "
        f"{'policy' if runs else 'model'} wins {percent(rates.mean)} of {first.num_prompts} prompts (95% interval"
        f"{of_seeds} {100 * low:.1f} to {percent(high)})"
    )
    if judge is not None and is_blind:
        sentence += f", but the judge is {judge.state}: {judge}"
    elif outcome == "undecided":
        sentence += ", and the interval includes 50%"
    reasons = _first(
        _of_judgement(first, runs),
        _of_reward_model(reward),
        _of_training(outcome, runs),
        _of_judge(outcome, rates, first.num_prompts),
    )
    seeds = tuple(run.settings.arguments.get("seed") for run in judged) or (None,) * len(judgements)
    return Verdict(outcome, f"{sentence}.", reasons, rates.mean, (low, high), seeds, opponent)


def _judged_alike(runs: Sequence[RecordedRun]) -> list[tuple[RecordedRun, Judgement]]:
    """Return the runs that were judged against the first one's opponent by its judge, with the newest judgement."""
    first = next(filter(None, map(_newest_judgement, runs)), None)
    newest = {
        run.directory: (run, each)
        for run in runs
        for each in run.judgements
        if first is not None and (each.opponent, each.judge) == (first.opponent, first.judge)
    }
    return [*newest.values()]


def _newest_judgement(run: RecordedRun) -> Judgement | None:
    judgements = run.judgements
    starts = (run.settings.arguments.get("sft_model_path"), run.settings.made_of.get("policy"))
    against_start = [judgement for judgement in judgements if judgement.opponent in starts]
    return (against_start or judgements or [None])[-1]


def _accuracy_of(name: str, runs: Sequence[RecordedRun]) -> RewardAccuracy | None:
    """Return the accuracy of a reward model, which may have moved together with a run beside it."""
    folders = [Path(name)]
    if not folders[0].exists():
        folders = [run.directory.parent / Path(name).name for run in runs if _was_beside(run, name)]
    return next(filter(None, map(read_accuracy, folders)), None)


def _was_beside(run: RecordedRun, name: str) -> bool:
    """Return whether a path lay in the directory of a run's directory when the run was trained."""
    output_dir = run.settings.arguments.get("output_dir")
    return output_dir is not None and Path(output_dir).parent == Path(name).parent


# ---- Reasons, each with what to do ----


def _first(*reasons: Iterator[str]) -> tuple[str, ...]:
    return tuple(itertools.islice(itertools.chain(*reasons), 3))


def _of_reward_model(accuracy: RewardAccuracy | None) -> Iterator[str]:
    if accuracy is not None and accuracy.state is not None:
        yield f"The reward model is {accuracy.state}, {accuracy}: {accuracy.advice}."


def _of_training(outcome: Outcome, runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Yield reasons in means over runs of the first and the last values."""
    kl, length = _ends(runs, "objective/kl"), _ends(runs, "response/length_mean")
    entropy = _ends(runs, "policy/entropy_avg")
    score = _ends(runs, "objective/raw_scores") or _ends(runs, "objective/scores")
    ended = _ends([run for run in runs if _has_stop(run)], "response/ended_frac")
    if ended and ended[1] < FEW_ENDED:
        yield (
            f"Only {ended[1]:.0%} of the responses end by themselves: raise response_length, or first train on texts "
            "that end."
        )
    if kl and length and kl[1] > KL_PER_TOKEN_LARGE * length[1]:
        yield (
            f"The policy has moved far from the reference, {kl[1] / length[1]:.2f} nats of KL per token: raise "
            "kl_coef or lower learning_rate."
        )
    if length and not 0.5 <= length[1] / max(length[0], 1e-9) <= 2:
        yield (
            f"Responses went from {length[0]:.1f} to {length[1]:.1f} tokens: raise kl_coef or change "
            "missing_eos_penalty."
        )
    if entropy and entropy[1] < ENTROPY_COLLAPSED * entropy[0]:
        yield (
            f"The entropy has fallen from {entropy[0]:.2f} to {entropy[1]:.2f} nats per token: raise kl_coef or lower "
            "learning_rate."
        )
    if outcome == "better":
        return
    is_still = kl is not None and abs(kl[1]) < KL_SMALL
    has_risen = score is not None and score[1] - score[0] > 0.1 * _spread(runs)
    if outcome == "worse" and score and has_risen and not is_still:
        yield (
            f"The score rose from {score[0]:.2f} to {score[1]:.2f}, but the judge does not agree: the policy exploits "
            "the reward; raise kl_coef."
        )
    if score and not has_risen:
        yield f"The score has not risen, from {score[0]:z.2f} to {score[1]:z.2f}: raise total_episodes."
    if kl and is_still:
        yield f"The policy has hardly changed, {kl[1]:z.2f} nats of KL per response: raise learning_rate."
    updates = max((int(entry.get("step", 0)) for run in runs for entry in run.log), default=0)
    if 0 < updates < FEW_UPDATES:
        yield f"Training was short, {updates} updates: raise total_episodes."


def _of_judgement(judgement: Judgement, runs: Sequence[RecordedRun]) -> Iterator[str]:
    rewards = {identity for run in runs for identity in run.settings.made_of.get("reward_identities", ())}
    if not rewards.isdisjoint(judgement.identities):
        yield "The judge is PPO's own reward: judge with a reward model that PPO has not seen, or with a chat model."
    if judgement.num_prompts < FEW:
        yield f"Only {judgement.num_prompts} prompts were judged: judge more (`num_prompts`)."


def _of_judge(outcome: Outcome, rates: SeedWinRates, num_prompts: int) -> Iterator[str]:
    controlled = [rate for rate in rates.length_controlled if rate is not None]
    if outcome == "better" and controlled and fmean(controlled) <= 0.5:
        yield f"At equal length the policy wins {percent(fmean(controlled))}: the judge may prefer long responses."
    if outcome == "undecided" and rates.interval[0] <= 0.5 <= rates.interval[1]:
        enough = round((1.96 * 0.5 / max(abs(rates.mean - 0.5), 1e-9)) ** 2, -1)
        if enough <= num_prompts and len(rates.rates) > 1:
            yield "The seeds differ: train more seeds."
        elif num_prompts < enough <= 2000:
            would = f"About {enough:.0f} prompts would decide a win rate of {percent(rates.mean)}"
            yield f"{would}: judge more (`num_prompts`)."


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


def _spread(runs: Sequence[RecordedRun]) -> float:
    """Return the standard deviation of the score between responses in the first log, if rewards are independent."""
    spreads = []
    for run in runs:
        first: Any = next((entry for entry in run.log if "loss" in entry), {})
        weights = deviation_weights(first, run.settings.made_of.get("reward_weights", {}))
        spreads.append(math.hypot(*(weight * first[name] for name, weight in weights.items())))
    return fmean(spreads) if spreads else 0.0
