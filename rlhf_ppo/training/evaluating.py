"""Evaluations and sample tables of a run: rollouts of the policy of now that nothing is learned from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Trainer, TrainerControl
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import EvalLoopOutput

from rlhf_ppo.algorithm.controllers import KLController
from rlhf_ppo.checkpoints.progress import PPOTrainerState
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.datasets import num_rows
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.evaluation.best_metric import missing_best_metric
from rlhf_ppo.evaluation.completions import sample_rows, show_table, table_of
from rlhf_ppo.evaluation.rollouts import evaluated
from rlhf_ppo.evaluation.runnable import runnable
from rlhf_ppo.evaluation.samples import first_prompts, held_out_prompts
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.models.unwrapping import as_module
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.processes.random_numbers import isolated_rng
from rlhf_ppo.processes.streams import Streams
from rlhf_ppo.reporting.metrics import evaluation_columns, evaluation_metrics
from rlhf_ppo.reporting.timing import PhaseTimer
from rlhf_ppo.rewards.logged import LoggedByFunctions
from rlhf_ppo.rewards.scorer import Scorer
from rlhf_ppo.rewards.shaping import scores_in_reward_unit
from rlhf_ppo.training.checks import check_datasets, check_is_name
from rlhf_ppo.training.datasets import PromptPreparation
from rlhf_ppo.training.divergence import DivergenceGuard
from rlhf_ppo.training.rollouts import Rollouts
from rlhf_ppo.training.run_directory import RunDirectory
from rlhf_ppo.training.saving import CheckpointWriter
from rlhf_ppo.training.stopping import EndAfterSignal

if TYPE_CHECKING:
    import pandas as pd


class EvaluatedTrainer(Protocol):
    """What evaluations ask of their trainer."""

    accelerator: Accelerator
    args: PPOConfig
    callback_handler: CallbackHandler
    control: TrainerControl
    data_collator: Any
    eval_dataset: Any
    kl_controller: KLController
    model_wrapped: Any
    scorer: Scorer
    state: PPOTrainerState
    train_dataset: Any
    _checkpoints: CheckpointWriter
    _directory: RunDirectory
    _end: EndAfterSignal
    _engine: GenerationEngine
    _guard: DivergenceGuard
    _logged: LoggedByFunctions
    _preparation: PromptPreparation
    _rollouts: Rollouts
    _streams: Streams
    _timer: PhaseTimer
    _tokenizer: PreTrainedTokenizerBase

    def collect_rollout(self, model: nn.Module, prompts: Prompts) -> Rollout:
        """See `PPOTrainer`."""
        ...

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return a loader of held-out prompts."""
        ...

    def is_world_process_zero(self) -> bool:
        """Tell whether this is the main process."""
        ...

    def _fire(self, event: str) -> None: ...
    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any: ...


