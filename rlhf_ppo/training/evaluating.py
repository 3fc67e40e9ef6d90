"""Evaluation: a rollout for every batch of held-out prompts, and what it is worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers.optimization import GreedyLR
from transformers.trainer_utils import EvalLoopOutput

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.evaluation.best_metric import evaluated_name, missing_best_metric
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.sharded import gathered
from rlhf_ppo.processes.random_numbers import isolated_rng
from rlhf_ppo.reporting.metrics import evaluation_metrics, gather_columns, warn_of_unscored
from rlhf_ppo.training.checks import check_datasets
from rlhf_ppo.training.hooks import TrainerHooks


class EvaluatesPolicy(TrainerHooks):
    """Gives a `PPOTrainer` its evaluation."""

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
            `eval_score` (as it is paid in training, but never scaled), `eval_kl` and `eval_entropy`
            (nats per response), `eval_response_length_mean` (tokens), `eval_ended_frac`,
            `eval_rewards/<name>/mean|std`, and speed.
        """
        if isinstance(eval_dataset, str) and eval_dataset not in _names(self.eval_dataset):
            raise ValueError(f"eval_dataset={eval_dataset!r} is none of {_names(self.eval_dataset)}")
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            check_datasets(self.args, self.train_dataset, eval_dataset)
            eval_dataset = cast(Any, self)._prepared(eval_dataset, "eval_dataset")
        return super().evaluate(cast(Any, eval_dataset), ignore_keys, metric_key_prefix)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate for a run that trains, and step a schedule that follows a metric.

        Raises:
            ValueError: The metric by which models are compared is not there; the run was saved before.
        """
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        if (missing := missing_best_metric(self.args, metrics)) is not None:
            if self.state.global_step > 0:
                self.control.should_evaluate = True  # the resumed run begins with this evaluation
                self._save_where_it_stopped(cast(torch.nn.Module, self.model_wrapped), trial)
                missing += f"; go on with resume_from_checkpoint={self._guard.last_checkpoint!r}"
            raise ValueError(missing)
        follows_metric = isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau | GreedyLR)
        if follows_metric and not skip_scheduler:
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
        parts: list[dict[str, Tensor]] = []
        trainer = cast(Any, self)
        with self._apart_from_training() as model:
            self.callback_handler.eval_dataloader = cast(Any, dataloader)
            for batch in dataloader:
                rollout = trainer.collect_rollout(model, Prompts.from_collated(batch, self.args.device))
                rollout = self._guard.checked_rollout(rollout)
                _, columns = trainer._rewards_of(rollout, score_std=None)
                parts.append(gather_columns(columns, cast(Any, self.accelerator.gather_for_metrics)))
                self._fire("on_prediction_step")
        self._timer.drain()
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        warn_of_unscored(columns["scores"])
        metrics = evaluation_metrics(columns, metric_key_prefix)
        extra = {
            f"{metric_key_prefix}_{name}": value for name, value in trainer._metrics_of_reward_functions().items()
        }
        return EvalLoopOutput(None, None, metrics | extra, len(columns["scores"]))  # pyright: ignore

    @contextmanager
    def _apart_from_training(self) -> Iterator[torch.nn.Module]:
        """Give the model to evaluate, with random numbers of its own, the same at every call."""
        with (
            isolated_rng(self.args.seed),
            self._streams.rewards.apart(self.args.seed, self.args.process_index),
            self._runnable_model() as model,
            self._guard.apart_from_updates(),
        ):
            yield model

    @contextmanager
    def _runnable_model(self) -> Iterator[torch.nn.Module]:
        """Give the prepared model, or, before training, the plain one with all its parameters on this device."""
        model = cast(torch.nn.Module, self.model_wrapped)
        self._engine.policy_changed()  # the best checkpoint may have been loaded, or the caller changed it
        self._learns_now = False
        try:
            if isinstance(model, PolicyAndValue) and not isinstance(model, FSDPModule):
                with gathered(model.parameters()):
                    yield model.to(self.args.device)
            else:
                yield model
        finally:
            self._learns_now = True


def _names(datasets: Any) -> list[str]:
    """Return the names of evaluation sets, if they have any."""
    return list(datasets) if isinstance(datasets, Mapping) else []
