"""What the tests of the trainer's behaviour share: a small run, its end, and how it is cut short."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.run import learning

MakeArgs = Callable[..., PPOConfig]
MakeTrainer = Callable[..., Any]

QUICK: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "num_ppo_epochs": 1,
    "num_mini_batches": 1,
    "response_length": 4,
    "total_episodes": 6,
}
"""Arguments of a run of three updates, a fifth of a second."""


class SeenPrompts(PPOTrainer):
    """Keeps the prompts of every update, and their columns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[list[list[int]]] = []
        self.columns: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def collect_rollout(self, prompts: Prompts, *given: Any) -> Any:
        pairs = zip(prompts.input_ids, prompts.attention_mask, strict=True)
        self.seen.append([ids[mask].tolist() for ids, mask in pairs])
        self.columns.append(dict(prompts.columns))
        return super().collect_rollout(prompts, *given)


class RunDied(Exception):
    """Raised in the middle of a run in place of a kill."""


class At(TrainerCallback):
    """Does something once, at an event after a number of updates.

    Args:
        event: The name of the callback's method.
        step: The number of updates.
        act: Gets what the event passes.
    """

    def __init__(self, event: str, step: int, act: Callable[[Any], Any]) -> None:
        setattr(self, event, self._act)
        self.step, self.act, self.has_acted = step, act, False

    def _act(self, args: Any, state: Any, control: Any, **passed: Any) -> None:
        if state.global_step == self.step and not self.has_acted:
            self.has_acted = True
            self.act(SimpleNamespace(args=args, control=control, **passed))


def die(_: Any = None) -> None:
    """End a run as a kill would: nothing is finished or written after it."""
    raise RunDied


class RecordingTrainer(PPOTrainer):
    """Keeps every sample table by the update after which it was made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.tables: dict[int, pd.DataFrame] = {}
        super().__init__(*args, **kwargs)

    def generate_completions(self, sampling: bool = False) -> pd.DataFrame | None:
        table = super().generate_completions(sampling)
        if table is not None:
            self.tables[self.state.global_step] = table
        return table


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.write_text, (self.mark, "exploded")


class InOnePass(PPOTrainer):
    """Overrides `compute_loss`, and takes one forward and one backward pass for both models, as under DDP."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(learning, "model_passes", lambda *given: ("value_model",) if given[-1] else (None,)):
            result = super().compute_loss(*args, **kwargs)
        if kwargs.get("return_outputs"):  # numbers, also in warm-up, so that an override may add a term of entropies
            assert result[1].output.entropy.isfinite().all()
        return result


def logged(trainer: Any, metric: str) -> list[float]:
    """What was logged of a metric."""
    return [entry[metric] for entry in trainer.state.log_history if metric in entry]


def record(trainer: PPOTrainer, method: str) -> list[Any]:
    """Return a list to which each later call of a trainer's method adds its result."""
    results: list[Any] = []
    original = getattr(trainer, method)

    def recording(*given: Any) -> Any:
        results.append(original(*given))
        return results[-1]

    setattr(trainer, method, recording)
    return results


def record_rollouts(trainer: PPOTrainer) -> list[Any]:
    """Record the rollouts that a trainer makes."""
    return record(trainer, "collect_rollout")


def train_and_record(trainer: PPOTrainer) -> list[Any]:
    """Train, and return the rollouts."""
    rollouts = record_rollouts(trainer)
    trainer.train()
    return rollouts


def parameters(trainer: PPOTrainer) -> dict[str, Tensor]:
    """Copies of all parameters of policy and value model."""
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def history(trainer: PPOTrainer) -> list[dict[str, Any]]:
    """All that was logged, without what a clock says and without the summary of one call of `train`."""
    return [{key: value for key, value in entry.items() if not _is_timing(key)} for entry in trainer.state.log_history]


def _is_timing(key: str) -> bool:
    return key.startswith("time/") or key in ("eps", "train_loss") or "runtime" in key or key.endswith("_per_second")


def end_of_run(trainer: PPOTrainer) -> dict[str, Any]:
    """Everything that a resumed run must share with one that never stopped."""
    return copy.deepcopy(
        {
            "parameters": parameters(trainer),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "history": history(trainer),
            "episode": trainer.state.episode,
            "global_step": trainer.state.global_step,
            "epoch": trainer.state.epoch,
            "num_input_tokens_seen": trainer.state.num_input_tokens_seen,
            "rng": torch.get_rng_state(),
        }
    )


def assert_identical(actual: Any, expected: Any, path: str = "run") -> None:
    """Compare nested values bit for bit."""
    assert type(actual) is type(expected), path
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key in expected:
            assert_identical(actual[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{path}: {actual} != {expected}"
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_identical(one, other, f"{path}[{index}]")
    elif isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected), path
    elif isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(actual, expected, check_exact=True, obj=path)
    else:
        assert actual == expected or actual is expected, f"{path}: {actual} != {expected}"


def die_and_resume(
    make_trainer: MakeTrainer, folder: Path, arguments: Callable[[], Mapping[str, Any]]
) -> tuple[Any, Any]:
    """Train once without a stop, and once with a death before the second update and a second start.

    Args:
        make_trainer: Makes the trainer.
        folder: Gets the output directories.
        arguments: Gives the trainer's arguments beside `QUICK`, with new models at each call.

    Returns:
        The resumed trainer and the one that never stopped, whose ends are identical.
    """

    def make(name: str, **callbacks: Any) -> PPOTrainer:
        saving = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(folder / name)}
        return make_trainer(**QUICK | arguments() | saving | callbacks)

    whole = make("whole")
    whole.train()
    with pytest.raises(RunDied):
        make("died", callbacks=[At("on_step_begin", 1, die)]).train()
    resumed = make("died")
    resumed.train(resume_from_checkpoint=True)
    assert_identical(end_of_run(resumed), end_of_run(whole))
    return resumed, whole
