"""Hyperparameter search: trials start anew, their values are in force, and the best is found."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.training.search import default_hp_space, trial_arguments
from tests.conftest import prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK, assert_identical, end_of_run, parameters

MakeTrainer = Callable[..., PPOTrainer]


class Kept(PPOTrainer):
    """Keeps each trainer that was made, the searching one first, and how each run of one ended."""

    made: list[Kept]
    ends: list[dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made.append(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            self.ends.append(end_of_run(self))


@pytest.fixture
def make_searcher(make_trainer: MakeTrainer) -> Callable[..., Kept]:
    Kept.made, Kept.ends = [], []

    def make(**overrides: Any) -> Kept:
        values = {
            **QUICK,
            "model": lambda: tiny_policy(),
            "value_model": lambda: tiny_scorer(seed=2),
            "eval_dataset": prompt_rows(4, seed=1),
            "score_scaling": True,
        }
        return make_trainer(Kept, **{**values, **overrides})  # pyright: ignore[reportReturnType]

    return make


def test_a_search_of_three_trials(make_searcher: Callable[..., Kept]) -> None:
    values = [
        {"learning_rate": 1e-2, "kl_coef": 0.0, "num_ppo_epochs": 2, "seed": 7},
        {"learning_rate": 1e-2, "kl_coef": 0.0, "num_ppo_epochs": 2, "seed": 7},
        {"learning_rate": 1e-3, "num_mini_batches": 2, "gradient_accumulation_steps": 2, "total_episodes": 8},
    ]
    asked: list[int | None] = []

    def policy(trial: Any) -> Any:
        asked.append(trial and trial.number)
        return tiny_policy()

    searcher = make_searcher(model=policy, save_strategy="steps", save_steps=1)
    before = parameters(searcher)
    best = searcher.hyperparameter_search(lambda trial: values[trial.number], n_trials=3)

    assert asked == [None, 0, 1, 2]
    first, second, third = searcher.made[1:]
    names = ("learning_rate", "kl_coef", "num_ppo_epochs", "seed", "batch_size", "mini_batch_size", "max_steps")
    assert [getattr(first.args, name) for name in names] == [1e-2, 0.0, 2, 7, 2, 2, 3]
    assert [getattr(third.args, name) for name in names] == [1e-3, 0.05, 1, 3, 4, 2, 2]
    ends = searcher.ends
    assert [end["global_step"] for end in ends] == [3, 3, 2]
    assert_identical(ends[1], ends[0])  # nothing of the first trial reached the second
    assert ends[2]["history"][0]["lr"] == 1e-3 and ends[0]["history"][0]["lr"] == 1e-2
    output_dir = Path(str(searcher.args.output_dir))
    assert sorted(path.name for path in output_dir.iterdir()) == ["run-0", "run-1", "run-2"]
    assert {path.name for path in (output_dir / "run-2").glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    scores = [end["history"][-1]["eval_score"] for end in (_evaluated(trainer) for trainer in (first, second, third))]
    assert scores[0] == scores[1] != scores[2]
    assert (best.run_id, best.objective) == (str(scores.index(max(scores))), max(scores))
    assert_identical(parameters(searcher), before)
    assert searcher.args.learning_rate == 1e-3 and searcher.state.global_step == 0


def _evaluated(trainer: PPOTrainer) -> dict[str, Any]:
    return {"history": [entry for entry in trainer.state.log_history if "eval_score" in entry]}


def test_the_best_trial_is_the_one_of_the_highest_score_at_its_end(make_searcher: Callable[..., Kept]) -> None:
    """Scores grow with the rate from update to update; the first evaluations are all alike."""

    def grows(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        return [trainer_state.global_step * Kept.made[-1].args.learning_rate] * len(completions)

    searcher = make_searcher(eval_on_start=True, reward_funcs=grows)

    def space(trial: Any) -> dict[str, Any]:
        return {"learning_rate": trial.suggest_categorical("learning_rate", [1e-9, 3e-2, 1e-8])}

    sampler = optuna.samplers.GridSampler({"learning_rate": [1e-9, 3e-2, 1e-8]}, seed=0)
    best = searcher.hyperparameter_search(space, n_trials=3, sampler=sampler)
    assert best.hyperparameters == {"learning_rate": 3e-2}
    found = next(trainer for trainer in searcher.made if trainer.args.output_dir.endswith(f"run-{best.run_id}"))
    evaluations = _evaluated(found)["history"]
    assert best.objective == evaluations[-1]["eval_score"] > evaluations[0]["eval_score"]


def test_a_pruned_trial_ends_early_and_the_next_one_runs(make_searcher: Callable[..., Kept]) -> None:
    class PruneTheFirst(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number == 0

    ended: list[int] = []

    class Ends(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ended.append(state.global_step)

    searcher = make_searcher(eval_strategy="steps", eval_steps=1, callbacks=[Ends()])
    best = searcher.hyperparameter_search(default_hp_space, n_trials=2, pruner=PruneTheFirst())
    assert ended == [1, 3]
    assert best.run_id == "1" and best.hyperparameters.keys() == {"learning_rate", "kl_coef", "num_ppo_epochs"}


def test_callbacks_with_a_state_start_anew(make_searcher: Callable[..., Kept]) -> None:
    """One evaluation without improvement is borne, the second ends a trial; a constant reward never improves."""
    searcher = make_searcher(
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_strategy="steps",
        load_best_model_at_end=True,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        total_episodes=12,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    searcher.hyperparameter_search(lambda trial: {}, n_trials=2, hp_name=lambda trial: f"trial{trial.number}")
    assert [end["global_step"] for end in searcher.ends] == [3, 3]
    assert {path.name for path in Path(str(searcher.args.output_dir)).iterdir()} == {"trial0", "trial1"}


def test_functions_make_each_trials_optimizer(make_searcher: Callable[..., Kept]) -> None:
    def make(named: list[tuple[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, 0.25)

    searcher = make_searcher(optimizers=(make, None))
    searcher.hyperparameter_search(lambda trial: {}, n_trials=2)
    assert [entry["lr"] for end in searcher.ends for entry in end["history"] if "lr" in entry][::3] == [0.25, 0.25]
    assert_identical(searcher.ends[1], searcher.ends[0])


def test_sigterm_ends_the_search_not_one_trial(make_searcher: Callable[..., Kept]) -> None:
    class Sigterm(TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    searcher = make_searcher(callbacks=[Sigterm()])
    with pytest.raises(SystemExit) as ended:
        searcher.hyperparameter_search(lambda trial: {}, n_trials=3)
    assert ended.value.code == 128 + signal.SIGTERM
    assert [end["global_step"] for end in searcher.ends] == [1]


@pytest.mark.parametrize(
    ("given", "asked", "message"),
    [
        ({"model": tiny_policy()}, {}, "^model is a LlamaForCausalLM, but each trial"),
        ({"value_model": tiny_scorer()}, {}, "^value_model is a LlamaForSequenceClassification, but each trial"),
        ({"eval_dataset": None}, {}, "eval_dataset=None: pass eval_dataset"),
        ({"eval_dataset": {"a": prompt_rows(2)}}, {}, "pass compute_objective"),
        ({}, {"direction": ["maximize", "maximize"]}, "pass compute_objective"),
        ({}, {"direction": "minimize"}, "would look for the worst eval_score"),
        ({}, {"backend": "ray"}, "^backend='ray': .* 'optuna' only"),
        ({}, {"n_jobs": 2}, "^n_jobs=2: "),
        ({}, {"n_trials": 0}, "^n_trials=0 leaves nothing to compare: ask for 1 or more"),
        ({}, {"n_trials": -1}, "^n_trials=-1 leaves"),
        ({}, {"n_trials": 1.0}, "^n_trials=1.0 must be a whole number"),
        ({}, {"n_trials": True}, "^n_trials=True must be a whole number"),
        ({}, {"n_trials": None}, "^n_trials=None must be a whole number, or None together with timeout"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_runs(
    given: dict[str, Any], asked: dict[str, Any], message: str, make_searcher: Callable[..., Kept]
) -> None:
    searcher = make_searcher(**given)
    with pytest.raises((TypeError, ValueError), match=message):
        searcher.hyperparameter_search(**asked)
    assert len(searcher.made) == 1 and searcher.ends == []


def test_a_trial_with_values_that_cannot_work_is_an_error_that_names_them(make_searcher: Callable[..., Kept]) -> None:
    for values, message in (({"learning_rat": 1.0}, "learning_rat"), ({"num_mini_batches": 3}, "num_mini_batches=3")):
        with pytest.raises(ValueError, match=message):
            make_searcher().hyperparameter_search(lambda trial, values=values: values, n_trials=1)
    with pytest.raises(TypeError, match="hp_space must return a dict"):
        make_searcher().hyperparameter_search(lambda trial: None, n_trials=1)


@pytest.mark.parametrize(
    ("direction", "returned", "message"),
    [
        ("maximize", None, "must return a number, got None"),
        ("maximize", (1.0, 2.0), r"must return a number, got \(1.0, 2.0\)"),
        ("maximize", "high", "must return a number, got 'high'"),
        (["maximize", "minimize"], 1.0, "must return 2 numbers, one for each direction, got 1.0"),
    ],
)
def test_an_objective_that_cannot_be_compared_ends_the_first_trial(
    direction: Any, returned: Any, message: str, make_searcher: Callable[..., Kept]
) -> None:
    searcher = make_searcher()
    with pytest.raises(TypeError, match=message):
        searcher.hyperparameter_search(lambda trial: {}, lambda metrics: returned, 2, direction)
    assert len(searcher.ends) == 1


@pytest.mark.parametrize("asked", [{"timeout": 60}, {"timeout": 60, "n_trials": None}, {"catch": (ValueError,)}])
def test_what_only_one_of_several_processes_would_obey_is_refused(
    asked: dict[str, Any], make_searcher: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    searcher = make_searcher()
    monkeypatch.setattr(type(searcher.accelerator), "num_processes", 2)
    with pytest.raises(ValueError, match="in the first process alone"):
        searcher.hyperparameter_search(**asked)


def test_functions_that_make_no_model_are_refused(make_searcher: Callable[..., Kept]) -> None:
    with pytest.raises(TypeError, match="model is a function that returned None"):
        make_searcher(model=lambda: None)
    with pytest.raises(TypeError, match=r"value_model is <lambda>, called with 2 arguments"):
        make_searcher(value_model=lambda trial, other: tiny_scorer())


def test_a_trials_arguments_are_computed_anew(make_args: Callable[..., PPOConfig]) -> None:
    args = make_args(warmup_ratio=0.1, total_episodes=None, num_train_epochs=1, exp_name="x")
    args.fill_derived(1, 32)
    values = {"warmup_ratio": 0.5, "per_device_train_batch_size": 2, "gradient_checkpointing": True, "seed": 9}
    trial = trial_arguments(args, values, "elsewhere")
    trial.fill_derived(1, 32)
    assert (args.max_steps, args.batch_size, args.run_name) == (4, 8, "x__3")
    assert (trial.max_steps, trial.batch_size, trial.run_name) == (8, 4, "x__9")
    assert (trial.warmup_steps, trial.activation_checkpointing, trial.output_dir) == (0.5, True, "elsewhere")
    assert (args.warmup_steps, args.activation_checkpointing) == (0.1, False)
    with pytest.raises(ValueError, match="hp_space sets output_dir='mine', but a trial trains"):
        trial_arguments(args, {"output_dir": "mine"}, "elsewhere")
