"""Hyperparameter search; every trial is a new trainer."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import BestRun, HPSearchBackend

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.models.loading import is_function, made
from rlhf_ppo.processes.distributed import is_sharding, zero_stage

_FOLLOWING = {
    "warmup_ratio": {"warmup_steps": 0},
    "gradient_checkpointing": {"activation_checkpointing": None},
    "gradient_checkpointing_kwargs": {"activation_checkpointing_kwargs": None},
}
"""Arguments that PPOConfig derives from another one, and their unset values."""


def default_hp_space(trial: Any) -> dict[str, Any]:
    """Search the three most important numbers: `learning_rate`, `kl_coef` and `num_ppo_epochs`."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "kl_coef": trial.suggest_float("kl_coef", 0.005, 0.2, log=True),
        "num_ppo_epochs": trial.suggest_int("num_ppo_epochs", 1, 4),
    }


def trial_arguments(args: PPOConfig, hyperparameters: Mapping[str, Any], output_dir: str) -> PPOConfig:
    """Return the validated arguments of a trial; derived values are computed again.

    Args:
        args: The arguments of the searching trainer.
        hyperparameters: Values of the trial, by the names of the fields.
        output_dir: The trial's directory.

    Raises:
        TypeError: `hp_space` returned no dict.
        ValueError: A name is not an argument or is output_dir, or the values are invalid.
    """
    if not isinstance(hyperparameters, Mapping):
        raise TypeError(f"hp_space must return a dict of arguments, got {hyperparameters!r}")
    names = {field.name for field in dataclasses.fields(args) if field.init}
    if unknown := sorted(hyperparameters.keys() - names):
        raise ValueError(f"hp_space sets {unknown}, which are no arguments of {type(args).__name__}")
    if "output_dir" in hyperparameters:
        raise ValueError(
            f"hp_space sets output_dir={hyperparameters['output_dir']!r}, but a trial trains in its own directory "
            "below the output_dir of the search; leave it out, or name the trial's directory with hp_name"
        )
    derived = {
        name: -1 if name == "max_steps" else None for name in args.derived_values if args.user_value(name) is None
    }
    following = {key: value for name in hyperparameters for key, value in _FOLLOWING.get(name, {}).items()}
    return dataclasses.replace(args, **{**derived, **following, **hyperparameters, "output_dir": output_dir})


@dataclass(frozen=True)
class Recipe:
    """Class and arguments of a trainer, to make the trainer of each trial in the same way.

    Attributes:
        trainer_class: The trainer's class.
        args: Positional arguments.
        kwargs: Keyword arguments.
        as_given: Models that may be functions, callbacks and KL controller, by parameter.
    """

    trainer_class: type
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    as_given: Mapping[str, Any]

    def check_starts_anew(self, config: PPOConfig) -> None:
        """Check that a trial shares neither weights nor an optimizer with the trainer.

        Args:
            config: Says whether the reference moves.

        Raises:
            ValueError: It would share them.
        """
        given = [*self.args, *self.kwargs.values()]
        for name in ("model", "value_model", *(["ref_model"] if config.reference_ema is not None else [])):
            model = self.as_given[name]
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

    def make(self, searching: PPOConfig, config: PPOConfig, trial: Any) -> Any:
        """Make the trainer of a trial, with its arguments, new models and new callbacks.

        Args:
            searching: The arguments of the searching trainer.
            config: The arguments of the trial.
            trial: The trial, for functions that make models.

        Raises:
            ValueError: The class does not take its arguments from its caller.
        """
        self.check_starts_anew(config)
        given = dict(self.as_given)
        callbacks, controller = given.pop("callbacks"), given.pop("kl_controller")
        functions = {name: model for name, model in given.items() if is_function(model)}
        instead: dict[int, Any] = {id(model): partial(made, model, name, trial) for name, model in functions.items()}
        instead |= {id(searching): config, id(callbacks): _started_anew(callbacks)}
        if any(controller is value for value in (*self.args, *self.kwargs.values())):
            instead[id(controller)] = copy.deepcopy(controller)
        set_seed(config.seed)
        trial_trainer: Any = self.trainer_class(
            *[instead.get(id(value), value) for value in self.args],
            **{name: instead.get(id(value), value) for name, value in self.kwargs.items()},
        )
        if trial_trainer.args is not config:
            raise ValueError(
                f"{self.trainer_class.__name__} makes its own PPOConfig, so a trial's values would have no effect; "
                "let it take args from its caller"
            )
        return trial_trainer


