"""The lines that stand for logs in the terminal: the few figures that are watched while a run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlhf_ppo.terminal.foreign import visible

Logs = Mapping[str, Any]


class Moment(NamedTuple):
    """Where a run is.

    Attributes:
        update: Updates that are done.
        num_updates: Updates of the whole run.
        seconds_per_update: Seconds that an update of this start of the run took on average, with all that goes with
            it; None before the first.
    """

    update: int
    num_updates: int
    seconds_per_update: float | None

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the updates to come will take at that rate."""
        return None if self.seconds_per_update is None else (self.num_updates - self.update) * self.seconds_per_update


def number(value: float) -> str:
    """Write a number of any size in at most nine characters, with four digits or more."""
    if 1e3 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.2e}"


def _decimals(value: float) -> str:
    """Write a number of a column: with three decimals, however small it is."""
    return f"{round(value, 3) + 0.0:.3f}" if abs(value) < 1e5 else f"{value:.1e}"


def duration(seconds: float) -> str:
    """Write seconds as 1:02:03."""
    minutes, whole = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{whole:02}"


# By decreasing importance: a narrow terminal leaves out the last ones. Key in training, key in evaluation, words.
_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("objective/scores", "score", lambda value: f"score {_decimals(value):>7}"),
    ("objective/kl", "kl", lambda value: f"KL {_decimals(value):>6}"),
    ("response/length_mean", "response_length_mean", lambda value: f"length {value:>6.1f}"),
    ("response/ended_frac", "ended_frac", lambda value: f"ended {value:>4.0%}"),
)
# Where there are none of these: of a language model, and of a reward model.
_OF_OTHER_TRAINERS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda value: f"loss {_decimals(value):>7}"),
    ("mean_token_accuracy", "mean_token_accuracy", lambda value: f"right tokens {value:>4.0%}"),
    ("accuracy", "accuracy", lambda value: f"right pairs {value:>4.0%}"),
    ("margin", "margin", lambda value: f"margin {_decimals(value):>6}"),
)


def line_of(logs: Logs, moment: Moment, width: int | None = None) -> str | None:
    """Write what was logged as one line.

    Args:
        logs: What Trainer logs: of training, of an evaluation, or anything else.
        moment: Where the run is.
        width: Columns of the terminal, into which the line is made to fit; None for no limit.

    Returns:
        The line; None for the summary that Trainer logs at the end, and where nothing was logged.
    """
    if "train_runtime" in logs:
        return None
    if "loss" in logs:
        parts = [_counted("update", moment), *_figures(logs, lambda training, _: training), *_times(moment)]
    elif (prefix := _prefix_of_evaluation(logs)) is not None:
        seconds = f"{float(logs[f'{prefix}_runtime']):.1f} s"
        of_evaluation = _figures(logs, lambda _, name: f"{prefix}_{name}")
        parts = [_counted(_name_of_evaluation(prefix), moment), *of_evaluation, seconds]
    else:
        parts = [f"{key} {_value(value)}" for key, value in logs.items() if key not in ("epoch", "total_flos")]
    return _fitted(parts, width) if parts else None


def _counted(what: str, moment: Moment) -> str:
    if moment.num_updates <= 0:
        return f"{what:<9} {moment.update}"
    return f"{what:<9} {moment.update:>{len(str(moment.num_updates))}}/{moment.num_updates}"


def _figures(logs: Logs, key_of: Callable[[str, str], str]) -> list[str]:
    for figures in (_FIGURES, _OF_OTHER_TRAINERS):
        found = [(logs.get(key_of(training, name)), words) for training, name, words in figures]
        if said := [words(float(value)) for value, words in found if value is not None]:
            return said
    return []


def _times(moment: Moment) -> list[str]:
    each, left = moment.seconds_per_update, moment.seconds_left
    if each is None or left is None or moment.num_updates <= 0:
        return []
    return [f"{each:>5.1f} s/update" if each >= 0.1 else f"{each:>5.2f} s/update", f"{duration(left)} left"]


def _prefix_of_evaluation(logs: Logs) -> str | None:
    return next((key.removesuffix("_runtime") for key in logs if key.endswith("_runtime")), None)


def _name_of_evaluation(prefix: str) -> str:
    """Return what an evaluation is called: `evaluated`, with the name of its data set where there are several."""
    name = prefix.removeprefix("eval").strip("_")
    return f"evaluated {name}" if name else "evaluated"


def _value(value: Any) -> str:
    is_number = isinstance(value, float) and math.isfinite(value)
    return number(value) if is_number else str(value)


def _fitted(parts: list[str], width: int | None) -> str:
    """Leave out figures from the last one on until the line fits; what is left of the time stays."""
    parts = list(parts)
    while width is not None and len(" | ".join(parts)) > width and len(parts) > 2:
        del parts[-2]
    line = visible(" | ".join(parts), one_line=True)
    return line if width is None else line[:width]
