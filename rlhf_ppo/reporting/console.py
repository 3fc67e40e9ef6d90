"""Terminal output of a run: one line per log, a progress bar, and a summary table."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerState
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.utils.import_utils import is_in_notebook

from rlhf_ppo.terminal import cell, print_text

LogConsole = Literal["line", "full", "none"]
Log = Mapping[str, Any]
"""The metrics of one log."""


def format_number(value: float) -> str:
    """Format a number of any size in at most nine characters, with four digits or more."""
    if 1e3 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.2e}"


def _decimals(value: float) -> str:
    return f"{value:z.3f}" if abs(value) < 1e5 else f"{value:.1e}"


def format_duration(seconds: float) -> str:
    """Format seconds as 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


# Key in training, key in evaluation, format: of PPO, then of TRL's SFT and reward trainers
_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("episode", "", lambda value: f"episode {value:>5.0f}"),
    ("objective/scores", "score", lambda value: f"score {_decimals(value):>7}"),
    ("objective/kl", "kl", lambda value: f"KL {_decimals(value):>6}"),
    ("response/length_mean", "response_length_mean", lambda value: f"length {value:>6.1f}"),
    ("response/ended_frac", "ended_frac", lambda value: f"ended {value:>4.0%}"),
    ("tools/call_frequency", "tools/call_frequency", lambda value: f"calls {value:.2f}"),
)
_FIGURES_OF_TRL: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda value: f"loss {_decimals(value):>7}"),
    ("mean_token_accuracy", "mean_token_accuracy", lambda value: f"right tokens {value:>4.0%}"),
    ("accuracy", "accuracy", lambda value: f"right pairs {value:>4.0%}"),
    ("margin", "margin", lambda value: f"margin {_decimals(value):>6}"),
)


def log_line(logs: Log, update: int, num_updates: int, seconds_per_update: float | None) -> str | None:
    """Format a log as one line.

    Args:
        logs: Logs of training, of an evaluation, or of a callback.
        update: Number of finished updates.
        num_updates: Number of updates of the run.
        seconds_per_update: Mean wall time of an update since the process started; None before the first.

    Returns:
        The line; None for Trainer's summary at the end of training and for an empty log.
    """
    if "train_loss" in logs:
        return None
    done = f"{update:>{len(str(num_updates))}}/{num_updates}"
    timed = [key.removesuffix("_runtime") for key in logs if key.endswith("_runtime")]
    if "loss" in logs:
        parts = [f"{'update':<9} {done}", *_shown_figures(logs, None)]
        if seconds_per_update is not None:
            left = format_duration((num_updates - update) * seconds_per_update)
            parts += [f"{seconds_per_update:.{1 if seconds_per_update >= 0.1 else 2}f} s", f"{left} left"]
    elif timed:
        evaluated = timed[-1]  # Trainer's own comes after those that functions log
        label = f"evaluated {evaluated.removeprefix('eval').strip('_')}".rstrip()
        seconds = float(logs[f"{evaluated}_runtime"])
        parts = [f"{label:<9} {done}", *_shown_figures(logs, evaluated), f"{seconds:.1f} s"]
    else:
        parts = [f"{key} {_value(value)}" for key, value in logs.items() if key not in ("epoch", "total_flos")]
    return " | ".join(parts) or None


def _shown_figures(logs: Log, evaluated: str | None) -> list[str]:
    """Format the figures of an update's log, or those of an evaluation whose keys have this prefix."""
    is_ppo = any(key.startswith("objective/") or key.endswith("_score") for key in logs)
    shown: list[str] = []
    for training, name, form in _FIGURES if is_ppo else _FIGURES_OF_TRL:
        value = logs.get(training if evaluated is None else f"{evaluated}_{name}")
        if value is not None:
            shown.append(form(float(value)))
    return shown


def _value(value: object) -> str:
    return format_number(value) if isinstance(value, float) and math.isfinite(value) else str(value)


