"""Overrides of `transformers.Trainer` for steps that are PPO updates.

The algorithm is in `trainer.py`.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from accelerate.utils import gather_object, set_seed
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerControl
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput, rotate_checkpoints

from rlhf_ppo.algorithm.advantages import KLController
from rlhf_ppo.algorithm.masked import RunningMoments
from rlhf_ppo.checkpoints.state import PPOTrainerState
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import Sizes, output_directory
from rlhf_ppo.config.validation import METHOD_HINTS, reject_call
from rlhf_ppo.data.prompts import Prompts, num_rows
from rlhf_ppo.data.rollout import Responses, Rollout
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.generation.transformers_engine import greedy_config
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.reference import Reference
from rlhf_ppo.models.unwrapping import as_module, drop_foreign_padding, drop_ignored_generation_settings
from rlhf_ppo.processes.distributed import (
    get_logger,
    is_sharding,
    preserve_rng,
    raise_on_all_ranks,
    use_stream_in_callbacks,
)
from rlhf_ppo.processes.signals import RunStopped, StopOnSignal, say
from rlhf_ppo.reporting import evaluation as evaluations
from rlhf_ppo.reporting.completion_files import NUM_KEPT_COMPLETIONS, write_completions
from rlhf_ppo.reporting.critic_audit import CriticAudit, audit, check_audit, prefixes_of
from rlhf_ppo.reporting.health import add_console_and_health, health_settings
from rlhf_ppo.reporting.metrics import UpdateStatistics, evaluation_columns, noting_out_of_memory, rate
from rlhf_ppo.reporting.model_card import names_of_parts, reward_origins, save_run_card
from rlhf_ppo.reporting.run_log import save_settings, where_results_are
from rlhf_ppo.rewards.scorer import Scorer, Scores
from rlhf_ppo.terminal import print_text
from rlhf_ppo.training import datasets, rollouts, saving
from rlhf_ppo.training.checks import check_datasets, check_rows
from rlhf_ppo.training.construction import set_up_engine
from rlhf_ppo.training.learning import CriticOnly, gradient_norms, monte_carlo_returns
from rlhf_ppo.training.optimization import Optimization, Optimizers, check_prepared, follow_metric, follows_metric
from rlhf_ppo.training.run_state import LoopState, RunState

if TYPE_CHECKING:
    import pandas as pd

logger = get_logger(__name__)


@contextmanager
def _overridden(args: PPOConfig, **values: Any) -> Iterator[None]:
    """Override arguments in the block."""
    given = {name: getattr(args, name) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(given)


class TrainerBase(Trainer):
    """Trainer whose step is a PPO update.

    Attributes:
        dataset_name: Hub name or path of the prompts, for the model card; scripts set it.
    """

    dataset_name: str | None = None
    args: PPOConfig
    model: PolicyAndValue
    optimizer: Any
    lr_scheduler: Any
    sizes: Sizes
    policy_model: nn.Module
    reference: Reference | None
    reward_models: list[nn.Module]
    score_moments: RunningMoments
    scorer: Scorer
    kl_controller: KLController
    _run: RunState
    _critic_only: CriticOnly
    _engine: GenerationEngine
    _rollouts: rollouts.Sampler
    _preparation: datasets.PromptPreparation
    _reward_funcs: Any

    # Methods and properties of PPOTrainer
    collect_rollout: Any
    generate_responses: Any
    score_responses: Any
    shape_rewards: Any
    learn: Any
    _evaluate_responses: Any
    _next_experience: Any
    _end_update: Any
    _score_unit: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Explain unknown arguments."""
        known = inspect.signature(cls).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            own = dict.fromkeys(PPOConfig.__dataclass_fields__, "PPOConfig")
            reject_call(cls.__name__, args, kwargs, known, own)
        return super().__new__(cls)

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            """Explain missing attributes that older trainers have; raise the error of a property that lacks one."""
            if isinstance(inspect.getattr_static(type(self), name, None), property):
                return object.__getattribute__(self, name)
            hint = f" ({METHOD_HINTS[name]})" if name in METHOD_HINTS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __init__(self, *args: Any, optimizers: Optimizers = (None, None), **kwargs: Any) -> None:
        self._optimization = Optimization(optimizers)
        super().__init__(*args, optimizers=cast(Any, self._optimization.given), **kwargs)
        self._optimization.check(self.model, self.accelerator)
        self.state = PPOTrainerState.of(self.state)
        run = self._run
        run.connect(self.accelerator, self.callback_handler, self.model)
        use_stream_in_callbacks(self.callback_handler, run.streams.callbacks)
        reduce_sum: Any = partial(self.accelerator.reduce, reduction="sum")
        run.signals = StopOnSignal(reduce_sum, self.accelerator.num_processes)
        self._rollout_metrics = rollouts.RolloutMetrics(run)
        self._open_steps: ExitStack | None = None  # releases what a run of `step` holds
        self._has_stepped = False
        self._printed = ""  # the latest sample table
        add_console_and_health(self, self.args, self.sizes, self.reward_models)
        self.add_callback(run.signals)
        set_up_engine(self.accelerator, self._models)

    @property
    def state(self) -> PPOTrainerState:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Trainer's state, shared with the parts of the trainer."""
        return self._run.state

    @state.setter
    def state(self, state: Any) -> None:
        self._run.state = state

    @property
    def control(self) -> TrainerControl:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Trainer's control, shared with the parts of the trainer."""
        return self._run.control

    @control.setter
    def control(self, control: TrainerControl) -> None:
        self._run.control = control

    @property
    def _models(self) -> PolicyAndValue:
        """Policy and value model without the wrappers of engines and compilation."""
        return self._run.unwrapped(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; keep the one that `early_accelerator` created."""
        if "accelerator" not in vars(self):
            super().create_accelerator_and_postprocess()

    # ---- The run around the updates ----

    @contextmanager
    def _open_run(self, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """Handle signals and lock the run's directory in the block; yield the checkpoint to resume from."""
        run, args = self._run, self.args
        opened = saving.opened(args, self.accelerator, resume_from_checkpoint)
        with run.signals.listening(), opened as checkpoint:
            run.guard.last_checkpoint = checkpoint
            self.scorer.stop()  # a failed update may have left pending rewards and logged values
            run.logged.forget()
            yield checkpoint

    def _begin_run(self, checkpoint: str | None, ignore_keys: list[str] | None = None) -> LoopState:
        """Prepare model, optimizer, schedule, data and state as Trainer does, and begin the loop."""
        run, args = self._run, self.args
        set_seed(args.seed, device_specific=True)
        run.streams.seed(args.seed)
        policy = self._models.policy
        drop_foreign_padding(policy)
        drop_ignored_generation_settings(policy)
        self._engine.policy_changed()
        self.accelerator.free_memory()
        self.sizes = run.sizes = args.fill_derived(self.accelerator.num_processes, num_rows(self.train_dataset))
        loader = self.get_train_dataloader()
        num_epochs, per_epoch, *_, max_steps = self.set_initial_training_values(args, loader)
        self._init_training_state(max_steps, per_epoch, num_epochs, checkpoint, None)
        saving.resume(run, checkpoint, num_rows(self.train_dataset) or 0, per_epoch)
        model, loader = self._prepare_for_training(max_steps, loader, checkpoint)
        check_prepared(self.optimizer, model, args, self.is_deepspeed_enabled or self.is_fsdp_enabled)
        run.progress.optimization = self._optimization.recorded()
        self._critic_only.begin(self.optimizer, self._optimization.policy_groups)
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self.state.global_step
        loss = run.progress.loss_of(args.process_index, self.accelerator.num_processes)
        self._tr_loss, self._total_loss_scalar = torch.tensor(loss, device=args.device), 0.0
        self._globalstep_last_logged = run.progress.last_logged_step
        model.zero_grad()
        self._note_run()
        run.stateful.start(checkpoint)
        run.loop = LoopState(
            model, datasets.Passes(loader, args, run.sizes), checkpoint, run.progress.epoch,
            num_skipped=run.progress.batches_in_epoch, updates_per_epoch=per_epoch,
            ignore_keys=ignore_keys, num_episodes_before=self.state.episode,
            schedule_follows_metric=follows_metric(self.lr_scheduler),
        )  # fmt: skip
        run.fire("on_train_begin")
        return run.loop

    def _note_run(self) -> None:
        """Write the run's settings and parts into its directory."""
        reference = None if self.reference is None else self.reference.own_policy
        made_of = names_of_parts(
            self.policy_model, reference, self.reward_models, self.scorer.names, self._reward_funcs, self.dataset_name
        )
        health = health_settings(self.callback_handler.callbacks)
        with raise_on_all_ranks(self.accelerator):
            if self.args.should_save:
                save_settings(output_directory(self.args), self.args, made_of, health)

    def _evaluate_on_start(self) -> None:
        if self.args.eval_on_start:
            loop = self._run.loop
            self._evaluate(None, loop.ignore_keys, skip_scheduler=True)

    def _begin_epoch(self) -> None:
        """Restore the random numbers of a checkpoint."""
        self._run.fire("on_epoch_begin")
        self._load_rng_state(self._run.loop.checkpoint)

    def _make_samples(self) -> None:
        """Make a sample table if it is due."""
        num_tables = self.args.num_sample_generations
        if num_tables > 0 and evaluations.is_due(self.state.global_step, self.state.max_steps, num_tables):
            self.generate_completions(sampling=True)

    def _count_update(self) -> None:
        """Count an update, step the schedule, and keep the metrics for the next log."""
        run, args, state, loop = self._run, self.args, self.state, self._run.loop
        loop.learning_rate = self._get_learning_rate()
        if not loop.schedule_follows_metric:
            self.lr_scheduler.step()
        state.global_step += 1
        state.epoch = state.global_step / loop.updates_per_epoch
        run.progress.batches_in_epoch += 1
        run.progress.episode += self.sizes.batch_size
        state.episode = run.progress.episode
        seconds = run.timer.drain()
        num_episodes, elapsed = state.episode - loop.num_episodes_before, time.monotonic() - loop.began
        num_tokens = self._rollout_metrics.num_response_tokens
        run.window.add(
            run.metrics
            | seconds
            | rate("time/tokens_per_second", num_tokens, sum(seconds.values()))
            | rate("eps", num_episodes, elapsed)
            | {"lr": loop.learning_rate, "episode": state.episode}
        )
        run.metrics = {}
        if args.torch_empty_cache_steps is not None and state.global_step % args.torch_empty_cache_steps == 0:
            clear_device_cache()

    def _end_epoch(self, epoch: int) -> None:
        """Count a pass over the data, and report."""
        self._run.loop.num_skipped, self._run.loop.checkpoint = 0, None
        if not self.control.should_training_stop:
            self._run.progress.epoch, self._run.progress.batches_in_epoch = epoch + 1, 0
        self._report("on_epoch_end")

    def _report(self, event: str) -> None:
        """Fire an event at the end of an update or a pass; log, evaluate and save if due."""
        self._run.fire(event)
        self._run.agree_on_control()
        if self.state.global_step in (1, self.state.max_steps) and self._has_unlogged_updates():
            self.control.should_log = True  # the first and the last update, whatever `logging_steps` is
        self._log_save_evaluate()

    def _has_unlogged_updates(self) -> bool:
        return self.args.logging_strategy != "no" and self.state.global_step > self._globalstep_last_logged

    def _log_save_evaluate(self) -> None:
        loop: Any = self._run.loop
        self._maybe_log_save_evaluate(
            self._tr_loss, loop.grad_norm, loop.model, None, loop.epoch, loop.ignore_keys, loop.start,
            loop.learning_rate,
        )  # fmt: skip
        self._run.agree_on_control()

    def _leave_if_stopped(self) -> None:
        """Leave the run with `RunStopped` if a signal ended it."""
        if (number := self._run.signals.stopped) is None:
            return
        self._save_last()  # save_strategy="best" saves after a best evaluation only
        self._run.fire("on_train_end")
        self._finish_current_push()
        self.is_in_train = False
        checkpoint, done, of = str(self._run.guard.last_checkpoint), self.state.global_step, self.state.max_steps
        if self.args.process_index == 0:
            say(
                f"{signal.Signals(number).name}: the run has ended after update {done} of {of}, with the checkpoint "
                f"{checkpoint}; resume_from_checkpoint=True (--resume_from_checkpoint True) continues from it."
            )
        raise RunStopped(number, checkpoint)

    def _save_last(self) -> None:
        """Write a checkpoint of the latest update, unless it has one."""
        name = f"checkpoint-{self.state.global_step}"
        if os.path.basename(self._run.guard.last_checkpoint or "") != name:
            self._save_checkpoint(self._run.loop.model, None)
            self._run.fire("on_save")

    def _finish_run(self) -> TrainOutput:
        """Log remaining updates and finish the run; after a signal, leave it."""
        control, loop = self.control, self._run.loop
        if self._has_unlogged_updates():
            # It ended early, after its checkpoint: a resumed run logs as if it had not.
            control.should_log, control.should_evaluate, control.should_save = True, False, False
            self._log_save_evaluate()
        self._leave_if_stopped()
        self._run.guard.check_weights()
        num_episodes = self.state.max_steps * self.sizes.batch_size
        output = self._finalize_training(None, num_episodes, loop.start)
        self.save_state()  # the log, for `rlhf-ppo report`
        return output

    # ---- The run of `step` ----

    @property
    def _begins_steps(self) -> bool:
        """Whether Trainer's `train` only sets up a run of `step`."""
        return self._open_steps is not None and not self._has_stepped

    @contextmanager
    def _step_of_run(self) -> Iterator[LoopState]:
        """Begin the run of `step` in its first call; end it after the last update, a signal or an error."""
        with ExitStack() as ending:
            ending.callback(self._release_steps)
            if self._open_steps is None and not self._has_stepped:
                self._open_steps = ExitStack()
                super().train(self._open_steps.enter_context(self._open_run(None)))
                self._has_stepped = True
            if self._open_steps is None or self.state.global_step >= self.state.max_steps:
                done, of = self.state.global_step, self.state.max_steps
                raise RuntimeError(
                    f"the run of step() is over after {done} of {of} updates; to continue, make a new PPOTrainer with "
                    "resume_from_checkpoint=True, and a larger total_episodes for more updates"
                )
            yield self._run.loop
            self._leave_if_stopped()
            if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
                self._finish_run()
            else:
                ending.pop_all()

    def _close_steps(self, saves: bool) -> None:
        """End a run of `step` before its last update, see `PPOTrainer.close`; do nothing without an open run.

        Args:
            saves: Whether to save, log and fire `on_train_end`, which all ranks do together.
        """
        if self._open_steps is None:
            return
        with ExitStack() as ending:
            ending.callback(self._release_steps)
            if saves:
                self._run.signals.agree(self.args.device)
                if self.args.save_strategy != "no":
                    with preserve_rng():
                        self._save_last()
                self._finish_run()

    def _release_steps(self) -> None:
        if self._open_steps is not None:
            self._open_steps.close()
            self._open_steps = None

    # ---- Optimizer steps ----

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        """Run models as Trainer's training step does."""
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            yield

    def _optimizer_step(
        self, model: nn.Module, losses: Sequence[Tensor], statistics: UpdateStatistics
    ) -> float | Tensor:
        """Clip the gradients, step and clear them.

        Args:
            model: The prepared model.
            losses: Losses of the step's micro-batches; Trainer logs their mean over the update's steps.
            statistics: Statistics of these micro-batches.

        Returns:
            Gradient norm before clipping.
        """
        run, args, accelerator = self._run, self.args, self.accelerator
        self._critic_only.drop_policy_gradients(self._run.unwrapped(model).policy)
        norms = gradient_norms(accelerator, self._run.unwrapped(model))
        clipped: Any = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        grad_norm: Any = self._get_grad_norm(model, grad_norm=clipped)
        if self.is_deepspeed_enabled and accelerator.optimizer_step_was_skipped:
            grad_norm = math.inf  # it has stepped, or skipped an overflow
        run.guard.check_step(statistics, len(losses), torch.stack(list(losses)).sum(), grad_norm)
        statistics.add_grad_norms(norms)
        run.fire("on_pre_optimizer_step")
        self.optimizer.step()
        run.fire("on_optimizer_step")
        for loss in losses:
            self._tr_loss += loss / (args.num_ppo_epochs * args.num_mini_batches)
        model.zero_grad()
        return grad_norm

    # ---- Data ----

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader whose batches are this rank's prompts for one update each."""
        with datasets.data_order(self.args):  # the sampler is seeded when it is made
            size, sampler = datasets.num_prompts(self.sizes, self.args), self._get_train_sampler
            return self._get_dataloader(self.train_dataset, "Training", size, sampler, is_training=True)

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, is_training: bool = False, **kwargs: Any
    ) -> DataLoader:
        # Rollouts are full batches; evaluations cover every row. The CPU pins no memory.
        pins = self.args.dataloader_pin_memory and self.args.device.type != "cpu"
        dataset = datasets.read_by_each_rank(dataset, batch_size * self.sizes.world_size, is_training, self.args)
        self.accelerator.dataloader_config.dispatch_batches = False  # it can send tensors of one width only
        with _overridden(self.args, dataloader_drop_last=is_training, dataloader_pin_memory=pins):
            made = super()._get_dataloader(dataset, description, batch_size, *args, is_training=is_training, **kwargs)
            return datasets.leaving_signals(made)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "attention_mask"]

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Keep all columns if rewards read them."""
        return dataset if self.scorer.reads_columns else super()._remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """Keep all columns if rewards read them, of data sets other than `datasets.Dataset`."""
        if self.scorer.reads_columns:
            return data_collator
        return super()._get_collator_with_removed_columns(data_collator, description)

    # ---- Optimizer and schedule ----

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """Make the optimizer, with the given function if there is one.

        Args:
            model: The prepared model; `self.model` when None.

        Raises:
            TypeError: The function returned no optimizer.
            ValueError: Its optimizer lacks trainable parameters, or holds foreign ones.
        """
        if self.optimizer is None:
            self.optimizer = self._optimization.made_optimizer(self.model if model is None else model)
        return self._optimization.rated(super().create_optimizer(model), model or self.model, self.args)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Make the scheduler; one that follows a metric maximizes it if greater is better."""
        follow_metric(self.args)
        if self.lr_scheduler is None:
            over = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = self._optimization.made_scheduler(over, num_training_steps)
            self._created_lr_scheduler = self.lr_scheduler is not None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self._optimization.take(scheduler, self.args, num_training_steps)
        return scheduler

    # ---- Checkpoints ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write what Trainer writes, under a temporary name, then rotate the checkpoints and upload."""
        run, args, state = self._run, self.args, self.state
        run.guard.check_weights()
        run.progress.losses = run.gather(self._tr_loss.reshape(1)).tolist()
        run.progress.last_logged_step = self._globalstep_last_logged
        self.store_flos()
        with saving.writing_checkpoint(run) as (directory, final):
            self.save_model(directory, _internal_call=True)
            if not args.save_only_model:
                self._save_optimizer_and_scheduler(directory)
                self._save_scaler(directory)
                self._save_rng_state(directory)
            if state.best_global_step == state.global_step:
                state.best_model_checkpoint = final
            if args.should_save:
                saving.export_states([*self.callback_handler.callbacks, self.control], state)
                state.save_to_json(os.path.join(directory, TRAINER_STATE_NAME))
        self.create_model_card()
        if args.push_to_hub:
            self._push_from_checkpoint(final)
        if args.should_save:
            rotate_checkpoints(output_directory(args), args.save_total_limit, state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with saving.without_frozen(as_module(self.model_wrapped), self._models, self.is_deepspeed_enabled):
            super()._save_optimizer_and_scheduler(output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or its adapter) and the tokenizer for `from_pretrained`, under every launcher.

        Then print one line with the places of policy, curves and samples, if progress is shown.

        Args:
            output_dir: The directory; `args.output_dir` when None.

        Raises:
            DivergenceError: A weight is not finite; nothing is written.
        """
        args, accelerator = self.args, self.accelerator
        if not self._run.is_saving:
            self._run.guard.check_weights(together=is_sharding(accelerator))
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type):
            # Trainer writes nothing here for sharded checkpoints
            self._save(output_dir, state_dict=accelerator.get_state_dict(self.model_wrapped))  # pyright: ignore
        super().save_model(output_dir, _internal_call)
        if not _internal_call and args.process_index == 0 and not args.disable_tqdm:
            own = output_directory(args)
            print_text(where_results_are(output_dir or own, own))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        args, directory = self.args, output_dir or output_directory(self.args)
        if not args.should_save:
            return
        critic = saving.CRITIC_DIR if args.save_critic else None
        value_directory = saving.VALUE_MODEL_DIR if self._run.is_saving else critic
        saving.save_models(self._models, directory, state_dict, value_directory)
        tokenizer: Any = self.processing_class
        tokenizer.save_pretrained(directory)
        if value_directory == saving.CRITIC_DIR:
            tokenizer.save_pretrained(os.path.join(directory, value_directory))
        torch.save(args, os.path.join(directory, TRAINING_ARGS_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            saving.load_models(self._models, resume_from_checkpoint, super()._load_from_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        saving.check_loaded(self._models, load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both, then apply this run's arguments if they changed."""
        if checkpoint is None:
            return
        loading = nullcontext()
        if self.is_fsdp_enabled:
            loading = saving.loading_without_policy_state(checkpoint, self._models.policy)
        with loading:
            super()._load_optimizer_and_scheduler(checkpoint)
        saving.apply_own_optimization(self._run, self._optimization, self.optimizer, self._get_learning_rate)

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return super()._load_best_model()
        best = cast(str, self.state.best_model_checkpoint)
        logger.info(f"Loading the best model from {best} ({self.state.best_metric}).")
        self._load_from_checkpoint(best)

    # ---- Evaluation ----

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sample responses to evaluation prompts and score them.

        Args:
            eval_dataset: Prompts in any format of `train_dataset`, or a dict of data sets; the constructor's when
                None.
            ignore_keys: Ignored; for compatibility with Trainer.
            metric_key_prefix: Prefix of each key.

        Returns:
            `eval_score` (in the reward's unit, shaped as in training: see
            `rlhf_ppo.rewards.scorer.scores_in_reward_unit`), `eval_kl` and `eval_entropy` (nats per response),
            `eval_response_length_mean` (tokens), `eval_ended_frac`, `eval_rewards/<name>/mean|std`, and speed.
        """
        if isinstance(eval_dataset, str):
            names = list(self.eval_dataset) if isinstance(self.eval_dataset, Mapping) else []
            if eval_dataset not in names:
                raise ValueError(
                    f"eval_dataset={eval_dataset!r} is none of {names}, the names of this trainer's evaluation sets: "
                    "pass one of them, or rows"
                )
        elif eval_dataset is not None:
            eval_dataset = self._prepared_eval(eval_dataset)
        return super().evaluate(cast(Any, eval_dataset), ignore_keys, metric_key_prefix)

    def _prepared_eval(self, eval_dataset: Any) -> Any:
        """Check and tokenize held-out prompts that a call passes."""
        check_datasets(self.args, self.train_dataset, eval_dataset, self._preparation.encoder is None)
        return self._preparation.prepared(eval_dataset, "eval_dataset")

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """Like `evaluate` with a data set, but nothing is logged.

        Args:
            test_dataset: Prompts in any format of `train_dataset`.
            ignore_keys: Ignored; for compatibility with Trainer.
            metric_key_prefix: Prefix of each key.

        Returns:
            The metrics of `evaluate`, as `metrics`; `predictions` and `label_ids` are None. `generate_completions`
            returns responses.
        """
        check_rows(test_dataset, "test_dataset", list)
        test_dataset = self._preparation.prepared(test_dataset, "test_dataset")
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """Evaluate during training, and step a schedule that follows a metric."""
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        self._run.agree_on_control()
        if follows_metric(self.lr_scheduler) and not skip_scheduler:
            name = self.args.metric_for_best_model or "score"
            self.lr_scheduler.step(metrics[f"eval_{name.removeprefix('eval_')}"])
        return metrics

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Collect a rollout for every batch of `dataloader`, with the same separate random numbers in every call."""
        run, gather = self._run, cast(Callable[..., Any], self.accelerator.gather_for_metrics)
        self._engine.policy_changed()  # the weights may have changed
        with rollouts.apart_from_training(run, self.model_wrapped) as model:
            self.callback_handler.eval_dataloader = dataloader  # pyright: ignore[reportAttributeAccessIssue]

            def evaluate(prompts: Prompts) -> Mapping[str, Tensor]:
                rollout = self.collect_rollout(model, prompts)
                run.guard.check_rollout(rollout)
                return evaluation_columns(rollout, self.args, self.kl_controller.coef)

            fire = partial(run.fire, "on_prediction_step")
            columns = evaluations.evaluated(dataloader, evaluate, gather, self.args.device, fire)
        metrics = rollouts.metrics_of_evaluation(run, columns, metric_key_prefix, self._score_unit)
        return EvalLoopOutput(None, None, metrics, len(columns["scores"]))  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def generate_completions(self, sampling: bool = False) -> pd.DataFrame | None:
        """Respond greedily to prompts; print the table, save it and send it to the trackers in `report_to`.

        The prompts are those of `eval_dataset`. Without it they are one batch of training prompts: the first rows, or
        those of a stream's latest update. The title of the table names the source.

        Args:
            sampling: Whether to stop after one batch.

        Returns:
            One row per prompt: query, model response, score, and each reward if there are several; rank 0 also writes
            it to `output_dir/_samples/`. None before the first update on a stream without evaluation data.
        """
        run, held_out = self._run, self.eval_dataset is not None
        gather: Callable[..., Any] = gather_object
        if held_out:
            gather = partial(self.accelerator.gather_for_metrics, use_gather_object=True)
        self._engine.policy_changed()
        with rollouts.apart_from_training(run, self.model_wrapped) as model:
            batches = itertools.islice(self._sample_prompts(), 1 if sampling else None)
            rows = rollouts.rows_of_samples(run, batches, partial(self._respond_greedily, model), gather)
        if not rows:
            return None
        table = evaluations.table_of(rows, self.scorer.names)
        if self.is_world_process_zero():
            self._printed = evaluations.show_table(table, self, held_out, self._printed)
        return table

    def _respond_greedily(self, model: nn.Module, prompts: Prompts) -> tuple[Prompts, Responses, Scores]:
        """Sample greedy responses and the baselines' responses, and score the former."""
        config = greedy_config(self.args, self._run.tokens.stop, self._run.vocabulary.never_sampled)
        with noting_out_of_memory("generate"):
            responses, prompts = self._rollouts.respond(model, prompts, config)
        with noting_out_of_memory("score"):
            return prompts, responses, self.score_responses(responses, prompts)

    @torch.no_grad()
    def audit_critic(
        self, eval_dataset: Any = None, *, num_prefixes: int = 4, num_continuations: int = 16
    ) -> CriticAudit:
        """Compare the value model with Monte Carlo returns of prefixes of held-out responses.

        Samples a response to each prompt, cuts it at `num_prefixes` places, samples `num_continuations` continuations
        of each prefix and of the prompt alone from the policy, and scores them as training does:
        `(num_prefixes + 1) * num_continuations + 1` responses to each prompt. Random numbers are its own, the same
        at every call. See `rlhf_ppo.reporting.critic_audit`.

        Args:
            eval_dataset: Prompts in any form that `train_dataset` may have; the constructor's when None.
            num_prefixes: Prefixes of each response; at least 2.
            num_continuations: Continuations of each prefix; at least 4.

        Returns:
            Explained variance, ranking and calibration with intervals, and the defects found. It is also written to
            `output_dir/critic_audit.json`.

        Raises:
            ValueError: There are no held-out prompts, a number is too small, or `whiten_rewards` is set.
        """
        check_audit(self.args, num_prefixes, num_continuations, self._rollouts.play is not None)
        sets: Any = self.eval_dataset if eval_dataset is None else self._prepared_eval(eval_dataset)
        if sets is None:
            raise ValueError("eval_dataset=None: an audit needs held-out prompts; pass eval_dataset")
        run, gather = self._run, cast(Callable[..., Any], self.accelerator.gather_for_metrics)
        generator = np.random.default_rng((self.args.seed, self.args.process_index))
        self._engine.policy_changed()
        with rollouts.apart_from_training(run, self.model_wrapped) as model:
            batches = evaluations.held_out_prompts(
                sets, lambda name: self.get_eval_dataloader(sets if name is None else sets[name]), self.args.device
            )
            audited = partial(rollouts.audit_columns, run, self._rollouts, model, self._returns_of_responses)
            rows = [gather(audited(batch, num_prefixes, num_continuations, generator)) for batch in batches]
        run.timer.drain()
        run.logged.drain()
        result = audit(prefixes_of(torch.cat(rows)), self.args.seed)
        if self.is_in_train:
            run.window.add(result.metrics)  # in the next log
        if self.is_world_process_zero():
            result.save(output_directory(self.args))
        return result

    def _returns_of_responses(
        self, model: nn.Module, responses: Responses, prompts: Prompts
    ) -> tuple[Rollout, Tensor]:
        rollout = self._evaluate_responses(model, responses, prompts)
        return rollout, monte_carlo_returns(rollout, self.shape_rewards(rollout), self.args)

    def _sample_prompts(self) -> Iterator[Prompts]:
        """Yield all held-out prompts in batches; without them, one batch of training prompts.

        These are the first rows, or a stream's latest prompts, since a stream cannot be read twice at a time.
        """
        latest, args = self._run.latest_prompts, self.args
        if self.eval_dataset is not None:
            yield from evaluations.held_out_prompts(self.eval_dataset, self.get_eval_dataloader, args.device)
        elif num_rows(self.train_dataset) is not None:
            collate = self._get_collator_with_removed_columns(self.data_collator, "sampling")
            rows: Any = self.train_dataset
            yield evaluations.first_prompts(rows, args.eval_batch_size, collate, self.accelerator, args.device)
        elif latest is not None:
            yield latest.take(range(len(latest))[: args.eval_batch_size])

    # ---- The hub ----

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **more: str | None,
    ) -> None:
        """Write `README.md` into `output_dir`, and `curves.png` if there are logs.

        It is TRL's card with rewards, final metrics, settings, curves and a judge's verdict. `push_to_hub` calls this
        method with its keyword arguments.

        Args:
            model_name: Title; the last part of `hub_model_id` or `output_dir` when None.
            dataset_name: Hub name or path of the prompts; the trainer's `dataset_name` when None.
            tags: Tags in addition to the default ones.
            **more: Trainer's other arguments, of which `language`, `license` and `finetuned_from` are used.
        """
        if self.is_world_process_zero():
            save_run_card(
                self.args,
                self.policy_model,
                reward_origins(self.reward_models, self.scorer.names),
                self.state.log_history,
                model_name=model_name,
                dataset_name=dataset_name or self.dataset_name,
                tags=[tags] if isinstance(tags, str) else list(tags or []),
                with_curves=not self.is_in_train,
                **{name: more[name] for name in ("language", "license", "finetuned_from") if name in more},
            )

    # ---- Counting: one step is one PPO update ----

    def set_initial_training_values(
        self, args: PPOConfig, dataloader: DataLoader
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Count epochs, steps and samples in PPO updates."""
        return datasets.counts(self.sizes, dataloader)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore each rank's random numbers; reseed them if the number of processes changed."""
        if checkpoint is None or saving.reseed_if_processes_changed(self._run):
            return
        super()._load_rng_state(checkpoint)
        self._run.streams.load(checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        self._run.streams.save(output_dir)
        super()._save_rng_state(output_dir)

    # ---- Logging ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and add the PPO metrics of the updates since the last training log.

        Args:
            logs: Trainer's logs; the key `loss` marks a training log, which every rank writes.
            start_time: Start time of training.
        """
        of_training = "loss" in logs
        if of_training:
            logs.update(self._run.window.drain())
        with raise_on_all_ranks(self.accelerator) if of_training else nullcontext():
            super().log(logs, start_time)
        if of_training:
            self._run.agree_on_control()
            rows = gather_object(self._rollout_metrics.kept_completions(self.state.global_step))
            with raise_on_all_ranks(self.accelerator):
                if rows and self.args.process_index == 0:
                    write_completions(output_directory(self.args), rows[:NUM_KEPT_COMPLETIONS])
