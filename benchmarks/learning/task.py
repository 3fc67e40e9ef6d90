"""What a task is: models, prompts, the reward that training pays and the judge that it does not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

Scores = Callable[[Sequence[str], Sequence[str]], list[float]]
"""Scores responses: takes prompts and responses, without special tokens; one number for each pair."""

COMMON: dict[str, Any] = {
    "num_sample_generations": 0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "gradient_accumulation_steps": 1,
    "stop_token": "eos",
}
"""Arguments of every run of both libraries."""


@dataclass(frozen=True)
class Task:
    """One task, as both libraries are given it.

    Attributes:
        tokenizer: Pads on the left.
        policy: Where the language model is; it is the reference too.
        reward: What training pays: a function, or where a reward model is, which the value model starts from as well.
        judge: The gold reward: what counts at the end, and no training sees.
        prompts: Of training.
        held_out: Of evaluations: none of them is trained on.
        arguments: Of both configurations; `num_updates` times the batch is `total_episodes`.
        num_updates: PPO updates of a run.
        num_final: Held-out responses before training and at its end.
        texts: A file of texts that the language model was trained on, for `ptx_coef`; None where there is none.
    """

    tokenizer: PreTrainedTokenizerBase
    policy: Path
    reward: Scores | Path
    judge: Scores
    prompts: list[str]
    held_out: list[str]
    arguments: dict[str, Any] = field(default_factory=dict)
    num_updates: int = 30
    num_final: int = 1024
    texts: Path | None = None


class TaskModule(Protocol):
    """A module with a task: `stories`, `preferences` and `arithmetic` are."""

    def prepare(self, data: Path, folder: Path) -> None:
        """Make what the task needs, once for all runs; what is there stays."""
        ...

    def load(self, data: Path, folder: Path) -> Task:
        """Read what `prepare` made."""
        ...


def reward_of(task: Task, score: Callable[[Path], Scores]) -> Scores:
    """Return the training reward as a function; `score` makes one of a reward model."""
    return score(task.reward) if isinstance(task.reward, Path) else task.reward
