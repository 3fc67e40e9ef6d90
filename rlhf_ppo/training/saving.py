"""Saving: whole checkpoints, and the policy alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from accelerate import Accelerator

from rlhf_ppo.checkpoints.disk import UNFINISHED, naming_full_disk, remove_leftovers
from rlhf_ppo.checkpoints.manifest import write_manifest
from rlhf_ppo.checkpoints.whole import put_in_place, what_was_changed
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.processes.engines import is_fsdp, is_sharding, zero_stage
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.training.divergence import DivergenceGuard


class CheckpointWriter:
    """Writes checkpoints that count as whole once the files of all ranks are there.

    Args:
        args: The arguments.
        accelerator: Knows processes and engine.
        guard: Refuses weights that are not finite, and knows the newest checkpoint.

    Attributes:
        is_writing: Whether a checkpoint is being written; the value model belongs into one, not into what `save_model`
            writes.
    """

    def __init__(self, args: PPOConfig, accelerator: Accelerator, guard: DivergenceGuard) -> None:
        self.args, self.accelerator, self.guard = args, accelerator, guard
        self.is_writing = False

    @contextmanager
    def place_for(self, run_directory: str, name: str, num_updates: int) -> Iterator[str]:
        """Give the directory to write a checkpoint into, whose name and manifest it gets once that is done.

        Args:
            run_directory: The run's.
            name: The checkpoint's.
            num_updates: Updates that are done, after which Trainer names checkpoints.
        """
        self.guard.check_weights()
        directory = os.path.join(run_directory, name)
        with naming_full_disk(directory, lambda: self.guard.last_checkpoint):
            written = os.path.join(run_directory, f"checkpoint-{num_updates}")
            if written != directory:  # Trainer knows one name only, which another checkpoint may have
                written = os.path.join(run_directory, UNFINISHED, os.path.basename(written))
            yield written
            self._mark_as_whole(written, directory)
        self.guard.last_checkpoint = directory

    def _mark_as_whole(self, written: str, directory: str) -> None:
        self.accelerator.wait_for_everyone()  # every rank's files are there before the manifest says so
        with failing_together(self.accelerator):
            if self.args.should_save:
                if written != directory:
                    put_in_place(written, directory)
                write_manifest(directory)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say that a checkpoint is being written while the context lasts."""
        self.is_writing = True
        try:
            yield
        finally:
            self.is_writing = False

    def failing_in_saving(self) -> AbstractContextManager[None]:
        """Raise an error of one rank on all; not under engines, whose ranks wait for each other while they save."""
        is_plain = zero_stage(self.accelerator) is None and not is_fsdp(self.accelerator)
        return failing_together(self.accelerator) if is_plain else nullcontext()

    @contextmanager
    def saving_model(self, directory: str) -> Iterator[None]:
        """Write models into a directory, of a checkpoint or not.

        Raises:
            DivergenceError: A weight is not finite; nothing is written then.
            DiskFullError: There is no room.
        """
        if not self.is_writing:
            self.guard.check_weights(together=is_sharding(self.accelerator))
            if self.args.should_save:
                remove_leftovers(directory)
        together = self.failing_in_saving() if self.is_writing else nullcontext()
        with naming_full_disk(directory, lambda: self.guard.last_checkpoint), together:
            yield


def check_best(best: str, newest: str | None) -> None:
    """Check that the best checkpoint is still what was written.

    Args:
        best: Its directory.
        newest: The newest checkpoint's.

    Raises:
        ValueError: It is not.
    """
    if (reason := what_was_changed(best)) is not None:
        raise ValueError(
            f"load_best_model_at_end=True, but the best checkpoint, {best}, is not whole any more: {reason}; "
            f"the newest one is {newest}"
        )
