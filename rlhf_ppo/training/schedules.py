"""What an optimizer and its scheduler were set to, so that a resumed run follows its own arguments."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR

Changes = dict[str, tuple[Any, Any]]
"""Name of a setting: what it was, and what it is."""

_MISSING = "not set"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Compare settings by name.

    Args:
        before: The checkpoint's.
        now: This run's.

    Returns:
        Those that differ.
    """
    names = sorted(before.keys() | now.keys())
    pairs = {name: (before.get(name, _MISSING), now.get(name, _MISSING)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def describe_changes(changed: Changes) -> str:
    """Write changes for a log: `learning_rate=0.0005 (was 0.001), ...`."""
    return ", ".join(f"{name}={_short(now)} (was {_short(before)})" for name, (before, now) in changed.items())


def _short(value: Any) -> Any:
    """One value for all parameter groups where they agree."""
    return value[0] if isinstance(value, list) and value and all(item == value[0] for item in value) else value


class Settings:
    """What a scheduler and its optimizer's groups are set to, taken when the scheduler is new.

    Args:
        scheduler: The scheduler, with its `optimizer`, before any step and before any checkpoint is loaded.

    Attributes:
        arguments: Further settings, of the run.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.arguments: dict[str, Any] = {}
        self._state = copy.deepcopy(scheduler.state_dict())
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}
            for group in scheduler.optimizer.param_groups
        ]

    @property
    def _base_rates(self) -> list[float]:
        return [float(group.get("initial_lr", group["lr"])) for group in self._groups]

    def recorded(self) -> dict[str, Any]:
        """Return all settings by name, as JSON gives them back; those of parameter groups are lists."""
        names = {name for group in self._groups for name in group} - {"lr", "initial_lr"}
        of_groups = {name: [group.get(name) for group in self._groups] for name in sorted(names)}
        settings = {**_constants(self._state), **of_groups, "learning_rate": self._base_rates, **self.arguments}
        return {name: json.loads(json.dumps(value)) for name, value in settings.items() if _is_json(value)}

    def put_in_force(self, changed: Changes, num_steps: int) -> None:
        """Replace what a checkpoint has brought by these settings, where they changed.

        A schedule goes on as if it had been this one from the start. One that follows a metric keeps what it has
        learned from it: its rates change by the factor by which the first ones did.

        Args:
            changed: What differs from the checkpoint's.
            num_steps: Steps that the scheduler has taken.
        """
        groups = self.scheduler.optimizer.param_groups
        for group, own in zip(groups, self._groups, strict=True):
            group.update({name: copy.deepcopy(own[name]) for name in changed if name in own})
        if isinstance(self.scheduler, ReduceLROnPlateau | GreedyLR):
            vars(self.scheduler).update({name: self._state[name] for name in changed if name in self._state})
            before = changed.get("learning_rate", (self._base_rates, None))[0]
            for group, old, new in zip(groups, before, self._base_rates, strict=True):
                _set_rate(group, float(group["lr"]) * new / old if old > 0 else new)
        elif changed.keys() - {name for group in self._groups for name in group}:
            self._replay(num_steps)

    def _replay(self, num_steps: int) -> None:
        self.scheduler.load_state_dict(copy.deepcopy(self._state))
        for group, own in zip(self.scheduler.optimizer.param_groups, self._groups, strict=True):
            _set_rate(group, own["lr"])
            if "initial_lr" in own:
                group["initial_lr"] = copy.deepcopy(own["initial_lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the optimizer's steps were taken in another process
            for _ in range(num_steps):
                self.scheduler.step()


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], Tensor):  # captured by a CUDA graph
        group["lr"].fill_(float(rate))
    else:
        group["lr"] = float(rate)


def _constants(state: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out of a new scheduler's state what only counts, and the rates, which stand with the groups."""
    counted = "last_epoch", "base_lrs"
    return {name: value for name, value in state.items() if not name.startswith("_") and name not in counted}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