_ROWS = {
    "objective/scores": "score",
    "objective/raw_scores": "score before scaling",
    "objective/kl": "KL to reference, nats",
    "objective/rlhf_reward": "score and KL penalty",
    "response/length_mean": "response length, tokens",
    "response/ended_frac": "share that ended",
    "policy/entropy_avg": "entropy, nats per token",
    "policy/clipfrac_avg": "share of tokens clipped",
    "val/explained_variance": "explained variance",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "time/tokens_per_second": "tokens per second",
    "eval_score": "held-out score",
    "eval_kl": "held-out KL, nats",
    "eval_ended_frac": "held-out share that ended",
}


def summary_table(log_history: Sequence[Log]) -> Table | None:
    """Return a table of the first, last, lowest and highest value of each metric of a run.

    Args:
        log_history: All logs of the run, also of earlier starts.

    Returns:
        One row for each logged metric, and for each reward if there are several; None without a PPO update.
    """
    updates = [log for log in log_history if "objective/kl" in log or "objective/scores" in log]
    if not updates:
        return None
    rewards = [key for key in updates[-1] if key.startswith("rewards/") and key.endswith("/mean")]
    rows = _ROWS | ({key: key.split("/", 1)[1].removesuffix("/mean") for key in rewards} if len(rewards) > 1 else {})
    table = Table("", "first", "last", "lowest", "highest", title=f"{updates[-1]['step']} updates")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, meaning in rows.items():
        if values := [float(log[key]) for log in log_history if key in log]:
            form = "{:.0%}".format if "frac" in key else format_number
            table.add_row(cell(meaning), *map(form, (values[0], values[-1], min(values), max(values))))
    return table


def use_console(trainer: Trainer, log_console: LogConsole) -> None:
    """Replace the trainer's printing callbacks by the callbacks that `log_console` selects.

    Args:
        trainer: A trainer with its default callbacks.
        log_console: "line" prints a line for each log, and a table at the end; "full" keeps Trainer's callbacks, which
            print every metric; "none" prints neither. Trackers and `trainer_state.json` always get every metric.
    """
    if log_console == "full":
        return
    trainer.remove_callback(PrinterCallback if trainer.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
    if not trainer.args.disable_tqdm and (is_in_notebook() or sys.stderr.isatty()):
        trainer.add_callback(UpdateBar())
    if log_console == "line":
        trainer.add_callback(LogLines())


class UpdateBar(ProgressCallback):
    """Trainer's progress bar without logs."""

    def on_log(self, *args: object, **kwargs: object) -> None:
        """Print nothing: `LogLines` does."""


class LogLines(PrinterCallback):
    """Print a line for each log, and a table at the end of the run, on the main process."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None
        self._first_update: float | None = None

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Record the start time and the first update."""
        self._start = time.monotonic(), state.global_step

    def on_epoch_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Record when the first update starts."""
        self._first_update = self._first_update or time.monotonic()

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Print after the first update when the run will end, unless that is within a minute."""
        if self._first_update is None or self._start is None or state.global_step != self._start[1] + 1:
            return
        seconds = time.monotonic() - self._first_update
        left = (state.max_steps - state.global_step) * seconds
        if state.is_world_process_zero and left >= 60:
            at = time.strftime("%a %H:%M", time.localtime(time.time() + left))
            with beside_bars():
                ends = f"At that rate training ends in {format_duration(left)}, on {at}."
                print_text(f"The first update took {seconds:.1f} s. {ends}")

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: Log | None = None, **kwargs: object
    ) -> None:
        """Print the line."""
        start, first = self._start or (0.0, state.global_step)
        done = state.global_step - first
        seconds = (time.monotonic() - start) / done if done > 0 else None
        line = log_line(logs or {}, state.global_step, state.max_steps, seconds)
        if state.is_world_process_zero and line is not None:
            with beside_bars():
                print_text(line)

    def on_train_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Print the table."""
        if state.is_world_process_zero and (table := summary_table(state.log_history)) is not None:
            with beside_bars():
                Console().print(table)


@contextmanager
def beside_bars() -> Iterator[None]:
    """Clear progress bars while the block prints, and redraw them below."""
    with tqdm.external_write_mode():
        yield
