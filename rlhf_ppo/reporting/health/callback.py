"""The callback that runs the health checks at each log of training, and at each evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from rlhf_ppo.config.health import HealthThresholds
from rlhf_ppo.reporting.health.checks import CHECKS, Check
from rlhf_ppo.reporting.health.history import History, Log, Surroundings
from rlhf_ppo.terminal.foreign import visible_logger
from rlhf_ppo.terminal.progress import beside_bars

logger = visible_logger(__name__)

SILENT_LOGS = 10
"""After how many logs in which a check found nothing it speaks again."""


class HealthCallback(TrainerCallback):
    """Adds `health/<check>` (0 or 1) to each log of what a check looks at, and warns once of what it finds.

    It must come before the callbacks that write logs elsewhere. All that it knows is in the log history, so that a
    resumed run repeats nothing and forgets nothing. A check is silent until it has found nothing for `SILENT_LOGS`
    logs; then it may speak again.

    Args:
        thresholds: From which figures on something is said.
        run: What the figures are compared with.
    """

    def __init__(self, thresholds: HealthThresholds | None = None, run: Surroundings | None = None) -> None:
        self.thresholds, self.run = thresholds or HealthThresholds(), run or Surroundings()
        self.checks = [check for check in CHECKS if is_on(check, self.thresholds)]
        self._history: History | None = None  # of the run that goes on

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take up the history of a run that is resumed."""
        self._history = History(state.log_history, self.run)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Run the checks that look at what was logged."""
        if not logs or not state.log_history or self._history is None:
            return
        entry = state.log_history[-1]
        self._history.add(entry)
        for check in self.checks:
            if not looks_at(check, self._history, entry):
                continue
            finding = check.find(self._history, self.thresholds)
            entry[check.key] = logs[check.key] = float(finding is not None)
            if finding is not None and state.is_world_process_zero and not has_spoken(check, self._history):
                with beside_bars():
                    logger.warning(check.message(finding))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave evaluations beside the run alone."""
        self._history = None


def looks_at(check: Check, history: History, entry: Log) -> bool:
    """Tell whether the newest entry of a history is one that a check looks at."""
    logs = check.logs(history)
    return bool(logs) and logs[-1] is entry


def has_spoken(check: Check, history: History) -> bool:
    """Tell whether a check has found something in one of the logs before the newest, after which it is silent."""
    return any(log.get(check.key) for log in check.logs(history)[-SILENT_LOGS - 1 : -1])


def said(log: Sequence[Log], thresholds: HealthThresholds, run: Surroundings) -> dict[str, list[tuple[int, str]]]:
    """Say again what the checks of a run have said.

    Args:
        log: The run's log, with `health/<check>`.
        thresholds: Those of the run.
        run: What its figures were compared with.

    Returns:
        For each check that has spoken, after which updates, and its words.
    """
    history, found = History((), run), dict[str, list[tuple[int, str]]]()
    for entry in log:
        history.add(entry)
        for check in CHECKS:
            if entry.get(check.key) and looks_at(check, history, entry) and not has_spoken(check, history):
                words = check.find(history, thresholds)
                found.setdefault(check.name, []).extend([] if words is None else [(int(entry["step"]), words)])
    return found


def is_on(check: Check, thresholds: HealthThresholds) -> bool:
    """Tell whether a check has a threshold."""
    return any(getattr(thresholds, name) is not None for name in check.thresholds)
