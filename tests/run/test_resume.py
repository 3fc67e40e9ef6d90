"""A run that died and was resumed equals one that was never stopped, bit for bit."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.reporting.run_log import step_of_policy
from rlhf_ppo.rewards.judges import PreferenceReward
from tests.conftest import prompt_rows
from tests.runs import (
    QUICK,
    At,
    MakeTrainer,
    RecordingTrainer,
    RunDied,
    assert_identical,
    die,
    end_of_run,
    history,
    logged,
    parameters,
)

# Eight prompts in batches of four: two updates to an epoch, four in all.
RUN: dict[str, Any] = QUICK | {
    **{"gradient_accumulation_steps": 2, "num_mini_batches": 2, "total_episodes": 16},
    **{"save_strategy": "steps", "save_steps": 1},
}


def rows() -> Dataset:
    return Dataset.from_list(prompt_rows(8))


def stream() -> IterableDataset:
    return rows().to_iterable_dataset().shuffle(seed=1, buffer_size=4)


def logs_more(log_metric: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    log_metric("mean_first_id", sum(ids[0] for ids in completion_ids) / len(completion_ids))
    return [float(ids[0] % 5) for ids in completion_ids]


def some_rows(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    return [None if ids[0] % 5 == 0 else float(ids[0] % 7) for ids in completion_ids]


def noise(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """A reward that is drawn."""
    return [random.random() + float(np.random.rand()) + float(torch.rand(())) for _ in completions]


def prefers_longer(prompts: list[str], pairs: list[list[str]]) -> list[float]:
    return [float(len(second) > len(first)) for first, second in pairs]


OPPONENTS = [PreferenceReward(prefers_longer, opponent, name=opponent) for opponent in ("reference", "self")]
SAMPLED = {"eval_strategy": "steps", "eval_steps": 2, "num_sample_generations": 4}
RECIPES: dict[str, Any] = {
    **{"kl_coef": 0.5, "kl_target": 0.01, "kl_horizon": 6, "kl_stop": 1e-3, "num_ppo_epochs": 3},
    **{"learning_rate": 0.05, "score_scaling": True, "score_clip": 1.5, "reward_funcs": some_rows},
    **{"critic_learning_rate": 0.1, "critic_warmup_steps": 2, "lam_critic": 0.9, "cliprange_high": 0.3},
    **{"num_generations": 2, "ptx_coef": 0.5, "ptx_dataset": [{"text": f"w{number} w2 w3"} for number in range(5)]},
}

# What the run differs in, and where it dies: the event, and the number of updates made by then.
CASES: dict[str, tuple[dict[str, Any], tuple[str, int]]] = {
    "in the middle of an epoch": ({}, ("on_step_begin", 1)),
    "in the middle of the second epoch": ({}, ("on_step_begin", 3)),
    "at the end of an epoch": ({}, ("on_epoch_end", 2)),
    "after the last update": ({}, ("on_epoch_end", 4)),
    "between two checkpoints and two logs": ({"save_steps": 2, "logging_steps": 3}, ("on_step_begin", 3)),
    "with a reward function that logs": ({"reward_funcs": logs_more, "logging_steps": 4}, ("on_step_begin", 2)),
    "with a reward that is drawn": ({"reward_funcs": noise}, ("on_step_begin", 2)),
    "between a sample table and its checkpoint": (SAMPLED, ("on_step_end", 2)),
    "with evaluations, logs and checkpoints at the end of epochs": (
        {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "epoch"},
        ("on_step_begin", 3),
    ),
    "on a stream, in its second pass": ({"train_dataset": stream}, ("on_step_begin", 3)),
    "with prompts grouped by length that a worker loads, and a seed for the data": (
        {"train_sampling_strategy": "group_by_length", "dataloader_num_workers": 1, "data_seed": 11},
        ("on_step_begin", 3),
    ),
    "with published recipes": (RECIPES, ("on_step_begin", 3)),
    "with opponents": ({"reward_funcs": OPPONENTS}, ("on_step_begin", 2)),
    "with continuous batching": ({"generation_engine": "continuous"}, ("on_step_begin", 2)),
}


@pytest.fixture
def new_run(make_trainer: MakeTrainer) -> Callable[..., RecordingTrainer]:
    def make(overrides: dict[str, Any], *callbacks: TrainerCallback) -> RecordingTrainer:
        values = {"train_dataset": rows, "eval_dataset": rows, **RUN, **overrides}
        made = {
            name: value() if name in ("train_dataset", "eval_dataset") else value for name, value in values.items()
        }
        return cast(RecordingTrainer, make_trainer(RecordingTrainer, callbacks=list(callbacks), **made))

    return make


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_one_that_never_stopped(case: str, new_run: Callable[..., RecordingTrainer]) -> None:
    overrides, death = CASES[case]
    whole = new_run({**overrides, "save_strategy": "no"})
    whole.train()
    died = new_run(overrides, At(*death, die))
    with pytest.raises(RunDied):
        died.train()
    resumed = new_run(overrides)
    resumed.train(resume_from_checkpoint=True)

    assert_identical(end_of_run(resumed), end_of_run(whole))
    assert_identical({**died.tables, **resumed.tables}, whole.tables)
    assert resumed._initial_global_step > 0  # it did not start anew


def test_a_patience_goes_on_where_it_stopped_and_no_evaluation_at_the_start_is_repeated(new_run: Any) -> None:
    def run(*callbacks: TrainerCallback, **more: Any) -> RecordingTrainer:
        stopping = [EarlyStoppingCallback(early_stopping_patience=each) for each in (3, 9)]
        return new_run({**evaluated, **more}, *stopping, *callbacks)

    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "load_best_model_at_end": True}
    evaluated |= {"metric_for_best_model": "kl", "greater_is_better": False, "total_episodes": 32}
    whole = run(output_dir=str(new_run({}).args.output_dir) + "-whole")
    assert whole.train().global_step == 4, "the KL is lowest after the first update"
    died = run(At("on_step_begin", 2, die))
    with pytest.raises(RunDied):
        died.train()
    resumed = run()
    resumed.train(resume_from_checkpoint=True)
    assert_identical(end_of_run(resumed), end_of_run(whole))


def test_the_end_of_the_last_pass_is_reported_once(new_run: Any) -> None:
    """Also where the run goes on with more passes; a patience would end one evaluation too early."""
    of_passes = {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "epoch"}
    run = of_passes | {"lr_scheduler_type": "constant", "total_episodes": None, "num_train_epochs": 2}
    first = new_run(run)
    first.train()
    again = new_run(run)
    again.train(resume_from_checkpoint=True)
    assert logged(again, "eval_score") == logged(first, "eval_score")
    longer = run | {"num_train_epochs": 3}
    extended, whole = new_run(longer), new_run(longer | {"output_dir": f"{first.args.output_dir}-whole"})
    extended.train(resume_from_checkpoint=True)
    whole.train()
    assert len(logged(whole, "eval_score")) == 3 and whole.state.global_step == 6
    summaries = [[log for log in history(trainer) if "total_flos" not in log] for trainer in (extended, whole)]
    assert_identical(*summaries)
    assert_identical(parameters(extended), parameters(whole))


class ThirdIsBest(PPOTrainer):
    """The policy after the third update is the best, then that after the second."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return super().evaluate(*args, **kwargs) | {"eval_score": {2: 1.0, 3: 2.0}.get(self.state.global_step, 0.0)}


