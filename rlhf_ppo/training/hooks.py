"""What Trainer is told about PPO: data loading, counting and logging.

The algorithm is in `trainer.py`; everything here overrides a hook of `transformers.Trainer` and does the least that
makes Trainer's own code right for a model of two parts and a step that is a whole rollout.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from accelerate import PartialState, skip_first_batches
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, set_seed
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.optimization import GreedyLR
from transformers.trainer_utils import has_length

from rlhf_ppo.checkpoints.disk import naming_full_disk
from rlhf_ppo.checkpoints.fits import check_same_split, naming
from rlhf_ppo.checkpoints.history import whole_history
from rlhf_ppo.checkpoints.progress import PPOTrainerState, Progress
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.models.unwrapping import drop_foreign_padding
from rlhf_ppo.processes.collectives import gather_over_ranks, sum_over_ranks
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.processes.random_numbers import isolated_rng
from rlhf_ppo.processes.streams import Streams, draw_apart
from rlhf_ppo.reporting.metrics import MetricWindow, UpdateStatistics
from rlhf_ppo.reporting.timing import PhaseTimer
from rlhf_ppo.training.divergence import DivergenceGuard, Skipped
from rlhf_ppo.training.ingredients import find_place, record_and_compare
from rlhf_ppo.training.optimization import OptimizesPolicyAndValue
from rlhf_ppo.training.search import SearchesHyperparameters
from rlhf_ppo.training.sharding import set_up_engine
from rlhf_ppo.training.stopping import StopsWhole

logger = get_logger(__name__)


class TrainerHooks(StopsWhole, SearchesHyperparameters, OptimizesPolicyAndValue):
    """Trainer with the hooks that PPO needs."""

    _engine: GenerationEngine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer = PhaseTimer()
        self._sum, self._gather = sum_over_ranks(self.accelerator), gather_over_ranks(self.accelerator)
        run = (self.args, self.accelerator, self._sum, self._unwrapped(self.model), self._moment)
        self._guard = DivergenceGuard(*run, num_updates=lambda: self.state.global_step)
        self._streams = Streams(self.args.process_index, self.args.seed)
        draw_apart(self.callback_handler, self._streams.callbacks)
        self._metrics: dict[str, float] = {}
        self._num_response_tokens = 0
        self._updates_per_epoch = 1
        self._latest_prompts: Prompts | None = None
        self._learns_now = True
        set_up_engine(self.accelerator, self._unwrapped(self.model))

    # ---- Data ----

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader whose every batch is this rank's prompts for one update."""
        with self._data_order():  # the sampler takes its seed when it is made
            return self._get_dataloader(
                dataset=self.train_dataset,
                description="Training",
                batch_size=self.sizes.local_batch_size,
                sampler_fn=self._get_train_sampler,
                is_training=True,
            )

    def _data_order(self, epoch: int = 0) -> AbstractContextManager[None]:
        """Draw the order of an epoch's prompts: the same on all ranks, which share it, and after resuming."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return isolated_rng(seed + epoch, device_specific=False)

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        # Rollouts are full batches (dataloader_drop_last); evaluation covers every row.
        self.args.dataloader_drop_last = is_training
        try:
            return super()._get_dataloader(*args, is_training=is_training, **kwargs)
        finally:
            self.args.dataloader_drop_last = True

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "attention_mask"]

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Keep every column where there are reward functions, which may read it."""
        if self._reward_functions_read_columns():
            return dataset
        return super()._remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """Do the same for data sets that are not `datasets.Dataset`."""
        if self._reward_functions_read_columns():
            return data_collator
        return super()._get_collator_with_removed_columns(data_collator, description)

    def _reward_functions_read_columns(self) -> bool:
        raise NotImplementedError

    # ---- Counting: one step is one PPO update ----

    def set_initial_training_values(
        self, args: PPOConfig, dataloader: DataLoader
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Count epochs, steps and samples in PPO updates."""
        num_updates, batch_size = self.sizes.num_total_batches, self.sizes.batch_size
        if has_length(dataloader):
            per_epoch = len(dataloader)
            num_epochs = math.ceil(num_updates / per_epoch)
            num_examples = self.num_examples(cast(DataLoader, dataloader))
        else:
            per_epoch, num_epochs, num_examples = num_updates, sys.maxsize, num_updates * batch_size
        return num_epochs, per_epoch, num_examples, num_updates * batch_size, batch_size, per_epoch, num_updates

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._progress, num_prompts = Progress(), length(self.train_dataset) or 0
        if resume_from_checkpoint is not None:
            self._progress = Progress.load(resume_from_checkpoint)
            self.state.log_history = whole_history(
                resume_from_checkpoint, self.state.log_history, self._progress.num_logged
            )
            check_same_split(
                self._progress,
                self.sizes.batch_size,
                self.accelerator.num_processes,
                self.accelerator.distributed_type == DistributedType.DEEPSPEED,
            )
            self.state.compute_steps(self.args, max_steps)
            find_place(resume_from_checkpoint, self.state, self._progress, num_update_steps_per_epoch, num_prompts)
        self._record = record_and_compare(self, resume_from_checkpoint)
        self._progress.num_prompts = num_prompts
        self._guard.start(Skipped(**self._progress.skipped))
        self._load_half_learned(resume_from_checkpoint)
        self._window = MetricWindow(self._progress.pending_metrics)
        self.state = PPOTrainerState.of(self.state, self._progress.episode)
        skipped = 0 if self.args.ignore_data_skip else self._progress.batches_in_epoch
        return self._progress.epoch, skipped

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on with each rank's random numbers; with another number of processes, with new ones for each."""
        if checkpoint is None:
            return
        if self._progress.num_processes != self.accelerator.num_processes:
            set_seed(self.args.seed + self.state.global_step, device_specific=True)
            self._streams.seed(self.args.seed, self.state.global_step)
            return
        with failing_together(self.accelerator), naming(checkpoint, "its random states (rng_state.pth and beside it)"):
            super()._load_rng_state(checkpoint)
            self._streams.load(checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        self._streams.save(output_dir)
        if self._half_learned is not None:
            self._half_learned.save(output_dir, self.args.process_index)
        super()._save_rng_state(output_dir)

    # ---- The loop's bookkeeping ----

    def _set_up_training(
        self, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[torch.nn.Module, DataLoader, Iterable[int], int]:
        """Prepare model, optimizer, scheduler, data and state as Trainer does.

        Returns:
            The prepared model, the loader, the epochs to run, and how many batches of the first one were done before.
        """
        set_seed(self.args.seed, device_specific=True)
        self._streams.seed(self.args.seed)
        drop_foreign_padding(self._unwrapped(self.model).policy)
        self._engine.policy_changed()
        self.accelerator.free_memory()
        self.sizes = self.args.fill_derived(num_processes(self.args), length(self.train_dataset))
        loader = self.get_train_dataloader()
        num_epochs, per_epoch, _, _, _, _, max_steps = self.set_initial_training_values(self.args, loader)
        self._updates_per_epoch = per_epoch
        counts = cast(int, max_steps), per_epoch, num_epochs
        first_epoch, num_skipped = self._init_training_state(*counts, resume_from_checkpoint, trial)
        model, loader = self._prepare_for_training(max_steps, loader, resume_from_checkpoint)
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self.state.global_step
        loss = self._progress.loss_of(self.args.process_index, self.accelerator.num_processes)
        self._tr_loss = torch.tensor(loss, device=self.args.device)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = self._progress.last_logged_step
        model.zero_grad()
        self._note_run(trial)
        return model, loader, itertools.count(first_epoch), num_skipped

    def _rollout_prompts(
        self, loader: DataLoader, epoch: int, num_skipped: int, resume_from_checkpoint: str | None
    ) -> Iterator[Prompts]:
        """Yield this rank's prompts for each update of an epoch, going on where a checkpoint was written."""
        self._load_rng_state(resume_from_checkpoint)
        self._make_up()
        if self.state.global_step >= self.state.max_steps:  # resumed from the run's last checkpoint
            self.control.should_training_stop = True
            return
        if num_skipped > 0:
            loader = skip_first_batches(loader, num_skipped)
        if hasattr(loader, "set_epoch"):
            cast(Any, loader).set_epoch(epoch)
        batches = iter(loader)
        with self._data_order(epoch):  # samplers without a generator of their own draw when they start
            first = list(itertools.islice(batches, 1))
        num_batches = num_skipped
        for batch in itertools.chain(first, batches):
            if len(batch["input_ids"]) == self.sizes.local_batch_size:  # a stream may end in a part of a batch
                num_batches += 1
                self._latest_prompts = Prompts.from_collated(batch, self.args.device)
                yield self._latest_prompts
        if num_batches == 0:
            logger.warning(f"The data gave no full batch in pass {epoch}; training stops.")
            self.control.should_training_stop = True

    def _advance_step(self, learning_rate: float, since: tuple[float, int]) -> None:
        """Count one update, step the scheduler, and keep the update's metrics for the next log.

        Args:
            learning_rate: The rate that the update used.
            since: Time and number of episodes at the start of this call of `train`.
        """
        args, state = self.args, self.state
        self._half_learned = None  # also where an overridden `learn` has passed it over
        self._metrics |= self._guard.finish_update()
        if not isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau | GreedyLR):
            cast(Any, self.lr_scheduler).step()
        state.global_step += 1
        state.epoch = state.global_step / self._updates_per_epoch
        self._progress.batches_in_epoch += 1
        self._progress.episode += self.sizes.batch_size
        state.episode = self._progress.episode
        seconds = self._timer.drain()
        self._window.add(
            self._metrics
            | seconds
            | {
                "time/tokens_per_second": self._num_response_tokens / sum(seconds.values()),
                "eps": (state.episode - since[1]) / (time.time() - since[0]),
                "lr": learning_rate,
                "episode": state.episode,
            }
        )
        self._metrics = {}
        if args.torch_empty_cache_steps is not None and state.global_step % args.torch_empty_cache_steps == 0:
            clear_device_cache()

    def _advance_epoch(self, epoch: int) -> None:
        self._progress.epoch, self._progress.batches_in_epoch = epoch + 1, 0

    def _count_input_tokens(self, attention_mask: Tensor) -> None:
        counted = self.args.include_num_input_tokens_seen
        if counted != "no":
            tokens = attention_mask.sum() if counted == "non_padding" else torch.tensor(attention_mask.numel())
            self.state.num_input_tokens_seen += int(self.accelerator.reduce(tokens.to(self.args.device)))  # pyright: ignore

    def _gradient_sync(self, model: torch.nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """Exchange gradients with the last micro-batch only.

        DeepSpeed keeps its own account; FSDP would keep whole gradients of both models on every rank.
        """
        if is_last or self.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            return nullcontext()
        return self.accelerator.no_sync(model)

    def _backward(self, loss: Tensor) -> None:
        is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if is_deepspeed else {}))

    def _optimizer_step(
        self, model: torch.nn.Module, losses: Sequence[Tensor], statistics: UpdateStatistics
    ) -> float | Tensor:
        """Clip, step and clear the gradients, and count the step, unless something of it is not finite.

        Args:
            model: The prepared model.
            losses: Those of the step's micro-batches; the mean over the update's steps is what Trainer logs.
            statistics: Holds the figures of these micro-batches, which are dropped with the step.

        Returns:
            The gradients' norm before clipping.
        """
        clipped = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        grad_norm = cast("float | Tensor", self._get_grad_norm(model, grad_norm=clipped))
        if self.is_deepspeed_enabled and self.accelerator.optimizer_step_was_skipped:
            grad_norm = math.inf  # its step is behind us; it leaves out those whose gradients overflow
        if self._guard.allows_step(statistics, len(losses), torch.stack(list(losses)).sum(), grad_norm):
            self._fire("on_pre_optimizer_step")
            cast(Any, self.optimizer).step()
            self._fire("on_optimizer_step")
            for loss in losses:
                self._tr_loss += loss / (self.args.num_ppo_epochs * self.args.num_mini_batches)
        else:
            statistics.drop_last(len(losses))
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.update()  # the gradients were unscaled, which it expects a step to follow
        model.zero_grad()
        return grad_norm

    def _fire(self, event: str) -> None:
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control)

    def _moment(self) -> str:
        """Say for an error what the models run for."""
        done = self.state.global_step
        return f"update {done + 1}" if self._learns_now else f"evaluation after update {done}"

    def _autocast(self) -> AbstractContextManager[None]:
        return self.accelerator.autocast()

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        with self.compute_loss_context_manager(), self._autocast():
            yield

    def _get_state(self) -> PPOTrainerState:
        return self.state

    # ---- Logging ----

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log the first and the last update also where `logging_steps` would not, unless nothing is to be logged."""
        if self.state.global_step in (1, self.state.max_steps) and self._has_unlogged_updates():
            self.control.should_log = True
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _log_what_is_left(self, *args: Any, **kwargs: Any) -> None:
        """Log the last updates of a run that ended early.

        Its checkpoint was written before and does not know: a resumed run logs what one that never stopped does.
        """
        if self._has_unlogged_updates():
            self.control.should_log, self.control.should_evaluate, self.control.should_save = True, False, False
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _has_unlogged_updates(self) -> bool:
        return self.args.logging_strategy != "no" and self.state.global_step > self._globalstep_last_logged

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and add the PPO metrics of the updates since the last training log.

        Args:
            logs: What Trainer logs; `loss` among it marks a training log, which every rank writes.
            start_time: When training started.

        Raises:
            DiskFullError: There is no room for what is logged or printed.
        """
        of_training = "loss" in logs
        if of_training:
            logs.update(self._window.drain())
        with failing_together(self.accelerator) if of_training else nullcontext(), self._naming_full_log():
            super().log(logs, start_time)

    def _naming_full_log(self) -> AbstractContextManager[None]:
        directory = cast(str, self.args.output_dir)
        return naming_full_disk(directory, lambda: self._guard.last_checkpoint, "what is logged or printed")


def num_processes(args: PPOConfig) -> int:
    """Count the processes of the run, starting the process group if need be."""
    args._setup_devices  # noqa: B018  the property starts it
    return PartialState().num_processes


def length(dataset: Any) -> int | None:
    """Return the number of rows, or None for a stream."""
    return len(dataset) if has_length(dataset) else None