def check_search(
    args: PPOConfig,
    accelerator: Accelerator,
    eval_dataset: Any,
    n_trials: Any,
    direction: str | list[str],
    backend: Any,
    options: Mapping[str, Any],
    compares_score: bool,
) -> None:
    """Check the arguments of `PPOTrainer.hyperparameter_search` before the first trial.

    Args:
        args: The arguments of the searching trainer.
        accelerator: Its accelerator.
        eval_dataset: Its evaluation set or sets.
        n_trials: As in the method.
        direction: As in the method.
        backend: As in the method.
        options: Options of Optuna.
        compares_score: Whether trials are compared by `eval_score`.

    Raises:
        TypeError: The number of trials is not a whole number.
        ValueError: The search cannot run.
    """
    if is_sharding(accelerator) or zero_stage(accelerator) is not None:
        raise ValueError("hyperparameter_search runs in one process or under DDP, not under DeepSpeed or FSDP")
    if backend not in (None, "optuna", HPSearchBackend.OPTUNA):
        raise ValueError(f"backend={backend!r}: hyperparameter_search runs with 'optuna' only")
    ALL_HYPERPARAMETER_SEARCH_BACKENDS[HPSearchBackend.OPTUNA]().ensure_available()
    if options.get("n_jobs", 1) != 1:
        raise ValueError(
            f"n_jobs={options['n_jobs']}: trials of one process share its random numbers and run one after the other; "
            "for several at a time start several processes with the same storage and study_name"
        )
    if accelerator.num_processes > 1 and (given := [name for name in ("timeout", "catch") if options.get(name)]):
        raise ValueError(
            f"{given[0]}={options[given[0]]!r} ends a trial or the search in the first process alone, for which the "
            f"others then wait; search in one process, or leave {given[0]} out"
        )
    if n_trials is not None or options.get("timeout") is None:
        _check_num_trials(n_trials)
    if compares_score and (isinstance(eval_dataset, Mapping) or isinstance(direction, list)):
        raise ValueError(
            "there is more than one eval_dataset or direction, and no single eval_score: pass compute_objective, "
            "which takes what evaluate() returns"
        )
    if compares_score and direction == "minimize":
        raise ValueError(
            "direction='minimize' would look for the worst eval_score; leave it 'maximize', or pass compute_objective"
        )
    if eval_dataset is None:
        raise ValueError("hyperparameter_search compares evaluations, but eval_dataset=None: pass eval_dataset")
    if args.generation_engine == "vllm":
        raise ValueError(
            "generation_engine='vllm' cannot start anew for each trial of hyperparameter_search; set it to "
            "'transformers' or 'continuous'"
        )


def _check_num_trials(number: Any) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"n_trials={number!r} must be a whole number, or None together with timeout")
    if number < 1:
        raise ValueError(f"n_trials={number} leaves nothing to compare: ask for 1 or more")


@contextmanager
def on_cpu(models: Iterable[nn.Module | None], device: torch.device) -> Iterator[None]:
    """Keep models on the CPU in the block, to free memory for the trials' models."""
    moved = [model for model in models if model is not None]
    for model in moved:
        model.to("cpu")
    try:
        yield
    finally:
        for model in moved:
            model.to(device)


def prune_if_due(trial: Any, objective: Any, step: int, accelerator: Accelerator, end: Callable[[], Any]) -> None:
    """Report an evaluation to Optuna, and end a pruned trial; every rank calls this.

    Args:
        trial: The trial.
        objective: Objective of the evaluation.
        step: Number of completed updates.
        accelerator: Exchanges Optuna's decision.
        end: Called before a pruned trial ends.

    Raises:
        optuna.TrialPruned: Optuna prunes the trial.
    """
    import optuna

    prunes = False
    if hasattr(trial, "study") and not trial.study._is_multi_objective():
        trial.report(objective, step)
        prunes = trial.should_prune()
    if bool(accelerator.reduce(torch.tensor(float(prunes), device=accelerator.device)) > 0):  # pyright: ignore
        end()
        raise optuna.TrialPruned


