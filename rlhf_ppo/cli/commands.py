"""The commands train, estimate, reward, sft and generate."""

import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import AutoModelForCausalLM, Trainer, set_seed
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.checkpoints.files import write_text
from rlhf_ppo.cli.arguments import (
    DryRunScriptArguments,
    PPOScriptArguments,
    check_single_process,
    quantization_options,
)
from rlhf_ppo.cli.checks import check_step_options, parse, train_and_eval_rows
from rlhf_ppo.cli.errors import Problems, program_name, user_errors
from rlhf_ppo.cli.estimate import EstimateArguments, devices_of, models_without_weights, prompts_of, show
from rlhf_ppo.cli.options import CHAT_TEMPLATE_KWARGS, JudgeArguments
from rlhf_ppo.cli.training import (
    RewardArguments,
    SFTArguments,
    load_tokenizer,
    measure_accuracy,
    measured_reward_trainer,
    policy_tokenizer,
    running,
    scored_ppo_trainer,
    sft_trainer,
    template_kwargs,
    train_and_save,
)
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.inherited import INHERITED_RANGES, check_inherited
from rlhf_ppo.config.validation import (
    AtLeastOne,
    Count,
    PositiveShare,
    Seed,
    Temperature,
    check_ranges,
    option,
    parse_template_kwargs,
    ranges_of,
)
from rlhf_ppo.data.prompts import prompt_column
from rlhf_ppo.data.sources import choose_split, load_splits
from rlhf_ppo.decoding import Decoded, Sampling, best_of_n, value_guided_search
from rlhf_ppo.estimate.run import estimate_run
from rlhf_ppo.estimate.update import Estimate
from rlhf_ppo.models.loading import load_pretrained, load_value_model
from rlhf_ppo.models.unwrapping import multiplied_dtype, text_config
from rlhf_ppo.processes.distributed import mixed_precision_dtype
from rlhf_ppo.rewards.resolve import resolve_environments, resolve_tools
from rlhf_ppo.terminal.text import print_text
from rlhf_ppo.trainer import PPOTrainer
from rlhf_ppo.training.checks import check_output_dir, check_writable
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
    try:
        prompt_length, num_prompts = prompts_of(args, policy, load, episodes)
    finally:
        if episodes is not None:
            episodes.environments.close()
    sizes = args.fill_derived(devices.count, num_prompts)
    found = estimate_run(
        args, sizes, policy, value_model, frozen, prompt_length, devices.sharding, mixed_precision_dtype(args),
        sequential_backward=devices.engine == "" and not args.torch_compile,
    )  # fmt: skip
    rates = (script_args.device_flops, script_args.device_bandwidth)
    dtype = multiplied_dtype(args, policy)
    show(found, args, sizes, devices, prompt_length, rates, dtype, script_args.device_memory)
    if episodes is not None and args.tool_isolation == "process":
        print_text(
            f"Beside each device, in the machine's memory: {sizes.local_batch_size} processes of environments, about "
            "3 MB each, and what an environment itself takes."
        )
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


@dataclass
class GenerateArguments:
    """Options of `rlhf-ppo generate`.

    Raises:
        ValueError: A number is outside its range.
    """

    model: str = option("", "Directory or hub name of the policy.")
    critic: str = option("", "Directory or hub name of the critic, such as RUN/critic of a run with save_critic.")
    dataset_name: str = option("", "Prompts: a file, a directory or a hub name with `prompt`, `text` or `input_ids`.")
    split: str = option("train", "Split of the dataset.")
    num_prompts: AtLeastOne = option(256, "Number of prompts, from the first.")
    n: AtLeastOne = option(8, "Best of n: responses sampled for each prompt, of which the critic chooses one.")
    weighted: bool = option(False, "Best of n: add up the values of equal responses, and choose the heaviest.")
    width: AtLeastOne | None = option(
        None, "Value-guided search instead: blocks of tokens sampled for each prompt in a round."
    )
    block: AtLeastOne = option(8, "Value-guided search: tokens of a block.")
    max_new_tokens: AtLeastOne = option(128, "Maximum length of a response, in tokens.")
    temperature: Temperature = option(0.7, "Sampling temperature; use that of training.")
    top_k: Count = option(0, "Sample from the top_k most likely tokens. 0: from all.")
    top_p: PositiveShare = option(1.0, "Sample from the most likely tokens whose probabilities sum to top_p.")
    stop_token_id: Count | None = option(None, "Id of the token that ends a response; None: the tokenizer's EOS.")
    batch_size: AtLeastOne = option(64, "Rows in a batch.")
    chat_template_kwargs: str | None = option(None, CHAT_TEMPLATE_KWARGS)
    seed: Seed = option(0, "Seed of the sampling.")
    trust_remote_code: bool = option(False, "Run Python code of a model's repository. Only for code you have read.")
    output: str = option("responses.jsonl", "File to write: one JSON object per prompt.")
    overwrite: bool = option(False, "Replace the file if it exists.")

    def __post_init__(self) -> None:
        """Check the numbers and the required options."""
        check_ranges(self, ranges_of(GenerateArguments))
        parse_template_kwargs(self.chat_template_kwargs)
        for name, what in {"model": "a policy", "critic": "its critic", "dataset_name": "prompts"}.items():
            if not getattr(self, name):
                raise ValueError(f"{name} is not given; give {what}")
        if self.weighted and self.width is not None:
            raise ValueError(f"weighted=True is for best of n, but width={self.width} searches; leave out one of them")


