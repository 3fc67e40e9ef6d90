"""Short help of the commands with many options, printed without importing torch or transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from rich.console import Console
from rich.table import Table

from rlhf_ppo.cli.options import JudgeArguments, LLMCommand
from rlhf_ppo.compat.params import UNAVAILABLE, LLMTrainingParams
from rlhf_ppo.terminal.text import cell


class Option(NamedTuple):
    """An option in the short help.

    Attributes:
        name: Name of the dataclass field.
        default: Its default; None is not shown.
        help: One sentence.
        value: Placeholder of the value; "" derives it from the default.
    """

    name: str
    default: Any
    help: str
    value: str = ""


class Page(NamedTuple):
    """Short help of a command.

    Attributes:
        summary: One sentence.
        groups: Title: options.
        examples: Command lines.
        more: Sentence about the options that are not shown.
    """

    summary: str
    groups: Mapping[str, Iterable[Option]]
    examples: tuple[str, ...]
    more: str = "--help-all lists all options. --config FILE reads options from a YAML file."


_MEMORY_AND_OUTPUT = """Memory and precision
use_peft = false: Train LoRA adapters instead of all weights.
dtype = float32: Data type of the loaded weights.
bf16 BOOL: Compute in bfloat16; on by default where the device supports it.
gradient_checkpointing = true: Recompute activations: less memory, more time.
Output
output_dir DIR: Directory of the model, the logs and the checkpoints.
report_to TRACKER = none: Trackers: wandb, tensorboard, trackio, ...
save_steps = 500: Steps between two checkpoints.
resume_from_checkpoint CHECKPOINT: Continue a run: True for its newest checkpoint, or a path.
seed = 42: Seed of all random numbers.
dry_run = false: Check files, columns and options, list all problems, and exit."""

_TRAIN = f"""Models and rewards
sft_model_path MODEL = EleutherAI/pythia-160m: Policy at the start: a directory or a hub name.
reward_model_path MODEL = EleutherAI/pythia-160m: Reward model; unused if only reward_funcs are given.
reward_funcs FUNCTION ...: Reward functions: built-in names, file.py:function or addresses.
Data
dataset_name DATA: Prompts: a file, a directory or a hub name, with the column `prompt`.
trust_remote_code = false: Run Python code of a model's repository.
max_prompt_length N: Drop longer prompts; in tokens.
Length of the run
total_episodes N: Number of responses to learn from; by default num_train_epochs decides.
num_train_epochs = 3.0: Passes over the prompts, without total_episodes.
per_device_train_batch_size = 8: Episodes per device and micro-batch.
gradient_accumulation_steps = 1: Micro-batches per update: their product is the rollout's size.
Responses
response_length = 53: Maximum length of a response, in tokens.
temperature = 0.7: Sampling temperature.
stop_token TOKEN: Token that ends a response; this command uses eos unless stop_token_id is given.
missing_eos_penalty X: Subtracted from the score of responses that do not end.
generation_engine = transformers: transformers, continuous or vllm.
PPO
learning_rate = 3e-6: Peak learning rate of the policy.
kl_coef = 0.05: Weight of the KL penalty: higher keeps the policy closer to its start.
num_ppo_epochs = 4: Passes over each rollout.
cliprange = 0.2: Clip range of the importance ratio around 1.
vf_coef = 0.1: Weight of the value loss.
lam = 0.95: Lambda of generalized advantage estimation.
preset NAME: Settings of a published recipe, such as recommended.
{_MEMORY_AND_OUTPUT}
logging_steps = 10: Updates between two log lines.
num_sample_generations = 3: Tables of samples during the run."""

_TRL = f"""Model and data
model_name_or_path MODEL: Model to train: a directory or a hub name.
dataset_name DATA: Training data: a file, a directory or a hub name, with COLUMNS.
trust_remote_code = false: Run Python code of a model's repository.
max_length = 1024: LONGER
Optimization
learning_rate = RATE: Peak learning rate.
num_train_epochs = 3.0: Passes over the data.
max_steps = -1: Number of optimizer steps; overrides num_train_epochs.
per_device_train_batch_size = 8: Rows per device and step.
gradient_accumulation_steps = 1: Batches per optimizer step.
warmup_steps = 0: Steps, or below 1 the share of steps, with a rising learning rate.
{_MEMORY_AND_OUTPUT}
logging_steps = 10: Steps between two log lines.
eval_strategy = no: When to evaluate: no, steps or epoch."""

_ESTIMATE = """Devices
num_devices N: Number of devices; by default that of accelerate_config, or 1.
accelerate_config FILE: Configuration of `accelerate launch`; its engine divides memory.
device_flops X: FLOP/s of a device, such as 4e14; measured here by default.
device_bandwidth X: Memory bandwidth of a device in bytes/s; measured here by default.
device_memory X: Memory of a device in bytes: finds the largest micro-batch that fits."""

_OPTION = re.compile(r"(\w+)(?: ([A-Z]+(?: \.\.\.)?))?(?: = (\S+))?: (.+)")


def _groups(text: str) -> dict[str, list[Option]]:
    """Read titles, and options below them, written `name PLACEHOLDER = default: help`."""
    groups: dict[str, list[Option]] = {}
    for line in text.split("\n"):
        if (found := _OPTION.fullmatch(line)) is None:
            options = groups.setdefault(line, [])
            continue
        name, placeholder, default, help = found.groups("")
        options.append(Option(name, _value(default), help, placeholder))
    return groups


def _value(text: str) -> Any:
    """Return a default as its type: JSON, or a plain word; "" is None."""
    try:
        return json.loads(text)
    except ValueError:
        return text or None


def _trl_groups(columns: str, longer: str, rate: str) -> dict[str, list[Option]]:
    """Return the options of a command that runs a trainer of TRL."""
    return _groups(_TRL.replace("COLUMNS", columns).replace("LONGER", longer).replace("RATE", rate))


TRAIN = Page(
    "Train a policy with PPO against a reward model or reward functions.",
    _groups(_TRAIN),
    (
        "rlhf-ppo train --sft_model_path runs/sft --reward_model_path runs/reward --dataset_name prompts.jsonl "
        "--output_dir runs/ppo",
        "rlhf-ppo train --sft_model_path Qwen/Qwen2.5-0.5B-Instruct --reward_funcs rewards.py:brevity "
        "--dataset_name prompts.jsonl --output_dir runs/ppo --use_peft",
        "rlhf-ppo train --config ppo.yaml --resume_from_checkpoint True",
    ),
)

SFT = Page(
    "Train a language model on texts with TRL's SFTTrainer.",
    _trl_groups(
        "`text`, `messages`, or `prompt` and `completion`",
        "Truncate longer texts; in tokens.\npacking = false: Pack several texts into one row.",
        "2e-5",
    ),
    (
        "rlhf-ppo sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name texts.jsonl --output_dir runs/sft",
        "rlhf-ppo sft --config sft.yaml --dry_run",
    ),
)

REWARD = Page(
    "Train a reward model on preference pairs with TRL's RewardTrainer.",
    _trl_groups("`chosen`, `rejected` and usually `prompt`", "Drop longer pairs; in tokens.", "1e-4"),
    (
        "rlhf-ppo reward --model_name_or_path runs/sft --dataset_name pairs.jsonl --output_dir runs/reward",
        "rlhf-ppo reward --config reward.yaml --dry_run",
    ),
)

ESTIMATE = Page(
    "Estimate memory and time of `rlhf-ppo train` without loading weights.",
    _groups(_ESTIMATE),
    (
        "rlhf-ppo estimate --sft_model_path runs/sft --reward_model_path runs/reward --dataset_name prompts.jsonl "
        "--output_dir runs/ppo --device_memory 8e10",
    ),
    "All options of `rlhf-ppo train` are accepted; --help-all lists them.",
)


CRITIC = Page(
    "Audit the critic of a finished run (critic RUN), or train one on kept completions (critic train).",
    _groups("""Audit of a run
