"""Complete checkpoints: how they are found and verified, and whether they fit the run that resumes from them."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer import TRAINER_STATE_NAME

from rlhf_ppo.checkpoints.files import find_damage, read_object
from rlhf_ppo.checkpoints.run import RUN_NAME, Run, belongs_to_another, delete, list_checkpoints, run_of
from rlhf_ppo.checkpoints.state import Progress, check_state, load_fingerprint
from rlhf_ppo.models.adapters import adapter_directory
from rlhf_ppo.models.unwrapping import active_adapter, is_peft_model, transformers_model
from rlhf_ppo.processes.distributed import get_logger, preserve_rng

logger = get_logger(__name__)

VALUE_MODEL_DIR = "value_model"
OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step*")
"""Optimizer state of: one process or DDP, FSDP, sharded FSDP, DeepSpeed."""

NEW_RUN = "start a new run from the checkpoint with model=<checkpoint> and value_model=<checkpoint>/value_model"
"""Advice where a checkpoint cannot be resumed."""


def start_checkpoint(directory: str) -> None:
    """Create an empty directory; it counts as unfinished until its manifest is written."""
    if os.path.lexists(directory):
        delete(Path(directory))
    os.makedirs(directory)


def commit_checkpoint(written: str, directory: str) -> None:
    """Move a checkpoint that was written in a directory of its own to its final name."""
    if os.path.lexists(directory):
        delete(Path(directory))
    os.rename(written, directory)
    shutil.rmtree(os.path.dirname(written))


def last_complete_checkpoint(output_dir: str, warn: Callable[[str], Any] = logger.warning) -> str | None:
    """Return the newest complete checkpoint of a run; warn about newer ones that are damaged or of another run.

    Args:
        output_dir: The run's directory.
        warn: Logs a warning.

    Returns:
        The checkpoint's directory, or None if there is none.
    """
    run = run_of(output_dir)
    for folder in list_checkpoints(output_dir):
        if run is not None and belongs_to_another(folder, run):
            warn(f"Skipping {folder}: it is not of the run that {RUN_NAME} in {output_dir} names.")
            continue
        reason = why_incomplete(str(folder))
        if reason is None:
            return str(folder)
        warn(f"Skipping {folder}: {reason}, it is incomplete.")
    return None


def why_incomplete(directory: str) -> str | None:
    """Return why a run cannot resume from a directory, as a clause about it; None for a complete checkpoint."""
    if (reason := find_damage(directory)) is not None:
        return reason
    try:
        read_object(Path(directory, TRAINER_STATE_NAME))
        check_state(directory, Progress.load(directory))
        load_fingerprint(directory)
        Run.load(directory)
    except ValueError as error:
        return str(error)
    if not Path(directory, VALUE_MODEL_DIR).is_dir():
        return f"it has no {VALUE_MODEL_DIR}/"
    for name in ("rng_state*.pth", "scheduler.pt"):
        if not any(Path(directory).glob(name)):
            return f"it has no {name.replace('*', '')}, which save_only_model=True leaves out like the optimizer"
    if not _has_optimizer(Path(directory)):
        return "it has no optimizer.pt, nor another engine's optimizer state"
    return _find_unreadable(directory, with_checksums=False)  # the manifest's hashes are as good


def newest_trl_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the newest checkpoint that TRL's SFT and reward trainers resume from exactly, or None."""
    return next((path for path in list_checkpoints(output_dir) if _is_complete_for_trl(path)), None)


def _is_complete_for_trl(checkpoint: Path) -> bool:
    try:
        read_object(checkpoint / TRAINER_STATE_NAME)  # the last file that TRL writes
    except (OSError, ValueError):
        return False
    return _has_optimizer(checkpoint) and _find_unreadable(str(checkpoint)) is None


def _has_optimizer(checkpoint: Path) -> bool:
    return any(path for name in OPTIMIZERS for path in checkpoint.glob(name))


def _find_unreadable(directory: str, with_checksums: bool = True) -> str | None:
    """Return which file its own format shows to be damaged: a wrong length, or a wrong checksum of `torch.save`.

    This also finds a damaged file for which somebody has written a new manifest.
    """
    for path in _state_files(Path(directory)):
        name = path.relative_to(directory)
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass
            elif zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    if with_checksums and (part := archive.testzip()) is not None:
                        return f"its {name} is damaged: {part} has another checksum"
            else:
                return f"its {name} is cut off"
        except (SafetensorError, OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
            return f"its {name} is cut off or damaged ({error})"
    return None


def _state_files(directory: Path) -> Iterator[Path]:
    for pattern in ("*.safetensors", "*.pt", "*.pth", "*.bin"):
        yield from (path for path in sorted(directory.rglob(pattern)) if path.name != "training_args.bin")


@contextmanager
def explaining_load_error(checkpoint: str | None, what: str) -> Iterator[None]:
    """Name the file of a checkpoint in errors that loading it raises.

    Args:
        checkpoint: The checkpoint.
        what: The file.

    Raises:
        ValueError: Loading failed.
    """
    try:
        yield
    except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError, EOFError, OSError) as error:
        raise ValueError(f"resume_from_checkpoint={checkpoint!r} cannot be loaded: {what}: {error}") from error


