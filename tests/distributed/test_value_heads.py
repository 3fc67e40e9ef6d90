"""A value model with bins in two processes: the range covers all ranks' returns, and a resumed run ends alike."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.distributed import processes
from tests.distributed.comparing import assert_same_end

pytestmark = pytest.mark.distributed

BINS = {
    "value_loss": "hl_gauss",
    "value_bins": 11,
    "num_ppo_epochs": 2,
    "num_mini_batches": 1,
    "fixed_responses": True,
}


@pytest.mark.parametrize("config", ["multi_gpu", "deepspeed_zero3", "fsdp2"])
def test_a_running_range_is_that_of_all_ranks_and_survives_a_resume(config, models, tmp_path):
    def call(name, **arguments):
        run = {"output_dir": str(tmp_path / name), "models": str(models), **BINS, "num_ppo_epochs": 2, **arguments}
        return "train_with_checkpoints", run

    whole, resumed, adapters = processes.run_all(
        config,
        [
            call("whole"),
            call("resumed", resume=str(tmp_path / "whole" / "checkpoint-1")),
            call("adapters", adapters=True),
        ],
    )
    ((alone,),) = processes.run_all("multi_gpu", [call("alone", gradient_accumulation_steps=4)], world=1)
    assert_same_end(resumed, whole)
    for name, ranks in (("whole", whole), ("adapters", adapters)):
        assert [rank["num_processes"] for rank in ranks] == [2, 2]
        saved = json.loads((tmp_path / name / "checkpoint-3" / "value_model" / "config.json").read_text())
        assert len(saved["value_centers"]) == 11 and saved["value_centers"][0] < saved["value_centers"][-1]
    for rank, one in zip(whole[0]["log"], alone["log"], strict=True):
        for metric in ("loss/value_avg", "val/values_mean", "val/returns_mean"):
            if metric in one:
                np.testing.assert_allclose(rank[metric], one[metric], rtol=1e-3, atol=1e-4)
