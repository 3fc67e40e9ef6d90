"""Health checks: signs in a run's logs that training goes wrong, likely causes, and options to change.

`History` has the logs as checks read them; the checks follow.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeGuard

from rlhf_ppo.config.arguments import HealthThresholds
from rlhf_ppo.reporting.judgements import JUDGED_RATE

Log = Mapping[str, Any]


@dataclass(frozen=True)
class RunContext:
    """Properties of a run that its metrics are compared with.

    Attributes:
        response_length: Longest response, tokens.
        max_grad_norm: Gradient norm at which gradients are clipped.
        num_episodes: Episodes of an update.
        can_end: Whether there is a stop token or a stop string.
        end_counts: Whether a missing stop token changes the score.
        judge: The evaluation metric that training does not see.
        reward_accuracy: Accuracy of the reward model on held-out pairs, if it was measured.
    """

    response_length: int = 53
    max_grad_norm: float = 1.0
    num_episodes: int = 64
    can_end: bool = True
    end_counts: bool = False
    judge: str = "eval_score"
    reward_accuracy: float | None = None


class History:
    """The logs of training, of evaluations and of the judge, in order.

    Args:
        logs: All logs of the run so far, as in `TrainerState.log_history`.
        run: Properties of the run.
    """

    def __init__(self, logs: Sequence[Log], run: RunContext | None = None) -> None:
        self.run = run or RunContext()
        self._series: dict[str, _Series] = {}
        self.updates: list[Log] = []
        self.evaluations: list[Log] = []
        self.judgements: list[Log] = []
        for log in logs:
            self.add(log)

    def add(self, log: Log) -> None:
        """Append a log, if it is one of training, or holds a win rate or the metric that training does not see."""
        if "loss" in log:
            self.updates.append(log)
        elif is_number(log.get(JUDGED_RATE)):
            self.judgements.append(log)
        elif is_number(log.get(self.run.judge)) and is_number(log.get("step")):
            self.evaluations.append(log)

    def last(self, key: str, count: int) -> list[float]:
        """Return a metric of the last `count` logs, or an empty list if a value is missing."""
        values = [log[key] for log in self.updates[-count:] if is_number(log.get(key))]
        return values if len(values) == count else []

    def first(self, key: str) -> float:
        """Return a metric of the first log that has it, or NaN."""
        return self._read(key).first

    def largest(self, key: str) -> float:
        """Return the largest value of a metric in all logs, or minus infinity."""
        return self._read(key).largest

    def newest_and_usual(self, key: str) -> tuple[float, float, int]:
        """Return the newest value of a metric, the median of the earlier values, and their number.

        Logs of critic warm-up, in which the policy does not change, are left out.
        """
        series = self._read(key)
        values, number = series.of_policy, len(series.of_policy) - 1
        if number < 1:
            return series.latest, math.nan, max(number, 0)
        place = bisect.bisect_left(values, series.latest)

        def earlier(index: int) -> float:
            return values[index if index < place else index + 1]

        return series.latest, (earlier((number - 1) // 2) + earlier(number // 2)) / 2, number

    def between(self, key: str, first: float, last: float) -> list[float]:
        """Return a metric of the logs from one step to another."""
        found: list[float] = []
        for log in reversed(self.updates):
            if is_number(step := log.get("step")):
                if step < first:
                    break
                if step <= last and is_number(log.get(key)):
                    found.append(log[key])
        return found[::-1]

    def _read(self, key: str) -> _Series:
        series = self._series.setdefault(key, _Series())
        while series.num_read < len(self.updates):
            series.read(self.updates[series.num_read], key)
        return series


@dataclass
class _Series:
    """Running summary of a metric, so that a check does not read all logs again.

    Attributes:
        num_read: Number of logs read.
        first: The first value, or NaN.
        largest: The largest value.
        of_policy: The values outside critic warm-up, sorted.
        latest: The latest of these.
    """

    num_read: int = 0
    first: float = math.nan
    largest: float = -math.inf
    of_policy: list[float] = field(default_factory=list)
    latest: float = math.nan

    def read(self, log: Log, key: str) -> None:
        self.num_read += 1
        if not is_number(value := log.get(key)):
            return
        self.first = value if math.isnan(self.first) else self.first
        self.largest = max(self.largest, value)
        if not log.get("val/critic_warmup"):
            bisect.insort(self.of_policy, value)
            self.latest = value


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


# The checks

Find = Callable[[History, HealthThresholds], str | None]


class Check(NamedTuple):
    """A health check.

    Attributes:
        name: Its name.
        thresholds: The fields of `HealthThresholds` that turn it on; it is off if all are None.
        symptom: The problem that it finds, in general.
        cause: The likely cause.
        options: Advice, each with the option of `PPOConfig` to change.
        find: Takes the history and the thresholds; returns the finding in words, or None.
        reads: The logs of a `History` that it reads.
    """

    name: str
    thresholds: tuple[str, ...]
    symptom: str
    cause: str
    options: tuple[str, ...]
    find: Find
    reads: Literal["updates", "evaluations", "judgements"] = "updates"

    @property
    def key(self) -> str:
        """Its key in the logs: 1 if it finds something, else 0."""
        return f"health/{self.name}"

    def message(self, finding: str) -> str:
        """Return the warning for a finding."""
        return f"Health ({self.name}): {finding}. Likely cause: {self.cause}. What to do: {self.advice}."

    def logs(self, history: History) -> list[Log]:
        """Return the logs that it reads."""
        return getattr(history, self.reads)

    @property
    def advice(self) -> str:
        """The options to change, in words."""
        return f"{', '.join(self.options[:-1])} or {self.options[-1]}"


CHECKS: list[Check] = []
"""All checks, in the order of their messages. Those of `patience` need that many logs in a row."""


def _check(
    name: str,
    symptom: str,
    cause: str,
    options: tuple[str, ...],
    reads: Literal["updates", "evaluations", "judgements"] = "updates",
    thresholds: tuple[str, ...] = (),
) -> Callable[[Find], Find]:
    """Add the decorated function to `CHECKS`; a check without `thresholds` has one with its own name."""

    def add(find: Find) -> Find:
        CHECKS.append(Check(name, thresholds or (name,), symptom, cause, options, find, reads))
        return find

    return add


# The policy: importance ratio, KL, clipping, entropy


@_check(
    "first_ratio",
    "the importance ratio is not 1 before the first optimizer step of an update",
    "the models do not give the same log-probabilities twice: dropout or noise in a model, 16-bit rounding, or an "
    "overridden step whose rollout and learning passes differ",
    ("compute in float32 (bf16=False)", "leave torch_compile off", "leave use_liger_kernel off"),
    thresholds=("first_logratio",),
)
def _first_ratio(history: History, limits: HealthThresholds) -> str | None:
    found = history.last("val/first_logratio", 1)
    if limits.first_logratio is None or not found or found[0] <= limits.first_logratio:
        return None
    return (
        f"before the first optimizer step of an update the log-ratio is {found[0]:.3g} nats (root mean square), not 0"
    )


@_check(
    "kl",
    "the KL to the reference is beyond its budget",
    "the policy has moved far from the reference, often towards responses that the reward overrates",
    ("raise kl_coef", "lower learning_rate", "lower num_ppo_epochs", "stop earlier (total_episodes)"),
    thresholds=("kl_per_token", "kl"),
)
def _kl_budget(history: History, limits: HealthThresholds) -> str | None:
    kls, lengths = (history.last(key, limits.patience) for key in ("objective/kl", "response/length_mean"))
    if not kls:
        return None
    if limits.kl is not None and min(kls) > limits.kl:
        return f"the KL to the reference is {kls[-1]:.3g} nats per response, above the budget of {limits.kl:g}"
    per_token = [kl / length for kl, length in zip(kls, lengths, strict=False) if length > 0]
    if limits.kl_per_token is not None and per_token and min(per_token) > limits.kl_per_token:
        return (
            f"the KL to the reference is {kls[-1]:.3g} nats per response, {per_token[-1]:.3g} per token, above "
            f"{limits.kl_per_token:g}"
        )
    return None


@_check(
    "kl_growth",
    "the KL to the reference rises ever faster",
    "the penalty does not hold the policy: the reward outweighs it, or updates are too large",
    ("raise kl_coef", "lower learning_rate", "bound the reward (score_clip)"),
)
def _kl_growth(history: History, limits: HealthThresholds) -> str | None:
    if limits.kl_growth is None:
        return None
    kls, length = history.last("objective/kl", 4 * limits.patience), limits.patience
    stretches = [kls[start : start + length] for start in range(0, len(kls), length)]
    overlap = any(min(after) <= max(before) for before, after in itertools.pairwise(stretches))
    if not stretches or overlap:  # overlapping stretches may differ by noise alone
        return None
    means = [statistics.fmean(each) for each in stretches]
    first, second, third = (after - before for before, after in itertools.pairwise(means))
    # A first rise from a small KL is normal; small rises of a large KL are noise.
    has_risen = means[-1] > max(0.1 * max(history.first("response/length_mean"), 1), 2 * means[0])
    if has_risen and second > limits.kl_growth * first and third > limits.kl_growth * second:
        return f"the KL rises ever faster: by {first:.3g}, {second:.3g} and {third:.3g} nats in equal times"
    return None


@_check(
    "negative_kl",
    "the KL to the reference is far below 0",
    "sampling is narrower than the distribution of the log-probabilities, or the policy avoids responses that the "
    "reference prefers",
    ("sample from all tokens (top_k=0)", "leave top_p at 1", "leave min_p unset", "lower learning_rate"),
)
def _negative_kl(history: History, limits: HealthThresholds) -> str | None:
    kls, lengths = (history.last(key, limits.patience) for key in ("objective/kl", "response/length_mean"))
    if limits.negative_kl is None or not kls or len(lengths) < len(kls):
        return None
    if all(kl < -limits.negative_kl * length for kl, length in zip(kls, lengths, strict=True)):
        return f"the KL to the reference is {kls[-1]:.3g} nats per response: below 0 on average of all episodes"
    return None


@_check(
    "clip_fraction",
    "much of each update is clipped",
    "updates are so large that the ratio leaves the clip range, where the loss has no gradient",
    ("lower learning_rate", "lower num_ppo_epochs", "lower num_mini_batches"),
)
def _clip_fraction(history: History, limits: HealthThresholds) -> str | None:
    share = _share_above(history, limits.clip_fraction, ("policy/clipfrac_avg",), limits.patience)
    return None if share is None else f"{share:.0%} of the tokens are clipped"


@_check(
    "entropy",
    "the policy is nearly certain of every token",
    "entropy collapse: a single way of answering has replaced all alternatives, so the policy no longer explores",
    ("raise kl_coef", "lower learning_rate", "raise temperature", "lower num_ppo_epochs"),
)
def _entropy(history: History, limits: HealthThresholds) -> str | None:
    fall = _fall(history, limits.entropy, "policy/entropy_avg", limits.patience)
    return None if fall is None else f"the entropy has fallen {fall} nats per token"


# Responses: their length, their end, and whether they differ


@_check(
    "length_limit",
    "responses grow to the limit",
    "the reward prefers long responses, or truncated responses are not penalized",
    ("set missing_eos_penalty", "set missing_eos_score", "raise response_length", "raise kl_coef"),
)
def _length_limit(history: History, limits: HealthThresholds) -> str | None:
    found, first = history.last("response/length_mean", limits.patience), history.first("response/length_mean")
    if limits.length_limit is None or not history.run.can_end or not found:
        return None
    limit = limits.length_limit * history.run.response_length
    if first >= 0.8 * limit or min(found) < limit:
        return None
    return f"responses have grown from {first:.3g} to {found[-1]:.3g} tokens, of at most {history.run.response_length}"


@_check(
    "length_shrinks",
    "responses shrink to a few tokens",
    "an early end is rewarded: the score or the KL of further tokens is negative, or the reward prefers short "
    "responses",
    (
        "change kl_coef",
        "weigh a reward for substance higher (reward_weights)",
        "lower missing_eos_penalty",
        "lower learning_rate",
    ),
)
def _length_shrinks(history: History, limits: HealthThresholds) -> str | None:
    fall = _fall(history, limits.length_shrinks, "response/length_mean", limits.patience)
    return None if fall is None else f"responses have shrunk {fall} tokens"


@_check(
    "ended",
    "hardly any response has a stop token",
    "response_length is too short for an answer, the model was not trained to end with this stop token, or it has "
    "unlearned it",
    (
        "raise response_length",
        "name the token that ends a turn (stop_token_id)",
        "name texts that do (stop_strings)",
        "set missing_eos_penalty",
    ),
)
def _ended(history: History, limits: HealthThresholds) -> str | None:
    found, first = history.last("response/ended_frac", limits.patience), history.first("response/ended_frac")
    if limits.ended is None or not history.run.can_end or not found or max(found) >= limits.ended:
        return None
    if first < 2 * limits.ended and not history.run.end_counts:
        return None
    before = f", where {1 - first:.0%} had none at first" if first > found[-1] else ""
    return f"{1 - found[-1]:.0%} of the responses have no stop token{before}"


@_check(
    "repeated",
    "most prompts get the same response",
    "mode collapse: a single response scores well on every prompt",
    ("raise kl_coef", "lower learning_rate", "add a reward that reads the prompt (reward_weights)"),
    thresholds=("unique",),
)
def _repeated(history: History, limits: HealthThresholds) -> str | None:
    found, first = history.last("response/unique_frac", limits.patience), history.first("response/unique_frac")
    if limits.unique is None or not found or max(found) >= limits.unique or first < 2 * limits.unique:
        return None
    return f"only {found[-1]:.0%} of the responses differ, where {first:.0%} did at first"


# Training signal: rewards, a held-out judge, values, gradients


@_check(
    "reward_variance",
    "all responses have nearly the same reward",
    "the reward is saturated or too sparse: without differences there is no advantage to learn from",
    (
        "raise score_clip",
        "raise per_device_train_batch_size",
        "raise gradient_accumulation_steps",
        "raise temperature",
        "stop earlier if it is the best reward (total_episodes)",
    ),
    thresholds=("reward_std",),
)
def _reward_variance(history: History, limits: HealthThresholds) -> str | None:
    if limits.reward_std is None or history.run.num_episodes < 2 or not history.updates:
        return None
    keys = [key for key in history.updates[-1] if key.startswith("rewards/") and key.endswith("/std")]
    found = {key: history.last(key, limits.patience) for key in keys}
    if not keys or not all(
        stds and max(stds) <= limits.reward_std * history.largest(key) for key, stds in found.items()
    ):
        return None
    names = ", ".join(key.removeprefix("rewards/").removesuffix("/std") for key in keys)
    return f"nearly all responses have the same reward ({names}): its standard deviation is {found[keys[0]][-1]:.2g}"


@_check(
    "judge",
    "a held-out judge falls while the score rises",
    "over-optimization: the policy raises the reward, but not the quality that the reward should measure",
    ("raise kl_coef", "keep the best model (load_best_model_at_end)", "stop earlier (total_episodes)"),
    reads="evaluations",
    thresholds=("judge_falls",),
)
def _judge(history: History, limits: HealthThresholds) -> str | None:
    if limits.judge_falls is None or len(history.evaluations) <= limits.judge_falls:
        return None
    last = history.evaluations[-limits.judge_falls - 1 :]
    verdicts = [float(log[history.run.judge]) for log in last]
    if not all(after < before for before, after in itertools.pairwise(verdicts)):
        return None
    between = (last[0]["step"], last[-1]["step"])
    # Scaled scores do not show a rise: their mean and deviation change too.
    scores = history.between("objective/raw_scores", *between) or history.between("objective/scores", *between)
    half = len(scores) // 2
    if half == 0 or statistics.fmean(scores[half:]) <= statistics.fmean(scores[:half]):
        return None
    return f"{history.run.judge} has fallen from {verdicts[0]:.3g} to {verdicts[-1]:.3g} while the score rose"


@_check(
    "reward_accuracy",
    "the reward model hardly knows the better response",
    "the reward model has learned little: too few pairs, too few epochs, or pairs whose labels contradict each other",
    ("raise num_train_epochs of `rlhf-ppo reward`", "take another reward_model_path"),
)
def _reward_accuracy(history: History, limits: HealthThresholds) -> str | None:
    accuracy = history.run.reward_accuracy
    if limits.reward_accuracy is None or accuracy is None or accuracy >= limits.reward_accuracy:
        return None
    return f"the reward model is right on {accuracy:.1%} of held-out pairs, where guessing is right on 50%"


@_check(
    "win_rate",
    "the judge prefers the responses of the model that training started from",
    "the policy exploits the reward, or the reward model does not share the judge's preferences",
    ("raise kl_coef", "lower learning_rate", "take a better reward model (reward_model_path)"),
    reads="judgements",
)
def _win_rate(history: History, limits: HealthThresholds) -> str | None:
    if limits.win_rate is None or not history.judgements:
        return None
    rate, low, high = (history.judgements[-1].get(f"{JUDGED_RATE}{end}", math.nan) for end in ("", "_low", "_high"))
    if not high < limits.win_rate:
        return None
    return f"the policy wins {rate:.1%} of the judged prompts (95% interval {100 * low:.1f} to {high:.1%})"


@_check(
    "explained_variance",
    "the values explain the returns worse than a constant would, for long",
    "the value model does not keep up: it learns too slowly, or its targets move too fast",
    ("raise vf_coef", "raise cliprange_value", "raise num_ppo_epochs", "scale the scores (score_scaling)"),
)
def _explained_variance(history: History, limits: HealthThresholds) -> str | None:
    found = history.last("val/explained_variance", limits.explained_variance_logs)
    if limits.explained_variance is None or not found or max(found) >= limits.explained_variance:
        return None
    return (
        f"the explained variance has been below {limits.explained_variance:g} for {len(found)} logs: {found[-1]:.3g}"
    )


@_check(
    "critic",
    "an audit finds the values no better than the mean return of the prompt",
    "the value model has not learned to tell good beginnings from bad ones, or it is broken",
    ("raise critic_learning_rate", "raise critic_warmup_steps", "raise num_ppo_epochs"),
    thresholds=("critic_gain",),
)
def _critic(history: History, limits: HealthThresholds) -> str | None:
    gain, low = (history.last(f"critic/gain_over_prompt{end}", 1) for end in ("", "_low"))
    if limits.critic_gain is None or not gain or not low or low[0] > limits.critic_gain:
        return None
    return (
        f"the values explain {gain[0]:+.3g} more of the Monte Carlo returns' variance than the prompt's mean does "
        f"(95% interval from {low[0]:.3g}); "
        + ("audit more held-out prompts to be sure" if gain[0] > limits.critic_gain else "audit_critic() shows more")
    )


@_check(
    "gradient_spike",
    "a gradient is many times as large as usual",
    "a mini-batch with an extreme reward or ratio; the gradient is clipped to max_grad_norm, but spikes may recur",
    ("bound the reward (score_clip)", "lower learning_rate", "lower max_grad_norm"),
)
def _gradient_spike(history: History, limits: HealthThresholds) -> str | None:
    if limits.gradient_spike is None or not history.last("grad_norm", 1):
        return None
    norm, usual, number = history.newest_and_usual("grad_norm")
    if number < limits.patience or norm <= max(limits.gradient_spike * usual, history.run.max_grad_norm):
        return None
    return f"the gradient norm is {norm:.3g}, where it was {usual:.3g}"


@_check(
    "no_gradient",
    "there is no gradient",
    "all advantages are 0, all tokens are clipped, or nothing is trainable",
    (
        "lower learning_rate if the policy has collapsed",
        "raise score_clip if all scores are cut",
        "check which adapter is trained (model_adapter_name)",
    ),
)
def _no_gradient(history: History, limits: HealthThresholds) -> str | None:
    found = history.last("grad_norm", limits.patience)
    if limits.no_gradient is None or not found or max(found) > limits.no_gradient:
        return None
    return f"the gradient norm is {found[-1]:.2g}"


# Episodes of several turns


@_check(
    "failed_calls",
    "most calls of tools fail",
    "the policy calls tools or arguments that do not exist, or a tool is broken or too slow",
    (
        "read the answers (num_completions_to_keep)",
        "raise tool_timeout",
        "start from a model that knows the tools (sft_model_path)",
    ),
)
def _failed_calls(history: History, limits: HealthThresholds) -> str | None:
    share = _share_above(history, limits.failed_calls, ("tools/failure_frequency",), limits.patience)
    return None if share is None else f"{share:.0%} of the calls of tools fail"


@_check(
    "cut_episodes",
    "most episodes are cut",
    "a limit is too low for the task, or the policy does not come to an end",
    ("raise response_length", "raise max_tool_calling_iterations", "raise tool_timeout", "set missing_eos_penalty"),
)
def _cut_episodes(history: History, limits: HealthThresholds) -> str | None:
    cuts = [f"episode/cut_by_{cut}_frac" for cut in ("length", "calls", "time")]
    share = _share_above(history, limits.cut_episodes, cuts, limits.patience)
    return None if share is None else f"{share:.0%} of the episodes are cut by a limit"


@_check(
    "no_calls",
    "the policy no longer calls tools",
    "calls cost more than they bring: they fail, they take length, or the answer without them is paid as well",
    ("raise the weight of the reward that calls earn (reward_weights)", "raise kl_coef", "lower learning_rate"),
)
def _no_calls(history: History, limits: HealthThresholds) -> str | None:
    fall = _fall(history, limits.no_calls, "tools/call_frequency", limits.patience)
    return None if fall is None else f"calls of tools have fallen {fall} per episode"


def _fall(history: History, share: float | None, metric: str, count: int) -> str | None:
    """Return `from <first> to <newest>` if a metric was below a share of its first value in the last `count` logs."""
    found, first = history.last(metric, count), history.first(metric)
    if share is None or not found or not max(found) < share * first:
        return None
    return f"from {first:.3g} to {found[-1]:.3g}"


def _share_above(history: History, limit: float | None, metrics: Sequence[str], count: int) -> float | None:
    """Return the newest sum of metrics if it was above a limit in the last `count` logs."""
    found = [history.last(metric, count) for metric in metrics]
    if limit is None or not all(found):
        return None
    sums = [sum(values) for values in zip(*found, strict=True)]
    return sums[-1] if min(sums) > limit else None
