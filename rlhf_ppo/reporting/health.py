"""Health checks: signs in a run's logs that training goes wrong, likely causes, and options to change."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import Sizes
from rlhf_ppo.models.adapters import origin
from rlhf_ppo.reporting.console import Log, beside_bars, use_console
from rlhf_ppo.reporting.judgements import AT_CHANCE, TOO_FEW_PAIRS, read_accuracy
from rlhf_ppo.terminal import visible_logger

logger = visible_logger(__name__)

PATIENCE = 3
"""Number of consecutive logs in which a noisy metric must be beyond its limit."""
SILENT_LOGS = 10
"""Number of logs without a finding after which a check may warn again."""


@dataclass(frozen=True)
class RunContext:
    """Properties of a run that its metrics are compared with.

    Attributes:
        num_episodes: Episodes of an update.
        explained_variance_logs: Number of consecutive logs in which the explained variance must be near 0 or below.
        reward_accuracy: State and accuracy, in words, of a reward model that may be at chance on held-out pairs;
            None: there is none.
        reward_weights: The weight of each reward by name; one without has weight 1.
    """

    num_episodes: int = 64
    explained_variance_logs: int = 20
    reward_accuracy: str | None = None
    reward_weights: Mapping[str, float] = field(default_factory=dict)


class Check(NamedTuple):
    """A health check.

    Attributes:
        name: Its name.
        find: Takes the logs of training so far and the run's properties; returns the finding in words, or None.
        symptom: The problem that it finds, in general.
        cause: The likely cause.
        options: Advice, each with the option of `PPOConfig` to change.
    """

    name: str
    find: Callable[[Sequence[Log], RunContext], str | None]
    symptom: str
    cause: str
    options: tuple[str, ...]

    @property
    def key(self) -> str:
        """Its key in the logs: 1 if it finds something, else 0."""
        return f"health/{self.name}"

    @property
    def advice(self) -> str:
        """The options to change, in words."""
        return f"{', '.join(self.options[:-1])} or {self.options[-1]}"

    def message(self, finding: str) -> str:
        """Return the warning for a finding."""
        return f"Health ({self.name}): {finding}. Likely cause: {self.cause}. What to do: {self.advice}."


def _values(logs: Sequence[Log], key: str) -> list[float]:
    values = (log.get(key) for log in logs)
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _last(logs: Sequence[Log], key: str, count: int = PATIENCE) -> list[float]:
    """Return a metric of the last `count` logs, or an empty list if a value is missing."""
    values = _values(logs[-count:], key)
    return values if len(values) == count else []


def _first(logs: Sequence[Log], key: str) -> float:
    """Return a metric of the first log that has it, or NaN."""
    return next((value for log in logs for value in _values([log], key)), math.nan)


def _kl(logs: Sequence[Log], run: RunContext) -> str | None:
    kls, lengths = _last(logs, "objective/kl"), _last(logs, "response/length_mean")
    per_token = [kl / length for kl, length in zip(kls, lengths, strict=False) if length > 0]
    if not per_token or min(per_token) <= 1:
        return None
    return f"the KL to the reference is {kls[-1]:.3g} nats per response, {per_token[-1]:.3g} per token, above 1"


def _kl_growth(logs: Sequence[Log], run: RunContext) -> str | None:
    kls = _last(logs, "objective/kl", 4 * PATIENCE)
    periods = [kls[start : start + PATIENCE] for start in range(0, len(kls), PATIENCE)]
    overlap = any(min(after) <= max(before) for before, after in itertools.pairwise(periods))
    if not periods or overlap:  # overlapping periods may differ by noise alone
        return None
    means = [statistics.fmean(period) for period in periods]
    first, second, third = (after - before for before, after in itertools.pairwise(means))
    # A first rise from a small KL is normal; small rises of a large KL are noise.
    has_risen = means[-1] > max(0.1 * max(_first(logs, "response/length_mean"), 1), 2 * means[0])
    if has_risen and second > 1.75 * first and third > 1.75 * second:
        return f"the KL rises ever faster: by {first:.3g}, {second:.3g} and {third:.3g} nats in equal times"
    return None


def _entropy(logs: Sequence[Log], run: RunContext) -> str | None:
    last, first = _last(logs, "policy/entropy_avg"), _first(logs, "policy/entropy_avg")
    if not last or not max(last) < 0.1 * first:
        return None
    return f"the entropy has fallen from {first:.3g} to {last[-1]:.3g} nats per token"


def _repeated(logs: Sequence[Log], run: RunContext) -> str | None:
    last, first = _last(logs, "response/unique_frac"), _first(logs, "response/unique_frac")
    if not last or max(last) >= 0.2 or first < 0.4:
        return None
    return f"only {last[-1]:.0%} of the responses differ, where {first:.0%} did at first"


def deviation_weights(entry: Log, reward_weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weight of each reward by the key of its standard deviation in a log.

    Args:
        entry: A log of training.
        reward_weights: The weight of each reward by name; one without has weight 1.
    """
    names = [key[len("rewards/") : -len("/std")] for key in entry if re.fullmatch("rewards/.*/std", key)]
    return {f"rewards/{name}/std": reward_weights.get(name, 1.0) for name in names}


