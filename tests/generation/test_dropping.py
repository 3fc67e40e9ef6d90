"""Rows that leave the batch change no row: the same greedy tokens, the same distribution, with any cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import utils

from rlhf_ppo.generation.sampling import response_mask
from rlhf_ppo.generation.transformers_engine import generate_compacting
from tests.generation.test_transformers_engine import prompts

STOP, NUM_TOKENS = 1, 24
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "gpt_neox": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "mistral": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 1, "sliding_window": 6},
}  # fmt: skip


def model_of(name: str) -> Any:
    config = AutoConfig.for_model(name, vocab_size=8, initializer_range=0.6, **ARCHITECTURES[name])
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = GenerationConfig()
    return model


def greedy() -> GenerationConfig:
    return GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=STOP, pad_token_id=STOP)


def given_rows(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 7, (count,), generator=generator).tolist()
    rows = prompts(*(torch.randint(2, 8, (length,), generator=generator).tolist() for length in lengths))
    return rows.input_ids, rows.attention_mask.long()


def batches_of(model: Any) -> list[tuple[int, ...]]:
    """Record the shape of each forward pass's ids."""
    shapes: list[tuple[int, ...]] = []

    def record(_: Any, args: Any, kwargs: Any) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    model.register_forward_pre_hook(record, with_kwargs=True)
    return shapes


@pytest.mark.parametrize("parted", [True, False], ids=["the cache goes on", "a cache that cannot be parted"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_rows_are_those_of_generate(name: str, parted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not parted:
        monkeypatch.delattr(CacheLayerMixin, "reorder_cache")
    model, (ids, mask) = model_of(name), given_rows(24)
    whole = model.generate(input_ids=ids, attention_mask=mask, generation_config=greedy())[:, ids.shape[1] :]
    lengths = response_mask(whole, STOP).sum(dim=1)
    assert len(set(lengths.tolist())) > 3, "rows must end at different times"
    shapes = batches_of(model)
    ours = generate_compacting(model, ids, mask, greedy())
    assert torch.equal(ours, whole)
    sizes = [rows for rows, _ in shapes]
    assert len(set(sizes)) > 2 and sizes == sorted(sizes, reverse=True)
    again = [width for (rows, width), (before, _) in zip(shapes[1:], shapes, strict=False) if rows < before]
    assert all((width == 1) is parted for width in again)


@pytest.mark.skipif(not hasattr(utils, "DeferredStopCheck"), reason="this transformers reads it in time")
def test_a_token_that_generate_drops_ends_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Apple's GPU transformers reads a step late whether all rows have ended, and drops what it sampled since."""
    monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(lambda *_, **__: True))
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda **_: event)
    model, (ids, mask) = model_of("llama"), given_rows(24)
    late = generate_compacting(model, ids, mask, greedy())
    monkeypatch.undo()
    assert torch.equal(late, generate_compacting(model, ids, mask, greedy()))
