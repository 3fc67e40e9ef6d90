"""Prompts generate alike alone and beside longer ones, whatever the model makes of padding and of its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import LlamaForCausalLM

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.generation.transformers_engine import (
    GenerationNeeds,
    call_sizes,
    generation_needs,
    greedy_config,
    sample_responses,
)
from rlhf_ppo.models.packing import hidden_states
from rlhf_ppo.models.policy_and_value import logits
from rlhf_ppo.models.unwrapping import CACHE
from tests.conftest import tiny_config, tiny_policy
from tests.models.architectures import tiny_model

NEEDS = {
    "rwkv": GenerationNeeds(one_by_one=True),  # its cached state mixes up rows
    "mbart": GenerationNeeds(equal_lengths=True),  # numbers padding too
    "marian": GenerationNeeds(equal_lengths=True),
}


ROWS = [[5, 9, 8], [7, 12, 20, 4, 31, 17, 6, 3], [6, 6, 3], [30, 2], [9, 4, 4, 4, 21, 13]]


def test_a_policy_stored_in_16_bits_may_be_off_by_their_rounding() -> None:
    assert generation_needs(tiny_policy().bfloat16()) == GenerationNeeds()


def respond(model: Any, rows: list[list[int]], make_args: Any) -> torch.Tensor:
    stop = 11
    config = greedy_config(make_args(response_length=9), stop)
    responses = sample_responses(model, Prompts.of_rows(rows, 0, torch.device("cpu")), config, rows_per_call=8)
    ended = (responses == stop).long().cumsum(dim=1) - (responses == stop).long() > 0
    return torch.nn.functional.pad(responses.masked_fill(ended, stop), (0, 9 - responses.shape[1]), value=stop)


@pytest.mark.parametrize("family", ["llama", "gpt2", "rwkv", "mbart", "marian", "mamba", "jamba", "falcon_h1", "zamba",
                                    "lfm2", "recurrent_gemma", "bloom"])  # fmt: skip
def test_a_prompt_alone_and_beside_longer_ones_gets_the_same_greedy_response(family: str, make_args: Any) -> None:
    """Rows end at different tokens, so that some of them are dropped on the way."""
    if family == "zamba" and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("transformers 5.17 refuses its own configuration of Zamba")
    model = tiny_model(family)
    together = respond(model, ROWS, make_args)
    for row, response in zip(ROWS, together, strict=True):
        alone = respond(model, [row], make_args)[0]
        assert response.tolist() == alone.tolist()
        whole = torch.tensor([row + alone.tolist()])
        with torch.no_grad():
            best = logits(model, hidden_states(model, whole, torch.ones_like(whole).bool()))[0].argmax(dim=1)
        real = (alone == 11).long().cumsum(0) - (alone == 11).long() == 0
        assert torch.equal(best[len(row) - 1 : -1][real], alone[real])
    assert replace(generation_needs(model), keeps_cache=True) == NEEDS.get(family, GenerationNeeds())
    assert len({len(set(row)) for row in together.tolist()}) > 1


def test_only_prompts_of_one_length_share_a_call() -> None:
    assert call_sizes([9, 9, 9, 4, 4, 2], 5, 8, equal_lengths=True) == [3, 2, 1]
    assert call_sizes([9, 9, 9, 4], 5, 2, equal_lengths=True) == [2, 1, 1]


def test_a_model_that_generates_from_something_else_is_refused() -> None:
    model = tiny_policy()

    def shift_cached_passes(module: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits.roll(1, -1) if args == () and output.logits.shape[1] == 1 else output.logits
        return output

    model.register_forward_hook(shift_cached_passes)
    with pytest.raises(ValueError, match="LlamaForCausalLM generates from other distributions"):
        generation_needs(model)


@pytest.mark.skipif(CACHE != "cache", reason="transformers takes past_key_values itself")
def test_code_of_the_time_before_transformers_renamed_the_cache_is_told_apart() -> None:
    class Swallows(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
            kwargs.pop("cache", None)
            return super().forward(input_ids, **kwargs)

    class Refuses(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, past_key_values: Any = None) -> Any:
            return super().forward(input_ids)

    for kind in (Swallows, Refuses):
        with pytest.raises(ValueError, match=f"{kind.__name__}.forward takes past_key_values, .* with cache: rename"):
            generation_needs(kind(tiny_config()))


def test_a_cache_that_cannot_be_parted_is_read_again(monkeypatch: pytest.MonkeyPatch, make_args: Any) -> None:
    from transformers.cache_utils import DynamicLayer

    expected = respond(tiny_policy(), ROWS, make_args)
    monkeypatch.setattr(DynamicLayer, "reorder_cache", lambda self, rows: None)
    model = tiny_policy()
    assert generation_needs(model) == GenerationNeeds(keeps_cache=False)
    assert torch.equal(respond(model, ROWS, make_args), expected)


def test_trying_leaves_random_numbers_and_modes_alone() -> None:
    model, state = tiny_policy().train(), torch.get_rng_state()
    generation_needs(model)
    assert model.training and torch.equal(torch.get_rng_state(), state)
