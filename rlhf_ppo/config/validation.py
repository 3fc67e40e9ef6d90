"""Checks of single values and of names, parsers of text values, and strict YAML.

An error names the argument, its value and its range; for the name of an argument that does not exist, the one to use
instead.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
import sys
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

import yaml

from rlhf_ppo.terminal import redacted


def option(default: Any, help: str, **argparse: Any) -> Any:
    """Return a dataclass field with a default and the text that `--help` shows."""
    return field(default=default, metadata={"help": help, **argparse})


class Interval(NamedTuple):
    """The finite numbers from `low` to `high`.

    Attributes:
        low: Smallest number.
        high: Largest number; infinity for no limit.
        open_low: Whether `low` itself is excluded.
        open_high: Whether `high` itself is excluded.
    """

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """Return whether `value` is finite, as a float too, and lies inside."""
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            return False
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        if self.low == -math.inf and self.high == math.inf:
            return "finite"
        low, high = (str(end) if isinstance(end, int) else f"{end:g}" for end in (self.low, self.high))
        start = f"{'greater than' if self.open_low else 'at least'} {low}"
        if self.high == math.inf:
            return f"finite and {start}"
        if self.high == FLOAT32_LARGEST and self.low != -FLOAT32_LARGEST:
            return f"{start} and at most {high}"
        return f"in {'(' if self.open_low else '['}{low}, {high}{')' if self.open_high else ']'}"


FLOAT32_LARGEST = 1e38
"""Limit of numbers that are used in float32, whose largest number is 3.4e38."""

WEIGHTS = Interval(-FLOAT32_LARGEST, FLOAT32_LARGEST)
"""The weights that a reward may have."""

LONGEST_WAIT = 1e6
"""Limit of a timeout in seconds: eleven days; some systems support no more than 49."""


Finite = Annotated[float, WEIGHTS]
Positive = Annotated[float, Interval(0, FLOAT32_LARGEST, open_low=True)]
NotNegative = Annotated[float, Interval(0, FLOAT32_LARGEST)]
AtLeastOneFloat = Annotated[float, Interval(1, FLOAT32_LARGEST)]
Share = Annotated[float, Interval(0, 1)]
PositiveShare = Annotated[float, Interval(0, 1, open_low=True)]
ShareBelowOne = Annotated[float, Interval(0, 1, open_high=True)]
Count = Annotated[int, Interval(0, math.inf)]
AtLeastOne = Annotated[int, Interval(1, math.inf)]
Port = Annotated[int, Interval(1, 65535)]
Seed = Annotated[int, Interval(0, 2**32 - 1)]  # as NumPy requires
Temperature = Annotated[float, Interval(1e-3, 1e3)]  # beyond, rounding to float32 decides the log-probabilities


def ranges_of(dataclass: type) -> dict[str, Interval]:
    """Return the range of each field whose annotation holds one, such as `AtLeastOne | None`."""
    ranges = {name: _range_in(hint) for name, hint in get_type_hints(dataclass, include_extras=True).items()}
    return {name: interval for name, interval in ranges.items() if interval is not None}


def _range_in(hint: Any) -> Interval | None:
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    return next(filter(None, map(_range_in, get_args(hint))), None)


def check_ranges(args: Any, ranges: Mapping[str, Interval]) -> None:
    """Check the numbers of a dataclass; see `check_range`.

    Args:
        args: The dataclass.
        ranges: Range of each checked field.

    Raises:
        ValueError: One is outside.
    """
    helps = {item.name: str(item.metadata.get("help", "")) for item in fields(args)}
    for name, interval in ranges.items():
        check_range(name, getattr(args, name), interval, helps[name])


def check_range(name: str, value: float | None, interval: Interval, meaning: str) -> None:
    """Raise unless `value` is None or inside `interval`.

    Args:
        name: Name of the argument.
        value: Its value.
        interval: Its range.
        meaning: Its help text, for the end of the message.

    Raises:
        ValueError: It is outside, infinite or NaN.
    """
    if value is not None and not interval.holds(value):
        raise ValueError(f"{name}={told(value)} must be {interval}. {name}: {meaning}")


def told(value: Any) -> str:
    """Return the representation of a value for messages; Python cannot print integers of more than 4300 digits."""
    is_huge = isinstance(value, int) and abs(value) >= 10**40
    return "a whole number of more than 40 digits" if is_huge else repr(value)


def python_number(value: Any) -> Any:
    """Convert NumPy numbers, fractions and similar to Python numbers, which JSON supports; return others unchanged."""
    if type(value) in (bool, int, float) or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return int(value)
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def check_type(name: str, value: Any, annotation: Any, meaning: str) -> None:
    """Raise unless `value` matches `annotation`; an integer matches float, a bool matches neither int nor float.

    Args:
        name: Name of the argument.
        value: Its value.
        annotation: A class, a `Literal`, a `list[...]`, a `dict[..., ...]` or a union of them.
        meaning: Its help text, for the end of the message.

    Raises:
        TypeError: It has another type.
        ValueError: It is none of the literals.
    """
    if _matches(value, annotation):
        return
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    if choices:
        none = [None] if types.NoneType in options else []
        raise ValueError(f"{name}={redacted(value, name)!r} must be one of {choices + none}. {name}: {meaning}")
    expected = " or ".join((option.__name__ if isinstance(option, type) else str(option)) for option in options)
    raise TypeError(
        f"{name}={redacted(value, name)!r} is not {expected.replace('NoneType', 'None')}. {name}: {meaning}"
    )


def parse_weights(name: str, value: Any) -> Any:
    """Parse weights that are given as text: a JSON list or object, or numbers of a command line.

    Args:
        name: Name of the argument.
        value: `[1.0, 0.5]`, `{"first": 1.0}`, the JSON text of either, a list that holds only such a text, or a list
            of numbers written as text. Any other value is returned unchanged, for `check_type`.

    Returns:
        A list or a dict.

    Raises:
        TypeError: A weight is not a number.
        ValueError: The text cannot be read, there is no weight, or a weight is out of range.
    """
    given = value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        is_json = len(value) == 1 and value[0].lstrip()[:1] in ("[", "{")
        value = value[0] if is_json else f"[{', '.join(value)}]"
    if isinstance(value, str):
        value = _json(name, value)
        if not isinstance(value, list | dict):
            raise ValueError(
                f"{name}={given!r:.200} cannot be read; write numbers, a JSON list such as '[1.0, 0.5]', or a JSON "
                """object such as '{"length": 0.5}'"""
            )
    if isinstance(value, list | dict) and not value:
        raise ValueError(f"{name}={given!r} must hold one number for each reward")
    if isinstance(value, list):
        return [_weight(f"{name}[{index}]", weight) for index, weight in enumerate(value)]
    if isinstance(value, dict):
        return {key: _weight(f"{name}[{key!r}]", weight) for key, weight in value.items()}
    return value


def _weight(name: str, given: Any) -> float:
    weight, meaning = python_number(given), "the factor of a reward in the score; 0 for a reward that is only logged"
    check_type(name, weight, float, meaning)
    check_range(name, weight, WEIGHTS, meaning)
    return weight


def parse_strings(name: str, value: Any) -> Any:
    r"""Parse a list of texts that is given as JSON text, alone or in a list, or as a single text.

    Args:
        name: Name of the argument.
        value: `["\n", "END"]`, its JSON text, a list that holds only such a text, or one text. Any other value is
            returned unchanged, for `check_type`.

    Returns:
        A list.

    Raises:
        ValueError: There is no text, or a text is empty or has U+FFFD, the decoders' mark of an incomplete character.
    """
    given = value
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], str):
        decoded = _json(name, texts[0])
        texts = decoded if isinstance(decoded, list) else texts
    if isinstance(texts, list) and (not texts or any(text == "" or "\ufffd" in str(text) for text in texts)):
        raise ValueError(f"{name}={given!r} must hold texts, none of them empty or with U+FFFD; None for none")
    return texts


def _json(name: str, text: str) -> Any:
    """Parse a JSON text; return None if it is not JSON.

    Raises:
        ValueError: A key is repeated.
    """
    try:
        return read_json(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def parse_template_kwargs(given: Any) -> dict[str, Any] | None:
    """Return `chat_template_kwargs`, a dict or JSON text; see `parse_object`.

    Raises:
        TypeError: It is no object, or a key is not a text.
        ValueError: The text is not JSON, or a key is one of `NOT_OF_TEMPLATES`.
    """
    settings = parse_object("chat_template_kwargs", given, '{"enable_thinking": false}')
    if own := NOT_OF_TEMPLATES.intersection(settings or ()):
        raise ValueError(f"chat_template_kwargs={settings!r} holds {min(own)!r}, which the trainer sets: leave it out")
    return settings


NOT_OF_TEMPLATES = frozenset(
    ("add_generation_prompt", "continue_final_message", "return_dict", "return_tensors", "tokenize")
)
"""Arguments of `apply_chat_template` that the trainer sets."""


def parse_object(name: str, given: Any, example: str) -> dict[str, Any] | None:
    """Return a dict that may be given as JSON text; None stays None.

    Args:
        name: Name of the argument.
        given: The dict or its text.
        example: A valid text, for the error message.

    Raises:
        TypeError: It is no object, or a key is not a text.
        ValueError: The text is not JSON.
    """
    value = given
    if isinstance(given, str):
        try:
            value = read_json(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{name}={redacted(given)!r:.80} is not JSON: {error}; write an object in double quotes: {example}"
            ) from error
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise TypeError(
            f"{name}={redacted(given)!r:.80} must be a dict or the JSON text of an object, such as {example}"
        )
    return None if value is None else dict(value)


def read_json(text: str) -> Any:
    """Parse a JSON text; integers that exceed the range of a float become infinite.

    Raises:
        ValueError: It is not JSON, or a key is repeated.
    """
    return json.loads(text, object_pairs_hook=unique_keys, parse_int=lambda n: int(n) if len(n) < 300 else float(n))


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object.

    Raises:
        ValueError: A key is repeated.
    """
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"the key {', '.join(twice)} is repeated in the JSON object")
    return dict(pairs)


