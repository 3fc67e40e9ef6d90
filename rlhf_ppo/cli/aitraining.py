"""AITraining's Python interface: `AutoTrainProject(params, backend="local", process=True).create()`."""

from __future__ import annotations

from accelerate import PartialState
from transformers import Trainer

from rlhf_ppo.cli.jobs import build_trainer, make_job, print_job, run_job
from rlhf_ppo.compat import mapping
from rlhf_ppo.compat.params import LLMTrainingParams

__all__ = ["AutoTrainProject", "LLMTrainingParams"]


class AutoTrainProject:
    """A training run on this machine; its configuration is checked and printed when it is made.

    Args:
        params: The parameters.
        backend: Where to train: only "local".
        process: Accepted as in AITraining; columns always get the names that the trainer reads.
        resume_from_checkpoint: A checkpoint of the run in the project's directory from which it goes on, True for its
            newest whole one; None or False starts a new run.

    Raises:
        TypeError: `params` are no `LLMTrainingParams`, or an argument has the wrong type.
        ValueError: There is no such backend, or an argument is out of its range.
    """

    def __init__(
        self,
        params: LLMTrainingParams,
        backend: str = "local",
        process: bool = False,
        resume_from_checkpoint: str | bool | None = None,
    ) -> None:
        if not isinstance(params, LLMTrainingParams):
            raise TypeError(f"params must be LLMTrainingParams, got {type(params).__name__}")
        if backend != "local":
            raise ValueError(f"backend={backend!r} is not available here: train on this machine with backend='local'")
        self.job = make_job(params, resume_from_checkpoint)
        if PartialState().is_main_process:
            print_job(self.job)

    def create(self) -> Trainer:
        """Train, and save the result in `./<project_name>`.

        Returns:
            The trainer, after training.

        Raises:
            ValueError: There is no such data, column or model, or they do not fit each other.
        """
        return self.train(self.build())

    def build(self) -> Trainer:
        """Load data and models and make the trainer.

        Raises:
            ValueError: There is no such data, column or model, or they do not fit each other.
        """
        with mapping.explaining():
            return build_trainer(self.job)

    def train(self, trainer: Trainer) -> Trainer:
        """Train, save the result, and return the trainer that `build` made."""
        return run_job(self.job, trainer)
