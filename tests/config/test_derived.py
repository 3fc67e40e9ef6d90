"""PPOConfig.fill_derived: the numbers that follow from others, filled once or several times."""

import dataclasses
from typing import Any

import pytest
from transformers import TrainingArguments

from rlhf_ppo.config import PPOConfig
from tests.config.test_ppo_config import make

DERIVED = (
    *("world_size", "local_batch_size", "micro_batch_size", "batch_size", "local_mini_batch_size", "mini_batch_size"),
    "num_total_batches",
)


def test_derived_fields_by_hand():
    args = PPOConfig(
        per_device_train_batch_size=4, gradient_accumulation_steps=3, num_mini_batches=2, num_train_epochs=1.5
    )
    assert [getattr(args, name) for name in DERIVED] == [None] * 7
    sizes = args.count_sizes(num_processes=2, num_examples=100)
    assert [getattr(args, name) for name in DERIVED] == [None] * 7
    assert args.fill_derived(num_processes=2, num_examples=100) == sizes
    assert {name: getattr(args, name) for name in (*DERIVED, "total_episodes")} == dataclasses.asdict(sizes)
    assert {name: getattr(args, name) for name in DERIVED} == {
        "world_size": 2,
        "local_batch_size": 12,  # 4 x 3
        "micro_batch_size": 8,  # 4 x 2
        "batch_size": 24,  # 12 x 2
        "local_mini_batch_size": 6,  # 12 / 2
        "mini_batch_size": 12,  # 24 / 2
        "num_total_batches": 7,  # 150 / 24 = 6.25
    }
    assert args.total_episodes == 150  # 1.5 x 100
    assert args.max_steps == 7
    assert args.run_name == "ppo_config__42"


def test_the_name_that_wandb_was_given_is_the_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_NAME", "named")
    args, named = PPOConfig(), PPOConfig(run_name="mine")
    for config in (args, named):
        config.fill_derived(1, 100)
    assert (args.run_name, named.run_name) == ("named", "mine")


@pytest.mark.parametrize("num_examples", [100, None])
def test_what_was_set_stays_whatever_the_number_of_processes(num_examples: int | None):
    by_steps, by_episodes = PPOConfig(max_steps=5, run_name="mine"), PPOConfig(total_episodes=100)
    for num_processes in (1, 2, 2, 1):
        by_steps.fill_derived(num_processes, num_examples)
        assert (by_steps.num_total_batches, by_steps.max_steps, by_steps.run_name) == (5, 5, "mine")
        assert by_steps.total_episodes == 5 * 8 * num_processes
        by_episodes.fill_derived(num_processes, num_examples)
        assert by_episodes.total_episodes == 100
        assert by_episodes.num_total_batches == by_episodes.max_steps == {1: 13, 2: 7}[num_processes]


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, (2, 2)),
        ({"logging_steps": 7}, (7, 7)),
        ({"eval_steps": 10}, (2, 10)),
        ({"load_best_model_at_end": True, "save_steps": 30}, (2, 10)),  # a multiple of the 10 that was checked
        ({"eval_strategy": "no"}, (2, None)),
    ],
)
def test_evaluations_follow_the_logs(given: dict[str, Any], steps: tuple[int, int | None]):
    args = PPOConfig(**{"eval_strategy": "steps", "max_steps": 40, **given})
    for _ in range(2):
        args.fill_derived(1, 100)
        assert (args.logging_steps, args.eval_steps) == steps


@pytest.mark.parametrize("name", DERIVED)
def test_a_derived_field_that_contradicts_the_others(name: str):
    args = make(**{name: 999})
    assert getattr(args, name) == 999
    with pytest.raises(ValueError, match=f"{name}=999 was set, but"):
        args.fill_derived(2, 100)
    assert getattr(args, name) == 999


def test_deepspeed_reads_the_real_world_size_and_afterwards_it_is_none(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("deepspeed")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    seen: list[int] = []

    def process_fsdp_then_deepspeed(self: TrainingArguments) -> None:
        deepspeed = HfTrainerDeepSpeedConfig({"train_batch_size": "auto"})
        deepspeed.trainer_config_process(self)
        seen.append(deepspeed.config["train_batch_size"])

    monkeypatch.setattr(TrainingArguments, "_process_fsdp_args", process_fsdp_then_deepspeed)
    args = PPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=3)
    unset_hf_deepspeed_config()
    assert seen == [12]
    assert args.world_size is None
