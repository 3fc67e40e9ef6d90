"""Two processes on the CPU under the shipped configurations: one algorithm, whatever splits the models."""

import itertools
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.distributed import images, processes, recipes
from tests.distributed.comparing import assert_logs_alike, assert_same_step, numbers
from tests.distributed.processes import LAUNCHERS

pytestmark = pytest.mark.distributed


IMAGES = "tests.distributed.images.train"
STEPS: list[dict[str, Any]] = [{}, {"adapted_head": True}, {"one_body": True}]


def runs(config, folder, models):
    """Train all weights and adapters by recipes, and take single steps, in the same two processes."""
    whole, adapter, one_step = (str(folder / name) for name in ("whole", "adapter", "one_step"))
    step = {"output_dir": one_step, "models": str(models), "local_batch_size": 4, "tokens_per_chunk": 3}
    of_adapters = {"adapters": True, "max_steps": 1, "gae_level": "turn", **recipes.CISPO}
    calls = [
        ("train", {"output_dir": whole, "models": str(models), **recipes.PPO, **recipes.BESIDE}),
        ("train", {"output_dir": adapter, "models": str(models), **of_adapters}),
        *(("one_step", step | what) for what in STEPS),
        (IMAGES, {"output_dir": str(folder / "images"), "models": str(models), "local_batch_size": 2}),
    ]
    return processes.run_all(config, calls)


@pytest.fixture(scope="module")
def ddp(models, tmp_path_factory):
    return runs("multi_gpu", tmp_path_factory.mktemp("ddp"), models)


@pytest.fixture(scope="module")
def one_process(models, tmp_path_factory):
    """The steps, with all tokens in one chunk, and the updates on images."""
    step = {"output_dir": str(tmp_path_factory.mktemp("one")), "models": str(models), "local_batch_size": 8}
    calls = [*(("one_step", step | what) for what in STEPS), (IMAGES, step | {"local_batch_size": 4})]
    *results, of_images = [rank for (rank,) in processes.run_all("multi_gpu", calls, world=1)]
    assert all(result["num_processes"] == 1 and set(result["chunks"]) == {1} for result in results)
    start = AutoModelForCausalLM.from_pretrained(models / "policy").state_dict()
    moved = [np.abs(results[0]["parameters"][f"policy.{name}"] - value.numpy()).max() for name, value in start.items()]
    assert min(moved) > 1e-3, "every gradient is large against the difference that is allowed"
    return [*results, of_images]


