"""Advice for arguments and names of transformers and of TRL's trainers that PPO does not have."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

_TABLES = yaml.safe_load(Path(__file__).with_name("hints.yaml").read_text(encoding="utf-8"))


def _by_name(table: str) -> dict[str, str]:
    """Return the advice of a table of `hints.yaml` by name."""
    return {name: advice for advice, names in _TABLES[table].items() for name in names}


REMOVED = _by_name("removed")
"""Argument of the documented signature that transformers no longer has or reads: the alternative."""

CONFIG_HINTS = _by_name("config")
"""Argument of TRL's configurations that `PPOConfig` does not have: the option to use, or why there is none."""

TRAINER_HINTS = _by_name("trainer")
"""Argument of other trainers that `PPOTrainer` does not have: the argument to use, or why there is none."""

METHOD_HINTS = _by_name("method")
"""Attribute of the trainer of TRL 0.11 that `PPOTrainer` does not have, and the line to write instead."""

IMPORT_HINTS = _by_name("import")
"""Name of TRL's that `rlhf_ppo` does not have, and the line to write instead."""


def reject_call(
    owner: str, args: Sequence[Any], kwargs: Mapping[str, Any], known: Collection[str], elsewhere: Mapping[str, str]
) -> None:
    """Raise for a trainer's arguments in the order, or with the names, of other trainers.

    Args:
        owner: Name of the trainer's class.
        args: Positional arguments.
        kwargs: Named arguments.
        known: Names of the arguments that exist.
        elsewhere: For each argument of another class, that class.

    Raises:
        TypeError: A model is first, or second as in TRL 0.11; or a name does not exist.
    """
    fix = f"write {owner}(args, model=..., ref_model=..., processing_class=...)"
    if args and "args" in kwargs:
        raise TypeError(f"the first argument of {owner} is args, got {type(args[0]).__name__}: {fix}")
    if len(args) > 1 and (isinstance(args[1], str) or hasattr(args[1], "state_dict")):
        kind = type(args[1]).__name__
        raise TypeError(f"the second argument of {owner} is processing_class, a tokenizer, got {kind}: {fix}")
    of_config = {name: f"in PPOConfig: {hint}" for name, hint in CONFIG_HINTS.items()}
    reject_unknown(owner, kwargs, known, of_config | TRAINER_HINTS, elsewhere)


def hint_for(name: str, known: Collection[str], hints: Mapping[str, str], elsewhere: Mapping[str, str]) -> str:
    """Return advice on an unknown argument: the hint for its name, its right place, or the closest known name.

    Args:
        name: The argument.
        known: Names of the arguments that exist.
        hints: Hints by name.
        elsewhere: For each argument of another class, that class.
    """
    if name in hints:
        return hints[name]
    if name in elsewhere:
        return f"it is an argument of {elsewhere[name]}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def reject_unknown(
    owner: str, names: Iterable[str], known: Collection[str], hints: Mapping[str, str], elsewhere: Mapping[str, str]
) -> None:
    """Raise for arguments that do not exist; see `hint_for`.

    Raises:
        TypeError: There is one; the message lists all, each with its hint.
    """
    advice = {name: hint_for(name, known, hints, elsewhere) for name in names if name not in known}
    if advice:
        listed = ", ".join(f"{name!r} ({hint})" if hint else repr(name) for name, hint in advice.items())
        raise TypeError(f"{owner} got an unexpected keyword argument {listed}")


def reject_removed(names: Iterable[str]) -> None:
    """Raise for names that `TrainingArguments` no longer has.

    Args:
        names: Names of arguments.

    Raises:
        TypeError: One of them is in `REMOVED`; the message names the replacement.
    """
    advice = [f"{name}: {REMOVED[name]}" for name in names if name in REMOVED]
    if advice:
        raise TypeError(f"no longer an argument of transformers.TrainingArguments: {'; '.join(advice)}")


class ExplainsUnknown:
    """Base of a dataclass whose constructor explains removed, foreign and misspelled arguments.

    As a base class, it keeps the signature of the dataclass's constructor.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the names of the keyword arguments before `__init__` sees them."""
        known = inspect.signature(cls).parameters
        # In the last versions of transformers that have a removed argument, its default is None.
        reject_removed(name for name, value in kwargs.items() if value is not None or name not in known)
        reject_unknown(cls.__name__, kwargs, known, CONFIG_HINTS, dict.fromkeys(TRAINER_ARGUMENTS, "PPOTrainer"))
        return super().__new__(cls)


TRAINER_ARGUMENTS = (
    *("processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model", "data_collator"),
    *("eval_dataset", "optimizers", "callbacks", "peft_config", "reward_funcs", "reward_processing_classes"),
    *("value_peft_config", "kl_controller", "engine", "ptx_dataset", "tools", "rollout_func", "environment_factory"),
)
"""Arguments of `PPOTrainer` that are not fields of `PPOConfig`."""
