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


@pytest.fixture(scope="module")
def whole_ddp(models, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("whole"))
    return processes.run("multi_gpu", "train_with_checkpoints", output_dir=folder, models=str(models))


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


def test_sigterm_to_one_rank_saves_a_checkpoint_from_which_the_run_goes_on(models, whole_ddp, tmp_path):
    run = {"output_dir": str(tmp_path), "models": str(models)}

    stopped = processes.run("multi_gpu", "train_until_sigterm", **run)

    assert [(rank["num_processes"], rank["global_step"]) for rank in stopped] == [(2, 2), (2, 2)]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2"}
    resumed = processes.run("multi_gpu", "train_with_checkpoints", resume=True, **run)
    assert_same_end(resumed, whole_ddp)


@pytest.mark.parametrize("config", ["multi_gpu", "fsdp2"])
def test_one_process_goes_on_where_two_stopped(config, models, tmp_path):
    run = {
        "output_dir": str(tmp_path), "models": str(models), "fixed_responses": True, "num_mini_batches": 1,
        "max_steps": 2, "learning_rate": 0.1, "adam_epsilon": 1.0,
    }  # fmt: skip
    two = processes.run(config, "train_with_checkpoints", **run)
    shutil.rmtree(tmp_path / "checkpoint-2")

    one = processes.run(config, "train_with_checkpoints", world=1, resume=True, gradient_accumulation_steps=4, **run)

    assert one[0]["num_processes"] == 1
    for ours, theirs in zip(updates(one[0]["log"]), updates(two[0]["log"]), strict=True):
        del ours["val/ratio_var"], theirs["val/ratio_var"]  # over micro-batches, which are others
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, value in two[0]["parameters"].items():
        np.testing.assert_allclose(one[0]["parameters"][name], value, rtol=0, atol=1e-5, err_msg=name)


def test_another_batch_or_another_number_of_deepspeed_processes_is_an_error(models, tmp_path):
    for config, arguments, message in (
        ("multi_gpu", {}, "batch_size=8 episodes per update, but with 1 processes it is 4 now"),
        (
            "deepspeed_zero2",
            {"gradient_accumulation_steps": 4},
            "the checkpoint is of 2 processes, but there are 1 now",
        ),
    ):
        run = {"output_dir": str(tmp_path / config), "models": str(models)}
        processes.run(config, "train_with_checkpoints", max_steps=1, **run)
        with pytest.raises(RuntimeError, match=message):
            processes.run(config, "train_with_checkpoints", world=1, resume=True, max_steps=2, **arguments, **run)
