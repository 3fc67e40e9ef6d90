"""What a checkpoint holds beyond Trainer's files, and how a half-written one is told from a whole one.

`trainer_state.json` is the last file of a checkpoint and appears in one piece: where it is, everything else is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

from accelerate.logging import get_logger
from safetensors import safe_open
from torch import Tensor, nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from rlhf_ppo.models.adapters import adapter_directory
from rlhf_ppo.models.inputs import is_peft_model

logger = get_logger(__name__)

PROGRESS_NAME = "ppo_state.json"
VALUE_MODEL_DIR = "value_model"


class PPOTrainerState(TrainerState):
    """Trainer's state, with the number of episodes, written in one piece.

    Attributes:
        episode: Episodes generated so far, on all ranks.
    """

    episode: int = 0

    @classmethod
    def of(cls, state: TrainerState, episode: int = 0) -> Self:
        """Take over another state's fields."""
        own = cls(**{item.name: getattr(state, item.name) for item in dataclasses.fields(state)})
        own.episode = episode
        return own

    def save_to_json(self, json_path: str) -> None:
        """Write the state to a temporary file and move it into place."""
        temporary = f"{json_path}.tmp"
        super().save_to_json(temporary)
        os.replace(temporary, json_path)


@dataclass
class Progress:
    """Where the loop stands, beyond what Trainer keeps.

    Attributes:
        episode: Episodes generated so far, on all ranks.
        epoch: Index of the current pass over the data.
        batches_in_epoch: Batches taken from that pass.
        loss: Sum of the losses since the last log.
        last_logged_step: Update at which the last log was written.
        pending_metrics: Metrics of the updates since the last log.
        score_moments: Fields of the `ScoreMoments` that `score_scaling` divides by.
        batch_size: Episodes of an update, on all ranks.
        num_processes: Number of processes of the run.
        optimization: What optimizer and scheduler were set to, by name.
        skipped: Fields of the `Skipped` that `on_divergence` counts.
    """

    episode: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    loss: float = 0.0
    last_logged_step: int = 0
    pending_metrics: list[dict[str, float]] = field(default_factory=list)
    score_moments: dict[str, float] = field(default_factory=dict)
    batch_size: int = 0
    num_processes: int = 0
    optimization: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)

    def save(self, directory: str) -> None:
        """Write `ppo_state.json`."""
        Path(directory, PROGRESS_NAME).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, directory: str) -> Self:
        """Read `ppo_state.json`."""
        return cls(**json.loads(Path(directory, PROGRESS_NAME).read_text(encoding="utf-8")))


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


def start_checkpoint(directory: str) -> None:
    """Make the directory, and make sure that it counts as unfinished until its last file is written."""
    os.makedirs(directory, exist_ok=True)
    Path(directory, TRAINER_STATE_NAME).unlink(missing_ok=True)


def what_is_missing(directory: str) -> str | None:
    """Tell why a directory is no whole checkpoint, or None if it is one."""
    for name in (TRAINER_STATE_NAME, PROGRESS_NAME):
        path = Path(directory, name)
        if not path.is_file():
            return f"it has no {name}"
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return f"its {name} is cut off"
    if not Path(directory, VALUE_MODEL_DIR).is_dir():
        return f"it has no {VALUE_MODEL_DIR}/"
    if not any(Path(directory).glob("rng_state*.pth")):
        return "it has no rng_state.pth, which save_only_model=True leaves out like the optimizer"
    return None


def last_whole_checkpoint(output_dir: str) -> str | None:
    """Find the newest checkpoint that was written to its end; warn about newer ones that were not.

    Args:
        output_dir: The run's directory.

    Returns:
        The checkpoint's directory, or None if there is none.
    """
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    for folder in sorted(folders, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        reason = what_is_missing(str(folder))
        if reason is None:
            return str(folder)
        logger.warning(f"Skipping {folder}: {reason}, so it is not whole.")
    return None


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
    own = {name: tuple(value.shape) for name, value in _state_to_save(model).items()}
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


def _state_to_save(model: nn.Module) -> dict[str, Tensor]:
    if not is_peft_model(model):
        return model.state_dict()
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=cast(Any, model).active_adapter)


def _saved_shapes(directory: str, files: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in Path(directory).glob(files):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, tuple(file.get_slice(name).get_shape())


def _tied_names(model: nn.Module, saved: Any) -> set[str]:
    state = _state_to_save(model)
    storages = {state[name].data_ptr() for name in saved}
    return {name for name, value in state.items() if value.data_ptr() in storages}
