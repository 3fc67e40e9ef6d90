"""Packed rows under `varlen_attn`, in whose place a plain softmax over each row stands on a CPU."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rlhf_ppo.models import packing
from rlhf_ppo.models.packing import PACKED, hidden_states, pack_rows
from rlhf_ppo.models.policy_and_value import response_logprobs
from tests.models.test_packing import PACKING, ROWS, alone, gradients, model_of, padded

CALLS: list[inspect.BoundArguments] = []
ALL, BEFORE = (-1, 0), {"mistral": (2, 0), "gemma3_text": (2, 0)}


def by_its_contract(*args: Any, **kwargs: Any) -> Tensor:
    """What PyTorch 2.13 says that `varlen_attn` computes: row by row, head by head, in float64."""
    call = inspect.signature(varlen_attn).bind(*args, **kwargs)
    CALLS.append(call)
    call.apply_defaults()
    given = call.arguments
    assert type(given["max_q"]) is int and given["max_q"] == given["max_k"] == given["cu_seq_q"].diff().max()
    assert given["cu_seq_q"].dtype == torch.int32 and torch.equal(given["cu_seq_q"], given["cu_seq_k"])
    query, key, value = given["query"], given["key"], given["value"]
    assert query.dtype == key.dtype == value.dtype and query.ndim == key.ndim == value.ndim == 3
    assert given["enable_gqa"] or query.shape[1] == key.shape[1]
    left, right = given["window_size"]
    scale = query.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    rows = []
    for start, end in zip(given["cu_seq_q"].tolist(), given["cu_seq_q"].tolist()[1:], strict=False):
        heads = []
        for head in range(query.shape[1]):
            group = head // (query.shape[1] // key.shape[1])
            q, k, v = (part[start:end, h].double() for part, h in ((query, head), (key, group), (value, group)))
            ahead = torch.arange(end - start) - torch.arange(end - start)[:, None]
            seen = (ahead <= right if right >= 0 else True) & (ahead >= -left if left >= 0 else ahead > -(10**9))
            heads.append((scale * q @ k.T).masked_fill(~seen, -torch.inf).softmax(dim=-1) @ v)
        rows.append(torch.stack(heads, dim=1))
    return torch.cat(rows).to(query.dtype)


def of_2_10(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False, return_aux: None = None,
) -> Tensor:  # fmt: skip
    """The same with the arguments of PyTorch 2.10."""
    window = (-1, 0) if is_causal else (-1, -1)
    return by_its_contract(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the device is taken for one that can."""
    CALLS.clear()
    monkeypatch.setattr(packing, "varlen_attn", by_its_contract)
    monkeypatch.setattr(packing, "_flash_can", lambda *states: True)


@pytest.mark.parametrize("name", PACKING)
def test_states_and_gradients_are_those_of_each_row_alone(name: str) -> None:
    model = model_of(name)
    expected = alone(model, ROWS)
    expected_gradients = gradients(model, expected)
    pack_rows(model)
    CALLS.clear()
    ids, mask = padded(ROWS, left=2)
    states = hidden_states(model, ids, mask)[mask]
    assert_allclose(states.detach(), expected.detach(), rtol=0, atol=1e-5)
    ours = gradients(model, states)
    assert ours.keys() == expected_gradients.keys()
    for key, value in expected_gradients.items():
        assert_allclose(ours[key], value, rtol=0, atol=1e-5 * float(1 + value.abs().max()), err_msg=key)
    assert len(CALLS) == 2
    assert CALLS[0].arguments["window_size"] == BEFORE.get(name, ALL)
    assert CALLS[1].arguments["window_size"] == (ALL if name == "gemma3_text" else BEFORE.get(name, ALL))


def test_log_probabilities_are_those_of_padded_rows() -> None:
    packed, plain = model_of("llama"), model_of("llama", attn_implementation="eager")
    pack_rows(packed)
    ids, mask = padded(ROWS, left=2)
    response_mask = mask[:, -4:]
    with torch.no_grad():
        ours, theirs = (
            response_logprobs(model, ids * mask, mask, response_mask, 0.7, with_entropy=True)
            for model in (packed, plain)
        )
    assert CALLS
    assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-5)


def test_rows_within_the_window_need_none() -> None:
    model = model_of("mistral", sliding_window=7)
    pack_rows(model)
    hidden_states(model, *padded(ROWS))
    assert CALLS[-1].arguments["window_size"] == ALL


def test_autocast_s_type_is_that_of_all_states() -> None:
    """Norms of queries and keys give float32 under autocast, which casts for `sdpa` alone."""
    model = model_of("qwen3", num_key_value_heads=2, head_dim=4)
    pack_rows(model)
    ids, mask = padded(ROWS)
    with torch.no_grad():
        expected = hidden_states(model, ids, mask)
        with torch.autocast("cpu", torch.bfloat16):
            states = hidden_states(model, ids, mask)
    assert {CALLS[-1].arguments[name].dtype for name in ("query", "key", "value")} == {torch.bfloat16}
    assert (states - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("name", "changes", "runs"),
    [("gpt2", {}, True), ("llama", {}, False), ("mistral", {"num_key_value_heads": 4}, False),
     ("mistral", {"num_key_value_heads": 4, "sliding_window": 9}, True),
     ("gemma3_text", {"num_key_value_heads": 4, "sliding_window": 9}, False)],
    ids=["gpt2", "grouped heads", "window", "window of no effect", "scale"],
)  # fmt: skip
def test_an_older_pytorch_runs_what_it_knows(
    name: str, changes: dict[str, Any], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "varlen_attn", of_2_10)
    monkeypatch.setattr(packing, "_TAKES", frozenset(inspect.signature(of_2_10).parameters))
    model = model_of(name, **changes)
    expected = alone(model, ROWS)
    pack_rows(model)
    assert model.config._attn_implementation == PACKED
    CALLS.clear()
    ids, mask = padded(ROWS)
    assert_allclose(hidden_states(model, ids, mask)[mask].detach(), expected.detach(), rtol=0, atol=1e-5)
    assert len(CALLS) == 2 * runs


@pytest.mark.parametrize(
    "option",
    [{"dropout": 0.1}, {"s_aux": torch.zeros(4)}, {"softcap": 30.0}, {"position_bias": torch.zeros(1)}],
    ids=str,
)
def test_what_the_kernels_do_not_know_takes_another_way(option: dict[str, Any]) -> None:
    state = torch.randn(1, 4, 3, 8)
    states = (state, state, state)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    assert packing.attend_varlen(states, starts, 3) is not None
    assert packing.attend_varlen(states, starts, 3, **option) is None


def test_pytorch_takes_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own function on tensors without storage, forward and backward."""
    monkeypatch.setattr(packing, "varlen_attn", varlen_attn)
    states: Any = tuple(
        torch.empty(1, 7, heads, 8, device="meta", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (4, 2, 2)
    )
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    attended = packing.attend_varlen(states, starts, 5, scaling=0.3, sliding_window=3)
    assert attended is not None and attended.shape == (1, 7, 4, 8)
    attended.sum().backward()
    assert all(part.grad is not None and part.grad.shape == part.shape for part in states)


def test_a_cpu_has_no_such_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = model_of("llama").bfloat16()
    pack_rows(model)
    monkeypatch.setattr(packing, "varlen_attn", by_its_contract)
    hidden_states(model, *padded(ROWS))
    assert not CALLS
