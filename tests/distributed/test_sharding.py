"""Frozen models are sharded like the trained ones, and score as they do whole; errors reach every rank."""

import re

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.distributed import processes
from tests.distributed.comparing import assert_logs_alike, assert_same_step
from tests.distributed.processes import LAUNCHERS

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ddp(models, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ddp"))
    return processes.run("multi_gpu", "train_with_reward_model", output_dir=folder, models=str(models))


@pytest.mark.parametrize(
    ("config", "arguments"),
    [("deepspeed_zero3", {}), ("deepspeed_zero3", {"ds3_gather_for_generation": False}), ("fsdp2", {})],
    ids=["ZeRO-3", "ZeRO-3 that gathers layer by layer", "FSDP2"],
)
def test_frozen_models_are_sharded_and_give_the_same_numbers(config, arguments, models, ddp, tmp_path):
    ranks = processes.run(config, "train_with_reward_model", output_dir=str(tmp_path), models=str(models), **arguments)

    assert [(rank["num_processes"], rank["zero_stage"]) for rank in ranks] == [(2, LAUNCHERS[config][1])] * 2
    policy = AutoModelForCausalLM.from_pretrained(models / "policy")
    reward_model = AutoModelForSequenceClassification.from_pretrained(models / "reward_model")
    whole = sum(value.numel() for model in (policy, reward_model) for value in model.parameters())
    assert ddp[0]["frozen_numbers_here"] == whole
    here = [rank["frozen_numbers_here"] for rank in ranks]
    assert sum(here) >= whole and max(here) < 0.55 * whole  # padding comes to the halves
    if config == "deepspeed_zero3":  # the constructor loads what is trained in shards, too
        assert max(rank["built_numbers_here"] for rank in ranks) < 0.55 * ddp[0]["built_numbers_here"]
    assert [rank["widths"] for rank in ranks] == [rank["widths"] for rank in ddp]
    assert ddp[0]["widths"] != ddp[1]["widths"]
    assert_logs_alike(ranks[0], ddp[0])
    for name in ("eval_score", "eval_kl", "eval_response_length_mean"):
        assert ranks[0]["before"][name] == pytest.approx(ddp[0]["before"][name], rel=1e-4, abs=1e-5)


def test_tied_weights_stay_tied_where_accelerate_sends_the_weights_of_one_rank(models, ddp, tmp_path):
    """It moves models to the meta device on the way, where a wrapper's tied weights become two."""
    arguments = {"output_dir": str(tmp_path), "models": str(models)}
    options = ["--fsdp_cpu_ram_efficient_loading", "true"]
    (ranks,) = processes.run_all("fsdp2", [("train_with_reward_model", arguments)], options=options)
    assert_logs_alike(ranks[0], ddp[0])


@pytest.fixture(scope="module")
def read_by_one_process(models, tmp_path_factory):
    arguments = {"output_dir": str(tmp_path_factory.mktemp("one")), "models": str(models), "local_batch_size": 8}
    ranks = processes.run("multi_gpu", "step_on_a_model_that_reads_characters", world=1, **arguments)
    assert ranks[0]["num_processes"] == 1
    return ranks[0]


@pytest.mark.parametrize("config", ["deepspeed_zero3", "fsdp2"])
def test_a_sharded_model_with_a_tokenizer_of_its_own(config, models, read_by_one_process, tmp_path):
    """Its scores and the step are those of one process; what one rank cannot read is an error on all, not a wait."""
    scenario, arguments = "step_on_a_model_that_reads_characters", {"output_dir": str(tmp_path), "models": str(models)}
    ranks, errors = processes.run_all(
        config, [(scenario, arguments), ("error_of", {"scenario": scenario, "unreadable_on": 1, **arguments})]
    )

    one = read_by_one_process
    assert [(rank["num_processes"], rank["zero_stage"]) for rank in ranks] == [(2, LAUNCHERS[config][1])] * 2
    assert max(rank["frozen_numbers_here"] for rank in ranks) < 0.55 * one["frozen_numbers_here"]
    assert one["evaluated"]["eval_rewards/reward_model/std"] > 0.1
    for name in ("eval_score", "eval_rewards/reward_model/std", "eval_kl"):
        assert ranks[0]["evaluated"][name] == pytest.approx(one["evaluated"][name], abs=1e-5)
    assert_same_step(ranks[0], one)
    too_long = r"ValueError: row 0 has \d+ tokens for the reward model, which has 2 positions: .*"
    assert re.fullmatch(too_long, errors[1]), errors[1]
    assert re.fullmatch(too_long.replace("ValueError: ", "ValueError: rank 1 failed: "), errors[0]), errors[0]


def test_an_error_of_one_ranks_reward_function_is_raised_on_all(models, tmp_path):
    """Also of a slow one, which is heard only after the models' passes."""
    arguments = {"scenario": "reward_function_fails_on_one_rank", "output_dir": str(tmp_path), "models": str(models)}
    calls = [("error_of", {**arguments, "slow": slow}) for slow in (False, True)]
    for errors in processes.run_all("multi_gpu", calls):
        assert errors[1] == "ZeroDivisionError: no such luck"
        assert errors[0] == "RuntimeError: rank 1 failed: ZeroDivisionError: no such luck"


@pytest.fixture(scope="module")
def ddp_against_opponents(models, tmp_path_factory):
    """The run of all weights, and that of adapters."""
    folder = str(tmp_path_factory.mktemp("ddp"))
    return processes.run_all("multi_gpu", [against_opponents(folder, models, adapters) for adapters in (False, True)])


def against_opponents(folder, models, adapters, **arguments):
    run = {"output_dir": folder, "models": str(models), "adapters": adapters, **arguments}
    return "train_against_opponents", run


@pytest.mark.parametrize(
    ("config", "arguments", "with_adapters"),
    [
        ("deepspeed_zero3", {}, [False]),
        ("deepspeed_zero3", {"ds3_gather_for_generation": False}, [True]),
        ("fsdp2", {}, [False, True]),
    ],
    ids=["ZeRO-3", "ZeRO-3 that gathers layer by layer", "FSDP2"],
)
def test_sharded_opponents_say_what_whole_ones_say(
    config, arguments, with_adapters, models, ddp_against_opponents, tmp_path
):
    runs = processes.run_all(
        config, [against_opponents(str(tmp_path), models, adapters, **arguments) for adapters in with_adapters]
    )

    for ranks, adapters in zip(runs, with_adapters, strict=True):
        assert ranks[0]["zero_stage"] == LAUNCHERS[config][1]
        ddp = ddp_against_opponents[adapters][0]
        assert_logs_alike(ranks[0], ddp)
        assert len({entry.get("rewards/reference/mean") for entry in ddp["log"]}) > 2, "the verdicts must differ"
        assert "eval_reference/win_rate" in ddp["before"] and "eval_self/win_rate" in ddp["before"]
