"""Whether what is to be trained is what a checkpoint was made of."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers.core_model_loading import revert_weight_conversion

from rlhf_ppo.checkpoints.progress import Progress
from rlhf_ppo.checkpoints.record import load_record
from rlhf_ppo.models.adapters import adapter_directory
from rlhf_ppo.models.unwrapping import active_adapter, is_peft_model, transformers_model
from rlhf_ppo.processes.random_numbers import rng_kept


@contextmanager
def naming(checkpoint: str | None, what: str) -> Iterator[None]:
    """Say which file of a checkpoint an error is about.

    Args:
        checkpoint: Its directory.
        what: The file.

    Raises:
        ValueError: In place of what loading it raised.
    """
    try:
        yield
    except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError, EOFError, OSError) as error:
        raise ValueError(f"resume_from_checkpoint={checkpoint!r} cannot be loaded: {what}: {error}") from error


def check_same_split(progress: Progress, batch_size: int, num_processes: int, is_deepspeed: bool) -> None:
    """Check that a checkpoint can go on with this number of processes.

    Args:
        progress: The checkpoint's.
        batch_size: Episodes of an update now, on all ranks.
        num_processes: Number of processes now.
        is_deepspeed: Whether DeepSpeed holds the optimizer, whose state it has split among the processes.

    Raises:
        ValueError: The prompts could not go on where they were, or the optimizer's state cannot be split anew.
    """
    if progress.batch_size != batch_size:
        raise ValueError(
            f"the checkpoint is of a run with batch_size={progress.batch_size} episodes per update, but with "
            f"{num_processes} processes it is {batch_size} now: choose per_device_train_batch_size and "
            f"gradient_accumulation_steps so that, times {num_processes} processes, they give {progress.batch_size}"
        )
    if is_deepspeed and progress.num_processes != num_processes:
        raise ValueError(
            f"the checkpoint is of {progress.num_processes} processes, but there are {num_processes} now, and "
            f"DeepSpeed cannot split its optimizer state anew: start {progress.num_processes} processes, or start a "
            "new run from the checkpoint with model=<checkpoint> and value_model=<checkpoint>/value_model"
        )


def check_engine(directory: str, is_deepspeed: bool, is_fsdp: bool) -> None:
    """Check that a checkpoint holds the optimizer's state in the form that this launch reads.

    Args:
        directory: The checkpoint's.
        is_deepspeed: Whether DeepSpeed reads it.
        is_fsdp: Whether FSDP reads it.

    Raises:
        ValueError: It was written by another engine, and the optimizer would start anew in silence.
    """
    names = ("global_step*",) if is_deepspeed else ("optimizer.bin", "optimizer_0") if is_fsdp else ("optimizer.pt",)
    if not any(path for name in names for path in Path(directory).glob(name)):
        engine = "DeepSpeed" if is_deepspeed else "FSDP" if is_fsdp else "a single process or DDP"
        raise ValueError(
            f"resume_from_checkpoint={directory!r} was written under another engine: it has no {names[0]}, which "
            f"{engine} reads the optimizer from; launch as it was launched, or start a new run from it with "
            "model=<checkpoint> and value_model=<checkpoint>/value_model"
        )


def begun_models(directory: str) -> set[str]:
    """Name the models, by the first part of their parameters' names, that FSDP's optimizer has a state of.

    Args:
        directory: The checkpoint's.
    """
    if (whole := Path(directory, "optimizer.bin")).exists():
        names = torch.load(whole, map_location="meta", weights_only=True)["state"].keys()
    else:
        entries = FileSystemReader(Path(directory, "optimizer_0")).read_metadata().state_dict_metadata
        prefix = "optimizer.state."
        names = [entry.removeprefix(prefix) for entry in entries if entry.startswith(prefix)]
    return {name.partition(".")[0] for name in names}


def optimizer_name(optimizer: Any) -> str:
    """Return the name of the optimizer's class, without what accelerate and engines have put around it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return type(optimizer).__name__


