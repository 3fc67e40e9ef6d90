"""Saving: whole checkpoints, and the policy alone."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rlhf_ppo.checkpoints.disk import UNFINISHED, naming_full_disk, remove_leftovers, remove_links
from rlhf_ppo.checkpoints.fits import optimizer_name
from rlhf_ppo.checkpoints.history import last_entries
from rlhf_ppo.checkpoints.manifest import write_manifest
from rlhf_ppo.checkpoints.progress import PPOTrainerState, Progress
from rlhf_ppo.checkpoints.record import save_record
from rlhf_ppo.checkpoints.whole import put_in_place, start_checkpoint, what_was_changed
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.settled import output_directory
from rlhf_ppo.config.sizes import Sizes
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.reference import Reference
from rlhf_ppo.processes.engines import is_fsdp, is_sharding, zero_stage
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.reporting.metrics import MetricWindow
from rlhf_ppo.reporting.results import where_results_are
from rlhf_ppo.terminal.foreign import print_text
from rlhf_ppo.training.divergence import DivergenceGuard
from rlhf_ppo.training.half_learned import LearningInParts
from rlhf_ppo.training.publishing import PublishedTrainer, push_checkpoint
from rlhf_ppo.training.run_directory import RunDirectory
from rlhf_ppo.training.stateful import StatefulParts
from rlhf_ppo.training.two_models import save_models
from rlhf_ppo.training.withholding import WithheldArguments


class SavedTrainer(PublishedTrainer, Protocol):
    """What a checkpoint keeps of a trainer."""

    args: PPOConfig
    accelerator: Accelerator
    optimizer: Any
    sizes: Sizes
    state: PPOTrainerState
    model: PolicyAndValue
    model_wrapped: Any
    processing_class: Any
    reference: Reference | None
    _directory: RunDirectory
    _gather: Callable[[Tensor], Tensor]
    _globalstep_last_logged: int
    _guard: DivergenceGuard
    _learning: LearningInParts
    _progress: Progress
    _record: dict[str, Any]
    _stateful: StatefulParts
    _tr_loss: Tensor
    _window: MetricWindow
    _withheld: WithheldArguments

    def create_model_card(self) -> None:
        """Write the model card."""
        ...

    def is_world_process_zero(self) -> bool:
        """Tell whether this is the main process."""
        ...

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None: ...
    def _unwrapped(self, model: nn.Module) -> PolicyAndValue: ...


class CheckpointWriter:
    """Writes checkpoints that count as whole once the files of all ranks are there.

    Args:
        run: The trainer.

    Attributes:
        is_writing: Whether a checkpoint is being written; the value model belongs into one, not into what `save_model`
            writes.
    """

    def __init__(self, run: SavedTrainer) -> None:
        self.run, self.args, self.accelerator, self.guard = run, run.args, run.accelerator, run._guard
        self.is_writing = False

    def save(self, run_directory: str, write: Callable[[], None]) -> None:
        """Write a checkpoint, push it, and delete those beyond the limit.

        Args:
            run_directory: The run's.
            write: Writes Trainer's part of it.
        """
        run, updates = self.run, self.run.state.global_step
        with self._place_for(run_directory, run._learning.checkpoint_name(updates), updates) as place:
            self.write(place, write)
        newest = cast(str, self.guard.last_checkpoint)
        if self.args.push_to_hub:
            push_checkpoint(run, newest)
        if self.args.should_save:
            best = run.state.best_model_checkpoint
            run._directory.rotate(run_directory, self.args.save_total_limit, best, newest)

    def write(self, directory: str, write: Callable[[], None]) -> None:
        """Write the files of a checkpoint: those of this package, and Trainer's.

        Args:
            directory: Where to.
            write: Writes Trainer's.
        """
        run = self.run
        run._progress.keep_losses(run._gather(run._tr_loss.reshape(1)).tolist())
        # the first two wait for the manifest
        withheld = {"save_total_limit": None, "push_to_hub": False, "output_dir": os.path.dirname(directory)}
        with self._writing():
            with failing_together(self.accelerator):
                if self.args.should_save:
                    self._begin(directory)
            with run._withheld.instead(**withheld), last_entries(run.state), self._failing_in_saving():
                if run.reference is not None and not self.args.save_only_model:
                    run.reference.save(directory, run.model_wrapped, self.args.should_save)
                write()

    def _begin(self, directory: str) -> None:
        """Write what this package adds to a checkpoint, into an empty directory."""
        run, progress = self.run, self.run._progress
        start_checkpoint(directory)
        run._directory.run.save(directory)
        save_record(directory, {**run._record, "optimizer": optimizer_name(run.optimizer)})
        progress.last_logged_step = run._globalstep_last_logged
        progress.pending_metrics = run._window.updates
        progress.batch_size, progress.num_generations = run.sizes.batch_size, run.args.num_generations
        progress.num_processes = self.accelerator.num_processes
        progress.skipped = dataclasses.asdict(self.guard.skipped)
        progress.num_logged = len(run.state.log_history)
        progress.save(directory)
        run._stateful.save(directory)
        run._directory.write_history(run.state.log_history)
        run.create_model_card()

    @contextmanager
    def _place_for(self, run_directory: str, name: str, num_updates: int) -> Iterator[str]:
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
    def _writing(self) -> Iterator[None]:
        """Say that a checkpoint is being written while the context lasts."""
        self.is_writing = True
        try:
            yield
        finally:
            self.is_writing = False

    def _failing_in_saving(self) -> AbstractContextManager[None]:
        """Raise an error of one rank on all; not under engines, whose ranks wait for each other while they save."""
        is_plain = zero_stage(self.accelerator) is None and not is_fsdp(self.accelerator)
        return failing_together(self.accelerator) if is_plain else nullcontext()

    @contextmanager
    def finishing(self, run_directory: str) -> Iterator[None]:
        """Keep Trainer from deleting checkpoints of other runs where a run ends, and delete this run's own."""
        limit, best = self.args.save_total_limit, self.run.state.best_model_checkpoint
        with self.run._withheld.instead(save_total_limit=None):
            yield
        if self.args.should_save and limit == 1 and best is not None:
            self.run._directory.rotate(run_directory, limit, best, newest=None)

    def save_model(self, output_dir: str | None, is_of_checkpoint: bool, write: Callable[[], None]) -> None:
        """Save the policy, and say where it is; see `PPOTrainer.save_model`.

        Args:
            output_dir: Where to; the run's directory when None.
            is_of_checkpoint: Whether a checkpoint is being written, of which nothing is said.
            write: Writes as Trainer does.
        """
        run, own = self.run, output_directory(self.args)
        directory = own if output_dir is None else output_dir
        with self._saving_model(directory):
            plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
            if plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type):
                # Trainer writes nothing here for sharded checkpoints
                run._save(output_dir, state_dict=cast(Any, self.accelerator.get_state_dict(run.model_wrapped)))
            write()
        if not is_of_checkpoint and run.is_world_process_zero() and not self.args.disable_tqdm:
            print_text(where_results_are(directory, own))

    def save_files(self, output_dir: str | None, state_dict: dict[str, Any] | None) -> None:
        """Write models, tokenizer and arguments, in the processes that save."""
        run, directory = self.run, output_directory(self.args) if output_dir is None else output_dir
        if self.args.should_save:
            save_models(run._unwrapped(run.model), directory, state_dict, self.is_writing)
            if run.processing_class is not None:
                run.processing_class.save_pretrained(directory)
            torch.save(run._withheld.as_given(), os.path.join(directory, "training_args.bin"))

    def naming_full_log(self) -> AbstractContextManager[None]:
        """Name the newest checkpoint where there is no room for a log."""
        return naming_full_disk(
            output_directory(self.args), lambda: self.guard.last_checkpoint, "what is logged or printed"
        )

    @contextmanager
    def _saving_model(self, directory: str) -> Iterator[None]:
        """Write models into a directory, of a checkpoint or not.

        Raises:
            DivergenceError: A weight is not finite; nothing is written then.
            DiskFullError: There is no room.
        """
        if not self.is_writing:
            self.guard.check_weights(together=is_sharding(self.accelerator))
            if self.args.should_save:
                remove_leftovers(directory)
                remove_links(directory)
        together = self._failing_in_saving() if self.is_writing else nullcontext()
        with naming_full_disk(directory, lambda: self.guard.last_checkpoint), together:
            yield

    def checked_best(self) -> str:
        """Return the best checkpoint.

        Raises:
            ValueError: It is no longer what was written.
        """
        best = cast(str, self.run.state.best_model_checkpoint)
        with failing_together(self.accelerator):
            if self.run.is_world_process_zero() and (reason := what_was_changed(best)) is not None:
                raise ValueError(
                    f"load_best_model_at_end=True, but the best checkpoint, {best}, is not whole any more: {reason}; "
                    f"the newest one is {self.guard.last_checkpoint}"
                )
        return best
