"""Processes that ask each other whether one has failed exchange no objects while none has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_ppo.processes import failing
from rlhf_ppo.processes.failing import failing_together


def test_without_an_error_no_objects_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NCCL they travel through the device, for which the host waits several times."""
    exchanged: list[Any] = []
    monkeypatch.setattr(failing, "gather_object", lambda objects: exchanged.extend(objects) or objects)
    two: Any = SimpleNamespace(num_processes=2, process_index=1)
    with failing_together(two):
        pass
    assert exchanged == []
    with pytest.raises(ValueError, match="mine"), failing_together(two):
        raise ValueError("mine")
    assert [failure.rank for failure in exchanged] == [1]
