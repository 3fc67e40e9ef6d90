"""Critic warm-up in two processes; rates of each model's own are among the recipes of test_launchers.py."""

from __future__ import annotations

import pytest

from tests.distributed import processes

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("config", ["multi_gpu", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"])
def test_the_policy_stays_while_the_critic_warms_up(config, models, tmp_path):
    run = {"models": str(models), "output_dir": str(tmp_path), "adapters": config in ("deepspeed_zero2", "fsdp2")}
    one_body = config in ("deepspeed_zero3", "fsdp2")  # whose hooks see a body without gradients
    calls = [("warm_the_critic_up", run), *[("warm_the_critic_up", run | {"one_body": True})] * one_body]
    if config == "multi_gpu":  # DDP then counts on each parameter
        calls.append(("warm_the_critic_up", run | {"ddp_find_unused_parameters": False, "adapters": True}))
    for rank, *_ in processes.run_all(config, calls):
        assert (rank["num_processes"], rank["zero_stage"]) == (2, processes.LAUNCHERS[config][1])
        assert_warmed_up(rank)


def assert_warmed_up(rank):
    """The policy stands for two updates, then takes Adam's first step: of the learning rate, whatever the gradient."""
    largest = rank["largest"]
    assert [update["policy"] for update in largest[:2]] == [0, 0]
    assert [update["value_model"] > 0.3 for update in largest] == [True] * 3
    assert largest[0]["value_model"] == pytest.approx(1, abs=0.1) and largest[2]["policy"] == pytest.approx(1, abs=0.1)
    assert rank["warmup"] == [1, 1, 0]
