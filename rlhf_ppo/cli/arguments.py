"""Arguments of the command lines: the parser, the options besides `PPOConfig`'s, data sets and trackers."""

from __future__ import annotations

import argparse
import inspect
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, cast, get_args, get_type_hints

import yaml
from datasets import Dataset
from pyarrow import DataType, types
from transformers import TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from trl.scripts.utils import ScriptArguments, TrlParser
from trl.trainer.model_config import ModelConfig
from trl.trainer.reward_config import RewardConfig
from trl.trainer.sft_config import SFTConfig

from rlhf_ppo.cli.errors import CommandParser, user_errors
from rlhf_ppo.config.checks import (
    CONFIG_HINTS,
    REJECTED,
    ExplainsUnknown,
    Interval,
    check_range,
    choose_bf16,
    hint_for,
    option,
    reject_removed,
    suggestion,
)
from rlhf_ppo.config.ppo_config import AgentArguments, EngineArguments, LoggingArguments, PPOConfig, RecipeArguments
from rlhf_ppo.config.presets import PRESETS
from rlhf_ppo.data.sources import Rows, choose_split, hold_out, load_splits, separate_prompts, with_prompts_from
from rlhf_ppo.models.adapters import is_adapter_directory
from rlhf_ppo.terminal import RedactsSecrets, visible_logger


