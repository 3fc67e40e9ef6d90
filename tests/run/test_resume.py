"""A run that died and was resumed equals one that was never stopped, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any, cast

import pytest
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from tests.conftest import prompt_rows
from tests.runs import DieAt, RecordingTrainer, RunDied, assert_identical, end_of_run

MakeTrainer = Callable[..., PPOTrainer]

# Eight prompts in batches of four: two updates to an epoch, four in all.
RUN: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_ppo_epochs": 1,
    "num_mini_batches": 2,
    "response_length": 4,
    "total_episodes": 16,
    "save_strategy": "steps",
    "save_steps": 1,
}


def rows() -> Dataset:
    return Dataset.from_list(prompt_rows(8))


def stream() -> IterableDataset:
    return rows().to_iterable_dataset().shuffle(seed=1, buffer_size=4)


def lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def logs_more(log_metric: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    log_metric("mean_first_id", sum(ids[0] for ids in completion_ids) / len(completion_ids))
    return [float(ids[0] % 5) for ids in completion_ids]


def some_rows(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    return [None if ids[0] % 5 == 0 else float(ids[0] % 7) for ids in completion_ids]


TRAINING_SAMPLES = {"eval_dataset": lambda: None, "num_sample_generations": 3}
SAMPLED = {"eval_strategy": "steps", "eval_steps": 2, "num_sample_generations": 4}
PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
    "eval_strategy": "steps",
    "eval_steps": 1,
}

# What the run differs in, and where it dies: the event, and the number of updates made by then.
CASES: dict[str, tuple[dict[str, Any], tuple[str, int]]] = {
    "in the middle of an epoch": ({}, ("on_step_begin", 1)),
    "in the middle of the second epoch": ({}, ("on_step_begin", 3)),
    "at the end of an epoch": ({}, ("on_epoch_end", 2)),
    "at the start of an epoch": ({}, ("on_epoch_begin", 2)),
    "after the last update": ({}, ("on_epoch_end", 4)),
    "after the last update, in the middle of an epoch": ({"total_episodes": 12}, ("on_epoch_end", 3)),
    "with checkpoints at the end of epochs": ({"save_strategy": "epoch"}, ("on_step_begin", 3)),
    "between two checkpoints and two logs": ({"save_steps": 2, "logging_steps": 3}, ("on_step_begin", 3)),
    "between two logs": ({"logging_steps": 3}, ("on_step_begin", 1)),
    "with a reward function that logs": ({"reward_funcs": logs_more, "logging_steps": 4}, ("on_step_begin", 2)),
    "between a checkpoint and the next sample table": (SAMPLED, ("on_save", 1)),
    "between a sample table and its checkpoint": (SAMPLED, ("on_step_end", 2)),
    "between evaluations": (SAMPLED, ("on_step_begin", 3)),
    "with samples of training prompts": (TRAINING_SAMPLES, ("on_step_begin", 1)),
    "with samples of a stream's prompts": ({**TRAINING_SAMPLES, "train_dataset": stream}, ("on_step_begin", 2)),
    "with evaluations and logs at the end of epochs": (
        {"eval_strategy": "epoch", "logging_strategy": "epoch"},
        ("on_step_begin", 3),
    ),
    "on a stream": ({"train_dataset": stream}, ("on_step_begin", 1)),
    "on a stream, in its second pass": ({"train_dataset": stream}, ("on_step_begin", 3)),
    "with LoRA": ({"peft_config": lora}, ("on_step_begin", 1)),
    "with a worker that loads data": ({"dataloader_num_workers": 1}, ("on_step_begin", 3)),
    "with prompts grouped by length, whitened rewards": (
        {"train_sampling_strategy": "group_by_length", "whiten_rewards": True},
        ("on_step_begin", 3),
    ),
    "counting input tokens, with a seed for the data": (
        {"include_num_input_tokens_seen": "non_padding", "data_seed": 11},
        ("on_step_begin", 2),
    ),
    "with scores scaled by all before": (
        {"reward_funcs": some_rows, "score_scaling": True, "score_clip": 1.5},
        ("on_step_begin", 2),
    ),
    "without a reference": ({"kl_coef": 0.0}, ("on_step_begin", 1)),
    "with continuous batching": ({"generation_engine": "continuous"}, ("on_step_begin", 2)),
    "with a plateau schedule": (PLATEAU, ("on_step_begin", 2)),
}


@pytest.fixture
def new_run(make_trainer: MakeTrainer) -> Callable[..., RecordingTrainer]:
    def make(overrides: dict[str, Any], *callbacks: TrainerCallback) -> RecordingTrainer:
        values = {"train_dataset": rows, "eval_dataset": rows, **RUN, **overrides}
        made = {
            name: value() if name in ("train_dataset", "eval_dataset", "peft_config") else value
            for name, value in values.items()
        }
        return cast(RecordingTrainer, make_trainer(RecordingTrainer, callbacks=list(callbacks), **made))

    return make


uninterrupted: dict[str, tuple[dict[str, Any], Any]] = {}
"""What runs that never stop end in; several cases share one."""


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_one_that_never_stopped(case: str, new_run: Callable[..., RecordingTrainer]) -> None:
    overrides, death = CASES[case]
    if repr(overrides) not in uninterrupted:
        trainer = new_run({**overrides, "save_strategy": "no"})
        trainer.train()
        uninterrupted[repr(overrides)] = end_of_run(trainer), trainer.tables

    died = new_run(overrides, DieAt(*death))
    with pytest.raises(RunDied):
        died.train()
    resumed = new_run(overrides)
    resumed.train(resume_from_checkpoint=True)

    expected, tables = uninterrupted[repr(overrides)]
    assert_identical(end_of_run(resumed), expected)
    assert_identical({**died.tables, **resumed.tables}, tables)
    assert resumed._initial_global_step > 0  # it did not start anew


@pytest.mark.parametrize("logging", [1, 4])
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_run_stopped_by_a_callback_goes_on_where_it_stopped(strategy: str, logging: int, new_run: Any) -> None:
    class StopAfter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = control.should_training_stop or state.global_step == 3

    overrides = {"save_strategy": strategy, "logging_steps": logging}
    trainer = new_run({**overrides, "save_strategy": "no"})
    trainer.train()
    stopped = new_run(overrides, StopAfter())
    assert stopped.train().global_step == 3
    resumed = new_run(overrides)
    resumed.train(resume_from_checkpoint=True)
    assert_identical(end_of_run(resumed), end_of_run(trainer))
    assert resumed._initial_global_step == 3


def test_a_second_run_of_the_same_trainer_resumes_too(new_run: Any) -> None:
    first = new_run({})
    first.train()
    expected = end_of_run(first)
    for later in ("checkpoint-3", "checkpoint-4"):
        shutil.rmtree(f"{first.args.output_dir}/{later}")
    first.train(resume_from_checkpoint=True)
    assert_identical(end_of_run(first), expected)
