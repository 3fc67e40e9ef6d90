"""Heads with bins in two processes: range and masks are those of all ranks' responses; a resumed run ends alike."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.distributed import processes
from tests.distributed.comparing import whole_and_other

pytestmark = pytest.mark.distributed

BINS = {
    "value_loss": "hl_gauss",
    "value_bins": 11,
    "critic_ensemble": 3,
    "critic_agreement_mask": 0.3,
    "critic_disagreement_mask": 0.3,
    "entropy_coef": 0.1,
    "num_ppo_epochs": 2,
    "num_mini_batches": 1,
    "fixed_responses": True,
}


@pytest.mark.parametrize("config", ["multi_gpu", "deepspeed_zero3", "fsdp2"])
def test_a_running_range_is_that_of_all_ranks_and_survives_a_resume(config, models, tmp_path):
    whole, adapters = whole_and_other(config, "train_with_checkpoints", models, tmp_path, {"adapters": True}, **BINS)
    alone = {"output_dir": str(tmp_path / "alone"), "models": str(models), **BINS, "gradient_accumulation_steps": 4}
    (alone,) = processes.run("multi_gpu", "train_with_checkpoints", world=1, **alone)
    for name, ranks in (("whole", whole), ("other", adapters)):
        assert [rank["num_processes"] for rank in ranks] == [2, 2]
        saved = json.loads((tmp_path / name / "checkpoint-3" / "value_model" / "config.json").read_text())
        assert (len(saved["value_centers"]), saved["value_heads"]) == (11, 3) and saved["value_centers"][0] < saved[
            "value_centers"
        ][-1]
    for rank, one in zip(whole[0]["log"], alone["log"], strict=True):
        for metric in ("loss/value_avg", "val/values_mean", "val/returns_mean", "val/spread", "policy/entropy_avg"):
            if metric in one:
                np.testing.assert_allclose(rank[metric], one[metric], rtol=1e-3, atol=1e-4)