class PPOArgumentParser(CommandParser, TrlParser):
    """A `TrlParser` that takes the name of a preset after `--config`, and whose errors name the closest option.

    ```python
    script_args, training_args, model_args = PPOArgumentParser(
        (ScriptArguments, PPOConfig, ModelConfig)
    ).parse_args_and_config()
    ```

    Raises:
        TypeError: The command line holds an option that `TrainingArguments` no longer has.
        ValueError: The YAML file cannot be read, or an option is unknown, or null where it needs a value.
    """

    def parse_args_and_config(self, args: Iterable[str] | None = None, *_: object, **__: object) -> tuple[Any, ...]:
        """Parse the command line; its options override those of the file or preset that `--config` names."""
        first = CommandParser(self.prog, add_help=False)
        first.add_argument("--config")
        options, words = first.parse_known_args(None if args is None else [*args])
        config = [] if options.config is None else ["--config", self._config_file(options.config, words)]
        try:
            *groups, unknown = super().parse_args_and_config([*config, *words], return_remaining_strings=True)
        except yaml.YAMLError as error:  # it names the line, or the key
            raise ValueError(f"--config {options.config}: {error}") from error
        values = dict(zip(unknown[::2], unknown[1::2], strict=True))  # of the file
        if any(values.get(f"--{section}", "").startswith("{") for section in ("common", "ppo", "report")):
            raise ValueError(
                f"--config {options.config} is the file of a pipeline: rlhf-ppo pipeline {options.config}"
            )
        if values:
            raise ValueError(f"--config {options.config}: there is no option {', '.join(self._advice(values))}")
        return tuple(groups)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Take the values of a file."""
        for group in self.dataclass_types:
            kinds = get_type_hints(group)
            for each in fields(group):
                takes_null = each.default is None or NoneType in get_args(kinds[each.name])
                if each.name in values and values[each.name] is None and not takes_null:
                    raise yaml.YAMLError(f"{each.name} is null, but needs a value: write it, or delete the line")
        for action in self._actions:
            value, choices = values.get(action.dest), [*map(str, action.choices or ())]
            if value is False and "no" in choices:
                values[action.dest] = "no"  # which YAML 1.1 reads as False
            elif isinstance(value, str) and choices and value not in choices:
                raise yaml.YAMLError(f"{action.dest}={value!r} must be one of {choices}")
        return super().set_defaults_with_config(**values)

    def _config_file(self, name: str, words: list[str]) -> str:
        """Return a preset's file; any other name is a path.

        If the policy trains adapters it is the preset for LoRA, whose rates are too large for all weights of a value
        model: unless one is chosen, the value is then a head of the policy.
        """
        for_all, for_lora = (PRESETS / f"{name.removesuffix('-lora')}{kind}.yaml" for kind in ("", "-lora"))
        if not for_lora.is_file():
            if not (for_all.is_file() or os.path.exists(name)) and PPOConfig in [*self.dataclass_types]:
                presets = sorted(path.stem for path in PRESETS.glob("*.yaml"))
                near = suggestion(name, presets)
                self.error(f"--config {name} is no file and no preset{near}: the presets are {', '.join(presets)}")
            return str(for_all if for_all.is_file() else name)
        options = vars(self.parse_known_args(words)[0])
        policy = options.get("sft_model_path")
        if options.get("use_peft") or (policy is not None and is_adapter_directory(policy)):
            if "value_model_path" in options and not (options["value_model_path"] or options["share_base_model"]):
                self.set_defaults(value_model_path="policy")
            return str(for_lora)
        if name.endswith("-lora"):
            self.error(f"--config {name} has learning rates for LoRA adapters: add --use_peft, or use {name[:-5]}")
        return str(for_all)

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[Any, list[str]]:
        """Parse; an error explains unknown options."""
        parsed, unknown = super().parse_known_args(args, namespace)
        advice = self._advice(word.partition("=")[0] for word in unknown if word.startswith("--"))
        if unknown:
            raise ValueError(
                f"there is no option {', '.join(advice)}" if advice else f"no option takes {' '.join(unknown)!r}"
            )
        return parsed, unknown

    def _advice(self, options: Iterable[str]) -> list[str]:
        """Return unknown options, each with its hint."""
        known = [action.dest for action in self._actions]
        advice: list[str] = []
        for word in options:
            name = word.lstrip("-").replace("-", "_")
            reject_removed([name])
            hint = hint_for(name, known, CONFIG_HINTS if PPOConfig in [*self.dataclass_types] else {}, {})
            advice.append(f"{word} ({hint})" if hint else word)
        return advice


def parse(groups: Sequence[type], program: str, argv: Sequence[str] | None) -> Any:
    """Parse a command line; a mistake ends the program with one sentence.

    Args:
        groups: The dataclasses whose fields are the options.
        program: Start of error messages.
        argv: The options; None takes the program's own.
    """
    has_ppo = PPOConfig in groups
    preset = ", or a preset such as recommended" if has_ppo else ""
    about = f"--config FILE reads options from a YAML file{preset}; the command line wins."
    parser = PPOArgumentParser(groups, prog=program, usage="%(prog)s [options]", description=about)
    for action in parser._actions if has_ppo else ():
        if action.dest in REJECTED or str(action.help).startswith("Derived"):
            action.help = argparse.SUPPRESS
    group_help(parser)
    with user_errors(program):
        options = parser.parse_args_and_config(argv)
        for model_args in options:
            if isinstance(model_args, ModelConfig):
                _check_models(model_args, next((each for each in options if isinstance(each, PPOConfig)), None))
        return options


def _check_models(model_args: ModelConfig, args: PPOConfig | None) -> None:
    """Raise a `ValueError` if options would train all weights instead of an adapter, or another model."""
    for name, of_class in ModelConfig.__dataclass_fields__.items():
        is_of_lora = (name.startswith("lora_") or name in ("use_rslora", "use_dora")) and name != "lora_task_type"
        if is_of_lora and not model_args.use_peft and (value := getattr(model_args, name)) != of_class.default:
            raise ValueError(f"{name}={value!r} has no effect without use_peft: add --use_peft")
        if "bnb" in name and not model_args.load_in_4bit and (value := getattr(model_args, name)) != of_class.default:
            raise ValueError(f"{name}={value!r} has no effect without load_in_4bit: add --load_in_4bit")
    path, policy = model_args.model_name_or_path, PPOConfig.__dataclass_fields__["sft_model_path"].default
    if args is not None and path is not None and args.sft_model_path == policy != path:
        raise ValueError(
            f"model_name_or_path={path!r} names the tokenizer only, and sft_model_path={policy!r}, its default, would "
            f"be trained: write --sft_model_path {path}"
        )


def group_help(parser: PPOArgumentParser) -> None:
    """Show options under the titles of `HELP_GROUPS`; options of other classes stay above them.

    Args:
        parser: A parser of dataclasses.
    """
    used = {kind for dataclass_type in parser.dataclass_types for kind in dataclass_type.__mro__}
    untitled = parser._optionals._group_actions
    for title, classes in HELP_GROUPS.items():
        names = {name for kind in classes if kind in used for name in kind.__annotations__}
        group = parser.add_argument_group(title)
        group._group_actions += [action for action in untitled if action.dest in names]
        untitled[:] = [action for action in untitled if action.dest not in names]


# ---- Models and data sets ----


@dataclass
class DryRunScriptArguments(ScriptArguments):
    """TRL's `ScriptArguments`, a dry run, and how an adapter is saved."""

    dry_run: bool = option(False, "Load data and models, check everything, and exit.")
    merge_adapter: bool = option(False, "Save the merged model instead of the adapter.")


