"""Two processes are killed and resumed: the end is that of a run that was never stopped, bit for bit."""

import shutil

import numpy as np
import pytest

from tests.conftest import tiny_policy, tiny_scorer
from tests.distributed import processes
from tests.distributed.test_launchers import LAUNCHERS, numbers

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("distributed")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_policy(tie_word_embeddings=True).save_pretrained(folder / "policy")
    tiny_scorer(seed=2).save_pretrained(folder / "value_model")
    return folder


def updates(log):
    """The log without its last entry, which is about this call of `train` alone."""
    return numbers(entry for entry in log if "train_runtime" not in entry)


def assert_same_end(resumed, whole):
    for one, other in zip(resumed, whole, strict=True):
        assert updates(one["log"]) == updates(other["log"])
        assert one["parameters"].keys() == other["parameters"].keys()
        for name, value in other["parameters"].items():
            np.testing.assert_array_equal(one["parameters"][name], value, err_msg=name)
        assert len(one["optimizer"]) == len(other["optimizer"]) > 0
        for ours, theirs in zip(one["optimizer"], other["optimizer"], strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(one["random"], other["random"])


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("config", ["multi_gpu", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"])
def test_a_killed_run_ends_like_one_that_was_not(config, adapters, models, tmp_path):
    run = {"models": str(models), "adapters": adapters}
    whole = processes.run(config, "train_with_checkpoints", output_dir=str(tmp_path / "whole"), **run)
    assert [rank["num_processes"] for rank in whole] == [2, 2]
    assert (whole[0]["distributed_type"], whole[0]["zero_stage"]) == LAUNCHERS[config]

    with pytest.raises(RuntimeError):
        processes.run(config, "train_with_checkpoints", output_dir=str(tmp_path / "died"), die_at=1, **run)
    assert {path.name for path in (tmp_path / "died").glob("checkpoint-*")} == {"checkpoint-1"}
    shutil.rmtree(tmp_path / "whole")
    resumed = processes.run(config, "train_with_checkpoints", output_dir=str(tmp_path / "died"), resume=True, **run)

    assert_same_end(resumed, whole)