def _matches(value: Any, annotation: Any) -> bool:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_matches(value, option) for option in arguments)
    if annotation is Any:
        return True
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_matches(item, arguments[0]) for item in value)
    if origin is dict:
        of_key, of_value = arguments
        return isinstance(value, dict) and all(_matches(k, of_key) and _matches(v, of_value) for k, v in value.items())
    # NumPy numbers are numbers; bool is an int in Python, but `num_mini_batches=True` is a mistake.
    number = {int: Integral, float: Real}.get(annotation)
    return isinstance(value, number or annotation) and not (number and isinstance(value, bool))


_BOOL = "tag:yaml.org,2002:bool"


class UniqueKeys(yaml.SafeLoader):
    """YAML loader that rejects repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raise if a key is repeated."""
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"the key {', '.join(twice)} is repeated")
        return super().construct_mapping(node, deep)


class PlainWords(UniqueKeys):
    """YAML loader that reads `yes`, `no`, `on` and `off` as text, as YAML 1.2 does."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
        for first, resolvers in UniqueKeys.yaml_implicit_resolvers.items()
    }


PlainWords.add_implicit_resolver(_BOOL, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


# ---- Names that do not exist ----


HINTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("hints.yaml").read_text(encoding="utf-8"))
"""The tables of advice in `hints.yaml`, by name."""


def _by_name(table: str) -> dict[str, str]:
    """Return the advice of a table of `hints.yaml` by name."""
    return {name: advice for advice, names in HINTS[table].items() for name in names}


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


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'close'?)` for the known name that is closest; empty if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


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
