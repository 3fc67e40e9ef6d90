"""What a reward function logs is checked at the call, by the function's name."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_ppo.processes.distributed import _portable
from rlhf_ppo.rewards.functions import LoggedByFunctions, RewardFunction
from rlhf_ppo.rewards.scorer import WrongRewardError
from tests.conftest import make_tokenizer
from tests.rewards.test_functions import make_batch

STATE = SimpleNamespace()


def scored(call: Any) -> LoggedByFunctions:
    """Score three completions with a function that makes a call of `log_metric` and `log_extra`."""
    logged = LoggedByFunctions()

    def judged(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        call(log_metric, log_extra)
        return [0.0] * len(completions)

    state: Any = lambda: STATE  # noqa: E731
    RewardFunction(judged, make_tokenizer(), state, logged.log_metric, log_extra=logged.log_extra)(make_batch())
    return logged


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda metric, extra: metric("m", 10**400), r"log_metric\('m', 10+\): pass numbers below 1e308"),
        (lambda metric, extra: metric("m", 10**5000), r"log_metric\('m', an integer of thousands of digits\)"),
        (lambda metric, extra: metric("m", "high"), r"log_metric\('m', 'high'\): pass one number"),
        (lambda metric, extra: metric("m", None), r"log_metric\('m', None\): pass one number"),
        (lambda metric, extra: metric("\ud800", 1.0), r"log_metric\('\\ud800', '\\ud800'\): .*half of a surrogate"),
        (lambda metric, extra: metric(3, 1.0), r"log_metric\(3, None\): pass a text as the name"),
        (lambda metric, extra: extra("c", ["a", "b"]), r"log_extra\('c', \['a', 'b'\]\): it has 2 values: .* 3 compl"),
        (lambda metric, extra: extra("c", "abc"), r"log_extra\('c', 'abc'\): pass a list of 3 values"),
        (lambda metric, extra: extra("c", None), r"log_extra\('c', None\): pass a list of 3 values"),
        (lambda metric, extra: extra("c", ["a", "\ud800", 3]), r"log_extra\('c', '\\ud800'\): .*half of a surrogate"),
        (lambda metric, extra: extra("c", [1, 2, 10**400]), r"log_extra\('c', 10+\): pass numbers below 1e308"),
        (lambda metric, extra: extra("\ud800", [1, 2, 3]), r"log_extra\('\\ud800', .*half of a surrogate"),
    ],
)  # fmt: skip
def test_what_cannot_be_logged_is_refused_at_the_call(call: Any, said: str) -> None:
    with pytest.raises(WrongRewardError, match=f"^the reward function 'judged' called {said}"):
        scored(call)


def test_all_ranks_raise_the_same() -> None:
    with pytest.raises(WrongRewardError) as raised:
        scored(lambda metric, extra: extra("c", ["a"]))
    other = pickle.loads(pickle.dumps(_portable(raised.value, rank=1)))

    assert (type(other), str(other)) == (WrongRewardError, str(raised.value))


@pytest.mark.parametrize("value", [1, True, 0.5, float("nan"), np.float32(2), torch.tensor([3.0]), "4"])
def test_what_python_takes_for_a_number_is_logged(value: Any) -> None:
    (logged,) = scored(lambda metric, extra: metric("m", value)).values["m"]

    assert logged == float(value) or logged != logged


def test_columns_hold_any_values_and_names_are_visible() -> None:
    values = [None, {"a": [1]}, torch.zeros(2)]
    logged = scored(lambda metric, extra: (extra("c\x1b[2J\n", iter(values)), metric("m\x1b", 1.0)))

    assert logged.columns == {r"c\x1b[2J\n": values} and logged.values == {r"m\x1b": [1.0]}


def test_nothing_logged_exchanges_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NCCL they travel through the device, for which the host waits several times in each update."""
    exchanged: list[Any] = []
    monkeypatch.setattr("rlhf_ppo.rewards.functions.gather_object", lambda own: exchanged.extend(own) or own)
    assert LoggedByFunctions().drain() == {} and exchanged == []
    assert scored(lambda metric, extra: metric("m", 2.0)).drain() == {"m": 2.0} and exchanged == [{"m": [2.0]}]
