"""Packed rows give what each row gives alone: states and gradients, whatever the model and the attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM, GenerationConfig

from rlhf_ppo.models import packing
from rlhf_ppo.models.packing import PACKED, hidden_states, pack_rows, packed_sdpa, packs_rows
from rlhf_ppo.models.unwrapping import backbone, recompute_in_eval_mode, set_learning
from tests.models.architectures import tiny_model

PACKING: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("llama", "gpt2", "gpt_neox", "opt")},
    "mistral": {"sliding_window": 3},
    "mixtral": {"sliding_window": None},
    "gemma3_text": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
}
ROWS = [[5, 0, 9, 8, 3], [31, 1, 0, 7, 7, 12, 20], [4]]
WAYS = ["_attend_row_by_row", "_attend_padded"]


def model_of(name: str, kind: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    return tiny_model(name, kind, **{"attn_implementation": "sdpa", **PACKING.get(name, {}), **changes})


def padded(rows: list[list[int]], left: int = 0) -> tuple[Tensor, Tensor]:
    width = left + max(map(len, rows)) + 1
    ids, mask = torch.full((len(rows), width), 10**6), torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        start = left * (index % 2)
        ids[index, start : start + len(row)], mask[index, start : start + len(row)] = torch.tensor(row), True
    return ids, mask


def alone(model: Any, rows: list[list[int]]) -> Tensor:
    return torch.cat([backbone(model)(input_ids=torch.tensor([row])).last_hidden_state[0] for row in rows])


def gradients(model: Any, states: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    (states * torch.randn(states.shape, generator=generator, dtype=states.dtype)).sum().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


pytestmark = pytest.mark.usefixtures("each_model_is_looked_at")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to attend, of which the CPU takes the first."""
    monkeypatch.setattr(packing, "_attend_row_by_row", getattr(packing, request.param))
    return request.param


def check_alone(model: Any, rows: list[list[int]], tolerance: float, left: int = 0, recomputes: bool = False) -> None:
    """Packed rows have the states and gradients of each row alone."""
    expected = alone(model, rows)
    expected_gradients = gradients(model, expected)
    pack_rows(model)
    if recomputes:
        model.gradient_checkpointing_enable()
        recompute_in_eval_mode(model)
        set_learning(model)
    ids, mask = padded(rows, left)
    states = hidden_states(model, ids, mask)[mask]
    assert_allclose(states.detach(), expected.detach(), rtol=0, atol=tolerance)
    ours = gradients(model, states)
    assert ours.keys() == expected_gradients.keys() and len(ours) > 10
    for key, value in expected_gradients.items():
        assert_allclose(ours[key], value, rtol=0, atol=tolerance * float(1 + value.abs().max()), err_msg=key)


COMPUTES_IN_32_BITS = "gemma3_text", "mixtral"
"""Whatever the weights are."""


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", PACKING)
def test_states_and_gradients_are_those_of_each_row_alone(name: str, checkpointing: bool, way: str) -> None:
    dtype, tolerance = (torch.float32, 1e-5) if name in COMPUTES_IN_32_BITS else (torch.float64, 1e-11)
    model = model_of(name).to(dtype)
    check_alone(model, ROWS, tolerance, left=2, recomputes=checkpointing)
    assert packs_rows(backbone(model))


LLAMA, PACKED_LLAMA = model_of("llama"), model_of("llama")
pack_rows(PACKED_LLAMA)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=9), min_size=1, max_size=5),
    left=st.integers(0, 4),
    way=st.sampled_from(WAYS),
)
def test_any_rows(rows: list[list[int]], left: int, way: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        monkeypatch.setattr(packing, "_attend_row_by_row", getattr(packing, way))
        ids, mask = padded(rows, left)
        states = hidden_states(PACKED_LLAMA, ids, mask)
        assert_allclose(states[mask], alone(LLAMA, rows), rtol=0, atol=1e-5)
        assert not states[~mask].any()


# ---- What does not pack ----


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("bloom", AutoModelForCausalLM, {"n_layer": 2, "n_head": 4}),
        ("mamba", AutoModelForCausalLM, {"state_size": 4}),
        ("llama", AutoModelForCausalLM, {"attn_implementation": "eager"}),
    ],
    ids=["bloom", "mamba", "llama, eager"],
)
def test_other_models_keep_padded_rows(name: str, kind: Any, changes: dict[str, Any]) -> None:
    if name in ("bloom", "mamba"):
        changes = changes | {"attn_implementation": None}
    model = model_of(name, kind, **changes)
    implementation = model.config._attn_implementation
    pack_rows(model)
    assert model.config._attn_implementation == implementation != PACKED


