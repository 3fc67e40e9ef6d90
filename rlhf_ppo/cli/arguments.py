"""Arguments of the command lines: the parser of `PPOConfig`, models, data sets, quantization and trackers."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import yaml
from accelerate import PartialState
from transformers import TrainingArguments
from trl.scripts.utils import ScriptArguments, TrlParser
from trl.trainer.model_config import ModelConfig
from trl.trainer.utils import get_quantization_config

from rlhf_ppo.cli.errors import CommandParser, left_over
from rlhf_ppo.config.inherited import check_keys, is_logged_in_to_wandb
from rlhf_ppo.config.presets import PRESETS
from rlhf_ppo.config.validation import CONFIG_HINTS, UniqueKeys, check_json_file, option, reject_removed
from rlhf_ppo.terminal import redact_in_place, visible_logger


class PPOArgumentParser(CommandParser, TrlParser):
    """A `TrlParser` whose errors name the replacement of removed, foreign and misspelled options.

    ```python
    script_args, training_args, model_args = PPOArgumentParser(
        (ScriptArguments, PPOConfig, ModelConfig)
    ).parse_args_and_config()
    ```

    Raises:
        TypeError: The command line or the YAML file holds an option that `TrainingArguments` no longer has.
        ValueError: The YAML file cannot be read, or an option is unknown.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"usage": "%(prog)s [options]", **kwargs})

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; an error explains unknown options."""
        parsed, unknown = super().parse_known_args(args, namespace)
        redact_in_place(sys.argv)  # trackers write it into files
        options = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        reject_removed(option.lstrip("-").replace("-", "_") for option in options)
        if options:
            raise ValueError(self._unknown(options))
        if unknown:
            words = sys.argv[1:] if args is None else args
            raise ValueError(f"there {'is' if len(unknown) == 1 else 'are'} {left_over(unknown, words)}")
        for name in ("deepspeed", "fsdp_config", "accelerator_config"):
            path = getattr(parsed, name, None)
            if isinstance(path, str) and not path.lstrip().startswith("{"):
                check_json_file(path, name)
        return parsed, unknown

    def parse_args_and_config(self, args: Iterable[str] | None = None, *_: Any, **__: Any) -> tuple[Any, ...]:
        """Parse the command line, over the values of the YAML file after `--config`."""
        given = [*(sys.argv[1:] if args is None else args)]
        words = [part for word in given for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
        if words.count("--config") > 1:
            self.error("argument --config: given twice; use one file for all options")
        if "--config" in words:
            position = words.index("--config")
            if position + 1 == len(words):
                self.error("argument --config: expected one argument")
            if (shipped := PRESETS / f"{words[position + 1]}.yaml").is_file():
                words[position + 1] = str(shipped)
            check_yaml(words[position + 1])
        parsed = super().parse_args_and_config(words)
        for each in parsed:
            modules = getattr(each, "lora_target_modules", None)
            if isinstance(modules, str) and re.fullmatch(r"[\w.]+", modules):
                each.lora_target_modules = [modules]  # a list's only name, which PEFT would read as a pattern
        return parsed

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Take defaults from the YAML file; an error explains unknown options."""
        names = [name.replace("-", "_") for name in kwargs]  # as on the command line
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"the key {', '.join(twice)} is repeated in --config")
        kwargs = dict(zip(names, kwargs.values(), strict=True))
        reject_removed(kwargs)
        for action in self._actions:
            if action.choices is not None and kwargs.get(action.dest) not in (None, *action.choices):
                if kwargs[action.dest] is False and "no" in action.choices:
                    kwargs[action.dest] = "no"  # as YAML reads the word
                    continue
                given = kwargs[action.dest]
                raise ValueError(f"{action.dest}={given!r} in --config must be one of {[*action.choices]}")
        unknown = super().set_defaults_with_config(**kwargs)
        if unknown:
            raise ValueError(f"in --config {self._unknown([word for word in unknown if word.startswith('--')])}")
        return unknown

    def _unknown(self, options: Sequence[str]) -> str:
        known = [name for action in self._actions for name in action.option_strings]
        names = {option: option.lstrip("-").replace("-", "_") for option in options} if "--kl_coef" in known else {}
        if hints := [f"{option} ({CONFIG_HINTS[name]})" for option, name in names.items() if name in CONFIG_HINTS]:
            return f"there is no option {', '.join(hints)}"
        near = [match for option in options for match in difflib.get_close_matches(option, known, n=1)]
        hint = f"; did you mean {' and '.join(near)}?" if near else "; --help lists the options"
        return f"there is no option {', '.join(options)}{hint}"


def check_yaml(path: str) -> None:
    """Check that a YAML file holds options, `name: value`, each name once.

    Args:
        path: The file after `--config`.

    Raises:
        ValueError: It cannot be read, is not a YAML mapping, or a key is repeated.
    """
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.load(file, UniqueKeys)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--config {path!r} cannot be read as YAML: {reason}") from error
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise ValueError(f"--config {path!r} must hold options as `name: value`, such as `learning_rate: 1e-6`")


