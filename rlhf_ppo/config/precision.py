"""The default of `bf16`: on where the device can do it."""

from __future__ import annotations

import os

from transformers import TrainingArguments
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_xla_available

from rlhf_ppo.terminal.foreign import visible_logger

logger = visible_logger(__name__)


def default_bf16(args: TrainingArguments) -> bool:
    """Tell whether a run whose `bf16` is not set computes in bf16; a run that cannot says so once, by rank 0.

    Args:
        args: Gives `fp16` and `use_cpu`; devices need not be set up.
    """
    if args.fp16 or os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16":
        return False
    on_cpu = args.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    if not on_cpu and (is_torch_bf16_gpu_available() or is_torch_xla_available()):
        return True
    if os.environ.get("RANK", "0") == "0":  # processes are not set up yet
        logger.warning_once(
            "bf16 stays off: no accelerator is used that can do it. (bf16=True, use_cpu=True forces it.)"
        )
    return False