def _reward_variance(logs: Sequence[Log], run: RunContext) -> str | None:
    keys = [name for name, weight in deviation_weights(logs[-1], run.reward_weights).items() if weight]
    last = {key: _last(logs, key) for key in keys}
    constant = [stds and max(stds) <= 0.05 * max(_values(logs, key)) for key, stds in last.items()]
    if run.num_episodes < 2 or not keys or not all(constant):
        return None
    names = ", ".join(key.removeprefix("rewards/").removesuffix("/std") for key in keys)
    return f"nearly all responses have the same reward ({names}): its standard deviation is {last[keys[0]][-1]:.2g}"


def _explained_variance(logs: Sequence[Log], run: RunContext) -> str | None:
    last = _last(logs, "val/explained_variance", run.explained_variance_logs)
    if not last or max(last) >= 0.01:  # of values that never change it is 0
        return None
    return f"the explained variance has been below 0.01 for {len(last)} logs: {last[-1]:.3g}"


def _reward_accuracy(logs: Sequence[Log], run: RunContext) -> str | None:
    return run.reward_accuracy and f"the reward model is {run.reward_accuracy}"


def _critic(logs: Sequence[Log], run: RunContext) -> str | None:
    gain, low = _last(logs, "critic/gain_over_prompt", 1), _last(logs, "critic/gain_over_prompt_low", 1)
    if not gain or not low or low[0] > 0:
        return None
    return (
        f"the values explain {gain[0]:+.3g} more of the Monte Carlo returns' variance than the prompt's mean does "
        f"(95% interval from {low[0]:.3g})"
    )


def _failed_calls(logs: Sequence[Log], run: RunContext) -> str | None:
    last, calls = _last(logs, "tools/failure_frequency"), _values(logs, "tools/call_frequency")
    if len(calls) >= PATIENCE and not any(calls):
        return "no response has called a tool so far"
    return f"{last[-1]:.0%} of the tool calls fail" if last and min(last) > 0.5 else None


def _cut_episodes(logs: Sequence[Log], run: RunContext) -> str | None:
    cuts = [_last(logs, f"episode/cut_by_{cut}_frac") for cut in ("length", "calls", "time")]
    if not all(cuts):
        return None
    shares = [sum(of_update) for of_update in zip(*cuts, strict=True)]
    return f"{shares[-1]:.0%} of the episodes are cut by a limit" if min(shares) > 0.5 else None


CHECKS = (
    Check(
        "kl",
        _kl,
        "the KL to the reference is beyond its budget",
        "the policy has moved far from the reference, often towards responses that the reward overrates",
        ("raise kl_coef", "lower learning_rate", "lower num_ppo_epochs", "stop earlier (total_episodes)"),
    ),
    Check(
        "kl_growth",
        _kl_growth,
        "the KL to the reference rises ever faster",
        "the penalty does not hold the policy: the reward outweighs it, or updates are too large",
        ("raise kl_coef", "lower learning_rate", "bound the reward (score_clip)"),
    ),
    Check(
        "entropy",
        _entropy,
        "the policy is nearly certain of every token",
        "entropy collapse: a single way of answering has replaced all alternatives, so the policy no longer explores",
        ("raise kl_coef", "lower learning_rate", "raise temperature", "lower num_ppo_epochs"),
    ),
    Check(
        "repeated",
        _repeated,
        "most prompts get the same response",
        "mode collapse: a single response scores well on every prompt",
        ("raise kl_coef", "lower learning_rate", "add a reward that reads the prompt (reward_weights)"),
    ),
    Check(
        "reward_variance",
        _reward_variance,
        "all responses have nearly the same reward",
        "the reward is saturated or too sparse: without differences there is no advantage to learn from",
        ("raise per_device_train_batch_size", "raise temperature", "stop earlier (total_episodes)"),
    ),
    Check(
        "reward_accuracy",
        _reward_accuracy,
        "held-out pairs do not show that the reward model knows the better response",
        "the reward model has learned little: too few pairs, too few epochs, or labels that contradict each other",
        ("raise num_train_epochs of `rlhf-ppo reward`", "train another reward_model_path on more pairs"),
    ),
    Check(
        "explained_variance",
        _explained_variance,
        "for a long time the values explain the returns no better than a constant would",
        "the value model does not keep up: it learns too slowly, or its targets move too fast",
        ("raise critic_learning_rate", "raise vf_coef", "raise num_ppo_epochs", "scale the scores (score_scaling)"),
    ),
    Check(
        "critic",
        _critic,
        "an audit finds the values no better than the mean return of the prompt",
        "the value model has not learned to tell good beginnings from bad ones, or the audit has too few prompts",
        ("raise critic_learning_rate", "raise critic_warmup_steps", "raise num_ppo_epochs"),
    ),
    Check(
        "failed_calls",
        _failed_calls,
        "most tool calls fail, or there are none",
        "the policy does not know how to call these tools, or a tool is broken or too slow",
        ("raise tool_timeout", "start from a model that knows the tools (sft_model_path)"),
    ),
    Check(
        "cut_episodes",
        _cut_episodes,
        "most episodes are cut",
        "a limit is too low for the task, or the policy does not come to an end",
        (
            "raise response_length",
            "raise max_tool_calling_iterations",
            "raise tool_timeout",
            "set missing_eos_penalty",
        ),
    ),
)
"""All checks, in the order of their messages."""