def check_same_processes(progress: Progress, batch_size: int, num_processes: int, is_deepspeed: bool) -> None:
    """Check that a checkpoint can be resumed with this number of processes.

    Args:
        progress: Progress of the checkpoint.
        batch_size: Episodes of an update now, on all ranks.
        num_processes: Number of processes now.
        is_deepspeed: Whether DeepSpeed has sharded the optimizer state.

    Raises:
        ValueError: The position in the data does not fit, or the optimizer state cannot be resharded.
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
            f"DeepSpeed cannot split its optimizer state anew: start {progress.num_processes} processes, or {NEW_RUN}"
        )


def check_engine(directory: str, is_deepspeed: bool, is_fsdp: bool) -> None:
    """Check that a checkpoint has the optimizer state in the format of this launch mode.

    Args:
        directory: The checkpoint.
        is_deepspeed: Whether DeepSpeed reads it.
        is_fsdp: Whether FSDP reads it.

    Raises:
        ValueError: Another launch mode wrote it; the optimizer would silently start without state.
    """
    names = ("global_step*",) if is_deepspeed else ("optimizer.bin", "optimizer_0") if is_fsdp else ("optimizer.pt",)
    if not any(path for name in names for path in Path(directory).glob(name)):
        engine = "DeepSpeed" if is_deepspeed else "FSDP" if is_fsdp else "a single process or DDP"
        raise ValueError(
            f"resume_from_checkpoint={directory!r} was written under another engine: it has no {names[0]}, which "
            f"{engine} reads the optimizer from; launch as it was launched, or {NEW_RUN}"
        )


def models_with_optimizer_state(directory: str) -> set[str]:
    """Return the models, by the first part of parameter names, for which FSDP saved an optimizer state.

    Args:
        directory: The checkpoint.
    """
    if (unsharded := Path(directory, "optimizer.bin")).exists():
        names = torch.load(unsharded, map_location="meta", weights_only=True)["state"].keys()
    else:
        entries = FileSystemReader(Path(directory, "optimizer_0")).read_metadata().state_dict_metadata
        prefix = "optimizer.state."
        names = [entry.removeprefix(prefix) for entry in entries if entry.startswith(prefix)]
    return {name.partition(".")[0] for name in names}


def optimizer_name(optimizer: Any) -> str:
    """Return the class name of an optimizer without the wrappers of accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return type(optimizer).__name__


def check_optimizer(optimizer: Any, directory: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a checkpoint's optimizer state is of this class of optimizer, with as many groups of parameters.

    Args:
        optimizer: The optimizer.
        directory: The checkpoint.
        before: The checkpoint's settings of the optimization, with a learning rate of each group; empty if unknown.
        now: Those of this run.

    Raises:
        ValueError: It is of another class, or has another number of groups.
    """
    kind = load_fingerprint(directory).get("optimizer")
    if kind not in (None, own := optimizer_name(optimizer)):
        raise ValueError(
            f"resume_from_checkpoint={directory!r}: its optimizer is {kind}, and {own} cannot use its state; "
            f"choose the same optim, or {NEW_RUN}"
        )
    before_groups, groups = (len(settings.get("learning_rate", ())) for settings in (before, now))
    if before and before_groups != groups:
        raise ValueError(
            f"resume_from_checkpoint={directory!r}: its optimizer has {before_groups} groups of parameters, and this "
            f"run's has {groups}: critic_learning_rate makes more; set it or leave it None as before, or {NEW_RUN}"
        )


def check_fits(model: nn.Module, directory: str) -> None:
    """Check that the safetensors files in `directory` have the parameters of `model`, by name and shape.

    Args:
        model: The model to load into; of a `PeftModel` only the active adapter is saved.
        directory: A checkpoint, or its `value_model/`.

    Raises:
        ValueError: A parameter is missing, unknown, or has another shape.
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


def is_converted_on_save(model: nn.Module) -> bool:
    """Return whether transformers renames, splits or stacks a model's weights when it saves them.

    It does for mixtures of experts and for models of images and text.
    """
    if is_peft_model(model):
        return False
    state = model.state_dict()
    return _as_saved(model, state).keys() != state.keys()


@torch.no_grad()
def load_converted(model: Any, directory: str) -> None:
    """Load weights of a model that `is_converted_on_save` through `from_pretrained`.

    Args:
        model: A transformers model; changed in place.
        directory: Directory that `save_pretrained` wrote.
    """
    with preserve_rng():
        loaded = type(model).from_pretrained(directory, dtype=next(model.parameters()).dtype)
    model.load_state_dict(loaded.state_dict())


def _as_saved(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return names and shapes of a state as transformers saves it, as meta tensors."""
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
    """Return the weights that are saved under the name of another weight with the same storage."""
    state = _state_to_save(model)
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(value.data_ptr(), []).append(name)
    groups = [set(_as_saved(model, {name: state[name] for name in group})) for group in names.values() if group[1:]]
    return {name for group in groups if group & set(saved) for name in group}
