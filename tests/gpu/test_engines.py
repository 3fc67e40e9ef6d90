"""Engines that need a GPU: vLLM, continuous batching with flash attention, NCCL under each launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rlhf_ppo.models.adapters import preserve_base
from tests.conftest import prompt_rows, save_models, tiny_policy, tiny_scorer
from tests.distributed.processes import ROOT, launch_environment
from tests.gpu.conftest import MakeTrainer, small_policy
from tests.ports import free_port

LAUNCHED = ["multi_gpu", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"]


@pytest.mark.needs(on_gpu="flash")
@pytest.mark.parametrize("asked", [{}, {"top_k": 5, "top_p": 0.9}], ids=["all tokens", "few tokens"])
def test_continuous_batching_says_the_log_probabilities_of_training(
    make_device_trainer: MakeTrainer, asked: dict[str, Any]
) -> None:
    """In bf16: the difference to the forward pass is its rounding."""
    trainer = make_device_trainer(generation_engine="continuous", max_steps=1, **asked)
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=2 if asked else 0.05)
    assert trainer.sampler.engine.dtype == torch.bfloat16  # type: ignore


def test_the_base_under_an_adapter_is_kept_in_the_host_s_memory(device: str) -> None:
    """Its copies are made and put back in the device's turn, and take nothing of a GPU."""
    lora = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    policy = get_peft_model(small_policy().bfloat16(), lora).to(device)
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    allocated = torch.cuda.memory_allocated()
    with preserve_base(policy), torch.no_grad():
        assert torch.cuda.memory_allocated() == allocated
        for name, weight in policy.named_parameters():
            weight += ".base_layer." in name
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_parameters())


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """The directory of a small policy, which vLLM loads."""
    save_models(tmp_path, policy=small_policy())
    return str(tmp_path / "policy")


@pytest.mark.needs("cuda", "vllm")
@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "sleep mode"])
def test_vllm_generates_and_leaves_the_base_under_lora_bit_for_bit(
    make_device_trainer: MakeTrainer, saved: str, sleeps: bool
) -> None:
    """Two evaluations between updates: in sleep mode TRL's adapter sends the weights before each call."""
    trainer = make_device_trainer(
        model=AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16), generation_engine="vllm",
        vllm_gpu_memory_utilization=0.2, vllm_enable_sleep_mode=sleeps, vllm_max_model_length=64,
        peft_config=LoraConfig(r=4, target_modules="all-linear"), eval_dataset=prompt_rows(6), learning_rate=1e-2,
    )  # fmt: skip
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters() if ".base_layer." in name}
    trainer.train()
    for _ in range(2):
        trainer.evaluate()
    assert before and all(
        torch.equal(weight, before[name].to(weight.device))
        for name, weight in trainer.model.named_parameters()
        if name in before
    )
    first = trainer.state.log_history[0]
    assert first["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [*(pytest.param(config, marks=pytest.mark.needs("cuda")) for config in LAUNCHED[:-1]), LAUNCHED[-1]]
)
def test_the_first_update_under_each_launcher(config: str, device: str, tmp_path: Path) -> None:
    """One process on one device: NCCL on a GPU. tests/distributed has all of them on a CPU, in two processes."""
    (report,) = launched(config, 1, device, tmp_path, "first_update")
    assert report["device"] == device and report["num_processes"] == 1
    assert report["dtypes"] == ["torch.float32"] * 3
    assert report["kl"] == 0 and report["ratio"] == pytest.approx(1, abs=1e-3)


@pytest.mark.needs("cuda", "two GPUs")
@pytest.mark.parametrize("config", LAUNCHED)
def test_two_gpus_take_one_step_together(config: str, device: str, tmp_path: Path) -> None:
    reports = launched(config, 2, device, tmp_path, "first_update")
    assert [report["num_processes"] for report in reports] == [2, 2]
    assert reports[0]["gradient_norm"] == pytest.approx(reports[1]["gradient_norm"])


@pytest.mark.needs("cuda", "two GPUs", "vllm")
def test_the_ranks_of_a_tensor_parallel_group_sample_the_same_ids(device: str, saved: str, tmp_path: Path) -> None:
    """Both ask the one vLLM that they are with the same prompts, and are given what the other one is."""
    one, other = launched("multi_gpu", 2, device, tmp_path, "sampled_in_a_group", saved)
    assert one["of_group"] == other["of_group"] and one["after"] != other["after"]


def launched(config: str, world: int, device: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run tests/gpu/launched.py in processes that `accelerate launch` would start; return what each reports."""
    save_models(folder, policy=tiny_policy(), value_model=tiny_scorer(seed=2))
    environment = os.environ | launch_environment(config, world, ["--mixed_precision", "bf16"])
    environment |= {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("launched.py")), device, str(folder), *arguments]
    processes = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(output[-4000:] for output in outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
