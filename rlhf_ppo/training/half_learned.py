"""Learning that a signal may end between two micro-batches, and that a resumed run finishes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from accelerate.utils import DistributedType
from torch import nn

from rlhf_ppo.checkpoints.fits import naming
from rlhf_ppo.checkpoints.half_learned import HalfLearned, check_as_begun, half_learned_in
from rlhf_ppo.data.experience import Experience
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.processes.random_numbers import shuffling_generator
from rlhf_ppo.processes.signals import Stopped
from rlhf_ppo.reporting.metrics import UpdateStatistics


class FinishesHalfLearned:
    """Gives a `PPOTrainer` updates whose learning one run begins and another one finishes.

    What is given up are the gradients of one mini-batch: it is learned again, with the same random numbers. The
    rollout and the optimizer steps before it are not made again.
    """

    _half_learned: HalfLearned | None = None  # from the first mini-batch to the last one, or to a resumed one's first

    def _load_half_learned(self: Any, checkpoint: str | None) -> None:
        """Read what a checkpoint keeps of the update that it is in the middle of, if it is.

        Raises:
            ValueError: It cannot be read, or not be finished with the arguments of now.
        """
        self._half_learned = None
        if checkpoint is None or half_learned_in(checkpoint) is None:
            return
        name = "the number of processes"
        check_as_begun({name: self._progress.num_processes}, {name: self.accelerator.num_processes})
        with failing_together(self.accelerator), naming(checkpoint, "the update that it is in the middle of"):
            loaded = HalfLearned.load(checkpoint, self.args.process_index, self.args.device)
        check_as_begun(loaded.begun_with, self._learns_with())
        self._half_learned = loaded

    def _learns_with(self: Any) -> dict[str, int]:
        learned_by = {name: getattr(self.args, name) for name in ("num_ppo_epochs", "num_mini_batches", "seed")}
        return learned_by | {"the number of prompts": self._progress.num_prompts}

    def _experience(self: Any, model: nn.Module, prompts: Prompts) -> Experience:
        """Return what an update learns from: a new rollout, or the one that a resumed run was learning from."""
        if self._half_learned is not None:
            self._go_on_with(self._half_learned)
            return self._half_learned.experience
        self._fire("on_step_begin")
        with self._guard.explaining():
            rollout = self._guard.checked_rollout(self.collect_rollout(model, prompts))
        return self._guard.checked_experience(self.estimate_advantages(rollout))

    @contextmanager
    def _learning(self: Any, model: nn.Module, experience: Experience) -> Iterator[tuple[HalfLearned, Any]]:
        """Yield what is learned of an update and the statistics of it; keep both where a signal ends the learning."""
        # A half-learned one has its own experience: an overridden `learn` may have changed it before.
        learned = self._half_learned or HalfLearned(experience, self._learns_with())
        self._half_learned = learned if type(learned.experience) is Experience else None  # others cannot be kept
        try:
            yield learned, UpdateStatistics(list(learned.sums))
        except Stopped:
            self._keep(learned)
            self._drop_gradients(model)
            raise
        self._half_learned = None

    def _minibatches(self: Any, learned: HalfLearned, statistics: UpdateStatistics) -> Iterator[Experience]:
        """Yield the mini-batches that are not learned yet; each counts as learned when the next one is asked for."""
        args = self.args
        generator = shuffling_generator(args.seed, self.state.global_step, args.process_index)
        minibatches = learned.experience.minibatches_of_epochs(args.num_ppo_epochs, args.num_mini_batches, generator)
        for minibatch in itertools.islice(minibatches, learned.num_minibatches, None):
            self._marked = self._streams.mark()
            if self._half_learned is not None:
                self._between.give_up_before_minibatch()
            start = time.monotonic()
            yield minibatch
            self._between.seconds = time.monotonic() - start
            learned.num_minibatches, learned.num_micro_batches = learned.num_minibatches + 1, 0
            learned.sums = list(statistics.sums)

    def _begin_micro_batch(self: Any, index: int) -> None:
        """Give up the mini-batch before one of its micro-batches, on all ranks, if a signal has come."""
        if self._half_learned is not None:
            self._between.give_up_before(index)

    def _end_micro_batch(self: Any, index: int) -> None:
        """Fire the event after a micro-batch that is not its mini-batch's last, unless a run before has done so."""
        learned = self._half_learned
        if learned is None:
            self._fire("on_substep_end")
        elif index >= learned.num_micro_batches:
            learned.num_micro_batches = index + 1
            self._fire("on_substep_end")

    def _keep(self: Any, learned: HalfLearned) -> None:
        """Note what a resumed run needs beside the experience; random numbers go back to before the mini-batch."""
        norm: Any = learned.grad_norm
        learned.grad_norm = float(getattr(norm, "full_tensor", lambda: norm)())
        learned.metrics, learned.num_response_tokens = self._metrics, self._num_response_tokens
        learned.seconds = self._timer.seconds
        learned.left_out, learned.num_steps = self._guard.left_out, self._guard.num_steps
        learned.wishes = self.control.state()["args"]
        # Callbacks go on drawing where they are: their events are not fired again.
        self._marked = {**self._streams.mark(), "training": self._marked["training"]}

    def _go_on_with(self: Any, learned: HalfLearned) -> None:
        self._metrics, self._num_response_tokens = dict(learned.metrics), learned.num_response_tokens
        self._timer.seconds = dict(learned.seconds)
        self._guard.left_out, self._guard.num_steps = list(learned.left_out), learned.num_steps
        for name, value in learned.wishes.items():
            setattr(self.control, name, value)

    def _drop_gradients(self: Any, model: nn.Module) -> None:
        model.zero_grad()
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            cast(Any, model).optimizer.zero_grad()  # of its own sums of micro-batches
        self.accelerator.gradient_state._set_sync_gradients(True)

    # ---- The checkpoint ----

    def _checkpoint_name(self: Any) -> str:
        """Name a checkpoint after the updates that are done, and the mini-batches of one that is half learned."""
        learned = self._half_learned
        return f"checkpoint-{self.state.global_step}" + ("" if learned is None else f"-{learned.num_minibatches}")
