"""Two processes are killed and resumed: they end like a run that was never stopped, bit for bit."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed import processes, recipes
from tests.distributed.comparing import assert_same_end, updates
from tests.distributed.processes import LAUNCHERS
from tests.distributed.scenarios import logits_of

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("config", ["multi_gpu", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"])
def test_a_killed_run_ends_like_one_that_was_not(config, models, tmp_path):
    """In bf16, where the engine's weights are not all that must be saved; what is saved loads as it was trained.

    The run of adapters is killed while the value model learns alone, before the policy has a state in the optimizer.

    The killed run's update before the kill is in the log too, so that two launches with one seed give the same bits.
    """

    def call(name, adapters, **arguments):
        run = {"output_dir": str(tmp_path / name), "models": str(models), "adapters": adapters, **arguments}
        return "train_with_checkpoints", {"bf16": True, "num_ppo_epochs": 2, **recipes.FOLLOWING, **run}

    warm = {"critic_warmup_steps": 2}

    def run_all(*calls, **how):
        return processes.run_all(config, calls, options=["--mixed_precision", "bf16"], **how)

    whole, whole_adapters = run_all(
        call("a", False), call("b", True, **warm), call("full", False, die_at=1), last_is_killed=True
    )
    for ranks in (whole, whole_adapters):
        assert [(rank["distributed_type"], rank["zero_stage"]) for rank in ranks] == [LAUNCHERS[config]] * 2
        assert [rank["mixed_precision"] for rank in ranks] == ["bf16"] * 2
    assert checkpoints(tmp_path / "full") == {"checkpoint-1"}
    (resumed,) = run_all(call("full", False, resume=True), call("LoRA", True, die_at=1, **warm), last_is_killed=True)
    assert checkpoints(tmp_path / "LoRA") == {"checkpoint-1"}
    (resumed_adapters,) = run_all(call("LoRA", True, resume=True, **warm))

    assert_same_end(resumed, whole)
    assert_same_end(resumed_adapters, whole_adapters)
    assert [entry["val/critic_warmup"] for entry in updates(whole_adapters[0]["log"])] == [1, 1, 0]
    assert_loads_as_trained(tmp_path, whole[0]["parameters"], whole_adapters[0]["parameters"])
    if config.startswith("deepspeed"):
        names = stored_by_deepspeed(tmp_path / "LoRA" / "checkpoint-1")
        frozen = {name for name in names if "lora_" not in name and "modules_to_save" not in name}
        assert len(names) > 8 and frozen <= {"policy.base_model.model.lm_head.weight"}  # tied: listed by another name


def test_checkpoints_of_which_each_rank_writes_its_shards(models, tmp_path):
    """They resume bit for bit, and what `save_model` writes beside is whole. In `fsdp2.yaml` rank 0 writes all.

    Layers that recompute activations have other names in the modules than in the weights.
    """
    folders = {name: str(tmp_path / name) for name in ("whole", "resumed", "saved", "adapter")}
    runs = {name: {"output_dir": folder, "models": str(models)} for name, folder in folders.items()}
    whole, resumed, *trained = processes.run_all(
        "fsdp2",
        [
            ("train_with_checkpoints", runs["whole"]),
            ("train_with_checkpoints", {**runs["resumed"], "resume": str(tmp_path / "whole" / "checkpoint-1")}),
            ("train", {**runs["saved"], "max_steps": 1}),
            ("train", {**runs["adapter"], "max_steps": 1, "adapters": True}),
        ],
        options=["--fsdp_state_dict_type", "SHARDED_STATE_DICT", "--fsdp_activation_checkpointing", "true"],
    )

    checkpoint = tmp_path / "whole" / "checkpoint-1"
    shards = {path.name for path in (checkpoint / "pytorch_model_fsdp_0").glob("*.distcp")}
    assert shards == {"__0_0.distcp", "__1_0.distcp"} and not (checkpoint / "pytorch_model_fsdp.bin").exists()
    assert_same_end(resumed, whole)
    for ranks, name in zip(trained, ("saved", "adapter"), strict=True):
        loaded = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / name))
        np.testing.assert_allclose(loaded, ranks[0]["logits"], rtol=0, atol=1e-6)


def test_three_processes_resume_bit_for_bit(models, tmp_path):
    """Of three numbers the order of a sum shows: DDP must group gradients alike after a start and later.

    With `ddp_find_unused_parameters=False` it groups them anew after the first backward pass, and this fails.
    """
    run = {"models": str(models), "output_dir": str(tmp_path / "whole")}
    resume = {"output_dir": str(tmp_path / "resumed"), "resume": str(tmp_path / "whole" / "checkpoint-1")}
    whole, resumed = processes.run_all(
        "multi_gpu", [("train_with_checkpoints", run), ("train_with_checkpoints", run | resume)], world=3
    )
    assert_same_end(resumed, whole)


def assert_loads_as_trained(folder, whole, adapters):
    """The last checkpoints' policies are those of the processes, as exactly as the file's type holds them."""
    loaded = AutoModelForCausalLM.from_pretrained(folder / "a" / "checkpoint-3").state_dict()
    saved = load_file(folder / "b" / "checkpoint-3" / "adapter_model.safetensors")
    names = {
        name.replace(".default.", "."): name for name in adapters if name.startswith("policy.") and "lora_" in name
    }
    assert len(loaded) > 20 and names.keys() == {f"policy.{name}" for name in saved}
    for name, value in loaded.items():
        assert torch.equal(value, torch.tensor(whole[f"policy.{name}"]).to(value.dtype)), name
    for name, value in saved.items():
        assert torch.equal(value, torch.tensor(adapters[names[f"policy.{name}"]]).to(value.dtype)), name


def stored_by_deepspeed(checkpoint):
    """Names of the parameters in DeepSpeed's own file of the modules."""
    path = sorted(checkpoint.glob("global_step*/*model_states.pt"))[0]
    state = torch.load(path, weights_only=False)
    return {*state["module"], *(state["frozen_param_fragments"] or ())}


