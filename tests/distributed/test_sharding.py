"""Frozen models are sharded like the trained ones, and score as they do whole; errors reach every rank."""

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.distributed import processes
from tests.distributed.comparing import assert_logs_alike
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


def test_an_error_of_one_ranks_reward_function_is_raised_on_all(models, tmp_path):
    """Of a slow one, which is heard only after the models' passes."""
    arguments = {"scenario": "reward_function_fails_on_one_rank", "output_dir": str(tmp_path), "models": str(models)}
    (errors,) = processes.run_all("multi_gpu", [("error_of", arguments)])
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
