"""The training of TRL's trainers: a signal ends it with a checkpoint, and it continues from the newest whole one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from transformers import Trainer, TrainerControl

from rlhf_ppo.checkpoints.disk import naming_full_disk
from rlhf_ppo.checkpoints.run import check_start, wanted_checkpoint
from rlhf_ppo.checkpoints.whole import newest_of_trl
from rlhf_ppo.processes.signals import EndsOnSignals, RunStopped, say


def resumed_checkpoint(args: Any) -> str | None:
    """Return the checkpoint that training continues from, None for a new run.

    `resume_from_checkpoint=True` chooses the newest whole one, where Trainer would take one that a kill cut off.

    Args:
        args: The arguments.

    Raises:
        ValueError: There is no such checkpoint, or none that is whole.
    """
    wanted = wanted_checkpoint(args.resume_from_checkpoint)
    if wanted is False:
        return None
    check_start(args.output_dir, wanted, overwrite=False)
    checkpoint = newest_of_trl(args.output_dir) if wanted is True else wanted
    if checkpoint is None:
        raise ValueError(
            f"resume_from_checkpoint=True, but output_dir={args.output_dir!r} holds no whole checkpoint; leave it out "
            "to start a new run"
        )
    return str(checkpoint)


@contextmanager
def ending_with_checkpoint(trainer: Trainer) -> Iterator[None]:
    """Let signals end training with a checkpoint, and name a full disk; the final save is finished first.

    Args:
        trainer: One of TRL's.

    Raises:
        DiskFullError: There was no room for a checkpoint or the model.
        RunStopped: A signal has ended training.
    """
    signals = _EndsTraining(trainer)
    trainer.add_callback(signals)
    directory = str(trainer.args.output_dir)
    try:
        with signals.listening(), naming_full_disk(directory, lambda: _newest(directory)):
            yield
    finally:
        trainer.remove_callback(signals)


def _newest(directory: str) -> str | None:
    newest = newest_of_trl(directory)
    return None if newest is None else str(newest)


class _EndsTraining(EndsOnSignals):
    """Ends Trainer's own loop as soon as the checkpoint that a signal asks for is written.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        accelerator = trainer.accelerator
        super().__init__(lambda flags: accelerator.reduce(flags, "sum"), self._awaited, accelerator.num_processes)  # pyright: ignore[reportArgumentType]
        self.trainer = trainer

    def _awaited(self) -> str:
        if self.trainer.is_in_train:
            return "the run ends with a checkpoint after the current step, and its evaluation if one is due"
        return "the run ends when its model is saved"

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Ask again for the checkpoint, which `save_strategy="best"` writes only after a best evaluation."""
        if self.stopped is not None:
            control.should_evaluate, control.should_save = False, True

    def on_save(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Leave before Trainer ends its loop, where it may delete this checkpoint."""
        if self.stopped is not None:
            self._end(self.stopped)

    def _end(self, number: int) -> NoReturn:
        trainer = self.trainer
        self.wait_until_told()
        trainer.accelerator.wait_for_everyone()  # every rank's files are there
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        trainer._finish_current_push()
        trainer.is_in_train = False
        done, of = trainer.state.global_step, trainer.state.max_steps
        checkpoint = os.path.join(str(trainer.args.output_dir), f"checkpoint-{done}")
        if trainer.is_world_process_zero():
            say(
                f"{signal.Signals(number).name}: the run has ended after step {done} of {of}, with the checkpoint "
                f"{checkpoint}; resume_from_checkpoint=True (--resume_from_checkpoint True) goes on from it."
            )
        raise RunStopped(number, checkpoint)
