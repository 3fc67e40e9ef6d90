"""Terminal output of a run: one line per log, a progress bar, a summary table, and hidden output of libraries."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_utils import has_length
from transformers.utils.import_utils import is_in_notebook

from rlhf_ppo.terminal import cell, is_terminal, print_text, visible

LogConsole = Literal["line", "full", "none"]
Logs = Mapping[str, Any]

_Figures = tuple[tuple[str, str, Callable[[float], str], int], ...]
_Parts = list[tuple[str, int]]


class RunPosition(NamedTuple):
    """Position of a run.

    Attributes:
        update: Number of finished updates.
        num_updates: Number of updates of the run.
        seconds_per_update: Mean wall time of an update since the process started; None before the first.
    """

    update: int
    num_updates: int
    seconds_per_update: float | None

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end of the run."""
        return None if self.seconds_per_update is None else (self.num_updates - self.update) * self.seconds_per_update


def format_number(value: float) -> str:
    """Format a number of any size in at most nine characters, with four digits or more."""
    if 1e3 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.2e}"


def _decimals(value: float) -> str:
    """Format a number of a column with three decimals."""
    return f"{value:z.3f}" if abs(value) < 1e5 else f"{value:.1e}"


def format_duration(seconds: float) -> str:
    """Format seconds as 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


# Key in training, key in evaluation, format, and rank: a narrow terminal drops the parts of the highest rank first.
_PPO_FIGURES: _Figures = (
    ("episode", "", lambda value: f"episode {value:>5.0f}", 4),
    ("objective/scores", "score", lambda value: f"score {_decimals(value):>7}", 0),
    ("objective/kl", "kl", lambda value: f"KL {_decimals(value):>6}", 1),
    ("response/length_mean", "response_length_mean", lambda value: f"length {value:>6.1f}", 6),
    ("response/ended_frac", "ended_frac", lambda value: f"ended {value:>4.0%}", 2),
)
# For logs of TRL's SFT and reward trainers.
_TRL_FIGURES: _Figures = (
    ("loss", "loss", lambda value: f"loss {_decimals(value):>7}", 0),
    ("mean_token_accuracy", "mean_token_accuracy", lambda value: f"right tokens {value:>4.0%}", 1),
    ("accuracy", "accuracy", lambda value: f"right pairs {value:>4.0%}", 1),
    ("margin", "margin", lambda value: f"margin {_decimals(value):>6}", 6),
)


def log_line(logs: Logs, position: RunPosition, width: int | None = None) -> str | None:
    """Format a log as one line.

    Args:
        logs: Logs of training, of an evaluation, or of a callback.
        position: Position of the run.
        width: Columns of the terminal; None for no limit.

    Returns:
        The line; None for Trainer's summary at the end of training and for an empty log.
    """
    if "train_runtime" in logs:
        return None
    if "loss" in logs:
        parts = [(_count("update", position), 0), *_figures(logs, lambda training, _: training), *_times(position)]
    elif prefix := next((key.removesuffix("_runtime") for key in logs if key.endswith("_runtime")), None):
        dataset = prefix.removeprefix("eval").strip("_")  # its name, if there are several
        figures = _figures(logs, lambda _, name: f"{prefix}_{name}")
        seconds = f"{float(logs[f'{prefix}_runtime']):.1f} s"
        parts = [(_count(f"evaluated {dataset}".rstrip(), position), 0), *figures, (seconds, 3)]
    else:
        parts = [(f"{key} {_value(value)}", 0) for key, value in logs.items() if key not in ("epoch", "total_flos")]
    return _fit(parts, width) if parts else None


def _count(label: str, position: RunPosition) -> str:
    if position.num_updates <= 0:
        return f"{label:<9} {position.update}"
    return f"{label:<9} {position.update:>{len(str(position.num_updates))}}/{position.num_updates}"


def _figures(logs: Logs, key_of: Callable[[str, str], str]) -> _Parts:
    for figures in (_PPO_FIGURES, _TRL_FIGURES):
        found = [(logs.get(key_of(training, name)), form, rank) for training, name, form, rank in figures]
        parts = [(form(float(value)), rank) for value, form, rank in found if value is not None]
        if any(rank < 3 for _, rank in parts):
            return parts
    return []


def _times(position: RunPosition) -> _Parts:
    each, left = position.seconds_per_update, position.seconds_left
    if each is None or left is None or position.num_updates <= 0:
        return []
    return [(f"{each:.1f} s" if each >= 0.1 else f"{each:.2f} s", 3), (f"{format_duration(left)} left", 5)]


def _value(value: Any) -> str:
    return format_number(value) if isinstance(value, float) and math.isfinite(value) else str(value)


def _fit(parts: _Parts, width: int | None) -> str:
    """Join the parts; drop the part of the highest rank until the line fits."""
    parts = list(parts)
    while width is not None and sum(len(text) + 3 for text, _ in parts) - 3 > width and len(parts) > 1:
        worst = max(range(len(parts)), key=lambda index: (parts[index][1], index))
        del parts[worst]
    line = visible(" | ".join(text for text, _ in parts), one_line=True)
    return line if width is None else line[:width]


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
}
_EVALUATION_ROWS = {
    "eval_score": "held-out score",
    "eval_kl": "held-out KL, nats",
    "eval_ended_frac": "held-out share that ended",
}
_FORMATS: Mapping[str, Callable[[float], str]] = {
    **dict.fromkeys(("response/ended_frac", "policy/clipfrac_avg", "eval_ended_frac"), "{:.0%}".format),
    "time/tokens_per_second": "{:.0f}".format,
}


def summary_table(log_history: Sequence[Logs]) -> Table | None:
    """Return a table of the first, last, lowest and highest value of each metric of a run.

    Args:
        log_history: All logs of the run, also of earlier starts.

    Returns:
        One row for each logged metric; None without a PPO update.
    """
    updates = [log for log in log_history if "loss" in log]
    if not any(key.startswith("objective/") for log in updates for key in log):
        return None
    evaluations = [log for log in log_history if "eval_runtime" in log]
    table = Table("", "first", "last", "lowest", "highest", title=_title(log_history, updates), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for logs, rows in ((updates, _with_rewards(_ROWS, updates)), (evaluations, _EVALUATION_ROWS)):
        for key, meaning in rows.items():
            if values := [float(log[key]) for log in logs if key in log]:
                form = _FORMATS.get(key, format_number)
                table.add_row(cell(meaning), *map(form, (values[0], values[-1], min(values), max(values))))
    return table


def _with_rewards(rows: Mapping[str, str], updates: Sequence[Logs]) -> dict[str, str]:
    """Add a row for each reward if there are several."""
    keys = [key for key in updates[-1] if key.startswith("rewards/") and key.endswith("/mean")]
    rewards = {key: key.removeprefix("rewards/").removesuffix("/mean") for key in keys} if len(keys) > 1 else {}
    return {"objective/scores": rows["objective/scores"], **rewards, **rows}


def _title(log_history: Sequence[Logs], updates: Sequence[Logs]) -> str:
    last = updates[-1]
    seconds = [log["train_runtime"] for log in log_history if "train_runtime" in log]
    parts = [f"{last['step']} updates" if last["step"] != 1 else "1 update"]
    if "episode" in last:
        parts.append(f"{last['episode']:g} episodes")
    if seconds:
        parts.append(f"{format_duration(seconds[-1])} since the run was started")
    return ", ".join(parts)


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
    if not trainer.args.disable_tqdm:
        trainer.add_callback(UpdateBar())
    if log_console == "line":
        trainer.add_callback(LogLines())


class UpdateBar(ProgressCallback):
    """Trainer's progress bar, only on a terminal or in a notebook, without logs, and correct after a resume."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar at the update that the run resumes from, for a correct estimate of the time left."""
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                dynamic_ncols=True,
                unit="update",
                disable=not _shows_bars(),
            )
        self.current_step = state.global_step

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the batches of an evaluation with several batches."""
        loader: Any = kwargs.get("eval_dataloader")
        if state.is_world_process_zero and _shows_bars() and has_length(loader) and len(loader) > 1:
            if self.prediction_bar is None:
                self.prediction_bar = tqdm(total=len(loader), leave=False, dynamic_ncols=True, unit="batch")
            self.prediction_bar.update(1)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Remove the bar of an evaluation, before `LogLines` prints its result."""
        if self.prediction_bar is not None:
            self.prediction_bar.clear()  # `close` erases no bar that it drew only once
            self.prediction_bar.close()
            self.prediction_bar = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)


class LogLines(PrinterCallback):
    """Print a line for each log, and a table at the end of the run, on the main process."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the start time and the first update."""
        self._start = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Print the line."""
        if state.is_world_process_zero and logs is not None:
            width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
            if (line := log_line(logs, self._position(state), width)) is not None:
                with beside_bars():
                    print_text(line)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the table."""
        if state.is_world_process_zero and (table := summary_table(state.log_history)) is not None:
            with beside_bars():
                Console().print(table)

    def _position(self, state: Any) -> RunPosition:
        each = None
        if self._start is not None and state.global_step > self._start[1]:
            each = (time.monotonic() - self._start[0]) / (state.global_step - self._start[1])
        return RunPosition(state.global_step, state.max_steps, each)


@contextmanager
def beside_bars() -> Iterator[None]:
    """Clear progress bars while the block prints, and redraw them below."""
    with tqdm.external_write_mode():
        yield


def _shows_bars() -> bool:
    return is_in_notebook() or is_terminal(sys.stderr)
