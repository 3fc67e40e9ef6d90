"""The nursery that all mutation tests of a process share."""

from collections.abc import Iterator

import pytest

from tests.mutation.nursery import Nursery, assert_passed


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """At the end the tests that killed mutants run once more: nothing fails where nothing is broken."""
    nursery = Nursery()
    yield nursery
    killers = sorted(nursery.killers)
    for start in range(0, len(killers), 50):
        assert_passed(nursery.run(tmp_path_factory.mktemp("unbroken"), killers[start : start + 50]))
    nursery.close()
