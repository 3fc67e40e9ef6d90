"""Hyperparameter search: every trial is a new trainer, so that nothing of one trial reaches the next."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, cast

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import BestRun, HPSearchBackend

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.models.making import is_function, made

_FOLLOWING = {
    "warmup_ratio": {"warmup_steps": 0},
    "gradient_checkpointing": {"activation_checkpointing": None},
    "gradient_checkpointing_kwargs": {"activation_checkpointing_kwargs": None},
}
"""What PPOConfig sets by another argument, and sets anew where it is unset."""


def default_hp_space(trial: Any) -> dict[str, Any]:
    """Search the three numbers that matter most: `learning_rate`, `kl_coef` and `num_ppo_epochs`."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "kl_coef": trial.suggest_float("kl_coef", 0.005, 0.2, log=True),
        "num_ppo_epochs": trial.suggest_int("num_ppo_epochs", 1, 4),
    }


def trial_arguments(args: PPOConfig, hyperparameters: Mapping[str, Any], output_dir: str) -> PPOConfig:
    """Return a trial's arguments: validated, and what follows from others computed anew.

    Args:
        args: The arguments of the trainer that searches.
        hyperparameters: What the trial sets, by the names of the fields.
        output_dir: The trial's own.

    Raises:
        TypeError: `hp_space` returned no dict.
        ValueError: A name is no argument, or the values cannot work.
    """
    if not isinstance(hyperparameters, Mapping):
        raise TypeError(f"hp_space must return a dict of arguments, got {hyperparameters!r}")
    names = {field.name for field in dataclasses.fields(args) if field.init}
    if unknown := sorted(hyperparameters.keys() - names):
        raise ValueError(f"hp_space sets {unknown}, which are no arguments of {type(args).__name__}")
    derived = {name: -1 if name == "max_steps" else None for name in args._filled if args._given(name) is None}
    following = {key: value for name in hyperparameters for key, value in _FOLLOWING.get(name, {}).items()}
    return dataclasses.replace(args, **{**derived, **following, **hyperparameters, "output_dir": output_dir})


