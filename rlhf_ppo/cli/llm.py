"""`rlhf-ppo llm`: AITraining's command line."""

# HfArgumentParser reads the annotations, so they are not postponed.
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import Trainer

from rlhf_ppo.cli.aitraining import AutoTrainProject
from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.parser import PPOArgumentParser
from rlhf_ppo.cli.training import running
from rlhf_ppo.compat.params import LLMTrainingParams


@dataclass
class LLMCommand:
    """What `rlhf-ppo llm` does with the parameters.

    Raises:
        ValueError: It shall do something that is not here.
    """

    train: bool = field(default=True, metadata={"help": "Train; the default."})
    dry_run: bool = field(default=False, metadata={"help": "Print the resolved configuration and exit."})
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "Go on with the run in project_name: True, or one of its checkpoints."}
    )
    backend: str = field(default="local", metadata={"help": "Where to train; only here: local."})
    deploy: bool = field(default=False, metadata={"help": "Not available here."})
    inference: bool = field(default=False, metadata={"help": "Not available here; see `rlhf-ppo judge`."})
    interactive: bool = field(default=False, metadata={"help": "Not available here; see `rlhf-ppo llm --help`."})

    def __post_init__(self) -> None:
        """Refuse what is not here."""
        advice = {
            "deploy": "serve the saved directory with `transformers serve` or vLLM",
            "inference": "compare two models' responses with `rlhf-ppo judge`",
            "interactive": "`rlhf-ppo llm --help` lists all options",
        }
        for name, instead in advice.items():
            if getattr(self, name):
                raise ValueError(f"--{name} is not available here: {instead}")
        if not self.train:
            raise ValueError("--train false leaves nothing to do; --dry-run shows the configuration without training")


def llm(argv: Sequence[str] | None = None) -> Trainer | None:
    """Train as `aitraining llm --train --trainer ppo|reward|sft` does, with the same options.

    Args:
        argv: The options of `LLMCommand` and `LLMTrainingParams`, with dashes or underscores. None takes the program's
            own.

    Returns:
        The trainer, after training and saving; None with `--dry-run`.

    Raises:
        SystemExit: An option is unknown, wrong or not available; the message says what to use.
    """
    usage = "rlhf-ppo llm --train --trainer ppo|reward|sft [options]; --help lists the options"
    parser: Any = PPOArgumentParser((LLMCommand, LLMTrainingParams), prog="rlhf-ppo llm", usage=usage)  # pyright: ignore[reportArgumentType]
    with user_errors(parser.prog):
        command, params = parser.parse_args_into_dataclasses(argv)
        resumed = command.resume_from_checkpoint
        project = AutoTrainProject(params, backend=command.backend, process=True, resume_from_checkpoint=resumed)
        if command.dry_run:
            return None
        trainer = project.build()
    with running(parser.prog, trainer):
        return project.train(trainer)
