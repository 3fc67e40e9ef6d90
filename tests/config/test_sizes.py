"""Batch sizes and the length of a run, by hand and as properties."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ppo import PPOConfig
from rlhf_ppo.config.ppo_config import Sizes, run_length

CPU: dict[str, Any] = {"use_cpu": True, "report_to": "none"}
SMALL = st.integers(1, 16)


def sizes_of(
    per_device: int, accumulation: int, num_processes: int = 1, num_examples: int | None = None, **options: Any
) -> Sizes:
    sizes = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": accumulation}
    return PPOConfig("out", **CPU, **sizes, **options).count_sizes(num_processes, num_examples)


@given(per_device=SMALL, accumulation=SMALL, num_mini_batches=SMALL, num_processes=SMALL)
def test_mini_batches_add_up_or_are_refused(per_device, accumulation, num_mini_batches, num_processes):
    try:
        options = {"num_mini_batches": num_mini_batches, "max_steps": 7}
        sizes = sizes_of(per_device, accumulation, num_processes, **options)
    except ValueError:
        assert per_device * accumulation / num_mini_batches != per_device * accumulation // num_mini_batches
        return
    assert sizes.local_mini_batch_size * num_mini_batches == sizes.local_batch_size == per_device * accumulation
    assert sizes.mini_batch_size * num_mini_batches == sizes.batch_size
    assert sizes.mini_batch_size == sizes.local_mini_batch_size * num_processes
    assert sizes.micro_batch_size * accumulation == sizes.batch_size


def test_a_pass_has_as_many_episodes_as_there_are_responses():
    groups = {"num_mini_batches": 2, "num_generations": 4, "num_train_epochs": 1.5}
    sizes = sizes_of(4, 3, 2, 8, **groups)
    assert (sizes.batch_size, sizes.total_episodes, sizes.num_total_batches) == (24, 48, 2)
    with pytest.raises(ValueError, match=r"5 prompts, fewer than the 6 of one batch .* / num_generations=4\)"):
        sizes_of(4, 3, 2, 5, **groups)


@pytest.mark.parametrize(
    ("batch_size", "num_examples", "epochs", "max_steps", "episodes", "expected_updates", "expected_episodes"),
    [
        (8, 80, 3.0, None, None, 30, 240),
        (8, 80, 3.0, -1, None, 30, 240),
        (8, 80, 3.0, 0, None, 30, 240),
        (8, 81, 1.0, None, None, 11, 81),  # the last update goes on with the next epoch
        (8, 10, 0.5, None, None, 1, 5),
        (8, 10, 0.01, None, None, 1, 1),
        (8, 80, 3.0, None, 100, 13, 100),  # 12.5 updates
        (8, None, 3.0, None, 100, 13, 100),
        (8, 80, 3.0, 5, None, 5, 40),
        (8, None, 3.0, 5, None, 5, 40),
        (8, 80, 3.0, 13, 100, 13, 100),  # both, and they agree
    ],
)
def test_length_by_hand(batch_size, num_examples, epochs, max_steps, episodes, expected_updates, expected_episodes):
    length = run_length(batch_size, num_examples, epochs, max_steps, episodes)
    assert length == (expected_updates, expected_episodes)


def test_fewer_episodes_than_an_update_are_an_error_at_construction() -> None:
    with pytest.raises(ValueError, match=r"^total_episodes=11 is less than the 12 episodes .*=4 x .*=3\); raise it"):
        PPOConfig("out", per_device_train_batch_size=4, gradient_accumulation_steps=3, total_episodes=11, **CPU)
    args = PPOConfig("out", per_device_train_batch_size=4, gradient_accumulation_steps=3, total_episodes=12, **CPU)
    assert args.count_sizes(1, 12).num_total_batches == 1
    with pytest.raises(ValueError, match=r"^total_episodes=12 is less than the 24 .*=3 x 2 processes\); raise it"):
        args.count_sizes(2, 24)
