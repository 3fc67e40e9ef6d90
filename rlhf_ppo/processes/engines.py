"""What runs the processes: DDP, DeepSpeed or FSDP, and the type that it multiplies matrices in."""

from __future__ import annotations

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from transformers import TrainingArguments

from rlhf_ppo.processes.logs import get_logger

logger = get_logger(__name__)


def num_processes(args: TrainingArguments) -> int:
    """Count the processes of the run, starting the process group if need be."""
    args._setup_devices  # noqa: B018  the property starts it
    return PartialState().num_processes


def use_one_device(args: TrainingArguments) -> None:
    """Keep Trainer from spreading one process over several accelerators with `nn.DataParallel`."""
    if args.n_gpu > 1:
        logger.warning(f"One of {args.n_gpu} accelerators is used; start the script with `accelerate launch` for all.")
        args._n_gpu = 1


def product_dtype(source: Accelerator | TrainingArguments) -> torch.dtype | None:
    """Return the 16-bit type that matrices are multiplied in, and DeepSpeed's weights have; None: the weights' own."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(source.mixed_precision)


def autocast_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """Return the 16-bit type that autocast casts to; None without it, as under DeepSpeed and FSDP, which store so."""
    stores = zero_stage(accelerator) is not None or is_fsdp(accelerator)
    return None if stores else product_dtype(accelerator)


def zero_stage(accelerator: Accelerator) -> int | None:
    """Return the stage of DeepSpeed ZeRO, or None without DeepSpeed."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else plugin.zero_stage


def is_fsdp(accelerator: Accelerator) -> bool:
    """Tell whether FSDP shards the models."""
    return getattr(accelerator.state, "fsdp_plugin", None) is not None


def is_sharding(accelerator: Accelerator) -> bool:
    """Tell whether an engine takes the weights apart, so that every rank has to take part in saving them."""
    return is_fsdp(accelerator) or zero_stage(accelerator) == 3


def has_no_engine(accelerator: Accelerator) -> bool:
    """Tell whether one process trains, without DDP, DeepSpeed or FSDP."""
    return accelerator.distributed_type == DistributedType.NO


def learns_in_turn(is_alone: bool, is_compiled: bool) -> bool:
    """Tell whether policy and value model learn one after the other: nothing around them expects one pass for both.

    DDP, DeepSpeed and FSDP exchange gradients in a backward pass and count on every parameter to take part in it.

    Args:
        is_alone: Whether one process trains, without any of these.
        is_compiled: Whether `torch.compile` takes both models as one.
    """
    return is_alone and not is_compiled