class Evaluation:
    """Evaluates a trainer's policy, in training or beside it.

    Args:
        run: The trainer.
        latest_prompts: Gives the prompts of the latest update, or None before it.

    Attributes:
        is_running: Whether an evaluation runs now.
    """

    def __init__(self, run: EvaluatedTrainer, latest_prompts: Callable[[], Prompts | None]) -> None:
        self.run, self.latest_prompts = run, latest_prompts
        self.is_running = False
        self._printed = ""  # what the latest table showed

    def prepared(self, dataset: Any) -> Any:
        """Check and tokenize what `evaluate` was given: prompts, the name of an evaluation set, or None."""
        run = self.run
        if isinstance(dataset, str):
            check_is_name(dataset, run.eval_dataset)
        elif dataset is not None:
            check_datasets(run.args, run.train_dataset, dataset)
            dataset = run._preparation.prepared(dataset, "eval_dataset")
        return dataset

    def rollouts(self, dataloader: DataLoader, prefix: str) -> EvalLoopOutput:
        """Collect a rollout for every batch.

        Args:
            dataloader: Gives the batches.
            prefix: Put before each metric's key.
        """
        run = self.run
        gather: Callable[..., Any] = run.accelerator.gather_for_metrics
        with self._apart_from_training() as model:
            run.callback_handler.eval_dataloader = dataloader  # pyright: ignore[reportAttributeAccessIssue]
            after_batch = partial(run._fire, "on_prediction_step")
            columns = evaluated(dataloader, partial(self._columns, model), gather, run.args.device, after_batch)
        moments = cast(Any, run).score_moments.moments if run.args.counts_scores else None
        shaped = (columns["scores"], columns.pop("token_scores"), columns["stopped"].bool(), run.args)
        columns["scores"] = scores_in_reward_unit(*shaped, moments)
        run._timer.drain()
        extra = {f"{prefix}_{name}": value for name, value in run._logged.drain().items()}
        metrics = evaluation_metrics(columns, prefix) | extra
        return EvalLoopOutput(None, None, metrics, len(columns["scores"]))  # pyright: ignore[reportArgumentType]

    def _columns(self, model: nn.Module, prompts: Prompts) -> dict[str, Tensor]:
        run = self.run
        rollout = run._guard.checked_rollout(run.collect_rollout(model, prompts))
        return evaluation_columns(rollout, run.args, run.kl_controller.coef)

    def finish(self, metrics: Mapping[str, float], trial: Any) -> None:
        """Write what an evaluation in training has logged, and check that it gave the metric of the best model.

        Raises:
            DiskFullError: There is no room for the log.
            ValueError: The metric is not there; the run was saved before.
        """
        run = self.run
        with failing_together(run.accelerator), run._checkpoints.naming_full_log():
            run._directory.write_history(run.state.log_history)
        if (missing := missing_best_metric(run.args, metrics)) is None:
            return
        if run.state.global_step > 0:
            run.control.should_evaluate = True  # the resumed run begins with this evaluation
            run._end.save_where_it_stopped(as_module(run.model_wrapped), trial)
            missing += f"; go on with resume_from_checkpoint={run._guard.last_checkpoint!r}"
        raise ValueError(missing)

    def samples(self, only_one_batch: bool) -> pd.DataFrame | None:
        """Make and show a table of samples, see `PPOTrainer.generate_completions`."""
        run, rows = self.run, list[dict[str, Any]]()
        gather: Callable[..., Any] = gather_object
        if run.eval_dataset is not None:
            gather = partial(run.accelerator.gather_for_metrics, use_gather_object=True)
        with self._apart_from_training() as model:
            for prompts in itertools.islice(self._sample_prompts(), 1 if only_one_batch else None):
                prompts, responses, scores = run._rollouts.greedy(model, prompts)
                extra = run._logged.drain_columns()
                rows += gather(sample_rows(run._tokenizer, prompts, responses, scores, extra))
        run._logged.drain()
        if not rows:
            return None
        table = table_of(rows, run.scorer.names)
        if run.is_world_process_zero():
            held_out = run.eval_dataset is not None
            self._printed = show_table(table, cast(Trainer, run), held_out, self._printed)
        return table

    def _sample_prompts(self) -> Iterator[Prompts]:
        """Yield all held-out prompts in batches; where there are none, one batch of training prompts.

        These are the first rows, or a stream's latest ones: a stream may not bear being read twice at a time.
        """
        run, latest, device = self.run, self.latest_prompts(), self.run.args.device
        if run.eval_dataset is not None:
            yield from held_out_prompts(run.eval_dataset, run.get_eval_dataloader, device)
        elif num_rows(run.train_dataset) is not None:
            collate = run._get_collator_with_removed_columns(run.data_collator, "sampling")
            yield first_prompts(run.train_dataset, run.args.eval_batch_size, collate, run.accelerator, device)
        elif latest is not None:
            yield latest.first(run.args.eval_batch_size)

    @contextmanager
    def _apart_from_training(self) -> Iterator[nn.Module]:
        """Give the model to evaluate, with random numbers of its own, the same at every call."""
        run, args = self.run, self.run.args
        run._engine.policy_changed()  # the best checkpoint may have been loaded, or the caller changed it
        self.is_running = True
        try:
            with (
                isolated_rng(args.seed),
                run._streams.rewards.apart(args.seed, args.process_index),
                runnable(as_module(run.model_wrapped), args.device) as model,
                run._guard.apart_from_updates(),
            ):
                yield model
        finally:
            self.is_running = False