dataset_name DATA: Held-out prompts; by default those that the run held out.
num_prompts = 200: Most held-out prompts, from the first.
num_prefixes = 4: Beginnings of each response.
num_continuations = 16: Continuations of each beginning.
reward_funcs FUNCTION ...: The run's reward functions, if they were Python objects.
Training on completions
model_name_or_path MODEL: Model to start from: a directory or a hub name.
completions RUN ...: Output directories of runs with num_completions_to_keep.
gamma = 1.0: Discount per token, as in the runs.
lam = 0.95: Lambda of the returns; 1 uses rewards alone.
eval_share = 0.1: Share of the completions that is held out.
Training and output
learning_rate = 5e-5: Peak learning rate.
num_train_epochs = 3.0: Passes over the completions.
per_device_train_batch_size = 8: Completions per device and step.
output_dir DIR: Directory of the value model."""),
    (
        "rlhf-ppo critic runs/ppo",
        "rlhf-ppo critic train --model_name_or_path runs/sft --completions runs/ppo --output_dir runs/critic",
    ),
)

GENERATE = Page(
    "Generate responses, of which a critic chooses the best.",
    _groups("""Models and prompts
model MODEL: The policy: a directory or a hub name.
critic MODEL: The critic, such as RUN/critic of a run with save_critic.
dataset_name DATA: Prompts: a file, a directory or a hub name, with the column `prompt`.
num_prompts = 256: Number of prompts, from the first.
Search
n = 8: Best of n: responses to each prompt.
weighted = false: Best of n: add up the values of equal responses.
width N: Value-guided search instead: blocks of tokens in a round.
block = 8: Value-guided search: tokens of a block.
Responses
max_new_tokens = 128: Maximum length of a response, in tokens.
temperature = 0.7: Sampling temperature; use that of training.
seed = 0: Seed of the sampling.
output FILE = responses.jsonl: File to write: one JSON object per prompt."""),
    ("rlhf-ppo generate --model runs/ppo --critic runs/ppo/critic --dataset_name prompts.jsonl --n 8",),
)

_PLACEHOLDERS = {bool: "", int: "N", float: "X"}


def _sections(titles: Mapping[str, str], *dataclasses: type) -> dict[str, list[Option]]:
    """Group the fields of dataclasses into sections.

    Args:
        titles: First option of each section: its title.
        dataclasses: Their fields, in order; unsupported ones are left out.
    """
    groups: dict[str, list[Option]] = {}
    title = ""
    hints = {name: hint for dataclass in dataclasses for name, hint in get_type_hints(dataclass).items()}
    for each in (each for dataclass in dataclasses for each in fields(dataclass)):
        title = titles.get(each.name, title)
        if each.name in UNAVAILABLE or each.metadata["help"].startswith("Not available"):
            continue
        default = None if each.default in (MISSING, "default") else each.default
        placeholder = _placeholder(hints[each.name])
        groups.setdefault(title, []).append(Option(each.name, default, each.metadata["help"], placeholder))
    return groups


def _placeholder(annotation: Any) -> str:
    """Return the placeholder of a value, from its type; "" for a switch."""
    kind = annotation if get_origin(annotation) is Literal else next(iter(get_args(annotation)), annotation)
    return "|".join(get_args(kind)) if get_origin(kind) is Literal else _PLACEHOLDERS.get(kind, "TEXT")


def _judge() -> Page:
    titles = {
        "dataset_name": "Prompts",
        "model": "Compared responses",
        "judge_model": "Judge",
        "max_new_tokens": "Generation",
        "output_dir": "Output",
    }
    return Page(
        "Measure how often a judge prefers one model's responses over another's.",
        _sections(titles, JudgeArguments),
        (
            "rlhf-ppo judge --model runs/ppo --opponent runs/sft --judge_model runs/judge_reward "
            "--dataset_name held_out.jsonl",
            "rlhf-ppo judge --model runs/ppo --opponent_column reference --judge_model gpt-4o-mini "
            "--dataset_name held_out.jsonl --num_prompts 100",
        ),
        "--config FILE reads options from a YAML file.",
    )


def _llm() -> Page:
    titles = {
        "train": "Command",
        "model": "Model and data",
        "lr": "Optimization",
        "peft": "Adapters",
        "log": "Logs, checkpoints and hub",
        "model_ref": "PPO",
    }
    return Page(
        "Train with the options of `aitraining llm`: --trainer ppo, reward or sft.",
        _sections(titles, LLMCommand, LLMTrainingParams),
        (
            "rlhf-ppo llm --train --trainer sft --model models/base --data-path texts.jsonl --project-name runs/sft",
            "rlhf-ppo llm --train --trainer ppo --model runs/sft --rl-reward-model-path runs/reward "
            "--data-path prompts.jsonl --project-name runs/ppo",
        ),
        "Options of AITraining that are missing here are errors that name an alternative.",
    )


def page_of(command: str) -> Page | None:
    """Return the short help of a command; None if its parser prints its help."""
    if command in ("judge", "eval", "llm"):
        return _llm() if command == "llm" else _judge()
    return {
        "train": TRAIN,
        "sft": SFT,
        "reward": REWARD,
        "estimate": ESTIMATE,
        "critic": CRITIC,
        "generate": GENERATE,
    }.get(command)


def print_page(command: str, page: Page) -> None:
    """Print the short help of a command.

    Args:
        command: Name of the command.
        page: Its help.
    """
    console = Console(highlight=False)
    console.print(cell(f"usage: rlhf-ppo {command} [options]\n\n{page.summary}"))
    dash = "-" if command == "llm" else "_"
    for title, options in page.groups.items():
        console.print(cell(f"\n{title}", "bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=24)
        table.add_column()
        for option in options:
            table.add_row(_left(option, dash), cell(option.help).append(_default(option.default), style="dim"))
        console.print(table)
    console.print(cell("\nExamples", "bold"))
    for example in page.examples:
        print_command(console, example)
    console.print(cell(f"\n{page.more}"))


def _left(option: Option, dash: str) -> Any:
    value = option.value or _PLACEHOLDERS.get(type(option.default), "TEXT")
    return cell(f"  --{option.name.replace('_', dash)}", "cyan").append(f" {value}".rstrip(), style="none")


def _default(default: Any) -> str:
    if default is None or default is False:
        return ""
    return f" [default: {'on' if default is True else default}]"


def print_command(console: Console, command: str) -> None:
    r"""Print a command line that can be copied: lines break between options, with a `\` at the end.

    Args:
        console: The terminal.
        command: The command line.
    """
    lines, line = [], ""
    for part in command.replace(" --", "\n--").split("\n"):
        if line and len(line) + len(part) + 5 > console.width:
            lines, line = [*lines, f"{line} \\"], f"    {part}"
        else:
            line = f"{line} {part}" if line else f"  {part}"
    for each in [*lines, line]:
        console.print(cell(each), soft_wrap=True)
