"""The directory of a run: kept from other runs, and opened for a new run or for one that goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from rlhf_ppo.checkpoints.disk import remove_leftovers
from rlhf_ppo.checkpoints.fits import check_engine
from rlhf_ppo.checkpoints.half_learned import half_learned_in
from rlhf_ppo.checkpoints.history import Entry, History
from rlhf_ppo.checkpoints.lock import locked
from rlhf_ppo.checkpoints.run import Run, check_start, continue_run, rotate, start_run, wanted_checkpoint
from rlhf_ppo.checkpoints.whole import last_whole_checkpoint, what_is_missing
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.settled import output_directory
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.processes.logs import get_logger
from rlhf_ppo.reporting.completion_files import write_completions
from rlhf_ppo.reporting.run_settings import save_settings

logger = get_logger(__name__)


class RunDirectory:
    """Which run has a directory, and which of its checkpoints are the run's.

    Args:
        args: The arguments.
        accelerator: Knows the processes.
        is_deepspeed: Whether DeepSpeed loads checkpoints.
        is_fsdp: Whether FSDP does.

    Attributes:
        run: The run.
    """

    def __init__(self, args: PPOConfig, accelerator: Accelerator, is_deepspeed: bool, is_fsdp: bool) -> None:
        self.args, self.accelerator = args, accelerator
        self.is_deepspeed, self.is_fsdp = is_deepspeed, is_fsdp
        self.run = Run.new()
        self._history: History | None = None
        self._given_up: str | None = None  # what is said of later checkpoints that the run does not take for its own

    @contextmanager
    def opened(self, directory: str, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """Keep other runs out of a directory; yield the checkpoint from which the run goes on, or None.

        Args:
            directory: The run's.
            resume_from_checkpoint: As `PPOTrainer.train` takes it.
        """
        with ExitStack() as stack:
            with failing_together(self.accelerator):
                if self.args.process_index == 0:
                    os.makedirs(directory, exist_ok=True)
                    stack.enter_context(locked(directory))
                    remove_leftovers(directory)
            yield self._open(directory, resume_from_checkpoint)

    def _open(self, directory: str, resume_from_checkpoint: str | bool | None) -> str | None:
        """Start a run in its directory, or find the one that goes on, and the checkpoint from which it does."""
        said = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        wanted = wanted_checkpoint(said)
        opened: list[Any] = [None]
        self._given_up = None
        with failing_together(self.accelerator):
            if self.args.process_index == 0:
                check_start(directory, wanted, self.args.overwrite_output_dir)
                if wanted is False:
                    opened = [(None, start_run(directory, self.args.overwrite_output_dir))]
                else:
                    opened = [self._continue_run(directory, wanted)]
        checkpoint, self.run = broadcast_object_list(opened)[0]
        with failing_together(self.accelerator):
            if checkpoint is not None and self.args.should_save and self.args.process_index != 0:
                _check_whole(checkpoint)  # of another node's own disk
        return checkpoint

    def _continue_run(self, directory: str, wanted: str | bool) -> tuple[str, Run]:
        checkpoint = _whole_checkpoint(directory, wanted)
        check_engine(checkpoint, self.is_deepspeed, self.is_fsdp)
        step = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME)).global_step
        learned = half_learned_in(checkpoint)
        run, abandoned = continue_run(directory, checkpoint, (step,) if learned is None else (step, learned))
        later = f"{', '.join(abandoned)}) is not taken for this run's any more: it is neither resumed from nor deleted"
        told = (
            f"Going on from {checkpoint}; what comes after it ({later}, and overwritten when its update comes again."
        )
        self._given_up = told if abandoned else None
        return checkpoint, run

    def note(
        self, directory: str, logged: Sequence[Entry], made_of: Mapping[str, Any], health: Mapping[str, Any]
    ) -> None:
        """Write into the directory whose run it is and what it is made of, once nothing refuses that run any more.

        Args:
            directory: The run's.
            logged: What the run has logged so far.
            made_of: The names of policy and rewards.
            health: What its health checks go by.
        """
        with failing_together(self.accelerator):
            if self.args.should_save:
                self.run.save(directory)
                save_settings(directory, self.args, made_of, health)
                self._history = History(directory, logged)
        if self._given_up is not None:
            logger.warning(self._given_up)

    def write_logged(self, logged: Sequence[Entry], rows: list[dict[str, Any]]) -> None:
        """Write what the run has logged as far as it goes, and responses of the update that was logged.

        Args:
            logged: What the run has logged so far.
            rows: This rank's responses, as `KeptCompletions.rows` gives them.
        """
        kept = self.args.num_completions_to_keep
        rows = gather_object(rows)[:kept] if kept > 0 else []
        with failing_together(self.accelerator):
            self.write_history(logged)
            if rows and self.args.process_index == 0:
                write_completions(output_directory(self.args), rows, self.run)

    def write_history(self, logged: Sequence[Entry]) -> None:
        """Append what the run has logged since."""
        if self._history is not None:
            self._history.write(logged)

    def rotate(self, directory: str, limit: int | None, best: str | None, newest: str | None) -> None:
        """Delete the run's own checkpoints beyond a limit, but neither the best one nor the newest."""
        rotate(directory, self.run, limit, best, newest)


def _whole_checkpoint(directory: str, wanted: str | bool) -> str:
    """Turn what the user said about resuming into the directory of a whole checkpoint."""
    if isinstance(wanted, str):
        _check_whole(wanted)
        return wanted
    found = last_whole_checkpoint(directory)
    if found is None:
        raise ValueError(
            f"resume_from_checkpoint=True, but output_dir={directory!r} holds no whole checkpoint; "
            "leave it out to start a new run"
        )
    return found


def _check_whole(directory: str) -> None:
    reason = what_is_missing(directory)
    if reason is not None:
        raise ValueError(
            f"resume_from_checkpoint={directory!r} is no whole checkpoint: {reason}; pass another directory, or True "
            "for the newest whole one"
        )
