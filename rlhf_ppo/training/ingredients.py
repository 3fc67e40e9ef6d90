"""What a trainer's run is made of, for the checkpoints: recorded when it starts, compared when it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerState

from rlhf_ppo.checkpoints.progress import Progress
from rlhf_ppo.checkpoints.record import (
    described_rows,
    hash_of_function,
    hash_of_text,
    hash_of_weights,
    load_record,
    recorded_arguments,
    what_changed,
)
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.reference import Reference
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.rewards.functions import function_name

logger = get_logger(__name__)


class RecordedTrainer(Protocol):
    """What is recorded of a `PPOTrainer`."""

    args: PPOConfig
    accelerator: Accelerator
    model: PolicyAndValue
    reference: Reference
    reward_models: list[nn.Module]
    train_dataset: Any
    _functions: Sequence[Callable[..., Any]]
    _tokenizer: PreTrainedTokenizerBase

    def is_world_process_zero(self) -> bool:
        """Tell whether this is the main process."""
        ...

    def _unwrapped(self, model: nn.Module) -> PolicyAndValue: ...


def record_and_compare(trainer: RecordedTrainer, checkpoint: str | None) -> dict[str, Any]:
    """Record what the run is made of, and say what of it is another than the checkpoint's.

    Args:
        trainer: A `PPOTrainer`.
        checkpoint: The directory of the checkpoint from which it goes on, or None.

    Returns:
        The record, in the processes that write checkpoints.
    """
    record: dict[str, Any] = {}
    with failing_together(trainer.accelerator):
        if trainer.args.should_save or trainer.is_world_process_zero():
            record = recorded(trainer)
        if checkpoint is not None and trainer.is_world_process_zero():
            compare_with(checkpoint, record)
    return record


def find_place(
    checkpoint: str, state: TrainerState, progress: Progress, num_updates_per_epoch: int, num_prompts: int
) -> None:
    """Set where in the data a resumed run begins, and say so if that is not where the checkpoint's left off.

    Args:
        checkpoint: The checkpoint's directory.
        state: Its state, with the number of updates that the run has now.
        progress: Its progress; in other data the pass that it was in is over.
        num_updates_per_epoch: Updates of a pass now.
        num_prompts: Rows of the data now; 0 if unknown.
    """
    if state.global_step >= state.max_steps:
        logger.warning(
            f"{checkpoint} is of update {state.global_step} and the run has {state.max_steps}: nothing is left to "
            "train; for more updates raise max_steps, total_episodes or num_train_epochs."
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


def recorded(trainer: RecordedTrainer) -> dict[str, Any]:
    """Describe arguments, data, tokenizer, rewards and the weights that are not trained, without any secret.

    Args:
        trainer: A `PPOTrainer`.
    """
    model = trainer._unwrapped(trainer.model)
    reference = trainer.reference.model
    return {
        "arguments": recorded_arguments(trainer.args),
        "train_dataset": described_rows(trainer.train_dataset),
        "processing_class": _described_tokenizer(trainer._tokenizer),
        "reward_funcs": {function_name(function): hash_of_function(function) for function in trainer._functions},
        "reward_model": [hash_of_weights(reward.parameters()) for reward in trainer.reward_models],
        "ref_model": None if reference is None else hash_of_weights(reference.parameters()),
        "base_model": hash_of_weights(value for value in model.parameters() if not value.requires_grad),
        "trained": hash_of_text(" ".join(name for name, value in model.named_parameters() if value.requires_grad)),
        "num_trained": sum(value.requires_grad for value in model.parameters()),
    }


def compare_with(checkpoint: str, now: dict[str, Any]) -> None:
    """Say what of a checkpoint's run is another now.

    Args:
        checkpoint: The checkpoint's directory.
        now: What `recorded` gives.

    Raises:
        ValueError: Other parameters are trained, for which the checkpoint's optimizer has no state.
    """
    before = load_record(checkpoint)
    if before is None:
        logger.warning(
            f"{checkpoint} was written by an earlier version: it has no manifest, so that its files are checked by "
            "their formats alone, and no record of its arguments, so that nothing can be said about changes of them."
        )
        return
    if before.get("trained") != now["trained"]:
        raise ValueError(
            f"resume_from_checkpoint={checkpoint!r} is of a run that trained {before.get('num_trained')} parameters, "
            f"but {now['num_trained']} are trained now, and they are not the same: its optimizer has no state for "
            "them; train the same parameters, or start a new run from the checkpoint with model=<checkpoint> and "
            "value_model=<checkpoint>/value_model"
        )
    if lines := what_changed(before, now):
        logger.warning("\n  ".join([f"{checkpoint} is resumed with changes:", *lines]))


def _described_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items())
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id]
    return hash_of_text(json.dumps([vocabulary, special, str(getattr(tokenizer, "chat_template", None))]))
