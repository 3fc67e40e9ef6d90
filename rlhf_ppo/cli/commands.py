"""The commands train, reward and sft."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import Trainer
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.cli.arguments import (
    DryRunScriptArguments,
    PPOScriptArguments,
    quantization_options,
)
from rlhf_ppo.cli.checks import check_step_options, parse
from rlhf_ppo.cli.errors import Problems, program_name, user_errors
from rlhf_ppo.cli.options import JudgeArguments
from rlhf_ppo.cli.training import (
    RewardArguments,
    SFTArguments,
    measure_accuracy,
    measured_reward_trainer,
    running,
    scored_ppo_trainer,
    sft_trainer,
    train_and_save,
)
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.inherited import INHERITED_RANGES, check_inherited
from rlhf_ppo.config.validation import (
    check_ranges,
)
from rlhf_ppo.terminal import print_text
from rlhf_ppo.trainer import PPOTrainer
from rlhf_ppo.training.checks import check_output_dir


def train(argv: Sequence[str] | None = None) -> PPOTrainer:
    """Train with PPO, with the options of TRL's `examples/scripts/ppo/ppo.py`.

    Args:
        argv: The options: those of `PPOScriptArguments`, `PPOConfig` and TRL's `ModelConfig`, or a YAML file with them
            after `--config`. None takes the program's own.

    Returns:
        The trainer, after training, saving and a table of samples.

    Raises:
        SystemExit: An option, the data or a model is wrong; the message names it.
    """
    return _train("train", scored_ppo_trainer, argv)


def reward(argv: Sequence[str] | None = None) -> Trainer:
    """Train a reward model with TRL's `RewardTrainer`, with the options of its configuration.

    Args:
        argv: The options: those of TRL's `ScriptArguments`, `RewardConfig` and `ModelConfig`, or `--config`.

    Returns:
        The trainer, after training and saving.

    Raises:
        SystemExit: An option, the data or the model is wrong; the message names it.
    """
    return _train("reward", lambda _, *given: measured_reward_trainer(*given), argv)


def sft(argv: Sequence[str] | None = None) -> Trainer:
    """Train a language model on texts with TRL's `SFTTrainer`, with the options of its configuration.

    Args:
        argv: The options: those of TRL's `ScriptArguments`, `SFTConfig` and `ModelConfig`, or `--config`.

    Returns:
        The trainer, after training and saving.

    Raises:
        SystemExit: An option, the data or the model is wrong; the message names it.
    """
    return _train("sft", lambda _, *given: sft_trainer(*given), argv)


def _train(command: str, make_trainer: Callable[..., Any], argv: Sequence[str] | None) -> Any:
    program, problems = program_name(command, argv), Problems()
    script_args, args, model_args = parse_options(program, command, argv, problems)
    if command == "train" and args.stop_token is None and args.stop_token_id is None:
        args.stop_token = "eos"
    rows = check_step_options(problems, command, (script_args, args, model_args))
    problems.fail(program)
    with user_errors(program):
        trainer = make_trainer(script_args, args, model_args, *rows)
    if script_args.dry_run:
        print_text(f"Dry run: no problems found; the run would write into {args.output_dir}.")
        return trainer
    with running(program, trainer):
        train_and_save(trainer, script_args.dataset_name, show_samples=True)
        if command == "reward":
            measure_accuracy(trainer)
    return trainer


OPTIONS = {
    "sft": (DryRunScriptArguments, SFTArguments),
    "reward": (DryRunScriptArguments, RewardArguments),
    "train": (PPOScriptArguments, PPOConfig),
}
"""Option groups of each command that takes TRL's `ModelConfig` too."""


def parse_options(program: str, command: str, argv: Sequence[str] | None, problems: Problems) -> Any:
    """Parse and check the options of a command; nothing is loaded.

    Args:
        program: Start of error messages.
        command: A key of `OPTIONS`, or "judge".
        argv: The options; None takes the program's own.
        problems: Gets the problems.

    Raises:
        SystemExit: The options cannot be parsed.
    """
    if command == "judge":
        return parse(JudgeArguments, program, argv, problems)[0]
    script_args, args, model_args = parse((*OPTIONS[command], ModelConfig), program, argv, problems)
    if command == "reward":
        model_args.lora_task_type = "SEQ_CLS"  # TRL's default is that of language models, which PEFT refuses here
    checks = (  # PPOConfig has checked its numbers, TRL's configurations have not
        lambda: quantization_options(model_args),
        lambda: check_output_dir(args.output_dir),
        lambda: check_ranges(args, INHERITED_RANGES),
        lambda: check_inherited(args),
    )
    for check in checks:
        with problems.collecting():
            check()
    return script_args, args, model_args
