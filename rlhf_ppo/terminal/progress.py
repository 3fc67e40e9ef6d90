"""The callbacks that print a run's progress, in place of Trainer's own."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_utils import has_length
from transformers.utils.import_utils import is_in_notebook

from rlhf_ppo.terminal.foreign import print_text
from rlhf_ppo.terminal.lines import Moment, line_of
from rlhf_ppo.terminal.quiet import is_terminal
from rlhf_ppo.terminal.summary import summary_table

LogConsole = Literal["line", "full", "none"]


@contextmanager
def beside_bars() -> Iterator[None]:
    """Take progress bars off the terminal while the block prints, and put them back below it."""
    with tqdm.external_write_mode():
        yield


def use_console(trainer: Trainer, log_console: LogConsole) -> None:
    """Let a trainer print its logs as `log_console` says.

    Args:
        trainer: A trainer, with the callbacks that Trainer has given it.
        log_console: "line" prints a line for each log, and a table at the end; "full" leaves it at Trainer's own
            callbacks, which print all that is logged; "none" prints neither. Trackers and `trainer_state.json` get
            all of it anyway.
    """
    if log_console == "full":
        return
    trainer.remove_callback(PrinterCallback if trainer.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
    if not trainer.args.disable_tqdm:
        trainer.add_callback(UpdateBar())
    if log_console == "line":
        trainer.add_callback(LogLines())


class UpdateBar(ProgressCallback):
    """Trainer's bar of updates and evaluations: only on a terminal or in a notebook, right after a resume, alone."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar from the update on that the run resumes from, so that it knows what is left of the time."""
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
        """Count the batches of an evaluation, where there are several."""
        loader: Any = kwargs.get("eval_dataloader")
        if _shows_bars() and has_length(loader) and len(loader) > 1:
            super().on_prediction_step(args, state, control, **kwargs)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Leave the logs to `LogLines`."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)


class LogLines(PrinterCallback):
    """Prints a line for each log, and a table of the run at its end, on the main process."""

    def __init__(self) -> None:
        self._begun: tuple[float, int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note when the run was started, and after which update."""
        self._begun = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Print the line."""
        if state.is_world_process_zero and logs is not None:
            line = line_of(logs, self._moment(state), _width())
            if line is not None:
                with beside_bars():
                    print_text(line)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the table."""
        if state.is_world_process_zero and (table := summary_table(state.log_history)) is not None:
            with beside_bars():
                Console().print(table)

    def _moment(self, state: Any) -> Moment:
        each = None
        if self._begun is not None and state.global_step > self._begun[1]:
            each = (time.monotonic() - self._begun[0]) / (state.global_step - self._begun[1])
        return Moment(state.global_step, state.max_steps, each)


def _width() -> int | None:
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def _shows_bars() -> bool:
    return is_in_notebook() or is_terminal(sys.stderr)
