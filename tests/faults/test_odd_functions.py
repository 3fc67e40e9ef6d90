"""Odd reward functions in a run: each works, and leaves the rest of the run alone, or is refused by name."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset

from rlhf_ppo import PPOTrainer
from rlhf_ppo.rewards import RewardFunction
from rlhf_ppo.rewards.functions import LoggedByFunctions, function_name
from rlhf_ppo.rewards.scorer import Scorer
from tests.conftest import make_tokenizer, prompt_rows
from tests.faults.odd_functions import FOR_LONG, ODD, checks_arguments, right
from tests.faults.odd_servers import two_rows
from tests.rewards.test_functions import STATE
from tests.runs import QUICK, assert_identical, end_of_run

MakeTrainer = Callable[..., PPOTrainer]
WORKING = [name for name, (_, outcome) in ODD.items() if outcome is None]
TIMES_OUT = {"hangs", "hangs in the loop of all", "never ends"}


def make(make_trainer: MakeTrainer, function: Any, **overrides: Any) -> PPOTrainer:
    rows = Dataset.from_list([{**row, "number": index} for index, row in enumerate(prompt_rows(8))])
    settings = {**QUICK, "total_episodes": 4, "logging_steps": 1, "train_dataset": rows, **overrides}
    return make_trainer(reward_funcs=[function, checks_arguments], **settings)


def end(trainer: PPOTrainer) -> dict[str, Any]:
    """The end of the run, its metrics under names that are the same for all functions."""
    found = end_of_run(trainer)
    name = trainer.scorer.names[0]
    found["history"] = [
        {key.replace(f"rewards/{name}/", "rewards/odd/"): value for key, value in entry.items()}
        for entry in found["history"]
    ]
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("oddity", WORKING)
def test_it_works(oddity: str, make_trainer: MakeTrainer, expected: dict[str, Any]) -> None:
    """The run is the one of a plain function, bit for bit."""
    if not expected:
        plain = make(make_trainer, right)
        plain.train()
        expected |= end(plain)
    before = os.getcwd(), torch.get_default_dtype(), torch.is_grad_enabled()
    trainer = make(make_trainer, ODD[oddity][0])
    trainer.train()
    assert (os.getcwd(), torch.get_default_dtype(), torch.is_grad_enabled()) == before
    assert_identical(end(trainer), expected)


@pytest.fixture
def no_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `KeyboardInterrupt` comes from the function, and not from a terminal, as during `train()`."""
    monkeypatch.setattr("rlhf_ppo.rewards.functions.can_be_ctrl_c", lambda: False)


@pytest.mark.parametrize("limit", [None, 60.0], ids=["no limit", "reward_timeout"])
@pytest.mark.parametrize("oddity", ODD)
@pytest.mark.usefixtures("no_ctrl_c")
def test_each_is_scored_or_refused_by_name(oddity: str, limit: float | None) -> None:
    """Also where a thread calls the function."""
    function, outcome = ODD[oddity]
    limit = 0.5 if oddity in TIMES_OUT else limit
    metrics = LoggedByFunctions().log_metric
    source = RewardFunction(function, make_tokenizer(), lambda: STATE, log_metric=metrics, timeout=limit)
    scorer, before = Scorer([source]), (os.getcwd(), torch.get_default_dtype(), time.monotonic())
    if outcome is None:
        assert scorer(two_rows(number=[0, 1])).total.tolist() == [3.0, 1.0]
    else:
        with pytest.raises(outcome[0], match=outcome[1] or None) as raised:
            scorer(two_rows(number=[0, 1]))
        said = "".join(traceback.format_exception_only(raised.value))
        assert f"the reward function {function_name(function)!r}" in said
    assert (os.getcwd(), torch.get_default_dtype()) == before[:2] and time.monotonic() - before[2] < FOR_LONG / 2


def test_what_was_left_behind_does_not_disturb_the_next(make_trainer: MakeTrainer) -> None:
    """The loop that a function blocks is left to it; in a run the limit is an argument."""
    blocked = make(make_trainer, ODD["hangs in the loop of all"][0], reward_timeout=0.2)
    with pytest.raises(TimeoutError):
        blocked.train()
    source = RewardFunction(ODD["async with a thread"][0], make_tokenizer(), lambda: STATE, timeout=60.0)
    assert source(two_rows()).tolist() == [3.0, 1.0]


def test_the_blocked_loop_is_left_before_the_error_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next function, called at once, would be put on the loop that is blocked."""
    submitted, done = threading.Event(), list[bool]()
    monkeypatch.setattr(
        "rlhf_ppo.rewards.functions.abandon_event_loop", lambda: done.append(submitted.wait(30) and late.done())
    )
    source = RewardFunction(ODD["never ends"][0], make_tokenizer(), lambda: STATE, timeout=0.2)
    late = source.submit(two_rows())
    submitted.set()
    with pytest.raises(TimeoutError):
        late.result()
    assert done == [False]
