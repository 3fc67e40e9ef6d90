"""What tests on a GPU share. On a machine without one the same tests run small on the CPU, where the CPU can.

`@pytest.mark.needs(...)` names what a test needs, `needs(on_gpu=...)` what it needs on a GPU; it is skipped only if
that is missing.
`REQUIRE_GPU=1`, as `make test-gpu` sets it, makes a machine without a GPU an error.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.modeling_flash_attention_utils import is_flash_attn_available
from transformers.utils.import_utils import is_kernels_available

from rlhf_ppo import PPOTrainer
from tests.runs import MakeTrainer

IS_FAST = torch.cuda.is_available() and os.environ.get("PRETEND_CUDA") != "1"
"""Whether there is a GPU; runs are short on the pretend GPU, which computes on the CPU."""
REASONS = {
    "cuda": "needs a GPU that torch finds",
    "two GPUs": "needs two GPUs: a tensor-parallel group, or NCCL between processes",
    "vllm": "needs vLLM: pip install trl[vllm]",
    "flash": "needs flash attention: pip install flash-attn; or pip install kernels, with HF_HUB_OFFLINE=0",
    "compiler": "needs Triton and a C compiler, which torch.compile calls",
    "bitsandbytes": "needs bitsandbytes: pip install bitsandbytes",
}
"""What a test may need, and what its skip says."""


def found() -> set[str]:
    """Return the names in `REASONS` that this machine has; the pretend GPU has no kernels itself."""
    gpus = torch.cuda.device_count()
    is_installed = {name: importlib.util.find_spec(name) is not None for name in ("vllm", "bitsandbytes", "triton")}
    loads_kernels = importlib.util.find_spec("flash_attn") is not None or os.environ.get("HF_HUB_OFFLINE") != "1"
    return {
        *(["cuda"] if gpus else []),
        *(["two GPUs"] if gpus > 1 else []),
        *(name for name in ("vllm", "bitsandbytes") if is_installed[name]),
        *(["flash"] if (is_flash_attn_available() or is_kernels_available()) and loads_kernels else []),
        *(["compiler"] if is_installed["triton"] and shutil.which(os.environ.get("CC", "cc")) else []),
    }


def missing(item: pytest.Item, there: set[str]) -> list[str]:
    """What a test needs and a machine lacks, in the order of `REASONS`."""
    marks = list(item.iter_markers("needs"))
    needed = {name for mark in marks for name in mark.args}
    if "cuda" in there:
        needed |= {mark.kwargs["on_gpu"] for mark in marks if "on_gpu" in mark.kwargs}
    assert needed <= REASONS.keys(), f"{item.name} needs {needed - REASONS.keys()}, which no machine is asked for"
    return [name for name in REASONS if name in needed - there]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip each test for the first thing that it lacks; these are whole runs, which `make check` leaves out."""
    here = found()
    if os.environ.get("REQUIRE_GPU") == "1" and "cuda" not in here:
        raise pytest.UsageError("REQUIRE_GPU=1, but torch finds no GPU")
    for item in items:
        if "gpu" not in item.path.parts:
            continue
        item.add_marker(pytest.mark.thorough)
        if lacks := missing(item, here):
            item.add_marker(pytest.mark.skip(reason=REASONS[lacks[0]]))


@pytest.fixture
def device() -> str:
    """Where the tests run here."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def small_config(**overrides: Any) -> LlamaConfig:
    """A Llama of two layers with grouped heads of 64, which flash attention can."""
    values = {
        "vocab_size": 32, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "pad_token_id": 0,
        "eos_token_id": 1, "bos_token_id": 2, "num_labels": 1,
    }  # fmt: skip
    return LlamaConfig(**{**values, **overrides})


def small_policy(**overrides: Any) -> LlamaForCausalLM:
    """A policy of that size."""
    torch.manual_seed(0)
    return LlamaForCausalLM(small_config(**overrides))


@pytest.fixture
def make_device_trainer(make_trainer: MakeTrainer, device: str) -> MakeTrainer:
    """Factory of trainers on the device with the default of its users: float32 weights, bf16 arithmetic."""

    def make(**overrides: Any) -> PPOTrainer:
        torch.manual_seed(1)
        values: dict[str, Any] = {
            "use_cpu": device == "cpu", "bf16": True, "model": small_policy(),
            "value_model": LlamaForSequenceClassification(small_config()), "total_episodes": None, "max_steps": 2,
        }  # fmt: skip
        return make_trainer(**{**values, **overrides})

    return make
