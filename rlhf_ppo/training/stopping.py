"""The end of a run after a signal: what is given up, what is saved, and what a resumed run makes up for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from torch import nn
from transformers import TrainerControl

from rlhf_ppo.checkpoints.progress import PPOTrainerState, Progress
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.evaluation.completions import is_due
from rlhf_ppo.processes.signals import EndsOnSignals, RunStopped, Stopped, end_despite_threads, say
from rlhf_ppo.processes.streams import Streams
from rlhf_ppo.rewards.scorer import Scorer
from rlhf_ppo.training.divergence import DivergenceGuard
from rlhf_ppo.training.half_learned import LearningInParts


class StoppableRun(Protocol):
    """What the end of a run asks of its trainer."""

    args: PPOConfig
    state: PPOTrainerState
    control: TrainerControl
    scorer: Scorer
    is_in_train: bool
    _progress: Progress

    def generate_completions(self, sampling: bool = False) -> Any:
        """Make a sample table."""
        ...

    def is_world_process_zero(self) -> bool:
        """Tell whether this is the main process."""
        ...

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool: ...
    def _evaluate(self, trial: Any, ignore_keys_for_eval: list[str] | None) -> dict[str, float]: ...
    def _finish_current_push(self) -> None: ...
    def _fire(self, event: str) -> None: ...
    def _get_output_dir(self, trial: Any) -> str: ...
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None: ...


class EndAfterSignal:
    """The end of a run after a signal.

    A rollout that is given up leaves the run where the update before has left it, the random numbers included.
    Learning that is given up leaves it after the last optimizer step: the resumed run finishes it. It also makes up
    for a sample table or an evaluation that is given up.

    Args:
        run: The trainer.
        signals: Knows which have come.
        learning: Knows the update that is half learned.
        streams: The random numbers.
        guard: Knows the newest checkpoint.
    """

    def __init__(
        self,
        run: StoppableRun,
        signals: EndsOnSignals,
        learning: LearningInParts,
        streams: Streams,
        guard: DivergenceGuard,
    ) -> None:
        self.run, self.signals, self.learning, self.streams, self.guard = run, signals, learning, streams, guard

    @contextmanager
    def saving(self, model: nn.Module, trial: Any) -> Iterator[None]:
        """End the block where a signal wants the run to end, with a checkpoint of what cannot be made again."""
        self.streams.mark()
        try:
            yield
        except Stopped as stop:
            self.signals.stopped = stop.number
            self.run.scorer.stop()
            self.save_where_it_stopped(model, trial)

    def save_where_it_stopped(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint of the last mark, unless it is there."""
        run = self.run
        name = self.learning.checkpoint_name(run.state.global_step)
        checkpoint, last = os.path.join(run._get_output_dir(trial), name), self.guard.last_checkpoint
        if last is not None and os.path.realpath(last) == os.path.realpath(checkpoint):
            return
        self._leave_evaluation()
        self.streams.go_back()
        run._save_checkpoint(model, trial)
        if self.learning.unfinished is None:  # else callbacks that look for `checkpoint-<step>` would not find it
            run._fire("on_save")

    def _leave_evaluation(self) -> None:
        if self.run.control.should_evaluate:
            self.run.control.should_evaluate = False
            self.run._progress.due.append("evaluation")

    def after_event(self, event: str) -> None:
        """Fire an event at the end of an update or a pass; a run that is to end leaves the evaluation to the next."""
        self.run._fire(event)
        self.streams.mark()
        if self.signals.stopped is not None:
            self._leave_evaluation()

    def sample_or_leave(self) -> None:
        """Make a sample table if one is due; one that a signal cuts short is left to the resumed run."""
        try:
            self._sample_if_due()
        except Stopped:
            self.run._progress.due.append("samples")

    def _sample_if_due(self) -> None:
        state = self.run.state
        if is_due(state.global_step, state.max_steps, self.run.args.num_sample_generations):
            self.run.generate_completions(sampling=True)

    def make_up(self) -> None:
        """Make the sample table and the evaluation that a signal has cut short, after the checkpoint was loaded."""
        run, due = self.run, self.run._progress.due
        self.streams.mark()
        if "samples" in due:
            self._sample_if_due()
        if "evaluation" in due and run._determine_best_metric(run._evaluate(None, None), None):
            run.state.best_model_checkpoint = self.guard.last_checkpoint
        due.clear()

    def end_if_stopped(self, event: str | None) -> None:
        """Leave the loop after the event in which a signal ended the run; after the loop, the run.

        Args:
            event: The event; None after the loop.

        Raises:
            Stopped: The loop is to be left.
            RunStopped: The run is to be left.
        """
        if (number := self.signals.stopped) is not None:
            if event is not None:
                raise Stopped(number)
            self._end(number)

    def _end(self, number: int) -> NoReturn:
        run, checkpoint = self.run, str(self.guard.last_checkpoint)
        run._fire("on_train_end")
        run._finish_current_push()
        run.is_in_train = False
        done, of = run.state.global_step, run.state.max_steps
        where = f"after update {done} of {of}"
        if self.learning.unfinished is not None:
            where = f"in update {done + 1} of {of}, {self.learning.progress()}"
        self.signals.wait_until_told()
        if run.is_world_process_zero():
            say(
                f"{signal.Signals(number).name}: the run has ended {where}, with the checkpoint {checkpoint}; "
                "resume_from_checkpoint=True (--resume_from_checkpoint True) goes on from it."
            )
        end_despite_threads(128 + number)
        raise RunStopped(number, checkpoint)


def awaited(num_updates: int, phase: str, is_saving: bool, is_half_learned: bool) -> str:
    """Say what is finished before a signal ends the run.

    Args:
        num_updates: Updates that are done.
        phase: The phase that runs now.
        is_saving: Whether a checkpoint is being written.
        is_half_learned: Whether what is learned of an update can be kept.
    """
    if is_saving:
        return f"the run ends when checkpoint-{num_updates} is written"
    if phase == "learn" and is_half_learned:
        return "the run ends with a checkpoint after the current pass of learning"
    if phase == "learn":  # by an overridden `learn`, or of an `Experience` of the user's own
        update = num_updates + 1
        return f"the run ends with a checkpoint when update {update} is learned, whose steps cannot be taken back"
    return f"the run ends with a checkpoint of update {num_updates} after the current pass or reward"
