"""Costs that are counted without storage equal those of a real pass, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_ppo.estimate.update import (
    _CPU_ATTENTION,
    PassCost,
    count_cache_bytes,
    count_pass,
    gathered_bytes,
    stored_bytes,
)
from rlhf_ppo.models.unwrapping import CACHE, backbone
from tests.conftest import tiny_policy

SIZES = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=40)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    "gpt_neox": SIZES,
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 40},
    "gemma2": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
}
ROWS, LENGTH = 3, 20


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **ARCHITECTURES[name], bos_token_id=0, eos_token_id=1, pad_token_id=2)
    return AutoModelForCausalLM.from_config(config)


def really(model: nn.Module) -> tuple[PassCost, int]:
    """Run the passes with numbers, and look at what is there: the cost, and the bytes of the cache."""
    body = backbone(model)
    own = {value.untyped_storage().data_ptr() for value in [*body.parameters(), *body.buffers()]}
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0  # with nothing masked some models leave the mask out
    with (
        FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value),
    ):
        body(input_ids=ids, attention_mask=mask, use_cache=False)
    saved = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in kept}
    with torch.no_grad():
        body.eval()
        cache = getattr(body(input_ids=ids, attention_mask=mask, use_cache=True), CACHE)
    cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    cost = PassCost(sum(size for address, size in saved.items() if address not in own), counter.get_total_flops())
    return cost, cached


def counted(model: nn.Module, *autocast: Any) -> tuple[PassCost, int]:
    return count_pass(model, ROWS, LENGTH, *autocast), count_cache_bytes(model, ROWS, LENGTH, *autocast)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_counted_is_what_a_real_pass_keeps(name: str, checkpointing: bool) -> None:
    model = model_of(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ours = counted(model)
    assert model.training
    assert ours == really(model)


def test_adapters_and_frozen_weights_count_as_they_are() -> None:
    model = get_peft_model(tiny_policy(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    assert counted(model) == really(model)


def test_16_bit_passes_keep_less() -> None:
    model = model_of("llama").train()
    cost, cached = counted(model, lambda: torch.autocast("cpu", torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = really(model)
    assert cost == expected
    assert cached == 2 * 3 * 2 * 8 * ROWS * LENGTH * 2, "transformers' own cache would have keys in float32"
    assert cost.saved_bytes < count_pass(model, ROWS, LENGTH).saved_bytes


def test_a_large_model_takes_no_memory() -> None:
    config = AutoConfig.for_model("llama", hidden_size=8192, num_hidden_layers=1, intermediate_size=28672)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert count_pass(model, 64, 4096).flops > 1e14


@pytest.mark.parametrize(("dtype", "share"), [(None, 1), (torch.bfloat16, 2)])
def test_a_sharded_pass_holds_a_block_and_the_next_beside_what_is_outside(dtype: torch.dtype | None, share: int):
    model = tiny_policy(num_hidden_layers=3)
    block = stored_bytes(model.model.layers[0].parameters())
    outside = stored_bytes(model.parameters()) - 3 * block
    assert gathered_bytes(model, dtype) == (outside + 2 * block) // share
