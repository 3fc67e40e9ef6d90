"""generation_overlap=1 with two processes: each rank's worker, and an exact resume after a kill."""

import pytest

from tests.distributed import processes
from tests.distributed.comparing import assert_same_end, updates
from tests.distributed.processes import LAUNCHERS

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("config", ["multi_gpu", "deepspeed_zero3", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_killed_run_ends_like_one_that_was_not(config, models, tmp_path):
    """The worker has the whole weights of the update before: their log-probabilities are the trainer's at lag 0."""
    run = {"models": str(models), "generation_overlap": 1, "num_prompts": 16, "max_steps": 4}
    killed = {**run, "output_dir": str(tmp_path / "killed")}
    call = "train_with_checkpoints"
    calls = [(call, {**run, "output_dir": str(tmp_path / "whole")}), (call, {**killed, "die_at": 2})]
    (whole,) = processes.run_all(config, calls, last_is_killed=True)
    assert [(rank["distributed_type"], rank["zero_stage"]) for rank in whole] == [LAUNCHERS[config]] * 2
    (resumed,) = processes.run_all(config, [(call, {**killed, "resume": True})])

    assert_same_end(resumed, whole)
    log = updates(whole[0]["log"])
    assert [entry["generation/lag"] for entry in log] == [0, 1, 1, 1]
    assert log[0]["sampling/sampling_logp_difference/max"] < 1e-5 < log[1]["sampling/sampling_logp_difference/max"]
