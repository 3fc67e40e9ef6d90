"""Break one place of one file at a time: the named tests must notice every time.

Each room that computes a number has a table in `tests/mutation/mutants/`: by file and tests, what stands there and
what is put in its place. `make test-mutants` breaks every place; other runs break one of each entry. What has
killed a mutant must pass where nothing is broken: the nursery sees to that at its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.mutants import TABLES
from tests.mutation.nursery import Mutant, Nursery, assert_killed, assert_passed

NUM_TRIED = int(os.environ.get("NUM_MUTANTS", "1"))
"""How many of each entry are tried."""


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The process of all mutants; at the end the tests that killed mutants pass with unbroken code."""
    nursery = Nursery()
    yield nursery
    killers = sorted(nursery.killers)
    for start in range(0, len(killers), 50):
        assert_passed(nursery.run(tmp_path_factory.mktemp("unbroken"), killers[start : start + 50]))
    nursery.close()


def mutants(num_of_each: int | None = None) -> list[Any]:
    """Return the places and what is put there, of all entries or the first of each."""
    return [
        pytest.param(
            tests.split(), Mutant(f"{room}/{file}", original, mutant), id=f"{room}/{file}-{original}->{mutant}"[:90]
        )
        for room, table in TABLES.items()
        for (file, tests), listed in table.items()
        for original, mutant in listed[:num_of_each]
    ]


def test_what_is_broken_is_there() -> None:
    for param in mutants():
        param.values[1].source()


@pytest.mark.slow
@pytest.mark.parametrize(("tests", "mutant"), mutants(NUM_TRIED))
def test_the_mutant_is_killed(tests: list[str], mutant: Mutant, nursery: Nursery, tmp_path: Path) -> None:
    assert_killed(nursery.run(tmp_path, tests, mutant))
