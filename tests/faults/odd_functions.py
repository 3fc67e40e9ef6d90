"""Reward functions as people write them, by what is odd about them, and what becomes of each.

Values of all kinds that they may return: `tests/rewards/test_functions.py`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Function = Callable[..., Any]
FOR_LONG = 30.0

Outcome = tuple[type[Exception], str] | None
"""The error and its words, or None: it works, and its scores are `EXPECTED`."""


def right(completion_ids: Any, **_: Any) -> list[float]:
    """What each function that works returns, in its own form."""
    return [float(len(ids)) for ids in completion_ids]


def returning(form: Callable[[list[float]], Any]) -> Function:
    def reward(completion_ids: Any, **_: Any) -> Any:
        return form(right(completion_ids))

    return reward


def doing(act: Callable[[], Any]) -> Function:
    def reward(completion_ids: Any, **_: Any) -> Any:
        act()
        return right(completion_ids)

    return reward


def raising(error: BaseException) -> Function:
    def raise_it() -> None:
        raise error

    return doing(raise_it)


def with_first(value: Any) -> Function:
    return returning(lambda scores: [value, *scores[1:]])


def mutates(prompts: Any, completions: Any, completion_ids: Any, number: Any, **_: Any) -> Any:
    scores = right(completion_ids)
    for values in (prompts, completions, completion_ids, number):
        values.clear()
    return scores


def checks_arguments(completion_ids: Any, number: list[int], prompts: list[str], **_: Any) -> Any:
    assert len(number) == len(prompts) == len(completion_ids), "another function has changed them"
    return [0.0] * len(completion_ids)


def changes_generators() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    print(torch.rand(1), random.random(), np.random.rand())


def recurses() -> None:
    recurses()


def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=[0.2]).start()


def generates(completion_ids: Any, **_: Any) -> Any:
    yield from right(completion_ids)


def generates_and_fails(completion_ids: Any, **_: Any) -> Any:
    yield 1.0
    raise LookupError("no such score")


def only_by_position(completion_ids: Any, /) -> Any:
    return right(completion_ids)


def wants_a_column(completion_ids: Any, gold: Any) -> Any:
    return right(completion_ids)


def logs_text(completion_ids: Any, log_metric: Any, **_: Any) -> Any:
    log_metric("length", "long")
    return right(completion_ids)


async def is_async(completion_ids: Any, **_: Any) -> Any:
    await asyncio.sleep(0.001)
    return right(completion_ids)


async def asks_a_thread(completion_ids: Any, **_: Any) -> Any:
    return await asyncio.to_thread(right, completion_ids)


async def blocks_the_loop(completion_ids: Any, **_: Any) -> Any:
    time.sleep(FOR_LONG)


async def never_ends(completion_ids: Any, **_: Any) -> Any:
    await asyncio.Event().wait()


async def gives_itself_up(completion_ids: Any, **_: Any) -> Any:
    raise asyncio.CancelledError


async def exits_in_the_loop(completion_ids: Any, **_: Any) -> Any:
    sys.exit("async")


async def generates_async(completion_ids: Any, **_: Any) -> Any:
    for score in right(completion_ids):
        yield score


class Judge:
    def __call__(self, completion_ids: Any, **_: Any) -> Any:
        return right(completion_ids)


class BadText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


NUMBER = (TypeError, "return a list of 2 numbers")
FINITE = (ValueError, "for row 0: return a finite number")
ROW_0 = (TypeError, "for row 0: return a number, or None")
PER_TOKEN = (ValueError, "tokens of row 0: return one for each")
COUNT = (ValueError, "rewards for 2 completions")
LATE = (TimeoutError, "has not returned within reward_timeout=0.5 seconds. Nothing can stop a thread")
EXIT = (RuntimeError, "which would end the program")

ODD: dict[str, tuple[Function, Outcome]] = {
    # What works.
    "tensor": (returning(torch.tensor), None),
    "generator": (generates, None),
    "rewards per token": (returning(lambda scores: [[0.0] * (int(score) - 1) + [score] for score in scores]), None),
    "async": (is_async, None),
    "async with a thread": (asks_a_thread, None),
    "partial": (functools.partial(right), None),
    "object": (Judge(), None),
    "sleeps": (doing(lambda: time.sleep(0.1)), None),
    "prints": (doing(lambda: print("scoring", "\x00 ä")), None),
    "warns": (doing(lambda: warnings.warn("old", stacklevel=2)), None),
    "plain, but returns a coroutine": (lambda completion_ids, **_: is_async(completion_ids), None),
    "mutates its arguments": (mutates, None),
    "seeds and draws random numbers": (doing(changes_generators), None),
    "changes the working directory": (doing(lambda: os.chdir("/")), None),
    "changes the default dtype": (doing(lambda: torch.set_default_dtype(torch.float64)), None),
    "switches gradients on": (doing(lambda: torch.set_grad_enabled(True)), None),
    "leaves a thread behind": (doing(leaves_a_thread), None),
    # What is refused.
    "raises": (raising(LookupError("no such score")), (LookupError, "no such score")),
    "raises StopIteration": (raising(StopIteration("over")), (StopIteration, "over")),
    "raises what has no text": (raising(BadText()), (BadText, "")),
    "recurses": (doing(recurses), (RecursionError, "maximum recursion depth")),
    "runs out of memory": (raising(MemoryError()), (MemoryError, "")),
    "exits": (doing(lambda: sys.exit(0)), EXIT),
    "exits in the loop of all": (exits_in_the_loop, EXIT),
    "raises KeyboardInterrupt": (raising(KeyboardInterrupt()), EXIT),
    "gives itself up": (gives_itself_up, (RuntimeError, "raised CancelledError itself")),
    "hangs": (doing(lambda: time.sleep(FOR_LONG)), LATE),
    "hangs in the loop of all": (blocks_the_loop, LATE),
    "never ends": (never_ends, LATE),
    "nothing": (returning(lambda scores: None), NUMBER),
    "async generator": (generates_async, NUMBER),
    "too few": (returning(lambda scores: scores[:-1]), COUNT),
    "no end": (returning(lambda scores: itertools.repeat(1.0)), COUNT),
    "generator that fails": (generates_and_fails, (LookupError, "no such score")),
    "NaN": (with_first(float("nan")), FINITE),
    "number as text": (with_first("0.5"), ROW_0),
    "column of scores": (returning(lambda scores: torch.tensor([[0.0] * 9] * 2)), PER_TOKEN),
    "only by position": (only_by_position, (TypeError, "only by position")),
    "a column that is not there": (wants_a_column, (ValueError, r"requires the arguments \['gold'\]")),
    "logs a text as metric": (logs_text, (ValueError, r"'logs_text' called log_metric\(.*, 'long'\): pass one")),
}  # fmt: skip
