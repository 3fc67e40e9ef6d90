"""The nursery that all mutation tests of a process share."""

from collections.abc import Iterator

import pytest

from tests.mutation.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()
