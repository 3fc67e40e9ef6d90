"""Frozen models are sharded like the trained ones, and score as they do whole; errors reach every rank."""

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.distributed import processes
from tests.distributed.comparing import numbers
from tests.distributed.processes import LAUNCHERS

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ddp(models, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ddp"))
    return processes.run("multi_gpu", "train_with_reward_model", output_dir=folder, models=str(models))


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ("deepspeed_zero3", {}),
        ("deepspeed_zero3", {"ds3_gather_for_generation": False}),
        ("fsdp2", {}),
    ],
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
    for ours, theirs in zip(numbers(ranks[0]["log"]), numbers(ddp[0]["log"]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    for name in ("eval_score", "eval_kl", "eval_response_length_mean"):
        assert ranks[0]["before"][name] == pytest.approx(ddp[0]["before"][name], rel=1e-4, abs=1e-5)


def test_an_error_of_one_ranks_reward_function_is_raised_on_all(models, tmp_path):
    errors = processes.run(
        "multi_gpu", "reward_function_fails_on_one_rank", output_dir=str(tmp_path), models=str(models), timeout=60
    )

    assert errors[1] == "ZeroDivisionError: no such luck"
    assert errors[0] == "RuntimeError: rank 1 failed: ZeroDivisionError: no such luck"


@pytest.fixture(scope="module", params=[False, True], ids=["all weights", "adapters"])
def adapters(request):
    return request.param


@pytest.fixture(scope="module")
def ddp_against_opponents(models, adapters, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ddp"))
    return processes.run(
        "multi_gpu", "train_against_opponents", output_dir=folder, models=str(models), adapters=adapters
    )


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ("deepspeed_zero3", {}),
        ("deepspeed_zero3", {"ds3_gather_for_generation": False}),
        ("fsdp2", {}),
    ],
    ids=["ZeRO-3", "ZeRO-3 that gathers layer by layer", "FSDP2"],
)
def test_sharded_opponents_say_what_whole_ones_say(
    config, arguments, models, adapters, ddp_against_opponents, tmp_path
):
    ranks = processes.run(
        config,
        "train_against_opponents",
        output_dir=str(tmp_path),
        models=str(models),
        adapters=adapters,
        **arguments,
    )

    assert ranks[0]["zero_stage"] == LAUNCHERS[config][1]
    ddp = ddp_against_opponents[0]
    for ours, theirs in zip(numbers(ranks[0]["log"]), numbers(ddp["log"]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert len({entry.get("rewards/reference/mean") for entry in ddp["log"]}) > 2, "the verdicts must differ"
    assert "eval_reference/win_rate" in ddp["before"] and "eval_self/win_rate" in ddp["before"]
