"""Episodes on two processes, whose numbers of rounds differ: none waits for ever, and the step is that of one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlhf_ppo.data.conversation import check_versions
from tests.distributed import processes
from tests.distributed.comparing import assert_same_step

pytestmark = pytest.mark.distributed

PLAY = "tests.distributed.playing.play"
LAUNCHERS = {
    "DDP": ("multi_gpu", {}),
    "ZeRO-3 that gathers layer by layer": ("deepspeed_zero3", {"ds3_gather_for_generation": False}),
    "FSDP2": ("fsdp2", {}),
}
HANGS = {6: {"hangs": 3}}


@pytest.fixture(scope="module", autouse=True)
def _recent_libraries() -> None:
    try:
        check_versions()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def alone(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    given = {"output_dir": str(tmp_path_factory.mktemp("one")), "models": str(models), "local_batch_size": 8}
    return processes.run("multi_gpu", PLAY, world=1, changes=HANGS, **given)[0]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_1_turn_and_9_and_a_tool_that_hangs(launcher: str, models: Any, alone: Any, tmp_path: Any) -> None:
    config, options = LAUNCHERS[launcher]
    given = {"output_dir": str(tmp_path), "models": str(models), "changes": HANGS, **options}
    fails = {place: {"scenario": PLAY, **given, "changes": {5: {"fails": place}}} for place in ("reset", "step")}
    ranks, *errors = processes.run_all(
        config, [(PLAY, given), *(("error_of", arguments) for arguments in fails.values())]
    )

    assert [rank["turns"] for rank in ranks] == [[1] * 4, [9, 9, 3, 9]] and alone["turns"] == [1] * 4 + [9, 9, 3, 9]
    assert_same_step(ranks[0], alone)
    in_step = "layer by layer" in launcher
    assert [len(rank["calls"]) for rank in ranks] == ([9, 9] if in_step else [1, 9])
    for (first, second), message in zip(
        errors, ("reset failed: ValueError: no board", "must be a list of finite"), strict=True
    ):
        assert re.search(rf"EpisodeError: row 1 of the batch, environment Walk: .*{message}", second), second
        assert first == second