class SearchesHyperparameters(Trainer):
    """Trainer whose search makes a new trainer for each trial, by the arguments that it was made with."""

    args: PPOConfig
    objective: float | None = None
    objective_step: int | None = None
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]
    _as_given: dict[str, Any]  # the constructor's models that may be functions, and callbacks

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments."""
        self = super().__new__(cls)
        self._made_with = args, kwargs
        return self

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
        _check_backend(backend, kwargs)
        if compute_objective is None:
            self._check_has_score(direction)
            compute_objective = eval_score
        self._check_starts_anew()
        trials = _Trials(self, default_hp_space if hp_space is None else hp_space, compute_objective, hp_name)
        optuna = ALL_HYPERPARAMETER_SEARCH_BACKENDS[HPSearchBackend.OPTUNA]()
        with self._models_on_cpu():
            return cast(Any, optuna).run(trials, n_trials, direction, **kwargs)

    def _check_has_score(self, direction: str | list[str]) -> None:
        if not isinstance(self.eval_dataset, Mapping) and direction == "minimize":
            raise ValueError(
                "direction='minimize' would look for the worst eval_score; leave it 'maximize', or pass "
                "compute_objective"
            )
        if isinstance(self.eval_dataset, Mapping) or isinstance(direction, list):
            raise ValueError(
                "there is more than one eval_dataset or direction, and no single eval_score: pass compute_objective, "
                "which takes what evaluate() returns"
            )

    def _check_starts_anew(self) -> None:
        if self.eval_dataset is None:
            raise ValueError("hyperparameter_search compares evaluations, but eval_dataset=None: pass eval_dataset")
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("hyperparameter_search runs in one process or under DDP, not under DeepSpeed or FSDP")
        if self.args.generation_engine == "vllm":
            raise ValueError(
                "generation_engine='vllm' cannot start anew for each trial of hyperparameter_search; set it to "
                "'transformers' or 'continuous'"
            )
        given = [*self._made_with[0], *self._made_with[1].values()]
        for name in ("model", "value_model"):
            model = self._as_given[name]
            if isinstance(model, nn.Module) and any(model is value for value in given):
                raise ValueError(
                    f"{name} is a {type(model).__name__}, but each trial of hyperparameter_search starts from new "
                    "weights: pass its path, or a function that returns the model and takes the trial or nothing"
                )
        parts = [part for value in given if isinstance(value, tuple) for part in value]
        if any(isinstance(part, Optimizer | LRScheduler) for part in parts):
            raise ValueError(
                "optimizers holds an object over this trainer's parameters, but each trial of hyperparameter_search "
                "has new ones: pass functions that make optimizer and scheduler"
            )

    def _make_trial(self, args: PPOConfig, trial: Any) -> Self:
        """Make the trainer of a trial, as this one was made, with other arguments and new models and callbacks."""
        args_given, kwargs_given = self._made_with
        given = dict(self._as_given)
        callbacks = given.pop("callbacks")
        functions = {name: model for name, model in given.items() if is_function(model)}
        instead: dict[int, Any] = {id(model): partial(made, model, name, trial) for name, model in functions.items()}
        instead |= {id(self.args): args, id(callbacks): _started_anew(callbacks)}
        set_seed(args.seed)
        trainer = cast(Any, type(self))(
            *[instead.get(id(value), value) for value in args_given],
            **{name: instead.get(id(value), value) for name, value in kwargs_given.items()},
        )
        if trainer.args is not args:
            raise ValueError(
                f"{type(self).__name__} makes its own PPOConfig, so that a trial's values would not be in force; let "
                "it take args from its caller"
            )
        return trainer

    @contextmanager
    def _models_on_cpu(self) -> Iterator[None]:
        """Make room for the trials' models."""
        trainer = cast(Any, self)
        frozen = [] if self.args.offload_frozen else [trainer.reference.model, *trainer.reward_models]
        models: list[nn.Module] = [model for model in (trainer.model, *frozen) if model is not None]
        for model in models:
            model.to("cpu")
        try:
            yield
        finally:
            for model in models:
                model.to(self.args.device)

    # ---- In a trial ----

    def _hp_search_setup(self, trial: Any) -> None:
        self._trial = trial  # its arguments are in force already

    def _get_output_dir(self, trial: Any) -> str:
        return cast(str, self.args.output_dir)  # a trial's own

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation to Optuna; where it prunes the trial, end it on all ranks."""
        if self.hp_search_backend is None or trial is None:
            return
        import optuna

        self.objective, self.objective_step = self.compute_objective(metrics.copy()), step
        prunes = False
        if hasattr(trial, "study") and not trial.study._is_multi_objective():
            trial.report(self.objective, step)
            prunes = trial.should_prune()
        if self.accelerator.reduce(torch.tensor(float(prunes), device=self.args.device)) > 0:  # pyright: ignore
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            raise optuna.TrialPruned


class _Trials:
    """What Trainer's loop over trials asks of a trainer.

    Args:
        searcher: The trainer whose method was called.
        hp_space: Takes the trial, returns its hyperparameters.
        compute_objective: Takes an evaluation's metrics.
        hp_name: Takes the trial, returns its name.
    """

    model = model_wrapped = None

    def __init__(
        self,
        searcher: SearchesHyperparameters,
        hp_space: Callable[[Any], dict[str, Any]],
        compute_objective: Callable[[dict[str, float]], float],
        hp_name: Callable[[Any], str] | None,
    ) -> None:
        self.searcher, self.args, self.accelerator = searcher, searcher.args, searcher.accelerator
        self.hp_space, self.compute_objective, self.hp_name = hp_space, compute_objective, hp_name
        self.objective: Any = None

    def train(self, resume_from_checkpoint: None, trial: Any) -> None:
        """Run a trial."""
        import optuna

        name = f"run-{trial.number}" if self.hp_name is None else self.hp_name(trial)
        args = trial_arguments(self.args, self.hp_space(trial), os.path.join(str(self.args.output_dir), name))
        trainer: Any = self.searcher._make_trial(args, trial)
        trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.OPTUNA, self.hp_name
        trainer.compute_objective = self.compute_objective
        try:
            self.objective = self._objective_of(trainer, trial)
        except optuna.TrialPruned:
            if self.args.process_index == 0:  # Optuna's loop runs there
                raise
            self.objective = float("nan")
        finally:
            trainer.scorer.stop()
            trainer.accelerator.free_memory()

    def _objective_of(self, trainer: Any, trial: Any) -> Any:
        trainer.train(trial=trial)
        if trainer.objective_step != trainer.state.global_step or trainer.args.load_best_model_at_end:
            return self.compute_objective(trainer.evaluate())  # of the policy that the trial ends with
        return trainer.objective


def eval_score(metrics: dict[str, float]) -> float:
    """Compare trials by the mean score of the responses to the evaluation prompts."""
    return metrics["eval_score"]


def _check_backend(backend: Any, options: Mapping[str, Any]) -> None:
    if backend not in (None, "optuna", HPSearchBackend.OPTUNA):
        raise ValueError(f"backend={backend!r}: hyperparameter_search runs with 'optuna' only")
    ALL_HYPERPARAMETER_SEARCH_BACKENDS[HPSearchBackend.OPTUNA]().ensure_available()
    if options.get("n_jobs", 1) != 1:
        raise ValueError(
            f"n_jobs={options['n_jobs']}: trials of one process share its random numbers and run one after the other; "
            "for several at a time start several processes with the same storage and study_name"
        )


def _started_anew(callbacks: list[Any] | None) -> list[Any] | None:
    """Make those callbacks anew that keep a state, as EarlyStoppingCallback does."""
    return callbacks and [
        type(callback).from_state(callback.state()) if isinstance(callback, ExportableState) else callback
        for callback in callbacks
    ]