def generate(argv: Sequence[str] | None = None) -> Decoded:
    """Generate responses to prompts, chosen by a critic, and write them to a file.

    Args:
        argv: The options of `GenerateArguments`. None takes the program's own.

    Returns:
        The responses.

    Raises:
        SystemExit: An option, the data or a model is wrong; the message names it.
    """
    program = program_name("generate", argv)
    problems = Problems()
    (options,) = parse(GenerateArguments, program, argv, problems)
    problems.fail(program)
    with user_errors(program):
        check_single_process("responses are generated")
        path = Path(os.path.expanduser(options.output))
        if path.is_dir():
            raise ValueError(f"output={options.output!r} is a directory; name a file in it")
        if path.exists() and not options.overwrite:
            raise ValueError(f"output={options.output!r} exists already: add --overwrite to replace, or name another")
        check_writable(str(path.parent), "output")
        path.parent.mkdir(parents=True, exist_ok=True)
        prompts = _prompts(options)
        found = decode(options, prompts)
        rows = zip(prompts, found.texts, found.chosen, strict=True)
        lines = [json.dumps({**prompt, "response": text, "value": best.value}) for prompt, text, best in rows]
        write_text(path, "\n".join(lines) + "\n")
    print_text(
        f"{len(prompts)} responses are in {path}: {found.num_sampled_tokens} tokens sampled, "
        f"{found.num_valued_rows} rows read by the critic. To judge them: rlhf-ppo judge "
        f"--dataset_name {shlex.quote(str(path))} --model_column response ..."
    )
    return found


def _prompts(options: GenerateArguments) -> list[dict[str, Any]]:
    """Return the first prompts of the data set: rows with `prompt`, or with `input_ids` and what describes them."""
    rows = choose_split(load_splits(options.dataset_name), options.split, "split")
    rows = rows.select(range(min(options.num_prompts, len(rows))))
    column = prompt_column(rows.column_names, "dataset_name")
    if column != "input_ids":
        return [{"prompt": prompt} for prompt in rows[column]]
    kept = {"input_ids", "attention_mask", "prompt"}.intersection(rows.column_names)
    return list(rows.select_columns(sorted(kept)))


def decode(options: GenerateArguments, prompts: Sequence[dict[str, Any]]) -> Decoded:
    """Load policy and critic, and choose a response to each prompt."""
    settings = {"trust_remote_code": options.trust_remote_code}
    tokenizer = load_tokenizer(options.model, options.trust_remote_code, "model")
    device = PartialState().device
    policy: Any = load_pretrained(AutoModelForCausalLM, options.model, "model", dtype="auto", **settings)
    size = text_config(policy).vocab_size
    if options.stop_token_id is not None and options.stop_token_id >= size:
        raise ValueError(f"stop_token_id={options.stop_token_id} would never be sampled: model has {size} token ids")
    critic = load_value_model(options.critic, "critic", **settings)
    how = Sampling(
        options.max_new_tokens, options.temperature, options.top_k, options.top_p, options.stop_token_id,
        options.batch_size, template_kwargs(options.model, options.chat_template_kwargs),
    )  # fmt: skip
    set_seed(options.seed)
    policy, critic = policy.to(device), critic.to(device)
    if options.width is not None:
        return value_guided_search(policy, critic, tokenizer, prompts, options.width, options.block, how)
    return best_of_n(policy, critic, tokenizer, prompts, options.n, how, weighted=options.weighted)
