"""Frozen models are sharded like the trained ones, and score as they do whole; errors reach every rank."""

import time

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.distributed import processes
from tests.distributed.comparing import assert_logs_alike
from tests.distributed.processes import LAUNCHERS

pytestmark = pytest.mark.distributed


def with_reward_model(folder, models, adapters, **arguments):
    return "train_with_reward_model", {"output_dir": folder, "models": str(models), "adapters": adapters, **arguments}


@pytest.fixture(scope="module")
def ddp(models, tmp_path_factory):
    """The run of all weights, and that of adapters, both with shared prefixes, and the first without."""
    folder = str(tmp_path_factory.mktemp("ddp"))
    calls = [with_reward_model(folder, models, adapters) for adapters in (False, True)]
    *shared, unshared = processes.run_all(
        "multi_gpu", [*calls, with_reward_model(folder, models, False, share_prefixes=False)]
    )
    ours, theirs = (run[0]["log"][:3] for run in (shared[0], unshared))
    assert max(entry["batch/shared_frac"] for entry in ours) > 0.2
    assert [entry["batch/shared_frac"] for entry in theirs] == [0] * 3
    same = [name for name in theirs[0] if name.startswith(("objective/", "loss/", "policy/", "val/grad_norm", "grad"))]
    assert len(same) > 10
    for name, entry, other in ((name, *pair) for name in same for pair in zip(ours, theirs, strict=True)):
        assert entry[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name
    return shared


@pytest.mark.parametrize(
    ("config", "arguments", "with_adapters"),
    [
        ("deepspeed_zero3", {}, [False]),
        ("deepspeed_zero3", {"ds3_gather_for_generation": False}, [False, True]),
        ("fsdp2", {}, [False, True]),
    ],
    ids=["ZeRO-3", "ZeRO-3 that gathers layer by layer", "FSDP2"],
)
def test_frozen_models_are_sharded_and_give_the_same_numbers(config, arguments, with_adapters, models, ddp, tmp_path):
    calls = [with_reward_model(str(tmp_path), models, adapters, **arguments) for adapters in with_adapters]
    runs = processes.run_all(config, calls)
    for ranks, of_ddp in zip(runs, ddp, strict=False):
        assert [(rank["num_processes"], rank["zero_stage"]) for rank in ranks] == [(2, LAUNCHERS[config][1])] * 2
        assert [rank["widths"] for rank in ranks] == [rank["widths"] for rank in of_ddp]
        assert of_ddp[0]["widths"] != of_ddp[1]["widths"]
        assert_logs_alike(ranks[0], of_ddp[0])
        assert len({entry.get("rewards/reference/mean") for entry in ranks[0]["log"]}) > 2, "the verdicts must differ"
        names = ("eval_score", "eval_kl", "eval_response_length_mean", "eval_reference/win_rate", "eval_self/win_rate")
        for name in names:
            assert ranks[0]["before"][name] == pytest.approx(of_ddp[0]["before"][name], rel=1e-4, abs=1e-5)

    policy = AutoModelForCausalLM.from_pretrained(models / "policy")
    reward_model = AutoModelForSequenceClassification.from_pretrained(models / "reward_model")
    whole = sum(value.numel() for model in (policy, reward_model) for value in model.parameters())
    assert ddp[0][0]["frozen_numbers_here"] == whole
    here = [rank["frozen_numbers_here"] for rank in runs[0]]
    assert sum(here) >= whole and max(here) < 0.55 * whole  # padding comes to the halves
    if config == "deepspeed_zero3":  # the constructor loads what is trained in shards, too
        assert max(rank["built_numbers_here"] for rank in runs[0]) < 0.55 * ddp[0][0]["built_numbers_here"]


def test_a_value_model_is_made_of_sharded_weights_and_adapters_are_merged_into_them(models, tmp_path):
    """It is made of a policy, of one with an adapter, and of a reward model with an adapter, which is merged too."""
    policy = AutoModelForCausalLM.from_pretrained(models / "policy")
    reward_model = AutoModelForSequenceClassification.from_pretrained(models / "reward_model")
    plain = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    adapters = {"model": peft_model(policy, "CAUSAL_LM"), "reward_model": peft_model(reward_model, "SEQ_CLS")}
    for argument, adapter in adapters.items():
        adapter.save_pretrained(tmp_path / argument)
    given = [{}, *({argument: str(tmp_path / argument)} for argument in adapters)]
    run = {"output_dir": str(tmp_path / "run"), "models": str(models)}
    made = processes.run_all("deepspeed_zero3", [("made_by_the_constructor", run | each) for each in given])

    merged, rewards = (dict(adapter.merge_and_unload().named_parameters()) for adapter in adapters.values())
    changed = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(plain[changed], merged[changed])
    for (weights, _), source in zip(made, (plain, merged, rewards), strict=True):
        parts = ("value_model", "reward_model") if source is rewards else ("value_model",)
        names = [name for name in source if name.startswith("model.")] + ["score.weight"]
        assert weights.keys() == {f"{part}.{name}" for part in parts for name in names}
        for name, weight in weights.items():
            expected = source.get(name.partition(".")[2])  # the head over a policy is new
            np.testing.assert_array_equal(weight, 0 if expected is None else expected.detach(), err_msg=name)


def peft_model(base, task_type):
    return get_peft_model(
        base, LoraConfig(r=4, target_modules=["q_proj"], task_type=task_type, init_lora_weights=False)
    )


@pytest.mark.parametrize("config", ["deepspeed_zero1", "deepspeed_zero2"])
def test_shared_prefixes_give_the_same_numbers_where_the_optimizer_is_sharded(config, models, ddp, tmp_path):
    runs = processes.run_all(
        config, [with_reward_model(str(tmp_path), models, adapters) for adapters in (False, True)]
    )
    for ranks, of_ddp in zip(runs, ddp, strict=True):
        assert [rank["zero_stage"] for rank in ranks] == [LAUNCHERS[config][1]] * 2
        assert max(entry.get("batch/shared_frac", 0) for entry in ranks[0]["log"]) > 0.2
        assert_logs_alike(ranks[0], of_ddp[0])


def test_tied_weights_stay_tied_where_accelerate_sends_the_weights_of_one_rank(models, ddp, tmp_path):
    """It moves models to the meta device on the way, where a wrapper's tied weights become two."""
    arguments = {"output_dir": str(tmp_path), "models": str(models)}
    options = ["--fsdp_cpu_ram_efficient_loading", "true"]
    (ranks,) = processes.run_all("fsdp2", [("train_with_reward_model", arguments)], options=options)
    assert_logs_alike(ranks[0], ddp[0][0])


def test_an_error_of_one_rank_and_other_settings_of_one_are_raised_on_all(models, tmp_path):
    """The error is of a slow reward function, which is heard only after the models' passes."""
    other, run = "train_with_other_settings_on_one_rank", {"output_dir": str(tmp_path), "models": str(models)}
    calls = [
        {"scenario": "reward_function_fails_on_one_rank"},
        *({"scenario": other, "what": each} for each in ("arguments", "rows", "output_dir")),
    ]
    errors, *of_settings = processes.run_all("multi_gpu", [("error_of", run | call) for call in calls])
    assert errors[1] == "ZeroDivisionError: no such luck"
    assert errors[0] == "RuntimeError: rank 1 failed: ZeroDivisionError: no such luck"
    differences = ("learning_rate=0.1 (rank 0: 0.001)", "train_dataset=32 rows", f"output_dir={tmp_path}/1")
    for (first, second), name in zip(of_settings, differences, strict=True):
        assert first == second
        assert first.startswith(f"ValueError: rank 1 has different arguments from rank 0: {name}")


@pytest.mark.parametrize(("config", "where"), [("fsdp2", "reward model"), ("deepspeed_zero3", "generation")])
def test_an_error_of_one_rank_in_a_pass_ends_all(config, where, models, tmp_path):
    """The others wait in the pass, until the process that failed has ended; it alone tells the cause."""
    run = {"output_dir": str(tmp_path / "run"), "models": str(models), "where": where}
    started = processes.started(config, [("out_of_memory_on_one_rank", run)], str(tmp_path))
    end = time.monotonic() + 90
    while any(process.is_alive() for process in started) and time.monotonic() < end:
        time.sleep(0.1)
    for process in started:
        process.kill()  # without effect on those that have ended
        process.join()
    assert [process.exitcode for process in started] == [1, 1]
    told = [(tmp_path / f"{rank}.log").read_text().count("OutOfMemoryError: no room") for rank in (0, 1)]
    assert told == [0, 1]
