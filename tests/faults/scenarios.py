"""What the processes of the fault tests do, beside what `tests.distributed.scenarios` has."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import PartialState

from rlhf_ppo import PPOTrainer
from rlhf_ppo.checkpoints.files import write_manifest
from rlhf_ppo.processes.distributed import RngStreams
from rlhf_ppo.training import saving
from tests import conftest
from tests.distributed.scenarios import make_trainer, train_with_checkpoints
from tests.runs import Bomb

AT = 2
"""The update in which things go wrong on rank 1; 3 are made."""


def on_rank_1(state: Any) -> bool:
    """Tell whether this is the process and the update in which things go wrong."""
    return PartialState().process_index == 1 and state.global_step == AT - 1


def nan_on_rank_1(prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, **columns: Any) -> Any:
    """A reward function that returns NaN for a row of one rank."""
    rewards = conftest.count_w4(prompts, completions, completion_ids)
    return [math.nan, *rewards[1:]] if on_rank_1(trainer_state) else rewards


class RolloutOfRank1(PPOTrainer):
    """One rank's log-probabilities of a response become NaN."""

    def collect_rollout(self, *args: Any) -> Any:
        rollout = super().collect_rollout(*args)
        if on_rank_1(self.state):
            rollout.logprobs[0, 0] = math.nan
        return rollout


class LossOfRank1(PPOTrainer):
    """One rank's loss becomes NaN."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss, parts = super().compute_loss(*args, **kwargs)
        return (loss * math.nan if on_rank_1(self.state) else loss), parts


class WeightOfRank1(PPOTrainer):
    """A weight of one rank becomes NaN before a checkpoint is written."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if PartialState().process_index == 1 and self.state.global_step == AT:
            with torch.no_grad():
                next(self.model.value_model.parameters()).view(-1)[0] = math.nan
        super()._save_checkpoint(model, trial)


WRONG: dict[str, dict[str, Any]] = {
    "score": {"given": {"reward_funcs": nan_on_rank_1}},
    "log-probability": {"trainer_class": RolloutOfRank1},
    "loss": {"trainer_class": LossOfRank1},
    "weight": {"trainer_class": WeightOfRank1},
}
"""What is not finite on rank 1: arguments of `train_with_checkpoints`."""


def outcome(wrong: str | None = None, **arguments: Any) -> dict[str, Any] | str:
    """Train, while something is wrong on rank 1 in update 2; return this rank's end, or its error."""
    try:
        return train_with_checkpoints(**WRONG.get(wrong or "", {}), **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def stopped_in_generation(output_dir: str, models: str, **arguments: Any) -> dict[str, Any]:
    """Rank 1 receives SIGTERM at the fifth token of the second update, of which each takes a fifth of a second.

    Returns:
        The exit code, the update after which the run ended, the seconds from the signal to the end, and how many
        tokens the second update came to.
    """
    trainer = make_trainer(output_dir, models, response_length=40, stop_token=None, num_ppo_epochs=1, **arguments)
    tokens, begun = 0, 0.0

    def slow(module: Any, given: Any) -> None:
        nonlocal tokens, begun
        if trainer.state.global_step == AT - 1 and trainer._run.timer.running == "generate":
            tokens += 1
            time.sleep(0.2)
            if tokens == 5:
                begun = time.monotonic()
                if trainer.args.process_index == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

    trainer.policy_model.register_forward_pre_hook(slow)
    code: Any = None
    try:
        trainer.train()
    except SystemExit as error:
        code = error.code
    return {"code": code, "step": trainer.state.global_step, "seconds": time.monotonic() - begun, "tokens": tokens}


def resume_a_copy(
    whole: str, output_dir: str, damaged: str | None = None, bomb: str | None = None, **arguments: Any
) -> dict[str, Any]:
    """Resume a copy of a finished run, of whose newest checkpoint a file has one bit flipped, or holds code.

    Returns:
        Under "outcome" this rank's end or error, under "said" its warnings.
    """
    if PartialState().is_main_process:
        shutil.copytree(whole, output_dir)
        newest = Path(output_dir, "checkpoint-3")
        if damaged is not None:
            content = bytearray((newest / damaged).read_bytes())
            content[len(content) // 2] ^= 1
            (newest / damaged).write_bytes(content)
        if bomb is not None:
            torch.save(Bomb(Path(output_dir, "mark")), newest / bomb)
            write_manifest(str(newest))
    with listening() as said:
        result = outcome(output_dir=output_dir, **{"resume": True, **arguments})
    return {"outcome": result, "said": said}


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect what the package warns of."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # pyright: ignore[reportAttributeAccessIssue]
    logging.getLogger("rlhf_ppo").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("rlhf_ppo").removeHandler(handler)


def killed_while_saving(rank: int, output_dir: str, models: str, **arguments: Any) -> None:
    """Train until SIGKILL ends one rank in its last part of the second checkpoint: rank 0 before the manifest."""
    owner, name = (saving.files, "write_manifest") if rank == 0 else (RngStreams, "save")
    original: Callable[..., Any] = getattr(owner, name)

    def save(*args: Any) -> None:
        is_second = any(str(each).endswith("checkpoint-2") for each in args)
        if PartialState().process_index == rank and is_second:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*args)

    with patch.object(owner, name, save):
        run = {"save_strategy": "steps", "save_steps": 1, "num_ppo_epochs": 1, **arguments}
        make_trainer(output_dir, models, **run).train()
