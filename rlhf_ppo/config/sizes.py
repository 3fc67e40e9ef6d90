"""How many episodes an update has and how many updates a run has."""

import math


def batch_sizes(
    per_device: int, accumulation: int, num_mini_batches: int, num_processes: int, num_examples: int | None
) -> dict[str, int]:
    """Count the episodes of one update, by the names of `PPOConfig`'s fields.

    ```
    local_batch_size = per_device x accumulation        batch_size      = local_batch_size x num_processes
    micro_batch_size = per_device x num_processes       mini_batch_size = batch_size / num_mini_batches
    ```

    Args:
        per_device: `per_device_train_batch_size`.
        accumulation: `gradient_accumulation_steps`.
        num_mini_batches: Optimizer steps per pass over a rollout.
        num_processes: Processes that train together.
        num_examples: Prompts of the training set, or None if it has no length.

    Returns:
        The five sizes and `world_size`.

    Raises:
        ValueError: A process's episodes cannot be cut into equal mini-batches, or the training set has fewer prompts
            than one update.
    """
    local = per_device * accumulation
    made_of = f"per_device_train_batch_size={per_device} x gradient_accumulation_steps={accumulation}"
    if local % num_mini_batches:
        divisors = [number for number in range(1, local + 1) if local % number == 0]
        raise ValueError(
            f"num_mini_batches={num_mini_batches} does not divide the {local} episodes of a process ({made_of}); use "
            f"one of {divisors}, or change the other two"
        )
    if num_examples is not None and num_examples < local * num_processes:
        raise ValueError(
            f"the training set has {num_examples} prompts, fewer than the {local * num_processes} of one batch "
            f"({made_of} x {num_processes} processes); lower per_device_train_batch_size or "
            "gradient_accumulation_steps, or add prompts"
        )
    return {
        "world_size": num_processes,
        "local_batch_size": local,
        "micro_batch_size": per_device * num_processes,
        "batch_size": local * num_processes,
        "local_mini_batch_size": local // num_mini_batches,
        "mini_batch_size": local * num_processes // num_mini_batches,
    }


def run_length(
    batch_size: int,
    num_examples: int | None,
    num_train_epochs: float,
    max_steps: int | None,
    total_episodes: int | None,
) -> dict[str, int]:
    """Count the updates and episodes of a run; every update has a full batch.

    ```
    num_total_batches = max_steps if set, else ceil(total_episodes / batch_size)
    total_episodes    = itself if set, else max_steps x batch_size if set, else num_train_epochs x num_examples
    ```

    Args:
        batch_size: Episodes per update.
        num_examples: Prompts of the training set, or None if it has no length.
        num_train_epochs: Passes over the training set; need not be whole.
        max_steps: Number of updates; not set if None or not positive.
        total_episodes: Number of episodes, or None.

    Returns:
        `num_total_batches` and `total_episodes`.

    Raises:
        ValueError: `max_steps` and `total_episodes` disagree, or nothing says when to stop.
    """
    if max_steps is not None and max_steps > 0:
        if total_episodes is not None and math.ceil(total_episodes / batch_size) != max_steps:
            raise ValueError(
                f"max_steps={max_steps} and total_episodes={total_episodes} contradict each other: {max_steps} "
                f"updates of {batch_size} episodes make {max_steps * batch_size}; set only one of them"
            )
        return {"num_total_batches": max_steps, "total_episodes": total_episodes or max_steps * batch_size}
    if total_episodes is None and num_examples is None:
        raise ValueError("the training set has no length, so max_steps or total_episodes must be set")
    if total_episodes is None:
        total_episodes = max(1, int(num_train_epochs * (num_examples or 0)))
    return {"num_total_batches": math.ceil(total_episodes / batch_size), "total_episodes": total_episodes}
