"""Odd numbers inside of an argument are errors at construction that name the argument, the key and what it may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rlhf_ppo import PPOConfig

ODD = [math.nan, math.inf, np.float64("nan"), True, np.True_, "1", "nan", [1.0], 1j]
BEYOND_FLOAT32 = 1e39
"""Scores are computed in float32, thresholds are not."""

TEXTS = ["1e400", "NaN", "-Infinity", "true", '"1"', "[1]"]


def config(**given: Any) -> PPOConfig:
    return PPOConfig(output_dir="x", use_cpu=True, bf16=False, **given)


WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "reward_weights[1]": lambda value: config(reward_weights=[1.0, value]),
    "reward_weights['length']": lambda value: config(reward_weights={"length": value}),
}


@pytest.mark.parametrize("value", [*ODD, None, BEYOND_FLOAT32], ids=lambda value: str(type(value)))
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_is_a_number_that_float32_holds(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"must be in \[-1e\+38, 1e\+38\]|is not float") as raised:
        WEIGHTS[name](value)
    assert str(raised.value).startswith(f"{name}=") and len(str(raised.value)) < 300


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:10])
def test_odd_numbers_of_a_json_text(text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^reward_weights(\['length'\])?="):
        config(reward_weights=f'{{"length": {text}}}')


def test_numbers_that_are_one() -> None:
    args = config(reward_weights=[np.float32(0.5), Fraction(1, 4), 0])
    assert repr(args.reward_weights) == "[0.5, 0.25, 0]"
