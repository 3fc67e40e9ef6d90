"""What surrounds the updates of a run: what comes before the first one, between two, and after the last."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from accelerate.utils import set_seed
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import TrainOutput

from rlhf_ppo.algorithm.controllers import check_coefficient
from rlhf_ppo.checkpoints.progress import Progress
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.presets import describe_preset
from rlhf_ppo.config.sizes import Sizes
from rlhf_ppo.data.datasets import num_rows
from rlhf_ppo.data.experience import Experience
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.estimate.run import RunEstimate
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.models.overflow import detecting_overflow
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.reference import Reference
from rlhf_ppo.models.unwrapping import drop_foreign_padding
from rlhf_ppo.processes.logs import get_logger
from rlhf_ppo.processes.signals import EndsOnSignals
from rlhf_ppo.processes.streams import Streams
from rlhf_ppo.reporting.metrics import MetricWindow
from rlhf_ppo.reporting.run_card import names_of_parts
from rlhf_ppo.reporting.timing import rate
from rlhf_ppo.reporting.watching import health_settings
from rlhf_ppo.rewards.scorer import Scorer
from rlhf_ppo.terminal.foreign import print_text
from rlhf_ppo.training.critic import CriticLearning
from rlhf_ppo.training.data_order import batches_of_pass
from rlhf_ppo.training.figures import UpdatedTrainer, UpdateFigures
from rlhf_ppo.training.half_learned import LearningInParts
from rlhf_ppo.training.optimization import follows_metric
from rlhf_ppo.training.stateful import StatefulParts
from rlhf_ppo.training.stopping import EndAfterSignal
from rlhf_ppo.training.subclassing import check_kept

logger = get_logger(__name__)


class LoopedTrainer(UpdatedTrainer, Protocol):
    """What the loop asks of its trainer."""

    callback_handler: CallbackHandler
    lr_scheduler: Any
    model: PolicyAndValue
    policy_model: nn.Module
    reference: Reference | None
    reward_models: list[nn.Module]
    scorer: Scorer
    sizes: Sizes
    train_dataset: Any
    _critic: CriticLearning
    _end: EndAfterSignal
    _engine: GenerationEngine
    _estimate: RunEstimate
    _globalstep_last_logged: int
    _initial_global_step: int
    _initial_num_input_tokens_seen: int
    _learning: LearningInParts
    _progress: Progress
    _signals: EndsOnSignals
    _stateful: StatefulParts
    _streams: Streams
    _total_loss_scalar: float
    _tr_loss: Tensor
    _window: MetricWindow

    def estimate_advantages(self, rollout: Rollout) -> Experience:
        """See `PPOTrainer`."""
        ...

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader of rollouts' prompts."""
        ...

    def set_initial_training_values(self, args: PPOConfig, dataloader: DataLoader) -> tuple[Any, ...]:
        """Count epochs, steps and samples."""
        ...

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]: ...
    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput: ...
    def _fire(self, event: str) -> None: ...
    def _get_learning_rate(self) -> float: ...
    def _get_output_dir(self, trial: Any) -> str: ...
    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]: ...
    def _load_rng_state(self, checkpoint: str | None) -> None: ...
    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None: ...
    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any: ...
    def _unwrapped(self, model: nn.Module) -> PolicyAndValue: ...


