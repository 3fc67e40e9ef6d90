"""Two processes on the CPU under the shipped configurations: one algorithm, whatever splits the models."""

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.conftest import tiny_policy, tiny_scorer
from tests.distributed import processes

LAUNCHERS = {
    "multi_gpu": ("MULTI_CPU", None),
    "deepspeed_zero1": ("DEEPSPEED", 1),
    "deepspeed_zero2": ("DEEPSPEED", 2),
    "deepspeed_zero3": ("DEEPSPEED", 3),
    "fsdp2": ("FSDP", None),
}
SESSION = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "eps", "time/tokens_per_second"}

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("distributed")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_policy(tie_word_embeddings=True).save_pretrained(folder / "policy")
    tiny_scorer(seed=2).save_pretrained(folder / "value_model")
    return folder


@pytest.fixture(scope="module")
def ddp(models, tmp_path_factory):
    return processes.run("multi_gpu", "train", output_dir=str(tmp_path_factory.mktemp("ddp")), models=str(models))


def numbers(log):
    return [{k: v for k, v in entry.items() if k not in SESSION and not k.startswith("time/")} for entry in log]


@pytest.mark.parametrize("config", LAUNCHERS)
def test_every_launcher_trains_like_ddp(config, models, ddp, tmp_path):
    ranks = processes.run(config, "train", output_dir=str(tmp_path), models=str(models))

    for rank in ranks:
        launched = {key: rank[key] for key in ("num_processes", "distributed_type", "zero_stage")}
        kind, stage = LAUNCHERS[config]
        assert launched == {"num_processes": 2, "distributed_type": kind, "zero_stage": stage}
    assert numbers(ranks[0]["log"]) == numbers(ranks[1]["log"])  # metrics are global
    for ours, theirs in zip(numbers(ranks[0]["log"]), numbers(ddp[0]["log"]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    for name, value in ranks[0]["policy"].items():
        np.testing.assert_allclose(value, ddp[0]["policy"][name], rtol=0, atol=1e-4)
        np.testing.assert_array_equal(saved[name.removeprefix("policy.")].numpy(), value)


def test_ranks_sample_different_responses_from_shared_weights(ddp):
    first = ddp[0]["log"][0]
    assert first["response/length_min"] < first["response/length_max"]
    assert first["val/ratio_var"] >= 0 and first["episode"] == 8


@pytest.fixture(scope="module")
def one_process(models, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("one"))
    return processes.run("multi_gpu", "one_step", world=1, output_dir=folder, models=str(models), local_batch_size=8)


def test_rewards_per_token_and_scaled_scores_are_those_of_one_process(models, tmp_path):
    """The running deviation is that of all ranks' scores; a slow reward and unscored rows change nothing of it."""
    (one,) = processes.run(
        "multi_gpu", "two_updates_of_scaled_rewards", world=1, output_dir=str(tmp_path / "1"), models=str(models),
        local_batch_size=8,
    )  # fmt: skip
    two = processes.run(
        "multi_gpu", "two_updates_of_scaled_rewards", output_dir=str(tmp_path / "2"), models=str(models),
        local_batch_size=4,
    )  # fmt: skip

    assert one["score_moments"]["count"] == 16
    for rank in two:
        assert rank["num_processes"] == 2
        assert rank["score_moments"] == pytest.approx(one["score_moments"], rel=1e-5)
    for ours, theirs in zip(numbers(two[0]["log"])[:2], numbers(one["log"])[:2], strict=True):
        ours.pop("val/ratio_var"), theirs.pop("val/ratio_var")
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, value in one["parameters"].items():
        np.testing.assert_allclose(two[0]["parameters"][name], value, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("config", LAUNCHERS)
def test_two_processes_take_the_step_of_one(config, models, one_process, tmp_path):
    single = one_process[0]
    assert single["num_processes"] == 1

    two = processes.run(config, "one_step", output_dir=str(tmp_path), models=str(models), local_batch_size=4)

    assert [rank["num_processes"] for rank in two] == [2, 2]
    ours, theirs = numbers(two[0]["log"])[0], numbers(single["log"])[0]
    assert ours.pop("val/ratio_var") == pytest.approx(theirs.pop("val/ratio_var"), abs=1e-6)
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, value in single["parameters"].items():
        np.testing.assert_allclose(two[0]["parameters"][name], value, rtol=0, atol=2e-6, err_msg=name)
