"""The subcommands whose options are those of a trainer's own configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import Trainer
from trl.scripts.utils import ScriptArguments
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.checkpoints.run import check_start
from rlhf_ppo.cli.errors import program_name, user_errors
from rlhf_ppo.cli.estimate import EstimateArguments, devices_of, models_without_weights, prompts_of, show
from rlhf_ppo.cli.parser import PPOArgumentParser
from rlhf_ppo.cli.quantization import quantization_options
from rlhf_ppo.cli.sources import PPOScriptArguments, choose_split, hold_out, load_splits
from rlhf_ppo.cli.training import (
    policy_tokenizer,
    reward_trainer,
    running,
    scored_ppo_trainer,
    sft_trainer,
    train_and_save,
)
from rlhf_ppo.cli.trl_arguments import RewardArguments, SFTArguments
from rlhf_ppo.cli.trl_training import resumed_checkpoint
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.inherited_values import check_inherited, check_numbers
from rlhf_ppo.config.settled import output_directory
from rlhf_ppo.estimate.run import estimate_run, multiplied_dtype
from rlhf_ppo.estimate.update import Estimate
from rlhf_ppo.processes.engines import learns_in_turn, product_dtype
from rlhf_ppo.trainer import PPOTrainer
from rlhf_ppo.training.checks import check_output_dir


def train(argv: Sequence[str] | None = None) -> PPOTrainer:
    """PPO, with the options of TRL's `examples/scripts/ppo/ppo.py`.

    Args:
        argv: The options: those of `PPOScriptArguments`, `PPOConfig` and TRL's `ModelConfig`, or a YAML file with them
            after `--config`. None takes the program's own.

    Returns:
        The trainer, after training, saving and a table of samples.

    Raises:
        SystemExit: An option, the data or a model is wrong; the message names it.
    """
    program = program_name("train", argv)
    with user_errors(program):
        script_args, args, model_args = _parse(program, PPOScriptArguments, PPOConfig, argv)
        if args.stop_token is None and args.stop_token_id is None:
            args.stop_token = "eos"
        check_start(output_directory(args), args.resume_from_checkpoint, args.overwrite_output_dir)
        train_dataset, eval_dataset = _splits(script_args, always_evaluates=True)
        trainer = scored_ppo_trainer(script_args, args, model_args, train_dataset, eval_dataset)
    with running(program, trainer):
        train_and_save(trainer, script_args.dataset_name, show_samples=True)
    return trainer


def estimate(argv: Sequence[str] | None = None) -> Estimate:
    """Print what `train` would need with the same options: memory by what it is for, and time; no weights are loaded.

    Args:
        argv: The options of `train`, and those of `EstimateArguments`. None takes the program's own.

    Returns:
        The estimate of one device and one update.

    Raises:
        SystemExit: There is no such model or data, they do not fit, or nothing says how many updates there are.
    """
    program = program_name("estimate", argv)
    with user_errors(program):
        return _estimate(*_parse(program, EstimateArguments, PPOConfig, argv))


def _estimate(script_args: EstimateArguments, args: PPOConfig, model_args: ModelConfig) -> Estimate:
    devices = devices_of(script_args, args)
    policy, value_model, frozen = models_without_weights(script_args, args, model_args)

    def load() -> tuple[Any, Any]:
        return policy_tokenizer(script_args, args, model_args), _splits(script_args, always_evaluates=True)[0]

    prompt_length, num_prompts = prompts_of(args, policy, load)
    sizes = args.fill_derived(devices.count, num_prompts)
    in_turn = learns_in_turn(devices.engine == "", args.torch_compile)
    how = (devices.sharding, product_dtype(args), in_turn)
    found = estimate_run(args, sizes, policy, value_model, frozen, prompt_length, *how)
    rates = (script_args.device_flops, script_args.device_bandwidth)
    show(found, args, sizes, devices, prompt_length, rates, multiplied_dtype(args, policy))
    return found


def reward(argv: Sequence[str] | None = None) -> Trainer:
    """Train a reward model with TRL's `RewardTrainer`, with the options of its configuration.

    Args:
        argv: The options: those of TRL's `ScriptArguments`, `RewardConfig` and `ModelConfig`, or `--config`.

    Returns:
        The trainer, after training and saving.

    Raises:
        SystemExit: An option, the data or the model is wrong; the message names it.
    """
    return _train("reward", RewardArguments, reward_trainer, argv)


def sft(argv: Sequence[str] | None = None) -> Trainer:
    """Train a language model on texts with TRL's `SFTTrainer`, with the options of its configuration.

    Args:
        argv: The options: those of TRL's `ScriptArguments`, `SFTConfig` and `ModelConfig`, or `--config`.

    Returns:
        The trainer, after training and saving.

    Raises:
        SystemExit: An option, the data or the model is wrong; the message names it.
    """
    return _train("sft", SFTArguments, sft_trainer, argv)


def _train(command: str, config: type, make_trainer: Callable[..., Trainer], argv: Sequence[str] | None) -> Trainer:
    program = program_name(command, argv)
    with user_errors(program):
        script_args, args, model_args = _parse(program, ScriptArguments, config, argv)
        resumed_checkpoint(args)
        trainer = make_trainer(args, model_args, *_splits(script_args))
    with running(program, trainer):
        train_and_save(trainer, script_args.dataset_name)
    return trainer


OPTIONS = {
    "sft": (ScriptArguments, SFTArguments),
    "reward": (ScriptArguments, RewardArguments),
    "train": (PPOScriptArguments, PPOConfig),
}
"""What the options of each training command are beside TRL's `ModelConfig`."""


def parse_options(program: str, command: str, argv: Sequence[str]) -> Any:
    """Read and check a training command's options; nothing is loaded.

    Args:
        program: What errors begin with.
        command: One of `OPTIONS`.
        argv: The options.

    Raises:
        SystemExit: An option is unknown or has no such value.
        TypeError, ValueError: A value is wrong.
    """
    script, config = OPTIONS[command]
    return _parse(program, script, config, argv)


def _parse(program: str, script: type, config: type, argv: Sequence[str] | None) -> Any:
    parser: Any = PPOArgumentParser((script, config, ModelConfig), prog=program)  # pyright: ignore[reportArgumentType]
    script_args, args, model_args = parser.parse_args_and_config(argv)
    quantization_options(model_args)  # an error comes before anything is loaded
    check_output_dir(args.output_dir)
    check_numbers(args)  # PPOConfig's are checked; TRL's are not
    check_inherited(args)
    return script_args, args, model_args


def _splits(script_args: ScriptArguments, always_evaluates: bool = False) -> tuple[Any, Any]:
    """Load the rows to train on and those to evaluate on; without the latter take some of the former, or none."""
    splits = load_splits(script_args.dataset_name, script_args.dataset_config, script_args.dataset_streaming)
    train_dataset = choose_split(splits, script_args.dataset_train_split, "dataset_train_split")
    if script_args.dataset_test_split != "test" or "test" in splits:
        return train_dataset, choose_split(splits, script_args.dataset_test_split, "dataset_test_split")
    return hold_out(train_dataset, num_rows=100) if always_evaluates else (train_dataset, None)
