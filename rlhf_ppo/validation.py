"""Checks of single argument values whose errors name the argument, its value and what it may be."""

import json
import math
import types
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, Union, cast, get_args, get_origin


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
        """Return whether `value` is finite and lies inside."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"finite and {'greater than' if self.open_low else 'at least'} {self.low:g}"
        return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}{')' if self.open_high else ']'}"


def check_range(name: str, value: float | None, interval: Interval, meaning: str) -> None:
    """Raise unless `value` is None or inside `interval`.

    Args:
        name: Name of the argument.
        value: Its value.
        interval: What it may be.
        meaning: What the argument is for; ends the message.

    Raises:
        ValueError: It is outside, infinite or NaN.
    """
    if value is not None and not interval.holds(value):
        raise ValueError(f"{name}={value!r} must be {interval}. {name}: {meaning}")


def check_type(name: str, value: Any, annotation: Any, meaning: str) -> None:
    """Raise unless `value` is what `annotation` says; an integer serves as a float, a bool as neither.

    Args:
        name: Name of the argument.
        value: Its value.
        annotation: A class, a `Literal`, a `list[...]` or a union of them.
        meaning: What the argument is for; ends the message.

    Raises:
        TypeError: It is of another type.
        ValueError: It is none of the annotation's literals.
    """
    if _matches(value, annotation):
        return
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    if choices:
        none = [None] if types.NoneType in options else []
        raise ValueError(f"{name}={value!r} must be one of {choices + none}. {name}: {meaning}")
    expected = " or ".join((option.__name__ if isinstance(option, type) else str(option)) for option in options)
    raise TypeError(f"{name}={value!r} is not {expected.replace('NoneType', 'None')}. {name}: {meaning}")


def parse_weights(weights: Any) -> Any:
    """Read what a command line says about weights: numbers, or one JSON object or list.

    Args:
        weights: Texts are read, everything else comes back as it is.

    Raises:
        ValueError: A text is neither a number nor JSON.
    """
    if isinstance(weights, str):
        weights = [weights]
    if not isinstance(weights, list) or not any(isinstance(weight, str) for weight in weights):
        return weights
    try:
        parsed = [json.loads(weight) if isinstance(weight, str) else weight for weight in weights]
    except ValueError as error:
        raise ValueError(
            f"reward_weights={weights!r} are neither numbers nor JSON ({error}): give numbers, such as 1.0 0.5, or "
            """an object, such as '{"correctness": 1.0, "formatting": 0.1}'"""
        ) from error
    return parsed[0] if len(parsed) == 1 and isinstance(parsed[0], list | dict) else parsed


def check_weights(weights: Sequence[float] | Mapping[str, float] | str | None) -> None:
    """Check that weights are finite numbers, one at least.

    Raises:
        ValueError: They are not.
    """
    numbers = list(weights.values()) if isinstance(weights, Mapping) else weights
    if numbers is not None and not (numbers and all(math.isfinite(cast(float, number)) for number in numbers)):
        raise ValueError(f"reward_weights={weights!r} must hold one finite number for each reward")


def _matches(value: Any, annotation: Any) -> bool:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_matches(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is dict:
        keys, values = arguments
        return isinstance(value, dict) and all(_matches(k, keys) and _matches(v, values) for k, v in value.items())
    if origin is list:
        return isinstance(value, list) and all(_matches(item, arguments[0]) for item in value)
    # NumPy's numbers count as numbers; bool is an int in Python, but `num_mini_batches=True` is a mistake.
    number = {int: Integral, float: Real}.get(annotation)
    return isinstance(value, number or annotation) and not (number and isinstance(value, bool))