class Loop:
    """Begins a run, counts and reports its updates, and ends it.

    Args:
        run: The trainer.

    Attributes:
        model: The prepared model.
        epochs: Numbers of the passes over the data, from the one that the run is in.
        grad_norm: Gradient norm of the latest update.
        latest_prompts: This rank's prompts of the latest update, each once; None before it.
        figures: What is noted of the latest update.
    """

    model: nn.Module
    epochs: Iterable[int]

    def __init__(self, run: LoopedTrainer) -> None:
        self.run, self.figures = run, UpdateFigures(run)
        self.grad_norm: float | Tensor | None = None
        self.latest_prompts: Prompts | None = None
        self._updates_per_epoch = 1

    # ---- Before the first update ----

    @contextmanager
    def opened(self, trial: Any, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """Listen to signals and keep other runs out of the run's directory; give the checkpoint to go on from."""
        run, directory = self.run, self.run._get_output_dir(trial)
        check_kept(run)
        with run._signals.listening(), run._directory.opened(directory, resume_from_checkpoint) as checkpoint:
            run._guard.last_checkpoint = checkpoint
            run.scorer.stop()  # an update that failed may have left answers to come, and some that were logged
            run._logged.forget()
            run._estimate.announce()
            self._announce_preset()
            with detecting_overflow(run.model, run.args):
                yield checkpoint

    def _announce_preset(self) -> None:
        args = self.run.args
        if (preset := describe_preset(args)) and args.log_console != "none" and self.run.accelerator.is_main_process:
            print_text(preset)

    def begin(
        self, checkpoint: str | None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> nn.Module:
        """Prepare model, optimizer, scheduler, data and state as Trainer does, and say that training begins.

        Args:
            checkpoint: The checkpoint to go on from, or None.
            trial: The trial of a hyperparameter search.
            ignore_keys_for_eval: Passed on to evaluations.

        Returns:
            The prepared model.
        """
        run = self.run
        self._prepare_afresh()
        loader = run.get_train_dataloader()
        num_epochs, per_epoch, _, _, _, _, max_steps = run.set_initial_training_values(run.args, loader)
        self._updates_per_epoch, self._checkpoint = per_epoch, checkpoint
        first_epoch, self._num_skipped = run._init_training_state(max_steps, per_epoch, num_epochs, checkpoint, trial)
        self.epochs = itertools.count(first_epoch)
        self.model, self._loader = run._prepare_for_training(max_steps, loader, checkpoint)
        run._critic.begin()
        run._initial_num_input_tokens_seen = run.state.num_input_tokens_seen
        run._initial_global_step = run.state.global_step
        self._take_up_losses()
        self.model.zero_grad()
        made_of = names_of_parts(run.policy_model, run.reward_models, run.scorer.names)
        health = health_settings(run.callback_handler.callbacks)
        run._directory.note(run._get_output_dir(trial), run.state.log_history, made_of, health)
        moments = run._progress.score_moments  # where earlier versions kept them
        run._stateful.start(checkpoint, {"score_moments": moments} if moments else {})
        if checkpoint is not None and run.reference is not None:
            run.reference.take_up(checkpoint, self.model)
        self._trial, self._ignore_keys = trial, ignore_keys_for_eval
        self._start = time.time()  # which Trainer's summary is told
        self._began, self._episodes_before = time.monotonic(), run.state.episode
        self.grad_norm, self._learning_rate, self._epoch = None, None, 0
        run._fire("on_train_begin")
        return self.model

    def _prepare_afresh(self) -> None:
        """Leave nothing of a run before."""
        run = self.run
        set_seed(run.args.seed, device_specific=True)
        run._streams.seed(run.args.seed)
        drop_foreign_padding(run._unwrapped(run.model).policy)
        run._engine.policy_changed()
        run.accelerator.free_memory()
        run.sizes = run.args.fill_derived(run.accelerator.num_processes, num_rows(run.train_dataset))

    def _take_up_losses(self) -> None:
        run, progress = self.run, self.run._progress
        loss = progress.loss_of(run.args.process_index, run.accelerator.num_processes)
        run._tr_loss = torch.tensor(loss, device=run.args.device)
        run._total_loss_scalar = 0.0
        run._globalstep_last_logged = progress.last_logged_step

    def evaluate_first(self) -> None:
        """Evaluate with `eval_on_start`."""
        if self.run.args.eval_on_start:
            self.run._evaluate(self._trial, self._ignore_keys, skip_scheduler=True)

    def begin_epoch(self) -> None:
        """Go on where the checkpoint was written, or from the state that the pass before has left."""
        run = self.run
        run._fire("on_epoch_begin")
        run._load_rng_state(self._checkpoint)
        run._end.make_up()

    # ---- An update ----

    def prompts(self, epoch: int) -> Iterator[Prompts]:
        """Yield this rank's prompts for each update of a pass, going on where a checkpoint was written.

        Each stands there `args.num_generations` times, next to each other.
        """
        run, num_batches = self.run, self._num_skipped
        self._epoch = epoch
        self.begin_epoch()
        if run.state.global_step >= run.state.max_steps:  # resumed from the run's last checkpoint
            run.control.should_training_stop = True
            return
        for batch in batches_of_pass(self._loader, run.args, run.sizes, epoch, num_batches):
            num_batches += 1
            self.latest_prompts = Prompts.from_collated(batch, run.args.device)
            yield self.latest_prompts.repeated(run.args.num_generations)
        if num_batches == 0:
            logger.warning(f"The data gave no full batch in pass {epoch}; training stops.")
            run.control.should_training_stop = True

    def experience(self, collect: Callable[[], Rollout]) -> Experience:
        """Return what an update learns from: a new rollout, or the one that a resumed run was learning from."""
        run = self.run
        if (learned := run._learning.unfinished) is not None:
            self.figures.restore(learned)
            return learned.experience
        run._fire("on_step_begin")
        check_coefficient(run.kl_controller)  # a checkpoint may have held another
        with run._guard.explaining():
            rollout = run._guard.checked_rollout(collect())
        return run._guard.checked_experience(run.estimate_advantages(rollout))

    def end_update(self) -> None:
        """Count an update, step the schedule, make what is due after it, and report."""
        run = self.run
        mean_kl = run._metrics.get("objective/kl")  # an overridden step may give none
        if mean_kl is not None and not run._critic.is_alone:  # which says nothing of what the coefficient does
            run.kl_controller.update(mean_kl, run.sizes.batch_size)
            check_coefficient(run.kl_controller)  # before it is saved
        if run.reference is not None:
            run.reference.follow(self.model)
        self._learning_rate = learning_rate = run._get_learning_rate()
        self._count_update(learning_rate)
        run._end.sample_or_leave()
        self._after("on_step_end")

    def _count_update(self, learning_rate: float) -> None:
        """Count one update, step the schedule, and keep the update's metrics for the next log."""
        run, args, state = self.run, self.run.args, self.run.state
        run._learning.unfinished = None  # also where an overridden `learn` has passed it over
        run._metrics |= run._guard.finish_update()
        if not follows_metric(run.lr_scheduler):
            run.lr_scheduler.step()
        state.global_step += 1
        state.epoch = state.global_step / self._updates_per_epoch
        run._progress.batches_in_epoch += 1
        run._progress.episode += run.sizes.batch_size
        state.episode = run._progress.episode
        seconds = run._timer.drain()
        num_episodes, elapsed = state.episode - self._episodes_before, time.monotonic() - self._began
        run._window.add(
            run._metrics
            | seconds
            | rate("time/tokens_per_second", self.figures.num_response_tokens, sum(seconds.values()))
            | rate("eps", num_episodes, elapsed)
            | {"lr": learning_rate, "episode": state.episode}
        )
        run._metrics = {}
        if args.torch_empty_cache_steps is not None and state.global_step % args.torch_empty_cache_steps == 0:
            clear_device_cache()

    # ---- After updates ----

    def end_epoch(self) -> None:
        """Count a pass, and report."""
        run = self.run
        self._num_skipped, self._checkpoint = 0, None
        if not run.control.should_training_stop:
            run._progress.epoch, run._progress.batches_in_epoch = self._epoch + 1, 0
        self._after("on_epoch_end")

    def finish(self) -> TrainOutput:
        """Report what is left and finish the run, or leave it where a signal wants that."""
        run = self.run
        if self._has_unlogged_updates():
            # It ended early. Its checkpoint was written before and does not know: a resumed run logs as if it had not.
            run.control.should_log, run.control.should_evaluate, run.control.should_save = True, False, False
            self._report()
        run._end.end_if_stopped(None)
        run._guard.check_weights()
        run._guard.say_what_was_skipped()
        return run._finalize_training(self._trial, run.state.max_steps * run.sizes.batch_size, self._start)

    def _after(self, event: str) -> None:
        run = self.run
        run._end.after_event(event)
        if run.state.global_step in (1, run.state.max_steps) and self._has_unlogged_updates():
            run.control.should_log = True  # the first and the last update also where `logging_steps` would not
        self._report()
        run._end.end_if_stopped(event)

    def _has_unlogged_updates(self) -> bool:
        run = self.run
        return run.args.logging_strategy != "no" and run.state.global_step > run._globalstep_last_logged

    def _report(self) -> None:
        when = (self._trial, self._epoch, self._ignore_keys, self._start, self._learning_rate)
        self.run._maybe_log_save_evaluate(self.run._tr_loss, self.grad_norm, self.model, *when)
