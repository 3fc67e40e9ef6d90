"""What a trainer's run is made of, for the checkpoints: recorded when it starts, compared when it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

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
from rlhf_ppo.processes.logs import get_logger
from rlhf_ppo.rewards.functions import function_name

logger = get_logger(__name__)


class RecordedTrainer(Protocol):
    """What is recorded of a `PPOTrainer`."""

    args: PPOConfig
    accelerator: Accelerator
    model: PolicyAndValue
    reference: Reference | None
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


def recorded(trainer: RecordedTrainer) -> dict[str, Any]:
    """Describe arguments, data, tokenizer, rewards and the weights that are not trained, without any secret.

    Args:
        trainer: A `PPOTrainer`.
    """
    model = trainer._unwrapped(trainer.model)
    reference = None if trainer.reference is None else trainer.reference.model
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