@dataclass
class PPOScriptArguments(DryRunScriptArguments):
    """Options of `rlhf-ppo train` besides those of `PPOConfig` and `ModelConfig`."""

    reward_funcs: list[str] | None = option(
        None,
        "Reward functions: built-in names, package.module.function, file.py:function or addresses. With "
        "them, a reward model scores only if reward_model_path is given.",
    )
    prompt_column: str | None = option(None, "Column of the prompts; by default `input_ids`, `prompt` or `text`.")
    environment: list[str] | None = option(
        None,
        "A multi-turn environment, as file.py:Class or package.module.Class. For several, write name=file.py:Class; "
        "each row's column `environment` names one.",
    )
    tools: list[str] | None = option(None, "Functions that the policy may call, as file.py:function.")
    value_model_path: str | None = option(
        None,
        "Model from which the value model starts, or 'policy' for a head on the policy; by default the reward model, "
        "or the policy with a new head.",
    )
    ptx_dataset: str | None = option(
        None,
        "With ptx_coef: additional texts for the policy to learn from, with SFT's columns: the split `train` of a "
        "file, a directory or a hub name.",
    )
    trust_remote_code: bool = option(False, "Run Python code of a model's repository. Only for code you have read.")


class _DefaultBf16(ExplainsUnknown, RedactsSecrets):
    """Base of TRL's configurations, with `PPOConfig`'s `bf16`: the launcher's, or what the device supports."""

    def __post_init__(self) -> None:
        """Set `bf16`, which TRL switches on everywhere."""
        args: Any = self
        check_range("max_length", args.max_length, Interval(1, math.inf), "Tokens of the longest row.")
        args.bf16 = choose_bf16(args)
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]
        args.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"  # torch warns otherwise


@dataclass(repr=False)
class SFTArguments(_DefaultBf16, SFTConfig):
    """TRL's `SFTConfig` with the `bf16` of `PPOConfig`."""

    bf16: bool | None = field(default=None, metadata=dict(PPOConfig.__dataclass_fields__["bf16"].metadata))


@dataclass(repr=False)
class RewardArguments(_DefaultBf16, RewardConfig):
    """TRL's `RewardConfig` with the `bf16` of `PPOConfig`."""

    bf16: bool | None = field(default=None, metadata=dict(PPOConfig.__dataclass_fields__["bf16"].metadata))


HELP_GROUPS: dict[str, tuple[type, ...]] = {
    "script": (ScriptArguments, DryRunScriptArguments, PPOScriptArguments),
    "models": (ModelConfig,),
    "PPO": (PPOConfig,),
    "PPO, recipes": (RecipeArguments,),
    "PPO, generation engine": (EngineArguments,),
    "PPO, tools and environments": (AgentArguments,),
    "PPO, logs": (LoggingArguments,),
    "transformers.TrainingArguments": (TrainingArguments,),
}
"""Groups of options in the help, in order: each title, and the classes that declare its options."""


def train_and_eval_rows(script_args: ScriptArguments, command: str) -> tuple[Any, Any]:
    """Load the rows to train on and to evaluate on; preference pairs get explicit prompts.

    Args:
        script_args: Gives the data and its splits.
        command: "sft", "reward", or "train", which holds rows out for evaluation if there is no split for it.
    """
    splits = load_splits(script_args.dataset_name, script_args.dataset_config, script_args.dataset_streaming)
    train_dataset, eval_dataset = choose_split(splits, script_args.dataset_train_split, "dataset_train_split"), None
    if script_args.dataset_test_split != "test" or "test" in splits:
        eval_dataset = choose_split(splits, script_args.dataset_test_split, "dataset_test_split")
    if command == "train":
        column = cast(PPOScriptArguments, script_args).prompt_column
        train_dataset, eval_dataset = (with_prompts_from(rows, column) for rows in (train_dataset, eval_dataset))
        if eval_dataset is None:
            train_dataset, eval_dataset = hold_out(train_dataset, num_rows=100)
    if command == "sft":
        return train_dataset, eval_dataset
    where_missing = command == "train"
    held_out = None if eval_dataset is None else separate_prompts(eval_dataset, where_missing)
    return separate_prompts(train_dataset, where_missing), held_out


