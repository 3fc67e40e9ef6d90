"""Processes of a run: launch mode (DDP, DeepSpeed, FSDP), precision, logs, collectives and errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.logging import MultiProcessAdapter
from accelerate.utils import gather_object, reduce
from torch import nn
from transformers import TrainingArguments

from rlhf_ppo.terminal import visible_logger


class RankedLogger(MultiProcessAdapter):
    """accelerate's logger, which logs on the main process only unless `main_process_only=False`."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Prefix the rank if there are several processes."""
        if PartialState().num_processes > 1:
            return super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)  # as in the base class: log the caller's line
        return logging.LoggerAdapter.process(self, msg, kwargs)


def get_logger(name: str) -> RankedLogger:
    """Return the logger of a module; with several processes its messages name the rank."""
    return RankedLogger(visible_logger(name), {})


logger = get_logger(__name__)


def num_processes(args: TrainingArguments) -> int:
    """Return the number of processes, after starting the process group.

    Raises:
        ValueError: Launched processes do not know each other, or `fp16` is on without an accelerator.
    """
    args._setup_devices  # noqa: B018  the property starts it
    count, launched = PartialState().num_processes, int(os.environ.get("WORLD_SIZE", 1))
    if "LOCAL_RANK" in os.environ and count < launched:
        raise ValueError(
            f"use_cpu={args.use_cpu!r}: the launcher started {launched} processes without accelerators; each would "
            "train alone; set use_cpu=True (--use_cpu) to train on CPUs together"
        )
    if args.fp16 and args.device.type == "cpu":
        raise ValueError("fp16=True has no effect on a CPU: leave it out, or set bf16=True")
    return count


def use_one_device(args: TrainingArguments) -> None:
    """Keep Trainer from spreading one process over several accelerators with `nn.DataParallel`."""
    if args.n_gpu > 1:
        logger.warning(f"One of {args.n_gpu} accelerators is used; start the script with `accelerate launch` for all.")
        args._n_gpu = 1


def mixed_precision_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """Return the 16-bit dtype of matrix products, which DeepSpeed also stores weights in; None: the weights' own."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(accelerator.mixed_precision))


def give_trained_one_type(model: nn.Module, accelerator: Accelerator) -> None:
    """With 16-bit precision, convert trainable, unsharded weights to the backend's type.

    ZeRO-3 keeps trainable weights in buffers of one type; its optimizer has float32 copies. PEFT creates float32
    adapters over 16-bit models.
    """
    if (dtype := mixed_precision_dtype(accelerator)) is None:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)


def zero_stage(accelerator: Accelerator) -> int | None:
    """Return the stage of DeepSpeed ZeRO, or None without DeepSpeed."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else plugin.zero_stage


def deepspeed_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """Return the 16-bit dtype in which DeepSpeed stores weights, or None."""
    return None if zero_stage(accelerator) is None else mixed_precision_dtype(accelerator)


def is_fsdp(accelerator: Accelerator) -> bool:
    """Return whether FSDP shards the models."""
    return getattr(accelerator.state, "fsdp_plugin", None) is not None


def warn_of_missing_fsdp(accelerator: Accelerator) -> None:
    """Warn if the launcher asked for FSDP, which accelerate silently ignores on CPUs."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not is_fsdp(accelerator):
        logger.warning(
            "The launcher asked for FSDP, which accelerate lacks on CPUs: each process holds whole models (DDP)."
        )


def is_sharding(accelerator: Accelerator) -> bool:
    """Return whether weights are sharded, so that every rank takes part in saving them."""
    return is_fsdp(accelerator) or zero_stage(accelerator) == 3


def any_rank(condition: bool) -> bool:
    """Return whether a condition holds on any rank; every rank must call this.

    Use it before a rare exchange of objects, which synchronizes host and device several times; this does so once.
    """
    state = PartialState()
    if state.num_processes == 1:
        return condition
    flag = torch.full((), float(condition), device=state.device)  # filled on the device: no copy
    return bool(reduce(flag) > 0)  # pyright: ignore[reportOperatorIssue]


@contextmanager
def raise_on_all_ranks(accelerator: Accelerator | PartialState, kind: type[Exception] = Exception) -> Iterator[None]:
    """Run a block of each rank's own work, such as a reward function; raise an error of one rank on all ranks.

    In the block no rank may wait for another one, as in a pass of a sharded model: there a rank raises its error, its
    process ends, and the launcher ends the others.

    Args:
        accelerator: Gives the number of processes; one process exchanges nothing.
        kind: The errors to exchange; others are raised on their rank only.

    Raises:
        Exception: Another rank failed. An error of this package, such as `DivergenceError`, is the same on all ranks;
            a common built-in error keeps its type and names the rank; any other becomes a `RuntimeError` that names
            rank and type.
    """
    failure: Exception | None = None
    try:
        yield
    except kind as error:
        failure = error
    if accelerator.num_processes > 1 and any_rank(failure is not None):
        sent = None if failure is None else _portable(failure, accelerator.process_index)
        raised = [error for error in gather_object([sent]) if error is not None]
        failure = failure or raised[0]
    if failure is not None:
        failure.__dict__[_ON_ALL_RANKS] = True
        raise failure


_ON_ALL_RANKS = "_rlhf_ppo_on_all_ranks"


def is_on_all_ranks(error: Exception) -> bool:
    """Return whether `raise_on_all_ranks` has raised the error."""
    return _ON_ALL_RANKS in error.__dict__


def _portable(error: Exception, rank: int) -> Exception:
    """Return the error that the other ranks raise; the original might not be picklable."""
    kind = type(error)
    if kind.__module__.split(".")[0] == __name__.split(".")[0]:
        with suppress(TypeError):  # its constructor takes more than a text
            return kind(str(error))
    if kind in (ValueError, TypeError, OSError, ConnectionError, FileNotFoundError, ImportError, RuntimeError):
        return kind(f"rank {rank} failed: {error}")
    return RuntimeError(f"rank {rank} failed: {kind.__name__}: {error}")