# ---- Windows ----


@pytest.mark.parametrize(
    ("name", "packs"),
    [("mistral", True), ("gemma3_text", True), ("mixtral", True), ("phimoe", False), ("qwen2_moe", False)],
)
def test_rows_longer_than_the_window_are_those_of_each_row_alone(name: str, packs: bool) -> None:
    """Two of these pass their window by the mask only, which packed attention does not read."""
    window = {"sliding_window": 16, "max_position_embeddings": 128}
    window |= {"use_sliding_window": True, "max_window_layers": 2} if name == "qwen2_moe" else {}
    model = tiny_model(name, attn_implementation="sdpa", **window)
    rows = [[(3 * place + row) % 48 for place in range(57 - 20 * row)] for row in range(2)]
    expected = alone(model, rows)
    pack_rows(model)
    assert packs_rows(backbone(model)) == packs
    ids, mask = padded(rows)
    assert_allclose(hidden_states(model, ids, mask)[mask].detach(), expected.detach(), rtol=0, atol=1e-4)


# ---- All other calls are as with sdpa ----


@pytest.mark.parametrize("name", PACKING)
def test_calls_with_masks_and_generation_are_sdpa_s(name: str) -> None:
    model, packed = model_of(name), model_of(name)
    pack_rows(packed)
    ids, mask = torch.tensor([[0, 0, 5, 9, 8], [7, 7, 12, 20, 4]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    config = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        states = [backbone(each)(input_ids=ids, attention_mask=mask).last_hidden_state for each in (packed, model)]
        tokens = [
            each.generate(input_ids=ids, attention_mask=mask, generation_config=config) for each in (packed, model)
        ]
    assert torch.equal(*states) and torch.equal(*tokens)


def test_what_is_saved_loads_as_before(tmp_path: Any) -> None:
    model = model_of("llama")
    pack_rows(model)
    model.save_pretrained(tmp_path)
    assert PACKED not in (tmp_path / "config.json").read_text()
    assert AutoModel.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


# ---- Flash attention, of which a stand-in runs on a CPU ----

CALLS: list[tuple[Any, Any]] = []


def stand_in(*args: Any, **kwargs: Any) -> Any:
    """Do what flash attention does with packed rows, and with rows padded on the right, whose mask it may ignore."""
    starts = kwargs.get("cu_seq_lens_k")
    if starts is not None:
        CALLS.append((args[4], starts.tolist()))
        return packed_sdpa(*args, squeezed_places=starts, **kwargs)  # which only a GPU reads
    return packed_sdpa(*args[:4], None, **kwargs)


AttentionInterface.register("flash_attention_stand_in", stand_in)


def with_flash_attention(name: str, **changes: Any) -> Any:
    model = tiny_model(name, **changes)

    def attend(name: str) -> None:  # transformers would look for the kernels
        for part in model.modules():
            if hasattr(part, "config"):
                part.config._attn_implementation_internal = name

    model.set_attn_implementation = attend
    attend("flash_attention_stand_in")
    return model


def test_flash_attention_gets_the_rows_places_and_no_mask() -> None:
    model = with_flash_attention("llama")
    expected = alone(tiny_model("llama"), ROWS)
    ids, mask = padded(ROWS)
    pack_rows(model)
    assert not CALLS, "it may not run here yet"
    states = hidden_states(model, ids, mask)[mask]
    assert packs_rows(model.model)
    assert_allclose(states.detach(), expected.detach(), rtol=0, atol=1e-5)
    assert CALLS == [(None, [0, 5, 12, 13])] * 2


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_stand_in"])
@pytest.mark.parametrize("share", [0.002, 1.0])
def test_a_leak_between_rows_is_seen_however_small(attention: str, share: float) -> None:
    """Each token's state takes a little of the one before it, over the border of rows too."""
    model = model_of("llama") if attention == "sdpa" else with_flash_attention("llama")
    model.model.layers[0].register_forward_hook(
        lambda module, inputs, output: output + share * torch.nn.functional.pad(output[:, :-1], (0, 0, 1, 0))
    )
    expected = torch.cat([backbone(model)(input_ids=torch.tensor([row])).last_hidden_state[0] for row in ROWS])
    pack_rows(model)
    ids, mask = padded(ROWS)
    assert_allclose(hidden_states(model, ids, mask)[mask].detach(), expected.detach(), rtol=0, atol=1e-5)
    assert not packs_rows(model.model)
