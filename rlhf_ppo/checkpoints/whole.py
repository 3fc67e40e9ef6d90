"""How a damaged or half-written checkpoint is told from a whole one.

`manifest.json` is the last file of a checkpoint and appears in one piece: where it is, everything else was.
Checkpoints that were written before there were manifests end with `trainer_state.json`; what their files' own formats
show is checked.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME

from rlhf_ppo.checkpoints.half_learned import half_learned_in
from rlhf_ppo.checkpoints.jsonfile import read_object
from rlhf_ppo.checkpoints.manifest import MANIFEST_NAME, what_is_damaged
from rlhf_ppo.checkpoints.progress import Progress, check_state
from rlhf_ppo.checkpoints.record import load_record
from rlhf_ppo.checkpoints.run import RUN_NAME, Run, delete, is_of_another, numbered, run_in
from rlhf_ppo.processes.logs import get_logger

logger = get_logger(__name__)

VALUE_MODEL_DIR = "value_model"
OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step*")
"""What holds the optimizer's state: one process or DDP, FSDP, FSDP in shards, DeepSpeed."""


def start_checkpoint(directory: str) -> None:
    """Make the directory, empty, so that it counts as unfinished until its last file is written."""
    if os.path.lexists(directory):
        delete(Path(directory))
    os.makedirs(directory)


def put_in_place(written: str, directory: str) -> None:
    """Give a checkpoint that was written in a directory of its own its name."""
    if os.path.lexists(directory):
        delete(Path(directory))
    os.rename(written, directory)
    shutil.rmtree(os.path.dirname(written))


def what_is_missing(directory: str) -> str | None:
    """Tell why nothing can be resumed from a directory, or None if it is a whole checkpoint."""
    if not _is_of_old_format(directory) and (reason := what_is_damaged(directory)) is not None:
        return reason
    try:
        read_object(Path(directory, TRAINER_STATE_NAME))
        check_state(directory, Progress.load(directory))
        load_record(directory)
        Run.load(directory)
        half_learned_in(directory)
    except ValueError as error:
        return str(error)
    if not Path(directory, VALUE_MODEL_DIR).is_dir():
        return f"it has no {VALUE_MODEL_DIR}/"
    for name in ("rng_state*.pth", "scheduler.pt"):
        if not any(Path(directory).glob(name)):
            return f"it has no {name.replace('*', '')}, which save_only_model=True leaves out like the optimizer"
    if not _has_optimizer(Path(directory)):
        return "it has no optimizer.pt, nor another engine's optimizer state"
    return _what_is_illegible(directory, with_checksums=_is_of_old_format(directory))


def newest_of_trl(output_dir: str | Path) -> Path | None:
    """Return the newest checkpoint that TRL's trainers of SFT and reward models continue from exactly, or None.

    The last file of such a checkpoint is `trainer_state.json`.

    Args:
        output_dir: The run's directory.
    """
    return next((path for path in numbered(output_dir) if _continues_with_trl(path)), None)


def _continues_with_trl(checkpoint: Path) -> bool:
    try:
        read_object(checkpoint / TRAINER_STATE_NAME)
    except (OSError, ValueError):
        return False
    return _has_optimizer(checkpoint) and _what_is_illegible(str(checkpoint)) is None


def _has_optimizer(checkpoint: Path) -> bool:
    return any(path for name in OPTIMIZERS for path in checkpoint.glob(name))


def what_was_changed(directory: str) -> str | None:
    """Tell which file of a checkpoint, also of one without an optimizer, is not as it was written, or None."""
    return _what_is_illegible(directory) if _is_of_old_format(directory) else what_is_damaged(directory)


def _is_of_old_format(directory: str) -> bool:
    return not Path(directory, RUN_NAME).exists() and not Path(directory, MANIFEST_NAME).exists()


def _what_is_illegible(directory: str, with_checksums: bool = True) -> str | None:
    """Check files by their formats: safetensors know their length, and the archives of `torch.save` have checksums.

    With a manifest, whose hashes are as good, the checksums are not read; a manifest that was written anew for a file
    that is cut off is no better than none.
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
    for ending in ("*.safetensors", "*.pt", "*.pth", "*.bin"):
        yield from (path for path in sorted(directory.rglob(ending)) if path.name != "training_args.bin")


def last_whole_checkpoint(
    output_dir: str, run: Run | None = None, warn: Callable[[str], Any] = logger.warning
) -> str | None:
    """Find the newest checkpoint of a run that is whole; warn about newer ones that are not, or not the run's.

    Args:
        output_dir: The run's directory.
        run: The run; None takes the one whose directory it is.
        warn: Prints a warning.

    Returns:
        The checkpoint's directory, or None if there is none.
    """
    run = run_in(output_dir) if run is None else run
    for folder in numbered(output_dir):
        if run is not None and is_of_another(folder, run):
            warn(f"Skipping {folder}: it is not of the run that {RUN_NAME} in {output_dir} names.")
            continue
        reason = what_is_missing(str(folder))
        if reason is None:
            return str(folder)
        warn(f"Skipping {folder}: {reason}, so it is not whole.")
    return None
