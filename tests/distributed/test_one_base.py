"""Adapters over one base in two processes: the base stays one, the run resumes, and engines that shard refuse it."""

from __future__ import annotations

import pytest

from tests.distributed import processes
from tests.distributed.comparing import assert_same_end
from tests.distributed.test_resume import stored_by_deepspeed

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("config", ["multi_gpu", "deepspeed_zero2"])
def test_one_base_stays_one_and_a_resumed_run_ends_alike(config, models, tmp_path):
    def call(name, is_shared=True, **arguments):
        run = {"output_dir": str(tmp_path / name), "models": str(models), "share_base_model": is_shared, **arguments}
        return "train_over_one_base", run

    resume = str(tmp_path / "whole" / "checkpoint-1")
    calls = [call("whole"), call("resumed", resume=resume), call("apart", is_shared=False)]
    whole, resumed, apart = processes.run_all(config, calls)
    assert_same_end(resumed, whole)
    num_base = 20  # tensors of two layers, the embedding (tied to the head) and the norm
    for rank, other in zip(whole, apart, strict=True):
        assert (rank["num_processes"], rank["zero_stage"]) == (2, processes.LAUNCHERS[config][1])
        assert rank["num_shared"] == num_base and other["num_shared"] == 0
        assert rank["num_held"] == other["num_held"] - num_base
    if config.startswith("deepspeed"):
        names = stored_by_deepspeed(tmp_path / "whole" / "checkpoint-1")
        assert len(names) == 17 and all(".lora_" in name or "modules_to_save" in name for name in names)