def check_optimizer(optimizer: Any, directory: str) -> None:
    """Check that a checkpoint's optimizer state is of this kind of optimizer.

    Raises:
        ValueError: It is of another one.
    """
    before = (load_record(directory) or {}).get("optimizer")
    if before is None and Path(directory, "optimizer.pt").exists():  # of an earlier version
        with naming(directory, "its optimizer.pt"):
            state = torch.load(Path(directory, "optimizer.pt"), map_location="meta", weights_only=True)
        unknown = {*optimizer.param_groups[0]} - {*state["param_groups"][0]} - {"initial_lr", "param_names"}
        before = f"one without {sorted(unknown)[0]}" if unknown else None
    if before not in (None, now := optimizer_name(optimizer)):
        raise ValueError(
            f"resume_from_checkpoint={directory!r}: its optimizer is {before}, whose state {now} cannot go on with; "
            "choose the same optim, or start a new run from the checkpoint with model=<checkpoint> and "
            "value_model=<checkpoint>/value_model"
        )


def check_fits(model: nn.Module, directory: str) -> None:
    """Check that the safetensors files in `directory` hold the parameters of `model`, by name and shape.

    Args:
        model: The model that is about to be loaded into; of a `PeftModel` only the active adapter is saved.
        directory: A checkpoint's directory, or its `value_model/`.

    Raises:
        ValueError: A parameter is missing, unknown, or of another shape.
    """
    refusal = f"resume_from_checkpoint={directory!r} is of another model"
    fix = "pass the model that the run was started with"
    own = {name: tuple(value.shape) for name, value in _as_saved(model, _state_to_save(model)).items()}
    files, folder = "model*.safetensors", directory
    if is_peft_model(model):
        files, folder = "adapter_model.safetensors", adapter_directory(model, directory)
    saved = dict(_saved_shapes(folder, files))
    if not saved:
        raise ValueError(f"{refusal}: it holds no {files}; {fix}")
    for name, shape in saved.items():
        if name not in own or own[name] != shape:
            here = f"has shape {own[name]}" if name in own else "does not exist"
            raise ValueError(
                f"{refusal}: its {name} has shape {shape}, which in the model that was passed {here}; {fix}"
            )
    missing = own.keys() - saved.keys() - _tied_names(model, saved.keys())
    if missing:
        raise ValueError(f"{refusal}: it lacks {sorted(missing)[:3]}; {fix}")


def is_saved_under_other_names(model: nn.Module) -> bool:
    """Tell whether transformers saves a model's weights under other names or in other pieces than it holds them.

    It does so with mixtures of experts, whose experts it stacks, and with models of images and text.
    """
    if is_peft_model(model):
        return False
    state = model.state_dict()
    return _as_saved(model, state).keys() != state.keys()


@torch.no_grad()
def load_under_other_names(model: Any, directory: str) -> None:
    """Load weights that `is_saved_under_other_names`, in the way of `from_pretrained`.

    Args:
        model: A transformers model, which is changed in place.
        directory: Where `save_pretrained` has written them.
    """
    with rng_kept():
        loaded = type(model).from_pretrained(directory, dtype=next(model.parameters()).dtype)
    model.load_state_dict(loaded.state_dict())


def _as_saved(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what transformers saves of a state: names and shapes, on tensors without storage."""
    shapes = {name: value.to("meta") for name, value in state.items()}
    return shapes if is_peft_model(model) else revert_weight_conversion(transformers_model(model), shapes)


def _state_to_save(model: nn.Module) -> dict[str, Tensor]:
    if not is_peft_model(model):
        return model.state_dict()
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=active_adapter(model))


def _saved_shapes(directory: str, files: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in Path(directory).glob(files):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, tuple(file.get_slice(name).get_shape())


def _tied_names(model: nn.Module, saved: Any) -> set[str]:
    """Name the weights that are saved under the name of another one, whose storage they share."""
    state = _state_to_save(model)
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(value.data_ptr(), []).append(name)
    groups = [set(_as_saved(model, {name: state[name] for name in group})) for group in names.values() if group[1:]]
    return {name for group in groups if group & set(saved) for name in group}
