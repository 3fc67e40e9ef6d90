"""Single values: what fits an annotation or an interval, and how an error reads."""

import math
from typing import Any, Literal

import numpy as np
import pytest

from rlhf_ppo.config.checks import Interval, check_range, check_type


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        *((1, int), (np.int64(1), int), (1, float), (0.5, float), (np.float32(0.5), float), (True, bool)),
        *((None, int | None), (1, int | None), ("a", Literal["a", "b"]), (None, Literal["a"] | None)),
        *(([], list[float]), ([1, 0.5], list[float] | None)),
    ],
)
def test_fits(value: Any, annotation: Any):
    check_type("argument", value, annotation, "")


@pytest.mark.parametrize(
    ("value", "annotation", "kind", "message"),
    [
        (1.0, int, TypeError, r"argument=1.0 is not int\. argument: Why\."),
        (True, int, TypeError, "argument=True is not int"),
        (False, float, TypeError, "argument=False is not float"),
        (1, bool, TypeError, "argument=1 is not bool"),
        ("1", float | None, TypeError, "argument='1' is not float or None"),
        (None, str, TypeError, "argument=None is not str"),
        ([1, "2"], list[float] | None, TypeError, r"is not list\[float\] or None"),
        ((1.0,), list[float], TypeError, r"is not list\[float\]"),
        ("c", Literal["a", "b"], ValueError, r"argument='c' must be one of \['a', 'b'\]\. argument: Why\."),
        ("c", Literal["a"] | None, ValueError, r"one of \['a', None\]"),
    ],
)
def test_does_not_fit(value: Any, annotation: Any, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        check_type("argument", value, annotation, "Why.")


CLOSED, OPEN = Interval(0, 1), Interval(0, 1, open_low=True, open_high=True)
AT_LEAST, ABOVE = Interval(2, math.inf), Interval(2, math.inf, open_low=True)


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "message"),
    [
        (CLOSED, (0, 0.5, 1), (-1e-9, 1 + 1e-9), r"must be in \[0, 1\]"),
        (OPEN, (1e-9, 1 - 1e-9), (0, 1), r"must be in \(0, 1\)"),
        (Interval(-math.inf, math.inf), (-1e300, 0, 1e300), (), "must be finite"),
        (AT_LEAST, (2, 1e300), (1.99,), "must be finite and at least 2"),
        (ABOVE, (2.01,), (2,), "must be finite and greater than 2"),
    ],
)
def test_ranges(interval: Interval, inside: tuple[float, ...], outside: tuple[float, ...], message: str):
    for value in (*inside, None):
        check_range("argument", value, interval, "Why.")
    for value in (*outside, math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=f"argument={value} {message}. argument: Why."):
            check_range("argument", value, interval, "Why.")
