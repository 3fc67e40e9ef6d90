"""What Trainer is told about PPO: the hooks of `transformers.Trainer` that a step which is a whole rollout changes.

The algorithm is in `trainer.py`. Each hook here does the least that makes Trainer's own code right; what is more than
that does one of the trainer's parts (see ADR 0016).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import BestRun, EvalLoopOutput, HPSearchBackend, TrainOutput

from rlhf_ppo.algorithm.controllers import KLController
from rlhf_ppo.checkpoints.fits import check_optimizer, naming
from rlhf_ppo.checkpoints.progress import PPOTrainerState, Progress
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.settled import output_directory
from rlhf_ppo.config.sizes import Sizes
from rlhf_ppo.data.experience import Experience
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.estimate.run import RunEstimate
from rlhf_ppo.evaluation.best_metric import evaluated_name
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.reference import Reference
from rlhf_ppo.models.unwrapping import as_module
from rlhf_ppo.processes.collectives import gather_over_ranks, sum_over_ranks
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.processes.logs import get_logger
from rlhf_ppo.processes.signals import EndsOnSignals
from rlhf_ppo.processes.streams import Streams, draw_apart
from rlhf_ppo.reporting.metrics import MetricWindow
from rlhf_ppo.reporting.model_card import FinalMetrics
from rlhf_ppo.reporting.run_card import save_run_card
from rlhf_ppo.reporting.timing import PhaseTimer
from rlhf_ppo.reporting.watching import watch_run
from rlhf_ppo.rewards.logged import LoggedByFunctions
from rlhf_ppo.rewards.scorer import Scorer
from rlhf_ppo.training.critic import CriticLearning
from rlhf_ppo.training.data_order import counts, data_order, num_prompts
from rlhf_ppo.training.datasets import PromptPreparation
from rlhf_ppo.training.divergence import DivergenceGuard
from rlhf_ppo.training.evaluating import Evaluation
from rlhf_ppo.training.half_learned import LearningInParts
from rlhf_ppo.training.loop import Loop
from rlhf_ppo.training.optimization import Optimization, Optimizers, check_prepared, follow_metric, follows_metric
from rlhf_ppo.training.publishing import naming_hub, push_policy
from rlhf_ppo.training.resuming import draws_anew, put_optimization_in_force, take_up
from rlhf_ppo.training.rollouts import Rollouts
from rlhf_ppo.training.run_directory import RunDirectory
from rlhf_ppo.training.saving import CheckpointWriter
from rlhf_ppo.training.search import Recipe, end_pruned, is_pruned, search
from rlhf_ppo.training.sharding import set_up_engine
from rlhf_ppo.training.stateful import StatefulParts
from rlhf_ppo.training.stepping import OptimizerSteps
from rlhf_ppo.training.stopping import EndAfterSignal, awaited
from rlhf_ppo.training.two_models import load_models, without_frozen
from rlhf_ppo.training.withholding import WithheldArguments

if TYPE_CHECKING:
    import pandas as pd

logger = get_logger(__name__)


class TrainerHooks(Trainer):
    """Trainer with the hooks that PPO needs.

    Attributes:
        dataset_name: Hub name or path of the prompts, which their data set does not know; scripts set it.
    """

    dataset_name: str | None = None
    objective: Any = None
    objective_step: int | None = None
    args: PPOConfig
    state: PPOTrainerState
    model: PolicyAndValue
    sizes: Sizes
    policy_model: nn.Module
    reference: Reference | None
    reward_models: list[nn.Module]
    scorer: Scorer
    kl_controller: KLController
    _critic: CriticLearning
    _engine: GenerationEngine
    _estimate: RunEstimate
    _rollouts: Rollouts
    _preparation: PromptPreparation
    _stateful: StatefulParts
    _functions: Sequence[Callable[..., Any]]
    _tokenizer: PreTrainedTokenizerBase
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]
    _as_given: dict[str, Any]  # the constructor's models that may be functions, and callbacks

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments, from which the trainer of each trial of a search is made."""
        self = super().__new__(cls)
        self._made_with = args, kwargs
        return self

    def __init__(self, *args: Any, optimizers: Optimizers = (None, None), **kwargs: Any) -> None:
        self._optimization, self._final_metrics = Optimization(optimizers), FinalMetrics()
        with naming_hub(kwargs["args"]):  # it makes the repository
            super().__init__(*args, optimizers=cast(Any, self._optimization.given), **kwargs)
        self._optimization.check(self.model, self.accelerator)
        self.state = PPOTrainerState.of(self.state)
        self._progress, self._window, self._timer = Progress(), MetricWindow(), PhaseTimer()
        self._record: dict[str, Any] = {}
        self._sum, self._gather = sum_over_ranks(self.accelerator), gather_over_ranks(self.accelerator)
        run = (self.args, self.accelerator, self._sum, self._unwrapped(self.model), self._moment)
        self._guard = DivergenceGuard(*run, num_updates=lambda: self.state.global_step)
        self._streams = Streams(self.args.process_index, self.args.seed)
        draw_apart(self.callback_handler, self._streams.callbacks)
        self._directory = RunDirectory(self.args, self.accelerator, self.is_deepspeed_enabled, self.is_fsdp_enabled)
        self._loop, self._withheld = Loop(self), WithheldArguments(self.args)
        # Who listens to signals is known globally, which must not keep the trainer alive.
        awaited = partial(TrainerHooks._awaited, weakref.proxy(self))
        self._signals = EndsOnSignals(self._sum, awaited, self.accelerator.num_processes)
        self._learning = LearningInParts(self, self._loop.figures.keep)
        self._checkpoints, self._steps = CheckpointWriter(self), OptimizerSteps(self, self._guard)
        self._end = EndAfterSignal(self, self._signals, self._learning, self._streams, self._guard)
        self._evaluation = Evaluation(self, lambda: self._loop.latest_prompts)
        self._logged, self._metrics = LoggedByFunctions(is_used=bool(self._functions)), dict[str, float]()
        watch_run(self, self.args, self.sizes.batch_size)
        self.add_callback(self._signals)
        set_up_engine(self.accelerator, self._unwrapped(self.model))

    # ---- Data ----

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader whose every batch is this rank's prompts for one update."""
        with data_order(self.args):  # the sampler takes its seed when it is made
            size, sampler = num_prompts(self.sizes, self.args), self._get_train_sampler
            return self._get_dataloader(self.train_dataset, "Training", size, sampler, is_training=True)

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        # Rollouts are full batches; evaluation covers every row. On the CPU there is no memory to pin.
        pins = self.args.dataloader_pin_memory and self.args.device.type != "cpu"
        with self._withheld.instead(dataloader_drop_last=is_training, dataloader_pin_memory=pins):
            return super()._get_dataloader(*args, is_training=is_training, **kwargs)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "attention_mask"]

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Keep every column where there are reward functions, which may read it."""
        return dataset if self.scorer.reads_columns else super()._remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """Do the same for data sets that are not `datasets.Dataset`."""
        if self.scorer.reads_columns:
            return data_collator
        return super()._get_collator_with_removed_columns(data_collator, description)

    # ---- Optimizer and schedule ----

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """Make the optimizer, by the function that was given if there is one.

        Args:
            model: The prepared model; None takes `self.model`.

        Raises:
            TypeError: The function returned something else.
            ValueError: Its optimizer misses trainable parameters, or holds others.
        """
        if self.optimizer is None:
            self.optimizer = self._optimization.made_optimizer(self.model if model is None else model)
        return self._optimization.rated(super().create_optimizer(model), model or self.model, self.args)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Make the scheduler; one that follows a metric follows it upwards where greater is better."""
        follow_metric(self.args)
        if self.lr_scheduler is None:
            over = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = self._optimization.made_scheduler(cast(Optimizer, over), num_training_steps)
            self._created_lr_scheduler = self.lr_scheduler is not None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self._optimization.take(scheduler, self.args, num_training_steps)
        return scheduler

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        is_sharding = self.is_deepspeed_enabled or self.is_fsdp_enabled
        check_prepared(cast(Optimizer, self.optimizer), prepared[0], self.args, is_sharding)
        self._progress.optimization = self._optimization.recorded()
        return prepared

    # ---- Checkpoints ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._checkpoints.save(self._get_output_dir(trial), partial(super()._save_checkpoint, model, trial))

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        with self._checkpoints.finishing(self._get_output_dir(trial)):
            return super()._finalize_training(trial, num_train_samples, start_time)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = as_module(self.model_wrapped)
        with without_frozen(engine, self._unwrapped(self.model), self.is_deepspeed_enabled):
            super()._save_optimizer_and_scheduler(output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or its adapter) and the tokenizer, loadable with `from_pretrained`, under every launcher.

        Then say in one line where policy, curves and samples are, where progress is shown.

        Args:
            output_dir: Where to; `args.output_dir` when None.

        Raises:
            DivergenceError: A weight is not finite; nothing is written then.
            DiskFullError: There is no room.
        """
        write = partial(super().save_model, output_dir, _internal_call)
        self._checkpoints.save_model(output_dir, _internal_call, write)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        self._checkpoints.save_files(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_models(self._unwrapped(self.model), resume_from_checkpoint, super()._load_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both; where the arguments are no longer the checkpoint's, those of this run are in force."""
        if checkpoint is None:
            return
        check_optimizer(self.optimizer, checkpoint)
        with naming(checkpoint, "its optimizer.pt or scheduler.pt"), self._critic.loading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        put_optimization_in_force(self, checkpoint)

    def _load_best_model(self) -> None:
        best = self._checkpoints.checked_best()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            super()._load_best_model()
            return
        logger.info(f"Loading the best model from {best} ({self.state.best_metric}).")
        self._load_from_checkpoint(best)

    def _unwrapped(self, model: nn.Module) -> PolicyAndValue:
        return cast(PolicyAndValue, self.accelerator.unwrap_model(model, keep_torch_compile=False))

    # ---- Evaluation ----

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sample responses to evaluation prompts and score them.

        Args:
            eval_dataset: Prompts in any form that `train_dataset` may have, or a dict of such data sets; the
                constructor's when None.
            ignore_keys: Accepted as Trainer does; there are no model outputs to ignore.
            metric_key_prefix: Put before each key.

        Returns:
            `eval_score` (the amount that training would pay, in the reward's unit: see
            `rlhf_ppo.rewards.shaping.scores_in_reward_unit`), `eval_kl` and `eval_entropy` (nats per response),
            `eval_response_length_mean` (tokens), `eval_ended_frac`, `eval_rewards/<name>/mean|std`, and speed.
        """
        dataset = self._evaluation.prepared(eval_dataset)
        return super().evaluate(dataset, ignore_keys, metric_key_prefix)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate for a run that trains, and step a schedule that follows a metric.

        Raises:
            ValueError: The metric by which models are compared is not there; the run was saved before.
        """
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        self._evaluation.finish(metrics, trial)
        if follows_metric(self.lr_scheduler) and not skip_scheduler:
            cast(Any, self.lr_scheduler).step(metrics[evaluated_name(self.args.metric_for_best_model or "score")])
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
        """Collect a rollout for every batch of `dataloader`, with its own random numbers, the same at every call."""
        return self._evaluation.rollouts(dataloader, metric_key_prefix)

    @torch.no_grad()
    def generate_completions(self, sampling: bool = False) -> pd.DataFrame | None:
        """Respond greedily to prompts; print the table, save it and send it to the trackers in `report_to`.

        The prompts are held-out ones, those of `eval_dataset`; without it one batch of training prompts: the first
        rows, or those of a stream's latest update. The table's title says which.

        Args:
            sampling: Whether to stop after one batch.

        Returns:
            One row per prompt: query, model response, score, and each reward when there are several; on rank 0 also
            in `output_dir/_samples/`. None before the first update on a stream without an evaluation data set.
        """
        return self._evaluation.samples(only_one_batch=sampling)

    # ---- Hyperparameter search ----

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "maximize",
        backend: str | HPSearchBackend | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Search hyperparameters with Optuna; this trainer itself stays as it is.

        Each trial is a new trainer with new models, in `output_dir/run-<number>`, seeded by its own `seed`: trials of
        the same hyperparameters give the same numbers. What is compared is the policy that the trial ends with.

        Args:
            hp_space: Takes the trial, returns values of `PPOConfig`'s fields; None searches `learning_rate`,
                `kl_coef` and `num_ppo_epochs`.
            compute_objective: Takes what `evaluate` returns, returns what is compared; None takes `eval_score`.
            n_trials: Number of trials.
            direction: "maximize" (unlike Trainer's default: a score is the better the higher) or "minimize"; a list
                for several objectives.
            backend: "optuna", the only one.
            hp_name: Takes the trial, returns the name of its directory.
            **kwargs: For `optuna.create_study` (`sampler`, `pruner`, `storage`, ...), and `timeout`,
                `gc_after_trial` and `catch` for `Study.optimize`.

        Returns:
            The best run, or for several objectives those that none surpasses: number, objective, hyperparameters.

        Raises:
            ValueError: A trial could not start anew, or nothing could be compared.
        """
        recipe = Recipe(type(self), *self._made_with, self._as_given | {"kl_controller": self.kl_controller})
        how = (hp_space, compute_objective, n_trials, direction, backend, hp_name)
        return search(self, recipe, *how, options=kwargs)

    def _hp_search_setup(self, trial: Any) -> None:
        self._trial = trial  # its arguments are in force already

    def _get_output_dir(self, trial: Any) -> str:
        return output_directory(self.args)  # a trial's own

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation to Optuna; where it prunes the trial, end it on all ranks."""
        if self.hp_search_backend is not None and trial is not None:
            self.objective, self.objective_step = self.compute_objective(metrics.copy()), step
            if is_pruned(trial, self.objective, step, self.accelerator):
                self.callback_handler.on_train_end(self.args, self.state, self.control)
                end_pruned()

    # ---- The hub ----

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **more: str | None,
    ) -> None:
        """Write `README.md` into `output_dir`, and `curves.png` beside it where something was logged.

        It names base model, prompts, rewards, settings, final metrics, versions and citations, and shows the curves
        and what a judge has found.

        `push_to_hub` passes its keyword arguments on to here.

        Args:
            model_name: The card's title; the last part of `hub_model_id` or `output_dir` when None.
            dataset_name: Hub name or path of the prompts; the trainer's `dataset_name` when None.
            tags: One or several tags beside the usual ones.
            **more: `language` and `license` in the card's metadata; `finetuned_from`, the hub name or path of the
                model that training started from, where the policy was not loaded from there; `dataset`, Trainer's
                name for `dataset_name`.
        """
        if self.is_world_process_zero():
            prompts = dataset_name or more.pop("dataset", None) or self.dataset_name
            save_run_card(self, model_name, prompts, tags, with_curves=not self._checkpoints.is_writing, **more)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the policy into `output_dir`, write its card, and upload both to `args.hub_model_id`.

        Policy (or adapter), tokenizer, card, curves and `training_args.bin` (without secrets) are uploaded. Responses
        in `completions/`, sample tables, reports, logs, checkpoints and optimizers are not, unless `args.hub_files`
        names them.

        Args:
            commit_message: The commit's.
            blocking: Whether to wait for the upload.
            token: A token that may write there; `args.hub_token`, or that of `hf auth login`, when None.
            revision: The branch; `args.hub_revision`, or the main one, when None.
            private: Whether a new repository is private; `args.hub_private_repo` when None.
            **kwargs: For `create_model_card`.

        Returns:
            The commit, or with `blocking=False` a future of it; None on ranks other than the first.

        Raises:
            HubError: The hub was not reached, failed or refused; the policy is in `output_dir`.
        """
        return push_policy(self, commit_message, blocking, token, revision, private, **kwargs)

    # ---- What PPOTrainer adds ----

    def collect_rollout(self, model: nn.Module, prompts: Prompts) -> Rollout:
        """See `PPOTrainer`."""
        raise NotImplementedError

    def estimate_advantages(self, rollout: Rollout) -> Experience:
        """See `PPOTrainer`."""
        raise NotImplementedError

    # ---- Counting: one step is one PPO update ----

    def set_initial_training_values(
        self, args: PPOConfig, dataloader: DataLoader
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Count epochs, steps and samples in PPO updates."""
        return counts(self.sizes, dataloader)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        counted = (max_steps, num_update_steps_per_epoch, num_train_epochs)
        super()._init_training_state(*counted, resume_from_checkpoint, trial)
        take_up(self, resume_from_checkpoint, max_steps, num_update_steps_per_epoch)
        skipped = 0 if self.args.ignore_data_skip else self._progress.batches_in_epoch
        return self._progress.epoch, skipped

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on with each rank's random numbers; with another number of processes, with new ones for each."""
        if checkpoint is None or draws_anew(self):
            return
        with failing_together(self.accelerator), naming(checkpoint, "its random states (rng_state.pth and beside it)"):
            super()._load_rng_state(checkpoint)
            self._streams.load(checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        self._streams.save(output_dir)
        self._learning.save(output_dir)
        super()._save_rng_state(output_dir)

    # ---- What the parts ask for ----

    def _awaited(self) -> str:
        is_half_learned = self._learning.unfinished is not None
        return awaited(self.state.global_step, self._timer.running, self._checkpoints.is_writing, is_half_learned)

    def _fire(self, event: str) -> None:
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control)

    def _moment(self) -> str:
        """Say for an error what the models run for."""
        done = self.state.global_step
        return f"evaluation after update {done}" if self._evaluation.is_running else f"update {done + 1}"

    # ---- Logging ----

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
        with failing_together(self.accelerator) if of_training else nullcontext(), self._checkpoints.naming_full_log():
            super().log(logs, start_time)
        if of_training:
            self._loop.figures.write_logged()