@dataclass
class Trials:
    """The interface that Trainer's loop over trials expects of a trainer.

    Attributes:
        recipe: Makes the trainer of each trial.
        args: The arguments of the searching trainer.
        accelerator: Its accelerator.
        hp_space: Takes the trial, returns its hyperparameters.
        compute_objective: Takes the metrics of an evaluation.
        hp_name: Takes the trial, returns its name; or None.
        objective: Objective of the last trial.
    """

    recipe: Recipe
    args: PPOConfig
    accelerator: Accelerator
    hp_space: Callable[[Any], dict[str, Any]]
    compute_objective: Callable[[dict[str, float]], float]
    hp_name: Callable[[Any], str] | None
    objective: Any = None
    model = model_wrapped = None

    def run(self, n_trials: int, direction: str | list[str], **options: Any) -> BestRun | list[BestRun]:
        """Run the trials, with Optuna's options."""
        optuna: Any = ALL_HYPERPARAMETER_SEARCH_BACKENDS[HPSearchBackend.OPTUNA]()
        return optuna.run(self, n_trials, direction, **options)

    def train(self, resume_from_checkpoint: None, trial: Any) -> None:
        """Run a trial."""
        import optuna

        name = f"run-{trial.number}" if self.hp_name is None else self.hp_name(trial)
        args = trial_arguments(self.args, self.hp_space(trial), os.path.join(str(self.args.output_dir), name))
        trial_trainer = self.recipe.make(self.args, args, trial)
        trial_trainer.hp_search_backend, trial_trainer.hp_name = HPSearchBackend.OPTUNA, self.hp_name
        trial_trainer.compute_objective = self.compute_objective
        try:
            self.objective = self._objective_of(trial_trainer, trial)
        except optuna.TrialPruned:
            if self.args.process_index == 0:  # Optuna's loop runs there
                raise
            self.objective = float("nan")
        finally:
            trial_trainer.scorer.stop()
            trial_trainer.accelerator.free_memory()

    def _objective_of(self, trial_trainer: Any, trial: Any) -> Any:
        trial_trainer.train(trial=trial)
        is_last = trial_trainer.objective_step == trial_trainer.state.global_step
        if not is_last or trial_trainer.args.load_best_model_at_end:
            return self.compute_objective(trial_trainer.evaluate())  # of the final policy
        return trial_trainer.objective


def eval_score(metrics: dict[str, float]) -> float:
    """Return the mean score of an evaluation."""
    return metrics["eval_score"]


def checked_objective(
    compute_objective: Callable[[dict[str, float]], Any], direction: str | list[str], metrics: dict[str, float]
) -> Any:
    """Compute the objective of an evaluation.

    Args:
        compute_objective: Takes the metrics, returns a number, or one for each direction.
        direction: As in the method.
        metrics: The metrics.

    Raises:
        TypeError: The function returned something else.
    """
    objective = compute_objective(metrics)
    values = objective if isinstance(objective, list | tuple) else [objective]
    num_values = len(direction) if isinstance(direction, list) else 1
    try:
        fits = len([float(value) for value in values]) == num_values
    except (TypeError, ValueError):
        fits = False
    if not fits:
        wanted = "a number" if num_values == 1 else f"{num_values} numbers, one for each direction"
        raise TypeError(f"compute_objective must return {wanted}, got {objective!r:.60}")
    return objective


def _started_anew(callbacks: list[Any] | None) -> list[Any] | None:
    """Make callbacks with a state, like EarlyStoppingCallback, again."""
    return callbacks and [
        type(callback).from_state(callback.state()) if isinstance(callback, ExportableState) else callback
        for callback in callbacks
    ]
