"""The callback that runs the health checks at each log of training and at each evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from transformers import Trainer, TrainerCallback

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.arguments import HealthThresholds
from rlhf_ppo.config.ppo_config import Sizes
from rlhf_ppo.reporting.console import beside_bars, use_console
from rlhf_ppo.reporting.health_checks import CHECKS, Check, History, Log, RunContext
from rlhf_ppo.reporting.judgements import read_accuracy
from rlhf_ppo.reporting.model_card import model_origin
from rlhf_ppo.terminal import visible_logger

logger = visible_logger(__name__)

SILENT_LOGS = 10
"""Number of logs without a finding after which a check may warn again."""


class HealthCallback(TrainerCallback):
    """Adds `health/<check>` (0 or 1) to each log that a check reads, and warns once of each finding.

    It must come before the callbacks that write logs elsewhere. Its whole state is in the log history, so a resumed
    run repeats and forgets nothing. After a warning, a check is silent until `SILENT_LOGS` logs had no finding.

    Args:
        thresholds: The thresholds of the checks.
        run: Properties of the run.
    """

    def __init__(self, thresholds: HealthThresholds | None = None, run: RunContext | None = None) -> None:
        self.thresholds, self.run = thresholds or HealthThresholds(), run or RunContext()
        self.checks = [
            check for check in CHECKS if any(getattr(self.thresholds, name) is not None for name in check.thresholds)
        ]
        self._history: History | None = None  # None outside of training

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the history of a resumed run."""
        self._history = History(state.log_history, self.run)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Run the checks that read the new log."""
        if not logs or not state.log_history or self._history is None:
            return
        entry = state.log_history[-1]
        self._history.add(entry)
        for check in self.checks:
            if not _reads(check, self._history, entry):
                continue
            finding = check.find(self._history, self.thresholds)
            entry[check.key] = logs[check.key] = float(finding is not None)
            if finding is not None and state.is_world_process_zero and not _has_warned(check, self._history):
                with beside_bars():
                    logger.warning(check.message(finding))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ignore evaluations after training."""
        self._history = None


def add_console_and_health(trainer: Trainer, args: PPOConfig, sizes: Sizes, reward_models: Sequence[Any]) -> None:
    """Print a trainer's logs as `log_console` says, and check its health before other callbacks get a log.

    Args:
        trainer: A `PPOTrainer` with Trainer's callbacks; a `HealthCallback` of the user is kept.
        args: Its arguments.
        sizes: The sizes of the run.
        reward_models: The reward models, which may have their accuracy beside them.
    """
    use_console(trainer, args.log_console)
    health = trainer.pop_callback(HealthCallback)
    if health is None and args.health_checks:
        context = _run_context(args, sizes.batch_size, trainer.eval_dataset, reward_models)
        health = HealthCallback(scaled_thresholds(args, sizes.num_total_batches), context)
    if health is not None:
        trainer.callback_handler.callbacks.insert(0, health)


def scaled_thresholds(args: PPOConfig, num_updates: int) -> HealthThresholds:
    """Return a run's thresholds: windows that were not given shrink in a short run, so that each check can warn.

    `explained_variance_logs` is at most half of the logs, but at least 10; `judge_falls` is at most half of the
    evaluations, but at least 2.

    Args:
        args: The run's arguments, whose `logging_steps` and `eval_steps` are known.
        num_updates: Number of updates.
    """
    standard, given = HealthThresholds(), args.given_thresholds()
    num_logs = num_updates / args.logging_steps if args.logging_steps >= 1 else 1 / args.logging_steps
    windows = {"explained_variance_logs": min(standard.explained_variance_logs, max(10, int(num_logs / 2)))}
    every = args.eval_steps
    if args.eval_strategy == "steps" and every and standard.judge_falls is not None:
        num_evaluations = num_updates / every if every >= 1 else 1 / every
        windows["judge_falls"] = min(standard.judge_falls, max(2, int(num_evaluations / 2)))
    return HealthThresholds(**{**windows, **given})


def health_settings(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the `thresholds` and the `run` of the health callback as JSON values; empty without one."""
    found = (callback for callback in callbacks if isinstance(callback, HealthCallback))
    return next(({"thresholds": asdict(each.thresholds), "run": asdict(each.run)} for each in found), {})


def warnings_of(log: Sequence[Log], thresholds: HealthThresholds, run: RunContext) -> dict[str, list[tuple[int, str]]]:
    """Return the warnings of a finished run.

    Args:
        log: The run's log, with `health/<check>`.
        thresholds: The run's thresholds.
        run: Properties of the run.

    Returns:
        For each check that warned, the updates and the findings.
    """
    history, found = History((), run), dict[str, list[tuple[int, str]]]()
    for entry in log:
        history.add(entry)
        for check in CHECKS:
            if entry.get(check.key) and _reads(check, history, entry) and not _has_warned(check, history):
                finding = check.find(history, thresholds)
                found.setdefault(check.name, []).extend([] if finding is None else [(int(entry["step"]), finding)])
    return found


def _reads(check: Check, history: History, entry: Log) -> bool:
    """Return whether a check reads the newest entry of a history."""
    logs = check.logs(history)
    return bool(logs) and logs[-1] is entry


def _has_warned(check: Check, history: History) -> bool:
    """Return whether a check is silent: it found something in one of the last logs before the newest."""
    return any(log.get(check.key) for log in check.logs(history)[-SILENT_LOGS - 1 : -1])


def _run_context(args: PPOConfig, num_episodes: int, eval_dataset: Any, models: Sequence[Any]) -> RunContext:
    judge = args.health_judge
    if isinstance(eval_dataset, Mapping) and eval_dataset and judge == PPOConfig.health_judge:
        judge = f"eval_{next(iter(eval_dataset))}_score"  # with several evaluation sets no metric is "eval_score"
    origins = filter(None, map(model_origin, models))
    accuracy = next(filter(None, map(read_accuracy, origins)), None)
    stops = (args.stop_token, args.stop_token_id, args.stop_strings)
    return RunContext(
        response_length=args.response_length,
        max_grad_norm=args.max_grad_norm,
        num_episodes=num_episodes,
        can_end=any(stop is not None for stop in stops),
        end_counts=args.missing_eos_penalty is not None or args.missing_eos_score is not None,
        judge=judge,
        reward_accuracy=None if accuracy is None else accuracy.accuracy,
    )
