"""Position of a run's loop, and the count of its updates."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from rlhf_ppo.reporting.metrics import rate
from rlhf_ppo.run.checkpoints import Progress
from rlhf_ppo.run.datasets import Passes
from rlhf_ppo.run.run_state import RunState


@dataclass
class LoopState:
    """Position of a run's loop, from its start to its end.

    Attributes:
        passes: The passes over the prompts.
        checkpoint: The checkpoint that the run resumes from, until the end of its pass.
        updates_per_epoch: Updates of a pass.
        ignore_keys: For evaluations.
        num_episodes_before: Episodes of the earlier run.
        schedule_follows_metric: Whether the schedule steps after evaluations instead of after updates.
        grad_norm: Gradient norm of the latest update.
        learning_rate: Learning rate of the latest update.
        start: Start time, for Trainer's summary.
        began: Start time on the monotonic clock.
    """

    passes: Passes
    checkpoint: str | None
    updates_per_epoch: int
    ignore_keys: list[str] | None
    num_episodes_before: int
    schedule_follows_metric: bool
    grad_norm: float | Tensor | None = None
    learning_rate: float | None = None
    start: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)


def count_update(
    run: RunState, loop: LoopState, progress: Progress, batch_size: int, num_tokens: int
) -> dict[str, float]:
    """Count an update in Trainer's state and in `progress`; return its times, rates and position.

    Args:
        run: The run.
        loop: The loop, with the learning rate of the update.
        progress: The progress that checkpoints save.
        batch_size: Episodes of an update.
        num_tokens: Response tokens of this one.
    """
    args, state = run.args, run.state
    state.global_step += 1
    state.epoch = state.global_step / loop.updates_per_epoch
    progress.batches_in_epoch += 1
    progress.episode += batch_size
    state.episode = progress.episode
    seconds = run.timer.drain()
    num_episodes, elapsed = state.episode - loop.num_episodes_before, time.monotonic() - loop.began
    if args.torch_empty_cache_steps is not None and state.global_step % args.torch_empty_cache_steps == 0:
        clear_device_cache()
    return (
        seconds
        | rate("time/tokens_per_second", num_tokens, sum(seconds.values()))
        | rate("eps", num_episodes, elapsed)
        | {"lr": cast(float, loop.learning_rate), "episode": state.episode}
    )
