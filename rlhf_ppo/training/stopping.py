"""The end of a run after a signal: what is given up, what is saved, and what a resumed run makes up for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from rlhf_ppo.evaluation.completions import is_due
from rlhf_ppo.processes.signals import (
    BetweenMicroBatches,
    EndsOnSignals,
    RunStopped,
    Stopped,
    end_despite_threads,
    say,
)


class StopsWhole:
    """Gives a `PPOTrainer` its end after a signal.

    A rollout that is given up leaves the run where the update before has left it, the random numbers included.
    Learning that is given up leaves it after the last optimizer step: the resumed run finishes it. It also makes up
    for a sample table or an evaluation that is given up.
    """

    def _listen(self: Any) -> None:
        self._signals = EndsOnSignals(self._sum, self._awaited, self.accelerator.num_processes)
        self._between = BetweenMicroBatches(self._signals, self.accelerator.num_processes, self.args.device)
        self.add_callback(self._signals)

    @contextmanager
    def _saved_if_stopped(self: Any, model: nn.Module, trial: Any) -> Iterator[None]:
        """End the block where a signal wants the run to end, with a checkpoint of what cannot be made again."""
        self._marked = self._streams.mark()
        try:
            yield
        except Stopped as stop:
            self._signals.stopped = stop.number
            self.scorer.stop()
            self._save_where_it_stopped(model, trial)

    def _save_where_it_stopped(self: Any, model: nn.Module, trial: Any) -> None:
        checkpoint = os.path.join(self._get_output_dir(trial), self._checkpoint_name())
        last = self._guard.last_checkpoint
        if last is not None and os.path.realpath(last) == os.path.realpath(checkpoint):
            return
        self._leave_evaluation()
        self._streams.go_back(self._marked)
        self._save_checkpoint(model, trial)
        if self._half_learned is None:  # else callbacks that look for `checkpoint-<global_step>` would not find it
            self._fire("on_save")

    def _leave_evaluation(self: Any) -> None:
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            self._progress.due.append("evaluation")

    def _after_event(self: Any, event: str) -> None:
        """Fire an event at the end of an update or a pass; a run that is to end leaves the evaluation to the next."""
        self._fire(event)
        self._marked = self._streams.mark()
        if self._signals.stopped is not None:
            self._leave_evaluation()

    def _sample_or_leave(self: Any) -> None:
        try:
            self._sample_if_due()
        except Stopped:
            self._progress.due.append("samples")

    def _sample_if_due(self: Any) -> None:
        if is_due(self.state.global_step, self.state.max_steps, self.args.num_sample_generations):
            self.generate_completions(sampling=True)

    def _make_up(self: Any) -> None:
        """Make the sample table and the evaluation that a signal has cut short, after the checkpoint was loaded."""
        self._marked = self._streams.mark()
        if "samples" in self._progress.due:
            self._sample_if_due()
        if "evaluation" in self._progress.due and self._determine_best_metric(self._evaluate(None, None), None):
            self.state.best_model_checkpoint = self._guard.last_checkpoint
        self._progress.due = []

    def _end_if_stopped(self: Any, event: str | None) -> None:
        """Leave the loop after the event in which a signal ended the run; after the loop, the run.

        Args:
            event: The event; None after the loop.

        Raises:
            Stopped: The loop is to be left.
            RunStopped: The run is to be left.
        """
        if self._signals.stopped is not None:
            if event is not None:
                raise Stopped(self._signals.stopped)
            self._end_stopped()

    def _end_stopped(self: Any) -> NoReturn:
        self._fire("on_train_end")
        self._finish_current_push()
        self.is_in_train = False
        number, checkpoint = self._signals.stopped, self._guard.last_checkpoint
        done, of, learned = self.state.global_step, self.state.max_steps, self._half_learned
        where = f"after update {done} of {of}"
        if learned is not None:
            num_minibatches = self.args.num_ppo_epochs * self.args.num_mini_batches
            where = (
                f"in update {done + 1} of {of}, {learned.num_minibatches} of {num_minibatches} mini-batches learned"
            )
        if self.is_world_process_zero():
            say(
                f"{signal.Signals(number).name}: the run has ended {where}, with the checkpoint {checkpoint}; "
                "resume_from_checkpoint=True (--resume_from_checkpoint True) goes on from it."
            )
        end_despite_threads(128 + number)
        raise RunStopped(number, checkpoint)

    def _awaited(self: Any) -> str:
        """Say what is finished before a signal ends the run."""
        done = self.state.global_step
        if self._writing_checkpoint:
            return f"the run ends when checkpoint-{done} is written"
        if self._timer.running == "learn" and self._half_learned is not None:
            return "the run ends with a checkpoint after the current pass of learning"
        if self._timer.running == "learn":  # by an overridden `learn`, or of an `Experience` of the user's own
            return (
                f"the run ends with a checkpoint when update {done + 1} is learned, whose steps cannot be taken back"
            )
        return f"the run ends with a checkpoint of update {done} after the current pass or reward"