def checkpoints(folder):
    return {path.name for path in folder.glob("checkpoint-*")}


@pytest.mark.parametrize("config", ["multi_gpu", "fsdp2"])
def test_sigterm_to_one_rank_ends_both_after_the_update(config, models, tmp_path):
    run = {"models": str(models), "ptx_coef": 0.3}
    ended = {**run, "output_dir": str(tmp_path / "ended")}
    whole, stopped = processes.run_all(
        config,
        [
            ("train_with_checkpoints", {**run, "output_dir": str(tmp_path / "whole")}),
            ("train_until_sigterm", {**ended, "at": ("on_optimizer_step", 1)}),
        ],
    )
    assert [(rank["num_processes"], rank["global_step"], rank["code"]) for rank in stopped] == [(2, 2, 143)] * 2
    assert checkpoints(tmp_path / "ended") == {"checkpoint-2"}
    (resumed,) = processes.run_all(config, [("train_with_checkpoints", {**ended, "resume": True})])
    assert_same_end(resumed, whole)


@pytest.mark.parametrize(("config", "before", "after"), [("multi_gpu", 1, 2), ("fsdp2", 2, 1)], ids=["DDP", "FSDP2"])
def test_another_number_of_processes_goes_on(config, before, after, models, tmp_path):
    """As those before would have, which took the second update too."""

    def train(world, **arguments):
        run = {
            "output_dir": str(tmp_path), "models": str(models), "fixed_responses": True, "num_mini_batches": 1,
            "max_steps": 2, "learning_rate": 0.1, "adam_epsilon": 1.0,
            "gradient_accumulation_steps": 4 // world, **arguments,
        }  # fmt: skip
        ranks = processes.run(config, "train_with_checkpoints", world=world, **run)
        return ranks[0]

    whole = train(before)
    shutil.rmtree(tmp_path / "checkpoint-2")
    resumed = train(after, resume=True)

    assert (whole["num_processes"], resumed["num_processes"]) == (before, after)
    for ours, theirs in zip(updates(resumed["log"]), updates(whole["log"]), strict=True):
        del ours["val/ratio_var"], theirs["val/ratio_var"]  # over micro-batches, which are others
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, value in whole["parameters"].items():
        np.testing.assert_allclose(resumed["parameters"][name], value, rtol=0, atol=1e-5, err_msg=name)
