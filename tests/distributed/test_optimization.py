"""Optimizers that functions make, longer runs, and hyperparameter search in two processes."""

from __future__ import annotations

import pytest

from tests.distributed import processes

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("config", ["multi_gpu", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"])
def test_both_models_learn_at_their_rates_and_a_longer_run_has_its_schedule(config, models, tmp_path):
    how = {"output_dir": str(tmp_path), "models": str(models)}
    adapters = {"adapters": config in ("deepspeed_zero2", "fsdp2")}
    warmups = [("warm_the_critic_up", how | adapters | {"output_dir": f"{tmp_path}/warm"})]
    if config == "multi_gpu":  # DDP then counts on each parameter
        counts = {"output_dir": f"{tmp_path}/counts", "ddp_find_unused_parameters": False, "adapters": True}
        warmups.append(("warm_the_critic_up", how | counts))
    ranks, *warmed = processes.run_all(config, [("train_longer_at_two_rates", how), *warmups])
    for rank, *_ in warmed:
        assert_warmed_up(rank)
    for rank in ranks:
        assert (rank["num_processes"], rank["zero_stage"]) == (2, processes.LAUNCHERS[config][1])
        assert rank["rates"] == pytest.approx([1e-3, 0.5e-3, 0.5e-3, 0.25e-3])
        assert rank["of_groups"] == [1e-3, 2e-3]
    assert ranks[0]["moved"] == {"policy", "value_model"}  # whose parameters are put together there


def assert_warmed_up(rank):
    """The policy stands for two updates, then takes Adam's first step: of the learning rate, whatever the gradient."""
    largest = rank["largest"]
    assert [update["policy"] for update in largest[:2]] == [0, 0]
    assert [update["value_model"] > 0.3 for update in largest] == [True] * 3
    assert largest[0]["value_model"] == pytest.approx(1, abs=0.1) and largest[2]["policy"] == pytest.approx(1, abs=0.1)
    assert rank["warmup"] == [1, 1, 0]
