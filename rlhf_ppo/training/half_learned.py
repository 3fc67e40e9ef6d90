"""Learning that a signal may end between two micro-batches, and that a resumed run finishes.

An update is half learned while some of its `num_ppo_epochs * num_mini_batches` mini-batches are not learned yet.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from rlhf_ppo.checkpoints.fits import naming
from rlhf_ppo.checkpoints.half_learned import HalfLearned, check_as_begun, half_learned_in
from rlhf_ppo.checkpoints.progress import Progress
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.experience import Experience
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.processes.random_numbers import shuffling_generator
from rlhf_ppo.processes.signals import BetweenMicroBatches, EndsOnSignals, Stopped
from rlhf_ppo.processes.streams import Streams
from rlhf_ppo.reporting.update_statistics import UpdateStatistics

_PTX = "ptx_coef above 0 (1: yes)"


class LearningRun(Protocol):
    """What is asked of the trainer of updates that are learned in parts."""

    args: PPOConfig
    accelerator: Accelerator
    _signals: EndsOnSignals
    _streams: Streams
    _sum: Callable[[Tensor], Tensor]

    def _fire(self, event: str) -> None: ...


class LearningInParts:
    """Makes mini-batches of updates whose learning one run begins and another one finishes.

    What is given up are the gradients of one mini-batch: it is learned again, with the same random numbers. The
    rollout and the optimizer steps before it are not made again.

    Args:
        run: The trainer. Its random numbers go back to before the mini-batch that is given up.
        keep: Notes, where learning is given up, the update's figures beside the experience.

    Attributes:
        unfinished: The update that is half learned, from its first mini-batch to its last one, or to the first one of
            a resumed run.
    """

    def __init__(
        self,
        run: LearningRun,
        keep: Callable[[HalfLearned], None],
    ) -> None:
        self.args, self.accelerator, self.streams, self.fire = run.args, run.accelerator, run._streams, run._fire
        self.reduce_sum = run._sum
        self.between = BetweenMicroBatches(run._signals, self.accelerator.num_processes, self.args.device)
        self.keep = keep
        self.unfinished: HalfLearned | None = None
        self._num_prompts = 0

    def start(self, checkpoint: str | None, progress: Progress) -> None:
        """Begin a run; read what a checkpoint keeps of the update that it is in the middle of, if it is.

        Args:
            checkpoint: The checkpoint's directory, or None.
            progress: Where the run stands.

        Raises:
            ValueError: It cannot be read, or not be finished with the arguments of now.
        """
        self.unfinished, self._num_prompts = None, progress.num_prompts
        if checkpoint is None or half_learned_in(checkpoint) is None:
            return
        name = "the number of processes"
        check_as_begun({name: progress.num_processes}, {name: self.accelerator.num_processes})
        with failing_together(self.accelerator), naming(checkpoint, "the update that it is in the middle of"):
            loaded = HalfLearned.load(checkpoint, self.args.process_index, self.args.device)
        check_as_begun({_PTX: 0} | loaded.begun_with, self._begun_with())
        self.unfinished = loaded

    def _begun_with(self) -> dict[str, int]:
        learned_by = {name: getattr(self.args, name) for name in ("num_ppo_epochs", "num_mini_batches", "seed")}
        return learned_by | {"the number of prompts": self._num_prompts, _PTX: int(self.args.ptx_coef > 0)}

    @contextmanager
    def learning(self, model: nn.Module, experience: Experience) -> Iterator[tuple[HalfLearned, UpdateStatistics]]:
        """Yield what is learned of an update and the statistics of it; keep both where a signal ends the learning.

        Args:
            model: The prepared model, whose gradients are dropped then.
            experience: What is learned from, where no update is half learned.
        """
        # A half-learned one has its own experience: an overridden `learn` may have changed it before.
        learned = self.unfinished or HalfLearned(experience, self._begun_with())
        self.unfinished = learned if type(learned.experience) is Experience else None  # others cannot be kept
        try:
            watches_kl = self.args.kl_stop is not None
            given = (list(learned.sums), tuple(learned.named), watches_kl)
            statistics = UpdateStatistics(*given, grad_norms=list(learned.grad_norms))
            statistics.learns_ptx = self.args.ptx_coef > 0
            yield learned, statistics
        except Stopped:
            norm: Any = learned.grad_norm
            learned.grad_norm = float(getattr(norm, "full_tensor", lambda: norm)())
            self.keep(learned)
            self.streams.mark_streams()  # callbacks go on drawing where they are: their events are not fired again
            self._drop_gradients(model)
            raise
        self.unfinished = None

    def minibatches(self, learned: HalfLearned, statistics: UpdateStatistics, update: int) -> Iterator[Experience]:
        """Yield the mini-batches that are not learned yet; each counts as learned when the next one is asked for.

        Args:
            learned: What is learned of the update.
            statistics: Figures of its micro-batches.
            update: Number of the update, from 0, which shuffles them.
        """
        args = self.args
        generator = shuffling_generator(args.seed, update, args.process_index)
        minibatches = learned.experience.minibatches_of_epochs(args.num_ppo_epochs, args.num_mini_batches, generator)
        for minibatch in itertools.islice(minibatches, learned.num_minibatches, None):
            self.streams.mark()
            if self.unfinished is not None:
                self.between.give_up_before_minibatch()
            start = time.monotonic()
            yield minibatch
            self.between.seconds = time.monotonic() - start
            learned.num_minibatches, learned.num_micro_batches = learned.num_minibatches + 1, 0
            learned.sums, learned.named = list(statistics.sums), list(statistics.named)
            learned.grad_norms = list(statistics.grad_norms)
            if self._ends_with_epoch(learned, statistics):
                break

    def _ends_with_epoch(self, learned: HalfLearned, statistics: UpdateStatistics) -> bool:
        """Tell, on all ranks alike, whether an epoch is learned that has moved the policy as far as `kl_stop`."""
        per_epoch, limit = self.args.num_mini_batches, self.args.kl_stop
        if limit is None or learned.num_minibatches % per_epoch:
            return False
        statistics.num_epochs = learned.num_minibatches // per_epoch
        kl = statistics.mean_kl(learned.epoch_start, self.reduce_sum)
        learned.epoch_start = len(statistics.sums)
        return kl > limit

    def begin_micro_batch(self, index: int) -> None:
        """Give up the mini-batch before one of its micro-batches, on all ranks, if a signal has come."""
        if self.unfinished is not None:
            self.between.give_up_before(index)

    def end_micro_batch(self, index: int) -> None:
        """Fire the event after a micro-batch that is not its mini-batch's last, unless a run before has done so."""
        learned = self.unfinished
        if learned is None:
            self.fire("on_substep_end")
        elif index >= learned.num_micro_batches:
            learned.num_micro_batches = index + 1
            self.fire("on_substep_end")

    def _drop_gradients(self, model: nn.Module) -> None:
        model.zero_grad()
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            cast(Any, model).optimizer.zero_grad()  # of its own sums of micro-batches
        self.accelerator.gradient_state._set_sync_gradients(True)

    # ---- The checkpoint ----

    def checkpoint_name(self, num_updates: int) -> str:
        """Name a checkpoint after the updates that are done, and the mini-batches of one that is half learned."""
        learned = self.unfinished
        return f"checkpoint-{num_updates}" + ("" if learned is None else f"-{learned.num_minibatches}")

    def save(self, checkpoint: str) -> None:
        """Write this process' file into a checkpoint in the middle of an update."""
        if self.unfinished is not None:
            self.unfinished.save(checkpoint, self.args.process_index)

    def progress(self) -> str:
        """Say how much of the update is learned."""
        num_minibatches = self.args.num_ppo_epochs * self.args.num_mini_batches
        return f"{cast(HalfLearned, self.unfinished).num_minibatches} of {num_minibatches} mini-batches learned"
