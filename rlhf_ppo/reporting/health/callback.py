"""The callback that runs the health checks at each log of training, and at each evaluation."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from rlhf_ppo.config.health import HealthThresholds
from rlhf_ppo.reporting.health.checks import CHECKS, Check
from rlhf_ppo.reporting.health.history import History, Surroundings
from rlhf_ppo.terminal.progress import beside_bars

logger = logging.getLogger(__name__)

SILENT_LOGS = 10
"""After how many logs in which a check found nothing it speaks again."""

FINDINGS = "health"
"""Key of the log history, which trackers do not get, under which what a check has said is kept: name to words."""


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
        self._history = History((), self.run)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take up the history of a run that is resumed."""
        self._history = History(state.log_history, self.run)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Run the checks that look at what was logged."""
        if not logs or not state.log_history:
            return
        entry = state.log_history[-1]
        self._history.add(entry)
        for check in self.checks:
            seen = self._history.evaluations if check.of_evaluations else self._history.updates
            if not seen or seen[-1] is not entry:
                continue
            finding = check.find(self._history, self.thresholds)
            entry[check.key] = logs[check.key] = float(finding is not None)
            if finding is None or any(log.get(check.key) for log in seen[-SILENT_LOGS - 1 : -1]):
                continue
            entry.setdefault(FINDINGS, {})[check.name] = finding
            if state.is_world_process_zero:
                with beside_bars():
                    logger.warning(check.message(finding))


def is_on(check: Check, thresholds: HealthThresholds) -> bool:
    """Tell whether a check has a threshold."""
    return any(getattr(thresholds, name) is not None for name in check.thresholds)
