"""How a run takes up where a checkpoint was written, or begins."""

from __future__ import annotations

from typing import Any, Protocol

from accelerate.utils import DistributedType, set_seed
from transformers import TrainerState

from rlhf_ppo.checkpoints.fits import check_same_split
from rlhf_ppo.checkpoints.half_learned import half_learned_in
from rlhf_ppo.checkpoints.history import whole_history
from rlhf_ppo.checkpoints.progress import PPOTrainerState, Progress
from rlhf_ppo.config.sizes import Sizes
from rlhf_ppo.data.datasets import num_rows
from rlhf_ppo.processes.logs import get_logger
from rlhf_ppo.processes.streams import Streams
from rlhf_ppo.reporting.metrics import MetricWindow
from rlhf_ppo.training.divergence import DivergenceGuard, Skipped
from rlhf_ppo.training.half_learned import LearningInParts
from rlhf_ppo.training.ingredients import RecordedTrainer, record_and_compare
from rlhf_ppo.training.optimization import Optimization

logger = get_logger(__name__)


class ResumedTrainer(RecordedTrainer, Protocol):
    """What a checkpoint gives back to a trainer."""

    is_fsdp_enabled: bool
    optimizer: Any
    sizes: Sizes
    state: PPOTrainerState
    _guard: DivergenceGuard
    _learning: LearningInParts
    _optimization: Optimization
    _progress: Progress
    _record: dict[str, Any]
    _streams: Streams
    _window: MetricWindow

    def _get_learning_rate(self) -> float: ...


def take_up(run: ResumedTrainer, checkpoint: str | None, max_steps: int, num_updates_per_epoch: int) -> None:
    """Give a run the counts, the unlogged metrics and the half-learned update of a checkpoint, or none.

    Args:
        run: The trainer, with Trainer's own state of the checkpoint.
        checkpoint: The checkpoint's directory, or None.
        max_steps: Updates of the run.
        num_updates_per_epoch: Updates of a pass over the data.
    """
    run._progress, num_prompts = Progress(), num_rows(run.train_dataset) or 0
    if checkpoint is not None:
        run._progress = progress = Progress.load(checkpoint)
        run.state.log_history = whole_history(checkpoint, run.state.log_history, progress.num_logged)
        is_deepspeed = run.accelerator.distributed_type == DistributedType.DEEPSPEED
        check_same_split(progress, run.sizes.batch_size, run.accelerator.num_processes, is_deepspeed)
        run.state.compute_steps(run.args, max_steps)
        same_batches = progress.num_generations == run.args.num_generations
        find_place(checkpoint, run.state, progress, num_updates_per_epoch, num_prompts, same_batches)
    run._record = record_and_compare(run, checkpoint)
    run._progress.num_prompts = num_prompts
    run._guard.start(Skipped(**run._progress.skipped))
    run._learning.start(checkpoint, run._progress)
    run._window = MetricWindow(run._progress.pending_metrics)
    run.state = PPOTrainerState.of(run.state, run._progress.episode)


def find_place(
    checkpoint: str,
    state: TrainerState,
    progress: Progress,
    num_updates_per_epoch: int,
    num_prompts: int,
    same_batches: bool = True,
) -> None:
    """Set where in the data a resumed run begins, and say so if that is not where the checkpoint's left off.

    Args:
        checkpoint: The checkpoint's directory.
        state: Its state, with the number of updates that the run has now.
        progress: Its progress; in other data the pass that it was in is over.
        num_updates_per_epoch: Updates of a pass now.
        num_prompts: Rows of the data now; 0 if unknown.
        same_batches: Whether an update takes as many prompts as before.
    """
    if state.global_step >= state.max_steps:
        logger.warning(
            f"{checkpoint} is of update {state.global_step} and the run has {state.max_steps}: nothing is left to "
            "train; for more updates raise max_steps, total_episodes or num_train_epochs."
        )
    if progress.batches_in_epoch > 0 and not same_batches:
        progress.epoch, progress.batches_in_epoch = progress.epoch + 1, 0
        logger.warning(
            f"num_generations is another than when {checkpoint} was written in the middle of a pass, and so is the "
            "number of prompts of an update: a new pass begins. The run is not the one that it would have been "
            "without the stop."
        )
    if not num_prompts:
        return
    changed = progress.num_prompts not in (0, num_prompts) or progress.batches_in_epoch > num_updates_per_epoch
    if changed and progress.batches_in_epoch > 0:
        progress.epoch, progress.batches_in_epoch = progress.epoch + 1, 0
        logger.warning(
            f"train_dataset has {num_prompts} prompts now, and had another number when {checkpoint} was written in "
            "the middle of a pass: a new pass begins, over the prompts of now. The run is not the one that it would "
            "have been without the stop."
        )


def draws_anew(run: ResumedTrainer) -> bool:
    """Tell whether the processes are not as many as before; each then has new random numbers."""
    if run._progress.num_processes == run.accelerator.num_processes:
        return False
    set_seed(run.args.seed + run.state.global_step, device_specific=True)
    run._streams.seed(run.args.seed, run.state.global_step)
    return True


def put_optimization_in_force(run: ResumedTrainer, checkpoint: str) -> None:
    """Put this run's own arguments in force, once optimizer and schedule of a checkpoint are loaded."""
    done = run.state.global_step
    if run.is_fsdp_enabled and done == 0 and not half_learned_in(checkpoint):
        run.optimizer.state.clear()  # torch has taken an empty step to save it, which Adam counts
    if (changed := run._optimization.put_in_force(run._progress.optimization, done)) is not None:
        logger.warning(
            f"The checkpoint's optimization was another; in force from update {done + 1} on is: {changed}. The "
            f"learning rate is {run._get_learning_rate():.4g} now."
        )