def check_columns(dataset: Rows, alternatives: list[set[str]], name: str = "the data set") -> None:
    """Check that a data set has the columns that TRL's trainer reads, and that they hold texts or conversations.

    Args:
        dataset: The rows; the columns of a stream may be unknown.
        alternatives: Sets of columns; the data set must have all columns of one set.
        name: Its name in errors.

    Raises:
        ValueError: It has none of the sets, or a row has no text or conversation there, or one of each.
    """
    columns = dataset.column_names
    has = next((needed for needed in alternatives if needed <= {*(columns or ())}), None)
    problem = None
    if columns is not None and has is None:
        wanted = " or ".join(" and ".join(f"`{name}`" for name in sorted(needed)) for needed in alternatives)
        wanted += ", and `prompt` unless both begin with it" if "chosen" in alternatives[0] else ""
        name_it = f"rename_columns({{'OLD': '{min(alternatives[0])}'}}).to_json('renamed.jsonl')"
        problem = (
            f"has the columns {columns}, but training needs {wanted}: rename them, such as by datasets' `{name_it}`"
        )
    elif has and isinstance(dataset, Dataset) and "input_ids" not in has:
        read = has | {"prompt"} if "chosen" in has and "prompt" in dataset.column_names else has
        problem = _unreadable_row(dataset, sorted(read))
    if problem:
        raise ValueError(f"{name} {problem}")


def _unreadable_row(dataset: Dataset, columns: Sequence[str]) -> str | None:
    """Describe the first row whose columns are not all texts, or all conversations; None if there is none."""
    table = dataset.data.table.select(columns)
    kinds = {_kind_of_type(table.schema.field(name).type) for name in columns}
    is_chat = "messages" in columns
    allowed = [{"conversation"}] if is_chat else [{"text"}, {"conversation"}]
    if kinds in allowed and not any(table.column(name).null_count for name in columns):
        return None
    for index, row in enumerate(dataset.select_columns([*columns])):
        values: Any = [dict(row)[name] for name in columns]
        kinds = {"text" if isinstance(value, str) else "conversation" if _is_chat(value) else "" for value in values}
        if kinds not in allowed:
            shown = ", ".join(f"{name}={value!r:.40}" for name, value in zip(columns, values, strict=True))
            fix = "conversations" if is_chat else "texts, or conversations"
            return f"has {shown} in row {index}: write {fix} (lists of messages), or drop the row"
    return None


def _kind_of_type(kind: DataType) -> str:
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    is_list = types.is_list(kind) or types.is_large_list(kind)
    return "conversation" if is_list and types.is_struct(kind.value_type) else ""


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(message, Mapping) for message in value)


# ---- Trackers ----

logger = visible_logger(__name__)


def prepare_trackers(args: TrainingArguments) -> None:
    """Check that trackers are installed; let W&B record offline into `./wandb` if nobody is logged in, and warn once.

    Args:
        args: Gives `report_to`.

    Raises:
        ValueError: A tracker is not installed, or transformers does not know it.
    """
    names: Any = args.report_to  # a list, after `__post_init__`
    for name, tracker in zip(names, get_reporting_integration_callbacks(names), strict=True):
        try:
            tracker()
        except (RuntimeError, ImportError) as error:
            raise ValueError(f"report_to={name!r}: {error}") from error
    if "wandb" in (args.report_to or []) and not is_logged_in_to_wandb():
        import wandb

        settings: Any = wandb.setup().settings
        settings.mode = "offline"
        logger.warning_once(
            "report_to=['wandb'], but nobody is logged in to W&B: the run is recorded in ./wandb, not uploaded. Log "
            "in with `wandb login`, upload it later with `wandb sync`, or report to none."
        )


_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")


def is_logged_in_to_wandb() -> bool:
    """Return whether W&B has a key or needs none, without asking the user or the network."""
    if os.environ.get("WANDB_MODE") in _WITHOUT_LOGIN:
        return True
    import wandb

    if wandb.run is not None or wandb.setup().settings.mode in _WITHOUT_LOGIN:
        return True
    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return wandb.api.api_key is not None  # before W&B 0.28
