"""Overrides of `transformers.Trainer` for steps that are PPO updates.

The algorithm is in `trainer.py`.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput, rotate_checkpoints

from rlhf_ppo.algorithm.advantages import ScoreMoments
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.checks import METHOD_HINTS, reject_call, reject_search
from rlhf_ppo.data.files import optional
from rlhf_ppo.data.prompts import TRAINER_COLUMNS, num_rows, renders_chats
from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import configuration_kept
from rlhf_ppo.ranks import processes
from rlhf_ppo.ranks.processes import get_logger, raise_on_all_ranks
from rlhf_ppo.ranks.random_streams import preserve_rng
from rlhf_ppo.ranks.signals import stopped
from rlhf_ppo.reporting import sample_tables
from rlhf_ppo.reporting.critic_audit import CriticAudit, check_audit
from rlhf_ppo.reporting.health import health_settings
from rlhf_ppo.reporting.metrics import combined, named_apart
from rlhf_ppo.reporting.model_card import names_of_parts, reward_origins, save_run_card
from rlhf_ppo.reporting.run_log import save_settings, step_of_policy, where_results_are
from rlhf_ppo.run import construction, datasets, evaluator, optimization, rollouts, saving
from rlhf_ppo.run.auditor import CriticAuditor
from rlhf_ppo.run.checkpoints import is_unfinished
from rlhf_ppo.run.external import ExternalRun
from rlhf_ppo.run.inputs import TrainerInputs
from rlhf_ppo.run.learning import CriticOnly
from rlhf_ppo.run.optimization import Optimization
from rlhf_ppo.run.run_state import LoopState, PPOTrainerState, Progress, Stateful, count_update
from rlhf_ppo.run.steps import Steps
from rlhf_ppo.terminal import print_text

if TYPE_CHECKING:
    import pandas as pd

logger = get_logger(__name__)


class TrainerBase(Steps, Trainer):
    """Trainer whose step is a PPO update.

    Attributes:
        dataset_name: Hub name or path of the prompts, for the model card; scripts set it.
    """

    dataset_name: str | None = None
    args: PPOConfig
    model: PolicyAndValue  # Trainer's own; the parts read and save `RunState.models`, without wrappers
    model_wrapped: nn.Module  # what the steps run
    state: PPOTrainerState  # pyright: ignore[reportIncompatibleVariableOverride]
    optimizer: Any
    lr_scheduler: Any
    hyperparameter_search = reject_search

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Explain unknown arguments."""
        reject_call(cls, args, kwargs, PPOConfig.__dataclass_fields__)
        return super().__new__(cls)

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            """Explain attributes that only older trainers have; repeat the error of a property."""
            if isinstance(inspect.getattr_static(type(self), name, None), property):
                return object.__getattribute__(self, name)
            hint = f" ({METHOD_HINTS[name]})" if name in METHOD_HINTS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __init__(self, inputs: TrainerInputs) -> None:
        args, loaded = inputs.args, construction.load(self, inputs)
        models = loaded.models
        self.policy_model, self.value_model, self.reference = models.policy, models.value_model, models.reference
        self.reward_models = [reward.model for reward in models.rewards]
        self.reward_model = next(iter(self.reward_models), None)  # TRL's attribute
        self.tokens, self.stop_token_id, self.sizes = loaded.tokens, loaded.tokens.stop, loaded.sizes
        self._is_stepped, self._reward_funcs = loaded.is_stepped, inputs.reward_funcs
        self._policy_loss, self._own_parts = loaded.policy_loss, inputs.own_parts(self)

        # Call Trainer's constructor, which makes the accelerator.
        self._optimization = Optimization(inputs.optimizers)
        policy_and_value = PolicyAndValue(models.policy, models.value_model, args.temperature)
        processes.use_one_device(args)
        with configuration_kept(models.policy, "use_cache"):  # which Trainer switches off
            super().__init__(
                model=policy_and_value,
                args=args,
                data_collator=loaded.preparation.collator(inputs.data_collator, loaded.tokens.pad),
                train_dataset=loaded.train_dataset,
                eval_dataset=loaded.eval_dataset,
                processing_class=loaded.tokenizer,
                callbacks=inputs.callbacks,
                optimizers=self._optimization.instances,
            )
        self._optimization.check(policy_and_value, self.accelerator)
        self.state = PPOTrainerState.of(self.state)

        # Make the parts that need it.
        self._run = run = construction.make_run(self, policy_and_value, loaded)
        self._critic_only, self._guard = CriticOnly(run), rollouts.DivergenceGuard(run)
        self._rollout_metrics = rollouts.RolloutMetrics(run)
        self._progress, self._external_run = Progress(), ExternalRun(run)
        self._latest_prompts: Prompts | None = None
        self._printed = ""  # the latest sample table
        parts = construction.make_parts(self, run, inputs, loaded, self._critic_only)
        self.sampler, self._preparation, self.scorer = parts.sampler, parts.preparation, parts.scorer
        self._baselines, self._play, self.ptx, self._signals = parts.baselines, parts.play, parts.ptx, parts.signals
        self.kl_controller, self.score_moments = parts.kl_controller, parts.score_moments

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; keep the one that `early_accelerator` created."""
        if "accelerator" not in vars(self):
            super().create_accelerator_and_postprocess()

    # ---- The run around the updates ----

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Run PPO.

        SIGTERM, SIGINT and SIGHUP end the run with a checkpoint after the current update. A second signal ends
        the process at once.

        Args:
            resume_from_checkpoint: A checkpoint directory; True for the newest complete checkpoint of `output_dir`;
                None for `args.resume_from_checkpoint`.
            trial: Ignored; for compatibility with Trainer.
            ignore_keys_for_eval: Ignored; for compatibility with Trainer.

        Returns:
            Number of updates, mean loss and speed.

        Raises:
            ValueError: The checkpoint is incomplete or belongs to another model, or `output_dir` holds another run.
            RuntimeError: Another process trains in `output_dir`.
            RunStopped: A signal ended the run. This is a `SystemExit` with code 143 (SIGTERM), 130 (SIGINT) or 129
                (SIGHUP).
        """
        if self._is_stepped:
            raise ValueError("train_dataset=None: pass the prompts to train on, or call step() with responses")
        opened = saving.opened(self._run, self.train_dataset, resume_from_checkpoint)
        with self._signals.listening(), opened as checkpoint:
            return super().train(checkpoint)

    def _begin_run(self, checkpoint: str | None) -> None:
        """Prepare model, optimizer, schedule, data and state as Trainer does, and begin the loop."""
        run, args, num_prompts = self._run, self.args, num_rows(self.train_dataset)
        construction.start_afresh(run, self.sampler.engine, seeds=not self._external_run.is_preparing)
        self.sizes = args.fill_derived(self.accelerator.num_processes, num_prompts)
        loader = self.get_train_dataloader()
        num_epochs, per_epoch, *_, max_steps = self.set_initial_training_values(args, loader)
        self._init_training_state(max_steps, per_epoch, num_epochs, checkpoint, None)
        self._progress = progress = saving.resume(run, self.sizes, checkpoint, num_prompts or 0, per_epoch)
        _, loader = self._prepare_for_training(max_steps, loader, checkpoint)
        optimization.check_prepared(self.optimizer, self.model_wrapped, self.accelerator)
        progress.optimization = self._optimization.recorded()
        self._critic_only.begin(self.optimizer, self._optimization.policy_groups)
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self.state.global_step
        loss, of_earlier_run = progress.unlogged_loss(args.process_index, self.accelerator.num_processes)
        self._tr_loss, self._total_loss_scalar = torch.tensor(loss, device=args.device), -of_earlier_run
        self._globalstep_last_logged = progress.last_logged_step
        self.model_wrapped.zero_grad()
        self._note_run()
        run.stateful.start(checkpoint)
        batches = partial(datasets.batches_of_pass, loader, args, self.sizes)
        self._schedule_follows_metric = optimization.follows_metric(self.lr_scheduler)
        self._loop = LoopState(batches, checkpoint, per_epoch, self.state.episode)
        run.fire("on_train_begin")
        if args.eval_on_start and checkpoint is None:
            self._evaluate(None, None, skip_scheduler=True)
        if self.state.global_step == 0:
            self._make_samples()

    def _prompt_batches(self) -> Iterator[Prompts]:
        """Yield this rank's prompts for each update, pass after pass, from where a resumed run has stopped.

        Each prompt is repeated `args.num_generations` times in adjacent rows.
        """
        if self._external_run.is_preparing:  # `step` brings its own
            return
        run, loop = self._run, self._loop
        for epoch in itertools.count(self._progress.epoch):
            run.fire("on_epoch_begin")
            run.agree_on_control()
            self._load_rng_state(loop.checkpoint)
            num_batches = num_skipped = self._progress.batches_in_epoch
            if run.is_over:  # resumed from the run's last checkpoint
                self.control.should_training_stop = True
            for batch in () if self.control.should_training_stop else loop.batches(epoch, num_skipped):
                num_batches += 1
                self._latest_prompts = Prompts.from_collated(batch, self.args.device)
                run.fire("on_step_begin")
                yield self._latest_prompts.repeated(self.args.num_generations)
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            if num_batches == 0 and not self.control.should_training_stop:
                logger.warning(f"Pass {epoch} over the data has no full batch; training stops.")
                self.control.should_training_stop = True
            self._leave_if_stopped()
            loop.checkpoint = None
            is_whole = self._progress.num_prompts > 0 and num_batches >= loop.updates_per_epoch
            if is_whole or not self.control.should_training_stop:
                self._progress.epoch, self._progress.batches_in_epoch = epoch + 1, 0
            if num_batches > 0 or not run.is_over:  # else resumed after the end of the last pass, which was reported
                self._report("on_epoch_end")
            if self.control.should_training_stop:
                return

    @property
    def _score_unit(self) -> ScoreMoments | None:
        return self.score_moments if self.args.score_scaling else None

    def _note_run(self) -> None:
        """Write the run's settings and parts into its directory."""
        reference = None if self.reference is None else self.reference.separate_policy
        weights, funcs = self.scorer.weights, self._reward_funcs
        made_of = names_of_parts(self.policy_model, reference, self.reward_models, weights, funcs, self.dataset_name)
        made_of |= saving.trained_parts(self._run.models) | {"num_prompts": self._progress.num_prompts or None}
        if self.args.should_save:
            save_settings(self.args, made_of | self._own_parts, health_settings(self.callback_handler.callbacks))

    def _make_samples(self) -> None:
        """Make a sample table if it is due."""
        num_tables = self.args.num_sample_generations
        if num_tables > 0 and sample_tables.is_due(self.state.global_step, self.state.max_steps, num_tables):
            self.generate_completions(sampling=True)

    def _count_update(self, metrics: dict[str, float], grad_norm: float | Tensor) -> None:
        """Count an update, step the schedule, and keep the metrics for the next log."""
        loop, num_tokens = self._loop, self._rollout_metrics.num_response_tokens
        loop.grad_norm, loop.learning_rate = grad_norm, self._get_learning_rate()
        if not self._schedule_follows_metric:
            self.lr_scheduler.step()
        counted = count_update(self._run, loop, self._progress, self.sizes.batch_size, num_tokens)
        self._progress.pending_metrics.append(metrics | counted)

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
        loop, epoch = self._loop, self._progress.epoch
        self._maybe_log_save_evaluate(
            self._tr_loss, loop.grad_norm, self.model_wrapped, None, epoch, None, loop.start, loop.learning_rate
        )
        self._run.agree_on_control()

    def _leave_if_stopped(self, is_over: bool = False) -> None:
        """Leave the run with `RunStopped` if a signal ended it, perhaps after the end of training."""
        if (number := self._signals.stopped) is None:
            return
        if not (is_over and self.args.load_best_model_at_end):  # which has replaced the last models
            self._save_last()  # save_strategy="best" saves after a best evaluation only
        if not is_over:
            self._run.fire("on_train_end")
        self._finish_current_push()
        self.is_in_train = False
        raise stopped(number, str(self._run.last_checkpoint), self.state, self.args)

    def _save_last(self) -> None:
        """Write a checkpoint of the latest update, unless it has one."""
        if not self._run.is_saved:
            self._save_checkpoint(self.model_wrapped, None)
            self._run.fire("on_save")

    def _finish_run(self) -> TrainOutput:
        """Log remaining updates and finish the run; after a signal, leave it."""
        control, loop = self.control, self._loop
        if self._external_run.is_preparing:  # nothing has run
            return TrainOutput(0, 0.0, {})
        if self._has_unlogged_updates():
            # Only a log: the checkpoint is written, so the log of a resumed run stays the same.
            control.should_log, control.should_evaluate, control.should_save = True, False, False
            self._log_save_evaluate()
        self._leave_if_stopped()
        self._guard.check_weights()
        output = self._finalize_training(None, self.state.max_steps * self.sizes.batch_size, loop.start)
        optional("The log")(self.save_state)()  # for `rlhf-ppo report`
        self._signals.agree(self.args.device)  # one may have arrived since the last update
        self._leave_if_stopped(is_over=True)
        return output

    # ---- The run of `step` ----

    def close(self) -> None:
        """End a run of `step` before its last update.

        Writes a checkpoint (unless `save_strategy="no"`, or the latest update has one), logs the updates since the
        last log, fires `on_train_end`, releases `output_dir` and restores the signal handlers. All processes must call
        it. `with PPOTrainer(...) as trainer:` calls it at the end of the block, also after an error. If one of several
        processes fails, it only releases `output_dir`.

        Without an open run it does nothing, so you may call it twice. Afterwards `save_model`, `evaluate` and
        `generate_completions` work as after `train`, `train` starts another run, and `step` raises an error. To
        continue the run, create a new trainer with `resume_from_checkpoint=True`.

        Raises:
            DivergenceError: A weight is not finite. `output_dir` is released nevertheless.
            RunStopped: A signal arrived after the last update; the run ended with a checkpoint.
        """
        self._external_run.close(self._save_and_finish)

    def __enter__(self) -> Self:
        """Return the trainer; the end of the block calls `close`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Call `close`; after an error of one of several processes only release `output_dir`."""
        ends_together = kind is None or self.accelerator.num_processes == 1
        self._external_run.close(self._save_and_finish if ends_together else None)

    def _begin_external_run(self, held: ExitStack) -> None:
        held.enter_context(self._signals.listening())
        super().train(held.enter_context(saving.opened(self._run, self.train_dataset, None)))

    def _save_and_finish(self) -> None:
        """End a run of `step` before its last update: save, log and fire `on_train_end`."""
        self._signals.agree(self.args.device)
        if self.args.save_strategy != "no":
            with preserve_rng():
                self._save_last()
        self._finish_run()

    def register_stateful(self, name: str, part: Stateful) -> None:
        """Save an object's state in every checkpoint and restore it on resume.

        Args:
            name: Key of the state in checkpoints.
            part: An object with `state_dict` and `load_state_dict`. Its state must be the same on all ranks: the main
                process saves it, and all ranks load it. A new run starts from the object's current state.

        Raises:
            TypeError: Its state cannot be in a checkpoint.
            ValueError: Another object has the name.
        """
        self._run.stateful.register(name, part)

    def _clip_gradients(self) -> float | Tensor:
        """Clip the gradients; return their norm before clipping, infinite where DeepSpeed skipped an overflow."""
        model = self.model_wrapped
        clipped: Any = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        grad_norm: Any = self._get_grad_norm(model, grad_norm=clipped)
        is_skipped = self.is_deepspeed_enabled and self.accelerator.optimizer_step_was_skipped
        return math.inf if is_skipped else grad_norm

    # ---- Data ----

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader whose batches are this rank's prompts for one update each."""
        with datasets.data_order(self.args):  # the sampler is seeded when it is made
            size, sampler = datasets.num_prompts(self.sizes, self.args), self._get_train_sampler
            return self._get_dataloader(self.train_dataset, "Training", size, sampler, is_training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return a loader of held-out prompts; with persistent workers, Trainer keeps one of each named data set."""
        if eval_dataset is None or isinstance(eval_dataset, str):
            return super().get_eval_dataloader(eval_dataset)
        return self.get_test_dataloader(eval_dataset)

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, is_training: bool = False, **kwargs: Any
    ) -> DataLoader:
        dataset = datasets.read_by_each_rank(dataset, batch_size * self.sizes.world_size, is_training, self.args)
        self.accelerator.dataloader_config.dispatch_batches = False  # it can send tensors of one width only
        with datasets.loading(self.args, dataset, is_training):
            load = partial(super()._get_dataloader, dataset, description, batch_size, *args, **kwargs)
            return datasets.leaving_signals(load(is_training=is_training))

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = [*TRAINER_COLUMNS]

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Keep all columns if rewards or environments read them."""
        return dataset if self._preparation.columns_are_read else super()._remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """Keep all columns if rewards or environments read them, of data sets other than `datasets.Dataset`."""
        if self._preparation.columns_are_read:
            return data_collator
        return super()._get_collator_with_removed_columns(data_collator, description)

    # ---- Optimizer and schedule ----

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make the optimizer, with the given function if there is one.

        Args:
            model: The prepared model; `self.model` when None.

        Raises:
            ValueError: The function's optimizer lacks trainable parameters.
        """
        if self.optimizer is not None:  # the user's, or that of an earlier call
            return self.optimizer
        prepared = self.model if model is None else model
        self.optimizer = self._optimization.make_optimizer(prepared)
        return self._optimization.rated(super().create_optimizer(model), prepared, self.args)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Make the scheduler; one that follows a metric maximizes it if greater is better."""
        optimization.follow_metric(self.args)
        if self.lr_scheduler is None:
            over = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = self._optimization.make_scheduler(over, num_training_steps)
            self._created_lr_scheduler = self.lr_scheduler is not None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self._optimization.record(scheduler, self.args, num_training_steps)
        return scheduler

    # ---- Checkpoints ----

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Write what Trainer writes, under a temporary name, then rotate the checkpoints and upload."""
        run, args, progress = self._run, self.args, self._progress
        self._guard.check_weights()
        progress.losses = run.gather(self._tr_loss.reshape(1)).tolist()
        progress.last_logged_step = self._globalstep_last_logged
        self.store_flos()
        with saving.writing_checkpoint(run, progress) as directory:
            self.save_model(directory, _internal_call=True)
            if not args.save_only_model:
                self._save_optimizer_and_scheduler(directory)
                self._save_scaler(directory)
                self._save_rng_state(directory)
        self.create_model_card()
        saving.upload(run, self._push_from_checkpoint, vars(self).get("push_in_progress"))
        if args.should_save:
            rotate_checkpoints(str(args.output_dir), args.save_total_limit, self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with saving.without_frozen(self._run, self.model_wrapped):
            super()._save_optimizer_and_scheduler(output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or its adapter) and the tokenizer for `from_pretrained`, under every launcher.

        Then print where policy, curves and samples are, if progress is shown.

        Args:
            output_dir: The directory; `args.output_dir` when None.

        Raises:
            DivergenceError: A weight is not finite; nothing is written.
        """
        args, accelerator = self.args, self.accelerator
        directory = output_dir or str(args.output_dir)
        if not is_unfinished(directory):
            self._guard.check_weights(together=processes.is_sharding(accelerator))
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type):
            # Trainer writes nothing here for sharded checkpoints
            self._save(output_dir, state_dict=accelerator.get_state_dict(self.model_wrapped))  # pyright: ignore
        super().save_model(output_dir, _internal_call)
        if not _internal_call and args.process_index == 0 and not args.disable_tqdm:
            print_text(where_results_are(directory, str(args.output_dir)))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if self.args.should_save:
            saving.save_all(self._run, output_dir or str(self.args.output_dir), state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            saving.load_models(self._run.models, resume_from_checkpoint, super()._load_from_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        saving.check_loaded(self._run.models, load_result)

    def _load_callback_state(self) -> None:
        saving.restore_states(self.args, self.callback_handler.callbacks, self.state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both, then apply this run's arguments if they changed."""
        if checkpoint is None:
            return
        with saving.loading_without_policy_state(self._run, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        saving.apply_settings(self._run, self._progress, self._optimization, self.optimizer, self._get_learning_rate)

    def _load_best_model(self) -> None:
        self.sampler.engine.policy_changed()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return super()._load_best_model()
        logger.info(f"Loading the best model from {self.state.best_model_checkpoint} ({self.state.best_metric}).")
        self._load_from_checkpoint(cast(str, self.state.best_model_checkpoint))

    # ---- Evaluation ----

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sample responses to evaluation prompts and score them.

        Args:
            eval_dataset: Prompts in any format of `train_dataset`, a dict of data sets, or the name of one in the
                constructor's dict; the constructor's when None.
            ignore_keys: Ignored; for compatibility with Trainer.
            metric_key_prefix: Prefix of each key.

        Returns:
            `eval_score` (in the reward's unit, shaped as in training: see
            `rlhf_ppo.rewards.scorer.scores_in_reward_unit`), `eval_kl` and `eval_entropy` (nats per response),
            `eval_response_length_mean` (tokens), `eval_ended_frac`, `eval_rewards/<name>/mean|std`, and speed.
        """
        if eval_dataset is not None:
            eval_dataset = self._preparation.held_out(eval_dataset, self.train_dataset, self.eval_dataset)
        return evaluator.evaluate_each(super().evaluate, eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Like `evaluate` with a data set, but nothing is logged.

        Args:
            test_dataset: Prompts in any format of `train_dataset`.
            ignore_keys: Ignored; for compatibility with Trainer.
            metric_key_prefix: Prefix of each key.

        Returns:
            The metrics of `evaluate`, as `metrics`; `predictions` and `label_ids` are None. `generate_completions`
            returns responses.
        """
        test_dataset = self._preparation.of_test(test_dataset, self.train_dataset, self.eval_dataset)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def _evaluate(
        self, trial: object, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate during training, and step a schedule that follows a metric."""
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        self._run.agree_on_control()
        if self._schedule_follows_metric and not skip_scheduler:
            optimization.step_by_metric(self.lr_scheduler, self.args, metrics)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Return whether an evaluation is the best so far; one without the metric is not."""
        return optimization.has_best_metric(self, metrics) and super()._determine_best_metric(metrics, trial)

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
        run = self._run
        with evaluator.apart_from_training(run, self.model_wrapped, self.sampler.engine):
            self.callback_handler.eval_dataloader = dataloader  # pyright: ignore[reportAttributeAccessIssue]
            columns = evaluator.evaluate(run, dataloader, self.collect_rollout, self._guard)
        metrics = rollouts.metrics_of_evaluation(run, columns, metric_key_prefix, self._score_unit)
        return EvalLoopOutput(None, None, metrics, len(columns["scores"]))  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def generate_completions(self, sampling: bool = False) -> pd.DataFrame | None:
        """Respond greedily to prompts; print the table, save it and send it to the trackers in `report_to`.

        With `rollout_func`, responses are as it samples them. The prompts are those of `eval_dataset`. Without it they
        are one batch of training prompts: the first rows, or those of a stream's latest update. The title of the table
        names the source.

        Args:
            sampling: Whether to stop after one batch (TRL's name; responses are greedy either way).

        Returns:
            One row per prompt: query, model response, score, and each reward if there are several; rank 0 also writes
            it to `output_dir/_samples/`. None before the first update on a stream without evaluation data.
        """
        run, is_held_out = self._run, self.eval_dataset is not None
        respond = partial(self._respond, config=self.sampler.settings(greedy=True))
        with evaluator.apart_from_training(run, self.model_wrapped, self.sampler.engine):
            batches = itertools.islice(self._sample_prompts(), 1 if sampling else None)
            rows = evaluator.rows_of_samples(run, batches, respond, self.score_responses, is_held_out)
        table = sample_tables.table_of(rows, self.scorer.names) if rows else None
        if table is not None and self.is_world_process_zero():
            self._printed = sample_tables.show_table(table, self, is_held_out, self._printed)
        return table

    @torch.no_grad()
    def audit_critic(
        self, eval_dataset: Any = None, *, num_prefixes: int = 4, num_continuations: int = 16
    ) -> CriticAudit:
        """Compare the value model with Monte Carlo returns of prefixes of held-out responses.

        Samples a response to each prompt, cuts it at `num_prefixes` places, samples `num_continuations` continuations
        of each prefix and of the prompt alone from the policy, and scores them as training does:
        `(num_prefixes + 1) * num_continuations + 1` responses to each prompt. It has its own random numbers, the same
        at every call. See `rlhf_ppo.reporting.critic_audit`.

        Args:
            eval_dataset: Prompts in any form that `train_dataset` may have; the constructor's when None.
            num_prefixes: Prefixes of each response; at least 2.
            num_continuations: Continuations of each prefix; at least 4.

        Returns:
            Explained variance and ranking with intervals, and the defects found. It is also written to
            `output_dir/critic_audit.json`, which a new run moves into `output_dir/_earlier`.

        Raises:
            ValueError: There are no held-out prompts, a number is too small, or `whiten_rewards` or
                `gae_level="turn"` is set.
        """
        sets: Any = self.eval_dataset
        if eval_dataset is not None:
            sets = self._preparation.held_out(eval_dataset, self.train_dataset, self.eval_dataset)
        check_audit(self.args, sets, num_prefixes, num_continuations, self._play is not None)
        with evaluator.apart_from_training(self._run, self.model_wrapped, self.sampler.engine):
            batches = evaluator.held_out_prompts(sets, self.get_eval_dataloader, self.args.device)
            auditor = CriticAuditor(self, self._respond, self._run, self.sampler, num_prefixes, num_continuations)
            result = auditor.audit(batches)
        if self.is_in_train:
            self._progress.pending_metrics.append(result.metrics)  # in the next log
        return result

    def _sample_prompts(self) -> Iterator[Prompts]:
        """Yield all held-out prompts in batches; without them, one batch of training prompts."""
        if self.eval_dataset is not None:
            return evaluator.held_out_prompts(self.eval_dataset, self.get_eval_dataloader, self.args.device)
        collate = self._get_collator_with_removed_columns(self.data_collator, "sampling")
        return evaluator.training_prompts(self._run, self.train_dataset, collate, self._latest_prompts)

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
            rewards, chats = reward_origins(self.reward_models, self.scorer.names), renders_chats(self._run.tokenizer)
            args, log, step, curves = self.args, self.state.log_history, step_of_policy(self), not self.is_in_train
            more |= {"model_name": model_name, "dataset_name": dataset_name or self.dataset_name}
            save_run_card(
                args, self.policy_model, rewards, log, step, tags=tags, with_curves=curves, reads_chats=chats, **more
            )

    # ---- Counting: one step is one PPO update ----

    def set_initial_training_values(self, args: PPOConfig, dataloader: DataLoader) -> datasets.Counts:
        """Count epochs, steps and samples in PPO updates."""
        return datasets.counts(self.sizes, dataloader)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore each rank's random numbers; reseed them if the number of processes changed."""
        if checkpoint is None or saving.reseed_if_processes_changed(self._run, self._progress):
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
        if "loss" not in logs:
            return super().log(logs, start_time)
        logs.update(named_apart(combined(self._progress.pending_metrics), logs))
        self._progress.pending_metrics = []
        with raise_on_all_ranks(self.accelerator):
            super().log(logs, start_time)
        self._run.agree_on_control()
        self._rollout_metrics.save_completions()
