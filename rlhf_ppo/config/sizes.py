"""Batch sizes and number of updates of a run."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Batch sizes and number of updates of a run, from its arguments and the numbers of processes and prompts.

    ```
    local_batch_size = per_device x accumulation        batch_size      = local_batch_size x world_size
    micro_batch_size = per_device x world_size          mini_batch_size = batch_size / num_mini_batches
    ```

    Attributes:
        world_size: Processes that train together.
        local_batch_size: Episodes of an update on each process.
        micro_batch_size: Episodes of one forward and backward pass, on all processes.
        batch_size: Episodes of an update, on all processes.
        local_mini_batch_size: Episodes of an optimizer step on each process.
        mini_batch_size: Episodes of an optimizer step, on all processes.
        num_total_batches: Updates of the run.
        total_episodes: Requested number of episodes; every update has a full batch.
    """

    world_size: int
    local_batch_size: int
    micro_batch_size: int
    batch_size: int
    local_mini_batch_size: int
    mini_batch_size: int
    num_total_batches: int
    total_episodes: int


def check_num_prompts(
    num_prompts: int, batch_size: int, num_generations: int, factors: str, max_prompt_length: int | None
) -> None:
    """Raise a `ValueError` if the training set has fewer prompts than one update.

    Args:
        num_prompts: Prompts of the training set.
        batch_size: Episodes of an update.
        num_generations: Responses to each prompt of an update.
        factors: The factors of the batch size, for the message.
        max_prompt_length: Longer prompts were dropped; None if none were.
    """
    if num_prompts * num_generations < batch_size:
        shared = "" if num_generations == 1 else f" / num_generations={num_generations}"
        dropping = f", or raise max_prompt_length={max_prompt_length}, which drops longer ones"
        raise ValueError(
            f"the training set has {num_prompts} prompts, fewer than the {batch_size // num_generations} of one batch "
            f"({factors}{shared}); lower per_device_train_batch_size or gradient_accumulation_steps, or add prompts"
            f"{'' if max_prompt_length is None else dropping}"
        )


def check_divides(argument: str, number: int, per_device: int, accumulation: int) -> None:
    """Raise a `ValueError` if a process's episodes of an update cannot be split into `number` equal parts."""
    local = per_device * accumulation
    if local % number:
        divisors = [divisor for divisor in range(1, local + 1) if local % divisor == 0]
        raise ValueError(
            f"{argument}={number} does not divide the {local} episodes of a process "
            f"({made_of(per_device, accumulation)}); use one of {divisors}, or change the other two"
        )


def check_total_episodes(total_episodes: int | None, per_device: int, accumulation: int, num_processes: int) -> None:
    """Raise a `ValueError` if a run has fewer episodes than one update."""
    batch_size = per_device * accumulation * num_processes
    if total_episodes is not None and total_episodes < batch_size:
        several = "" if num_processes == 1 else f" x {num_processes} processes"
        raise ValueError(
            f"total_episodes={total_episodes} is less than the {batch_size} episodes of one update "
            f"({made_of(per_device, accumulation)}{several}); raise it, or lower the other two"
        )


def made_of(per_device: int, accumulation: int) -> str:
    """Return the factors of a process's episodes, for messages."""
    return f"per_device_train_batch_size={per_device} x gradient_accumulation_steps={accumulation}"


def run_length(
    batch_size: int,
    episodes_of_pass: int | None,
    num_train_epochs: float,
    max_steps: int | None,
    total_episodes: int | None,
) -> tuple[int, int]:
    """Compute the numbers of updates and episodes of a run; every update has a full batch.

    ```
    num_total_batches = max_steps if set, else ceil(total_episodes / batch_size)
    total_episodes    = itself if set, else max_steps x batch_size if set, else num_train_epochs x episodes_of_pass
    ```

    Args:
        batch_size: Episodes per update.
        episodes_of_pass: Episodes of a pass over the training set, or None if it has no length.
        num_train_epochs: Passes over the training set; need not be whole.
        max_steps: Number of updates; not set if None or not positive.
        total_episodes: Number of episodes, or None.

    Returns:
        `num_total_batches` and `total_episodes`.

    Raises:
        ValueError: `max_steps` and `total_episodes` disagree, or the length of the run is unknown.
    """
    if max_steps is not None and max_steps > 0:
        if total_episodes is not None and math.ceil(total_episodes / batch_size) != max_steps:
            raise ValueError(
                f"max_steps={max_steps} and total_episodes={total_episodes} contradict each other: {max_steps} "
                f"updates of {batch_size} episodes make {max_steps * batch_size}; set only one of them"
            )
        return max_steps, total_episodes or max_steps * batch_size
    if total_episodes is None and episodes_of_pass is None:
        raise ValueError("the training set has no length, so max_steps or total_episodes must be set")
    if total_episodes is None:
        total_episodes = max(1, int(num_train_epochs * (episodes_of_pass or 0)))
    return math.ceil(total_episodes / batch_size), total_episodes
