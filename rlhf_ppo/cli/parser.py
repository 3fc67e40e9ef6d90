"""The command line of `PPOConfig`: options, a YAML file, and answers to options that are gone."""

from collections.abc import Sequence
from typing import Any

from trl.scripts.utils import TrlParser

from rlhf_ppo.inherited_arguments import reject_removed


class PPOArgumentParser(TrlParser):
    """A `TrlParser` that names the replacement of each option that `TrainingArguments` no longer has.

    ```python
    script_args, training_args, model_args = PPOArgumentParser(
        (ScriptArguments, PPOConfig, ModelConfig)
    ).parse_args_and_config()
    ```

    Raises:
        TypeError: The command line or the YAML file holds such an option.
    """

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and explain what is left over where it is an option of the past."""
        parsed, unknown = super().parse_known_args(args, namespace)
        reject_removed(option.partition("=")[0].lstrip("-").replace("-", "_") for option in unknown)
        return parsed, unknown

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Take defaults from the YAML file, and explain options of the past."""
        reject_removed(kwargs)
        return super().set_defaults_with_config(**kwargs)
