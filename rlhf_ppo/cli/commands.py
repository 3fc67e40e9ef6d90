"""The commands train, estimate, reward and sft."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import Trainer
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.cli.arguments import (
    DryRunScriptArguments,
    PPOScriptArguments,
    quantization_options,
)
from rlhf_ppo.cli.checks import check_step_options, parse, train_and_eval_rows
from rlhf_ppo.cli.errors import Problems, program_name, user_errors
from rlhf_ppo.cli.estimate import EstimateArguments, devices_of, models_without_weights, prompts_of, show
from rlhf_ppo.cli.options import JudgeArguments
from rlhf_ppo.cli.training import (
    RewardArguments,
    SFTArguments,
    measure_accuracy,
    measured_reward_trainer,
    policy_tokenizer,
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
from rlhf_ppo.estimate.run import estimate_run
from rlhf_ppo.estimate.update import Estimate
from rlhf_ppo.models.unwrapping import multiplied_dtype
from rlhf_ppo.processes.distributed import mixed_precision_dtype
from rlhf_ppo.rewards.resolve import resolve_environments, resolve_tools
from rlhf_ppo.terminal import print_text
from rlhf_ppo.trainer import PPOTrainer
from rlhf_ppo.training.checks import check_output_dir
from rlhf_ppo.training.episodes import EpisodeRollouts


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


def estimate(argv: Sequence[str] | None = None) -> Estimate:
    """Estimate memory, by purpose, and time of `train` with the same options, without loading weights.

    Args:
        argv: The options of `train`, and those of `EstimateArguments`. None takes the program's own.

    Returns:
        The estimate of one device and one update.

    Raises:
        SystemExit: There is no such model or data, they do not fit, or nothing says how many updates there are.
    """
    program = program_name("estimate", argv)
    problems = Problems()
    options = parse_options(program, "estimate", argv, problems)
    problems.fail(program)
    with user_errors(program):
        return _estimate(*options)


def _estimate(script_args: EstimateArguments, args: PPOConfig, model_args: ModelConfig) -> Estimate:
    devices = devices_of(script_args, args)
    policy, value_model, frozen = models_without_weights(script_args, args, model_args)

    def load() -> tuple[Any, Any]:
        return policy_tokenizer(script_args, args, model_args), train_and_eval_rows(
            script_args, always_evaluates=True
        )[0]

    agents = (resolve_tools(script_args.tools), resolve_environments(script_args.environment))
    episodes = EpisodeRollouts.of(args, *agents, rollout_func=None)
    prompt_length, num_prompts = prompts_of(args, policy, load, episodes)
    sizes = args.fill_derived(devices.count, num_prompts)
    found = estimate_run(
        args, sizes, policy, value_model, frozen, prompt_length, devices.sharding, mixed_precision_dtype(args),
        sequential_backward=devices.engine == "" and not args.torch_compile,
    )  # fmt: skip
    rates = (script_args.device_flops, script_args.device_bandwidth)
    dtype = multiplied_dtype(args, policy)
    show(found, args, sizes, devices, prompt_length, rates, dtype, script_args.device_memory)
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
    "estimate": (EstimateArguments, PPOConfig),
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
