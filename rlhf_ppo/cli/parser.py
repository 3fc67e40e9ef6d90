"""The command line of `PPOConfig`: options, a YAML file, and answers to options that are gone or misspelt."""

import argparse
import difflib
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import yaml
from trl.scripts.utils import TrlParser

from rlhf_ppo.cli.errors import CommandParser, left_over
from rlhf_ppo.config.inherited import reject_removed
from rlhf_ppo.config.presets import PRESETS, preset_options
from rlhf_ppo.config.recipes import settle_clip_ranges
from rlhf_ppo.config.redaction import hide_in
from rlhf_ppo.config.validation import check_json_file
from rlhf_ppo.config.yaml_files import UniqueKeys


class PPOArgumentParser(CommandParser, TrlParser):
    """A `TrlParser` that names the replacement of each option that `TrainingArguments` no longer has.

    ```python
    script_args, training_args, model_args = PPOArgumentParser(
        (ScriptArguments, PPOConfig, ModelConfig)
    ).parse_args_and_config()
    ```

    Raises:
        TypeError: The command line or the YAML file holds such an option.
        ValueError: The YAML file is none, or an option is unknown.
    """

    _of_config: Collection[str] = ()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and explain what is left over."""
        parsed, unknown = super().parse_known_args(args, namespace)
        hide_in(sys.argv)  # which trackers write into files
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
        has_preset = getattr(parsed, "preset", None) in PRESETS
        if has_preset or getattr(parsed, "policy_loss", None) == "gspo":
            named = self._named(args)
            for name, value in (preset_options(parsed.preset, named) if has_preset else {}).items():
                setattr(parsed, name, value)
            settle_clip_ranges(parsed, named)
        return parsed, unknown

    def _named(self, args: Sequence[str] | None) -> set[str]:
        """Return the options that the command line or the YAML file gives."""
        defaults = {action: action.default for action in self._actions}
        try:
            for action in self._actions:
                action.default = argparse.SUPPRESS
            given, _ = super().parse_known_args(args)
        finally:
            for action, default in defaults.items():
                action.default = default
        return {*vars(given), *self._of_config}

    def parse_args_and_config(self, args: Iterable[str] | None = None, *_: Any, **__: Any) -> tuple[Any, ...]:
        """Parse the command line, over the values of the YAML file after `--config`."""
        words = [part for word in (sys.argv[1:] if args is None else args) for part in _apart(word)]
        if words.count("--config") > 1:
            self.error("argument --config: given twice; one file holds all")
        if "--config" in words:
            position = words.index("--config")
            if position + 1 == len(words):
                self.error("argument --config: expected one argument")
            check_yaml(words[position + 1])
        return super().parse_args_and_config(words)

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Take defaults from the YAML file, and explain options that are not there."""
        names = [name.replace("-", "_") for name in kwargs]  # as on the command line
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"the key {', '.join(twice)} stands twice in --config")
        kwargs = dict(zip(names, kwargs.values(), strict=True))
        reject_removed(kwargs)
        self._of_config = {*kwargs}
        for action in self._actions:
            if action.choices is not None and kwargs.get(action.dest) not in (None, *action.choices):
                if kwargs[action.dest] is False and "no" in action.choices:
                    kwargs[action.dest] = "no"  # as YAML reads the word
                    continue
                given = kwargs[action.dest]
                raise ValueError(f"{action.dest}={given!r} in --config must be one of {[*action.choices]}")
        unknown = super().set_defaults_with_config(**kwargs)
        if unknown:
            raise ValueError(f"{self._unknown([word for word in unknown if word.startswith('--')])}, as in --config")
        return unknown

    def _unknown(self, options: Sequence[str]) -> str:
        known = [name for action in self._actions for name in action.option_strings]
        near = [match for option in options for match in difflib.get_close_matches(option, known, n=1)]
        hint = f"; did you mean {' and '.join(near)}?" if near else "; --help lists the options"
        return f"there is no option {', '.join(options)}{hint}"


def check_yaml(path: str) -> None:
    """Check that a file holds options as YAML: `name: value`, each name once.

    Args:
        path: The file after `--config`.

    Raises:
        ValueError: It cannot be read, is no YAML or no mapping, or a key stands twice.
    """
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.load(file, UniqueKeys)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--config {path!r} cannot be read as YAML: {reason}") from error
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise ValueError(f"--config {path!r} must hold options as `name: value`, such as `learning_rate: 1e-6`")


def _apart(word: str) -> list[str]:
    return ["--config", word.removeprefix("--config=")] if word.startswith("--config=") else [word]