def check_single_process(task: str) -> None:
    """Check that the command was not started in several processes, each of which would do all of its work.

    Args:
        task: What the command does, such as "a critic is fitted".

    Raises:
        ValueError: A launcher has started several.
    """
    # Launchers set both variables; accelerate's own count is 1 on CPUs.
    processes = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if processes > 1:
        raise ValueError(f"num_processes={processes}: {task} in a single process; start only one")


# ---- Models and data sets ----


@dataclass
class DryRunScriptArguments(ScriptArguments):
    """TRL's `ScriptArguments`, and a dry run."""

    dry_run: bool = option(False, "Check files, columns and options, list all problems, and exit.")


@dataclass
class PPOScriptArguments(DryRunScriptArguments):
    """Options of `rlhf-ppo train` besides those of `PPOConfig` and `ModelConfig`."""

    reward_funcs: list[str] | None = option(
        None,
        "Reward functions: built-in names, package.module.function, file.py:function or addresses, with optional "
        "settings, such as 'keyword(keywords=[\"yes\"])'. With them, a reward model scores only if reward_model_path "
        "is given.",
    )
    environment: list[str] | None = option(
        None,
        "An environment of several turns as file.py:Class or package.module.Class; several as name=file.py:Class, of "
        "which the column `environment` names one.",
    )
    tools: list[str] | None = option(None, "Functions that the policy may call, as file.py:function.")
    value_model_path: str | None = option(
        None,
        "The value model at its start; by default the reward model, or the policy with a new head.",
    )
    ptx_dataset: str | None = option(
        None,
        "With ptx_coef: additional texts for the policy to learn from, with the columns of SFT; the split train of a "
        "file, a directory or a hub name.",
    )
    trust_remote_code: bool = option(False, "Run Python code of a model's repository. Only for code you have read.")


# ---- Quantization ----


def quantization_options(model_args: ModelConfig) -> dict[str, Any]:
    """Return the `from_pretrained` arguments of `--load_in_4bit` and `--load_in_8bit`.

    Args:
        model_args: TRL's options of a model.

    Raises:
        ValueError: There is no CUDA GPU, or bitsandbytes is not installed.
    """
    asked = [name for name in ("load_in_4bit", "load_in_8bit") if getattr(model_args, name)]
    if not asked:
        return {}
    if not torch.cuda.is_available():
        raise ValueError(
            f"{asked[0]}=True quantizes with bitsandbytes, which needs a CUDA GPU, and torch finds none: leave "
            f"--{asked[0]} out (with --use_peft --dtype bfloat16 the frozen weights have 16 bits), or use a GPU"
        )
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"{asked[0]}=True needs bitsandbytes, which is not installed: pip install bitsandbytes")
    return {"quantization_config": get_quantization_config(model_args), "device_map": {"": PartialState().device}}


# ---- Data set columns ----

NUMBERS = ("bool", "double", "float", "int", "uint")
"""How the names of the types of numbers begin in `datasets`, such as int64."""


def check_columns(dataset: Any, alternatives: list[set[str]], name: str = "the data set") -> None:
    """Check that a data set has the columns that TRL's trainer reads.

    Args:
        dataset: The rows; the columns of a stream may be unknown.
        alternatives: Sets of columns; the data set must have all columns of one set.
        name: Its name in errors.

    Raises:
        ValueError: It has none of the sets, or a column holds numbers.
    """
    columns = dataset.column_names
    if columns is not None and not any(needed <= {*columns} for needed in alternatives):
        wanted = " or ".join(" and ".join(f"`{name}`" for name in sorted(needed)) for needed in alternatives)
        raise ValueError(f"{name} has the columns {columns}, but training needs {wanted}; rename them")
    for column, kind in (dataset.features or {}).items():
        if column in set().union(*alternatives) and getattr(kind, "dtype", "string").startswith(NUMBERS):
            raise ValueError(f"the column `{column}` holds {kind.dtype}, but training needs texts or messages in it")


# ---- Trackers ----

logger = visible_logger(__name__)


def prepare_trackers(args: TrainingArguments) -> None:
    """Let W&B record offline into `./wandb` if nobody is logged in, instead of asking for a login; warn once.

    Args:
        args: Gives `report_to`.

    Raises:
        ValueError: Another tracker has no key.
    """
    if "wandb" in (args.report_to or []) and not is_logged_in_to_wandb():
        import wandb

        settings: Any = wandb.setup().settings
        settings.mode = "offline"
        logger.warning_once(
            "report_to=['wandb'], but nobody is logged in to W&B: the run is recorded in ./wandb, not uploaded. Log "
            "in with `wandb login`, upload it later with `wandb sync`, or report to none."
        )
    check_keys(args)
