"""What is before a message, and where it is said to come from."""

from __future__ import annotations

import logging

import pytest
from accelerate import PartialState

from rlhf_ppo.processes.logs import get_logger


@pytest.mark.parametrize(("num_processes", "shown"), [(1, "mine is 3"), (2, "[RANK 0] mine is 3")])
def test_the_rank_is_named_where_there_are_several(
    num_processes: int, shown: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = PartialState()
    monkeypatch.setitem(state._shared_state, "num_processes", num_processes)
    get_logger("rlhf_ppo.mine").warning("mine is %d", 3)
    get_logger("rlhf_ppo.mine").warning_once("mine is %d", 3)
    assert [record.getMessage() for record in caplog.records] == [shown] * 2
    assert {(record.name, record.levelno) for record in caplog.records} == {("rlhf_ppo.mine", logging.WARNING)}
    assert caplog.records[0].filename == "test_logs.py"