def test_a_best_evaluation_without_a_checkpoint_is_told_and_the_best_saved_model_is_loaded(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by a run that has moved since."""
    run = QUICK | {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(), "load_best_model_at_end": True}
    run |= {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    first = make_trainer(ThirdIsBest, **run | {"total_episodes": 8})
    moved = Path(f"{first.args.output_dir}-moved")
    again = make_trainer(ThirdIsBest, **run | {"total_episodes": 12}, output_dir=str(moved))
    for trainer, resumed in ((first, None), (again, True)):
        with caplog.at_level("WARNING", logger="rlhf_ppo"):
            trainer.train(resume_from_checkpoint=resumed)
        best = Path(str(trainer.args.output_dir), "checkpoint-2")
        assert trainer.state.best_model_checkpoint == str(best) and trainer.state.best_global_step == 3
        assert_identical(dict(trainer.policy_model.state_dict()), load_file(best / "model.safetensors"))
        assert step_of_policy(trainer) == 2
        [told] = [each.getMessage() for each in caplog.records if "load_best_model_at_end" in each.getMessage()]
        assert "after update 3 was the best" in told and "that of update 2; set save_steps=eval_steps" in told
        caplog.clear()
        if resumed is None:
            best.parent.rename(moved)


class FallingScore(PPOTrainer):
    """The policy after the first update is the best."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return super().evaluate(*args, **kwargs) | {"eval_score": float(-self.state.global_step)}


@pytest.mark.parametrize("place", ["moved", "then relative"])
def test_the_best_checkpoint_is_found_where_the_run_is_now(
    place: str, make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(), "metric_for_best_model": "score"}
    run = QUICK | evaluated | {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    run |= {"load_best_model_at_end": True}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDied):
        make_trainer(FallingScore, **run, output_dir="run", callbacks=[At("on_step_begin", 2, die)]).train()
    if place == "moved":
        Path("run").rename("elsewhere")
        monkeypatch.chdir(tmp_path.parent)
    here = tmp_path / ("elsewhere" if place == "moved" else "run")
    best = load_file(here / "checkpoint-1" / "model.safetensors")
    trainer = make_trainer(FallingScore, **run, output_dir=str(here))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint == str(here / "checkpoint-1")
    assert_identical(dict(trainer.policy_model.state_dict()), best)
    assert {path.name for path in here.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-3"}


@pytest.mark.skipif(
    "num_steps_trained" not in inspect.getsource(Trainer._finalize_training),
    reason="this transformers divides by the updates of all runs",
)
def test_the_loss_of_a_resumed_run_is_the_mean_over_its_own_updates(make_trainer: MakeTrainer) -> None:
    """Not of those before it whose losses were not logged yet."""
    run = RUN | {"train_dataset": rows()}
    whole = make_trainer(**run, logging_strategy="no")
    each = make_trainer(**run, output_dir=f"{whole.args.output_dir}-logged")
    for trainer in (whole, each):
        trainer.train()
    losses = [entry["loss"] for entry in each.state.log_history if "loss" in entry]
    resumed = make_trainer(**run, logging_strategy="no", output_dir=f"{whole.args.output_dir}-resumed")
    checkpoint = str(Path(str(whole.args.output_dir), "checkpoint-2"))
    assert resumed.train(resume_from_checkpoint=checkpoint).training_loss == pytest.approx(sum(losses[2:]) / 2)


def test_an_engine_with_weights_of_its_own_is_told_of_the_best_model(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = QUICK | {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(), "load_best_model_at_end": True}
    trainer = make_trainer(FallingScore, **run, save_strategy="steps", save_steps=1)
    events: list[str] = []
    engine = type(trainer.sampler.engine)
    for name, method in ((name, getattr(engine, name)) for name in ("sample", "policy_changed")):

        def noted(*given: Any, name: str = name, inner: Any = method) -> Any:
            events.append(name)
            return inner(*given)

        monkeypatch.setattr(engine, name, noted)
    trainer.train()
    assert step_of_policy(trainer) == 1 and events[-1] == "policy_changed"


def test_an_argument_that_a_callback_changed_is_told_on_resume(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    def cool(passed: Any) -> None:
        passed.args.temperature = 0.5

    with pytest.raises(RunDied):
        make_trainer(**RUN, callbacks=[At("on_step_end", 1, cool), At("on_step_begin", 2, die)]).train()
    with caplog.at_level("WARNING", logger="rlhf_ppo"):
        make_trainer(**RUN).train(resume_from_checkpoint=True)
    assert "resumed with other arguments: temperature=0.7 (was 0.5)" in caplog.text


def test_a_best_figure_of_another_metric_is_forgotten(make_trainer: MakeTrainer) -> None:
    run = QUICK | {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(), "load_best_model_at_end": True}
    run |= {"save_strategy": "steps", "save_steps": 1}
    with pytest.raises(RunDied):
        make_trainer(FallingScore, **run, callbacks=[At("on_step_begin", 2, die)]).train()
    trainer = make_trainer(**run, metric_for_best_model="response_length_mean", greater_is_better=False)
    trainer.train(resume_from_checkpoint=True)
    lengths = [log["eval_response_length_mean"] for log in trainer.state.log_history if "eval_score" in log]
    assert trainer.state.best_metric == lengths[2] and trainer.state.best_global_step == 3


def test_a_run_with_another_number_of_processes_draws_other_random_numbers(make_trainer: MakeTrainer) -> None:
    """Not those of the first updates again, which the seed would give."""
    trainer = make_trainer(**RUN)
    torch.manual_seed(int(trainer.args.seed))
    of_the_start = torch.rand(4)
    torch.manual_seed(int(trainer.args.seed))
    trainer._progress.num_processes, trainer.state.global_step = 2, 2
    trainer._load_rng_state("of two processes")
    assert not torch.isin(torch.rand(4), of_the_start).any()
