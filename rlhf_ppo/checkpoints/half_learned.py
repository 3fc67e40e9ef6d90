"""The update that a run was learning when a signal ended it: what each rank keeps, to finish it bit for bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_ppo.checkpoints.jsonfile import parsed_json
from rlhf_ppo.config.validation import check_type
from rlhf_ppo.data.experience import Experience

_EXPERIENCE, _SUMS, _NORMS, _VALUES = "experience.", "sums", "grad_norms", "values"


@dataclass
class HalfLearned:
    """An update of which not all mini-batches are learned.

    Weights, optimizer and random numbers are in the checkpoint's other files, as they were before the first mini-batch
    that is not learned.

    Attributes:
        experience: This rank's.
        begun_with: What mini-batches are made from, by the arguments' names; with other values they would be others.
        num_minibatches: Mini-batches that are learned.
        num_micro_batches: Micro-batches of the next one whose `on_substep_end` was fired; they are learned again.
        sums: Figures of each micro-batch that is learned, float32 `(num_figures,)`.
        epoch_start: How many of these the epoch that is learned began with.
        named: Names of those that the losses give beyond PPO's own.
        grad_norm: The gradients' norm of the last optimizer step.
        grad_norms: Those of policy and value model at each step, float32 `(2,)`.
        metrics: Those of the rollout.
        num_response_tokens: Tokens of the responses of all ranks.
        seconds: Seconds by phase.
        completions: Rows of this rank's responses that are kept when the update is logged.
        left_out: Why the divergence guard left out responses of this rank.
        num_steps: Optimizer steps that it allowed.
        wishes: What callbacks asked for since the update began, such as "should_save".
    """

    experience: Experience
    begun_with: dict[str, int]
    num_minibatches: int = 0
    num_micro_batches: int = 0
    sums: list[Tensor] = field(default_factory=list)
    epoch_start: int = 0
    named: list[str] = field(default_factory=list)
    grad_norm: float | Tensor = 0.0
    grad_norms: list[Tensor] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    num_response_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    completions: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    num_steps: int = 0
    wishes: dict[str, bool] = field(default_factory=dict)

    def save(self, directory: str, rank: int) -> None:
        """Write a rank's `half_learned_<rank>.safetensors`."""
        names = [each.name for each in dataclasses.fields(self.experience)]
        of_experience = {f"{_EXPERIENCE}{name}": getattr(self.experience, name) for name in names}
        tensors = {name: value for name, value in of_experience.items() if isinstance(value, Tensor)}
        if self.sums:
            tensors[_SUMS] = torch.stack(self.sums)
        if self.grad_norms:
            tensors[_NORMS] = torch.stack(self.grad_norms)
        values = {name: getattr(self, name) for name in _value_types()}
        save_file(
            {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()},
            _file(directory, rank),
            metadata={_VALUES: json.dumps(values)},
        )

    @classmethod
    def load(cls, directory: str, rank: int, device: torch.device) -> Self:
        """Read a rank's file.

        Raises:
            ValueError: There is none, or it holds something else.
        """
        with _read(_file(directory, rank)) as file:
            tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}
            sums, norms = (list(tensors.pop(name, torch.empty(0))) for name in (_SUMS, _NORMS))
            experience = Experience(**{name.removeprefix(_EXPERIENCE): value for name, value in tensors.items()})
            return cls(experience, sums=sums, grad_norms=norms, **_values(file))


def half_learned_in(directory: str) -> int | None:
    """Return how many mini-batches are learned of the update that a checkpoint is in the middle of, or None.

    Raises:
        ValueError: The file that says so holds something else.
    """
    files = sorted(Path(directory).glob(_file("", "*")))
    if not files:
        return None
    with _read(str(files[0])) as file:
        return _values(file)["num_minibatches"]


def check_as_begun(before: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Check that a half-learned update can be finished.

    Args:
        before: What its mini-batches were made from, by name.
        now: The same of this run.

    Raises:
        ValueError: Something of it has changed.
    """
    names = [name for name in now if before.get(name) != now[name]]
    if changed := [f"{name} was {before.get(name)} and is {now[name]} now" for name in names]:
        raise ValueError(
            "the checkpoint is of the middle of an update, which can only be finished as it was begun, but "
            f"{', '.join(changed)}: keep what it was until that update is learned, or resume from an earlier "
            "checkpoint by its directory"
        )


def _file(directory: str, rank: int | str) -> str:
    return str(Path(directory, f"half_learned_{rank}.safetensors"))


@contextmanager
def _read(path: str) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its {Path(path).name} is missing, or holds something else: {error!r:.200}") from error


def _values(file: Any) -> dict[str, Any]:
    values, types = parsed_json(file.metadata()[_VALUES]), _value_types()
    if (
        not types.keys() - {"named", "completions", "epoch_start"} <= values.keys() <= types.keys()
    ):  # earlier versions had none
        raise KeyError(f"{sorted(values)} instead of {sorted(types)}")
    for name, value in values.items():
        check_type(name, value, types[name], "")
    return values


def _value_types() -> dict[str, Any]:
    types = get_type_hints(HalfLearned)
    return {name: types[name] for name in types.keys() - {"experience", "sums", "grad_norms"}}