def test_rewards_per_token_and_scaled_scores_are_those_of_one_process(models, tmp_path):
    """The running deviation is that of all ranks' scores; a slow reward and unscored rows change nothing of it.

    Neither do holes in the response masks, nor recipes, of which one ends an update after two epochs or three.
    `step`, given each rank's share of responses, takes the same updates.
    """

    def ranks(world: int) -> list[list[dict[str, Any]]]:
        how = {"models": str(models), "local_batch_size": 8 // world}
        by_recipe = {"in_turns": True, "gae_level": "turn", "num_ppo_epochs": 3, **recipes.PPO, "kl_stop": 3.0}
        calls = [
            ("two_updates_of_scaled_rewards", {"output_dir": f"{tmp_path}/{world}-fixed", **recipes.CISPO, **how}),
            ("two_updates_of_scaled_rewards", {"output_dir": f"{tmp_path}/{world}-turns", **by_recipe, **how}),
            ("two_steps_of_given_responses", {"output_dir": f"{tmp_path}/{world}-given", **recipes.GSPO, **how}),
        ]
        return processes.run_all("multi_gpu", calls, world=world)

    alone = [rank for (rank,) in ranks(1)]
    for one, two in zip(alone, ranks(2), strict=True):
        assert_same_updates(one, two)
    assert [entry["policy/kl_stop_epoch"] for entry in alone[1]["log"][:2]] == [2, 3]


def assert_same_updates(one, two):
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
def test_every_launcher_trains_alike(config, models, ddp, one_process, tmp_path):
    whole, adapter, *steps, of_images = ddp if config == "multi_gpu" else runs(config, tmp_path, models)

    kind, stage = LAUNCHERS[config]
    for rank in (*whole, *adapter, *itertools.chain(*steps), *of_images):
        launched = {key: rank[key] for key in ("num_processes", "distributed_type", "zero_stage")}
        assert launched == {"num_processes": 2, "distributed_type": kind, "zero_stage": stage}
    for ours, of_ddp in ((whole, ddp[0]), (adapter, ddp[1])):
        assert_trained_alike(ours, of_ddp)
    images.assert_alike(of_images, one_process[-1], models)
    for two, one in zip(steps, one_process[:-1], strict=True):
        assert_same_step(two[0], one)
        assert two[0]["table"] == two[1]["table"] == one["table"]
        assert all(sum(rank["chunks"]) > 2 * len(rank["chunks"]) for rank in two)
        assert [rank["gathered_by_the_way"] for rank in two] == [0, 0]
        assert two[0]["chunks"] != two[1]["chunks"]


def assert_trained_alike(ranks, of_ddp):
    assert numbers(ranks[0]["log"]) == numbers(ranks[1]["log"])  # metrics are global
    assert_logs_alike(ranks[0], of_ddp[0])
    assert ranks[0]["policy"].keys() == of_ddp[0]["policy"].keys()
    for name, value in ranks[0]["policy"].items():
        np.testing.assert_allclose(value, of_ddp[0]["policy"][name], rtol=0, atol=1e-4)


def test_ranks_share_the_prompts_of_an_epoch_and_answer_with_random_numbers_of_their_own(models, tmp_path):
    """Each prompt goes to one rank, once an epoch, from a stream too; to one prompt the ranks give other answers.

    All responses to a prompt are of one rank.
    """
    arguments = (
        {"train_sampling_strategy": "random"}, {"train_sampling_strategy": "group_by_length"}, {"stream": True},
        {"tokens": [5] * 16, "learning_rate": 0.0}, {"num_generations": 2},
    )  # fmt: skip
    run = {"output_dir": str(tmp_path), "models": str(models)}
    *epochs, same, groups = processes.run_all("multi_gpu", [("see_prompts", {**run, **given}) for given in arguments])

    for (one, other), given in zip(epochs, arguments, strict=False):
        assert one["num_processes"] == other["num_processes"] == 2
        assert len(one["seen"]) == len(other["seen"]) == 16
        assert one["num_evaluated"] == other["num_evaluated"] == 5
        assert all(rank["names"] == [f"w{token}" for token in rank["seen"]] for rank in (one, other))
        for epoch in (slice(0, 8), slice(8, 16)):
            assert sorted(one["seen"][epoch] + other["seen"][epoch]) == list(range(3, 19))
        assert "stream" in given or one["seen"][:8] != one["seen"][8:]
    assert same[0]["seen"] == same[1]["seen"] and same[0]["answers"] != same[1]["answers"]
    assert all(rank["seen"][::2] == rank["seen"][1::2] for rank in groups)
    assert all(rank["answers"][::2] != rank["answers"][1::2] for rank in groups)
    assert sorted(groups[0]["seen"][::2] + groups[1]["seen"][::2]) == list(range(3, 19))


def test_a_flag_that_a_callback_sets_on_one_rank_holds_on_all(models, tmp_path):
    """Such as that of a limit of time, which ranks reach at different moments."""
    expected = {  # updates that are evaluated and saved, and the last one
        ("on_step_end", "should_training_stop"): [[], [], 1],
        ("on_step_end", "should_evaluate"): [[1, 2, 3], [2, 3], 3],
        ("on_log", "should_save"): [[2, 3], [1, 2, 3], 3],
        ("on_evaluate", "should_save"): [[1, 2, 3], [1, 2, 3], 3],
        ("on_log", "should_training_stop"): [[], [], 1],
        ("on_epoch_begin", "should_training_stop"): [[], [], 0],
    }
    calls = [
        ("set_flags_on_one_rank", {
            "output_dir": str(tmp_path / "-".join(case)), "models": str(models), "event": case[0], "flag": case[1],
        })
        for case in expected
    ]  # fmt: skip
    found = processes.run_all("multi_gpu", calls)
    assert dict(zip(expected, found, strict=True)) == {case: [end, end] for case, end in expected.items()}