class HealthCallback(TrainerCallback):
    """Adds `health/<check>` (0 or 1) to each log of training, and warns once of each finding.

    It must come before the callbacks that write logs elsewhere. Its whole state is in the log history, so a resumed
    run repeats no warning and misses none. After a warning, a check is silent until `SILENT_LOGS` logs had no finding.

    Args:
        run: Properties of the run.
    """

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self._logs: list[Log] = []

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Read the history of a resumed run."""
        self._logs = [log for log in state.log_history if "loss" in log]

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, float] | None = None, **_: object
    ) -> None:
        """Run the checks on a log of training."""
        if not logs or "loss" not in logs:
            return
        entry = state.log_history[-1]
        self._logs.append(entry)
        for check in CHECKS:
            finding = check.find(self._logs, self.run)
            entry[check.key] = logs[check.key] = float(finding is not None)
            if finding is not None and state.is_world_process_zero and not _has_warned(check, self._logs):
                with beside_bars():
                    logger.warning(check.message(finding))


def _has_warned(check: Check, logs: Sequence[Log]) -> bool:
    return any(log.get(check.key) for log in logs[-SILENT_LOGS - 1 : -1])


def add_console_and_health(
    trainer: Trainer,
    args: PPOConfig,
    sizes: Sizes,
    reward_models: Sequence[nn.Module],
    reward_weights: Mapping[str, float],
) -> None:
    """Print a trainer's logs as `log_console` says, and check its health before other callbacks get a log.

    Args:
        trainer: A `PPOTrainer` with Trainer's callbacks.
        args: Its arguments.
        sizes: The sizes of the run.
        reward_models: The reward models, which may have their accuracy beside them.
        reward_weights: The weight of each reward by name.
    """
    use_console(trainer, args.log_console)
    if args.health_checks:
        num_logs = 0.0  # unknown
        if args.logging_strategy == "steps":
            every = args.logging_steps if args.logging_steps >= 1 else args.logging_steps * sizes.num_total_batches
            num_logs = sizes.num_total_batches / every
        measured = filter(None, map(read_accuracy, filter(None, map(origin, reward_models))))
        problems = (f"{model.state}, {model}" for model in measured if model.state in (AT_CHANCE, TOO_FEW_PAIRS))
        run = RunContext(
            sizes.batch_size,
            min(RunContext.explained_variance_logs, max(10, int(num_logs / 2))),  # a short run can be warned too
            next(problems, None),
            reward_weights,
        )
        trainer.callback_handler.callbacks.insert(0, HealthCallback(run))


def health_settings(callbacks: Sequence[object]) -> dict[str, Any]:
    """Return the run's properties for `ppo_settings.json`; empty without health checks."""
    return next((asdict(callback.run) for callback in callbacks if isinstance(callback, HealthCallback)), {})


def warnings_of(log: Sequence[Log], run: RunContext) -> dict[str, list[tuple[int, str]]]:
    """Return the warnings of a recorded run.

    Args:
        log: The run's log, with `health/<check>`.
        run: Properties of the run.

    Returns:
        For each check that warned, the updates and the findings.
    """
    logs, warnings = list[Log](), dict[str, list[tuple[int, str]]]()
    for entry in filter(lambda entry: "loss" in entry, log):
        logs.append(entry)
        for check in CHECKS:
            if entry.get(check.key) and not _has_warned(check, logs) and (finding := check.find(logs, run)):
                warnings.setdefault(check.name, []).append((int(entry["step"]), finding))
    return warnings
