"""The commands train, reward and sft."""

from collections.abc import Sequence
from typing import Any

from transformers import Trainer
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.cli.arguments import (
    DryRunScriptArguments,
    PPOScriptArguments,
    RewardArguments,
    SFTArguments,
    check_columns,
    parse,
    train_and_eval_rows,
)
from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.trainers import (
    PAIRS,
    load_scorers,
    measure_accuracy,
    measured_reward_trainer,
    ppo_trainer,
    running,
    say_how_prompts_are_read,
    sft_trainer,
    text_columns,
    train_and_save,
)
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.checks import check_output_dir
from rlhf_ppo.rewards.resolve import resolve_environments, resolve_rewards, resolve_tools
from rlhf_ppo.run.checkpoints import find_start
from rlhf_ppo.run.datasets import check_rows
from rlhf_ppo.run.learning import resolve_policy_loss
from rlhf_ppo.terminal import print_text
from rlhf_ppo.trainer import PPOTrainer

OPTIONS = {
    "sft": (DryRunScriptArguments, SFTArguments, ModelConfig),
    "reward": (DryRunScriptArguments, RewardArguments, ModelConfig),
    "train": (PPOScriptArguments, PPOConfig, ModelConfig),
}
"""Option groups of each command."""


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
    return _train("train", argv)


def reward(argv: Sequence[str] | None = None) -> Trainer:
    """Train a reward model with TRL's `RewardTrainer`, with the options of its configuration; see `train`."""
    return _train("reward", argv)


def sft(argv: Sequence[str] | None = None) -> Trainer:
    """Train a language model on texts with TRL's `SFTTrainer`, with the options of its configuration; see `train`."""
    return _train("sft", argv)


def parse_step(command: str, argv: Sequence[str] | None, program: str) -> tuple[Any, Any]:
    """Parse the options of a command, load its data and the user's functions; find every mistake that needs no model.

    Args:
        command: A key of `OPTIONS`.
        argv: The options; None takes the program's own.
        program: Start of error messages.

    Returns:
        The groups of options, and the rows to train on and to evaluate on.

    Raises:
        SystemExit: An option or the data is wrong; the message names it.
    """
    script_args, args, model_args = options = parse(OPTIONS[command], program, argv)
    if command == "reward":
        model_args.lora_task_type = "SEQ_CLS"  # TRL's default is that of language models, which PEFT refuses here
    if command == "train" and args.stop_token is None and args.stop_token_id is None:
        args.stop_token = "eos"
    with user_errors(program):
        check_output_dir(args.output_dir)
        rows = train_and_eval_rows(script_args, command)
        if command == "train":
            resolve_policy_loss(args.policy_loss)
            resolve_rewards(script_args.reward_funcs)
            resolve_tools(script_args.tools)
            if resolve_environments(script_args.environment) is None:
                check_rows(rows[0], "train_dataset")
        else:
            columns = PAIRS if command == "reward" else text_columns(args)
            check_columns(rows[0], columns, f"dataset_name={script_args.dataset_name!r}")
        return options, rows


def _train(command: str, argv: Sequence[str] | None) -> Any:
    program = f"rlhf-ppo {command}"
    (script_args, args, model_args), rows = parse_step(command, argv, program)
    with user_errors(program):
        if command == "train":
            find_start(args.output_dir, args.resume_from_checkpoint, args.overwrite_output_dir)  # before models load
            trainer = ppo_trainer(
                script_args,
                args,
                model_args,
                *rows,
                reward_funcs=script_args.reward_funcs,
                tools=resolve_tools(script_args.tools),
                environment_factory=resolve_environments(script_args.environment),
                **load_scorers(script_args, args, model_args),
            )
            if trainer.is_world_process_zero():
                say_how_prompts_are_read(rows[0], trainer.processing_class)
        else:
            make = sft_trainer if command == "sft" else measured_reward_trainer
            trainer = make(args, model_args, *rows)
    if script_args.dry_run:
        print_text(f"Dry run: no problems found; the run would write into {args.output_dir}.")
        return trainer
    with running(program, trainer):
        train_and_save(
            trainer,
            script_args.dataset_name,
            merge=script_args.merge_adapter,
            show_samples=True,
            trust_remote_code=getattr(script_args, "trust_remote_code", False),  # else of `args`
        )
        if command == "reward":
            measure_accuracy(trainer)
    return trainer
