"""TRL's documented helper functions: names of arguments, shapes, and that padding changes nothing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from rlhf_ppo.compat.trl import batch_generation, forward, generate, truncate_response
from tests.conftest import tiny_policy, tiny_scorer

CONTRACT = {
    generate: ["lm_backbone", "queries", "pad_token_id", "generation_config"],
    batch_generation: ["model", "queries", "local_rollout_forward_batch_size", "pad_token_id", "generation_config"],
    forward: ["model", "query_responses", "pad_token_id"],
    truncate_response: ["stop_token_id", "pad_token_id", "responses"],
}
PAD, EOS = 0, 1
GREEDY = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": PAD}


def queries(fill: int = PAD) -> Tensor:
    return torch.tensor([[fill, fill, 5, 9], [3, 4, 7, 8], [fill, fill, fill, 6]])


@pytest.mark.parametrize("function", CONTRACT, ids=lambda function: function.__name__)
def test_arguments_are_those_of_the_contract(function: Any) -> None:
    """Ours come after them and have defaults."""
    parameters = list(inspect.signature(function).parameters.values())
    documented = CONTRACT[function]
    assert [parameter.name for parameter in parameters][: len(documented)] == documented
    assert all(parameter.default is not parameter.empty for parameter in parameters[len(documented) :])


def test_generate_returns_whole_sequences_and_the_scores_of_each_step() -> None:
    policy = tiny_policy()
    config = GenerationConfig(**GREEDY)
    sequences, scores = generate(policy, queries(), PAD, config)
    assert sequences.shape == (3, 9) and scores.shape == (3, 5, 32)
    assert torch.equal(sequences[:, :4], queries())
    assert torch.equal(scores.argmax(dim=-1), sequences[:, 4:])
    row = torch.cat((torch.tensor([5, 9]), sequences[0, 4:8]))
    own = policy(input_ids=row[None]).logits[0, 1:]
    assert_allclose(scores[0], own.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fill", [0, 31, 10**6])
def test_padding_is_nothing(fill: int) -> None:
    """It may lie outside the vocabulary; the queries come back with it."""
    policy, config = tiny_policy(), GenerationConfig(**GREEDY)
    expected, scores = generate(policy, queries(), PAD, config)
    sequences, with_fill = generate(policy, queries(fill), fill, config)
    assert torch.equal(sequences[:, :4], queries(fill)) and torch.equal(sequences[:, 4:], expected[:, 4:])
    assert_allclose(with_fill, scores, rtol=1e-5, atol=1e-5)


def test_a_mask_tells_padding_from_a_real_token_of_the_same_id() -> None:
    policy, config = tiny_policy(), GenerationConfig(**GREEDY)
    given = torch.tensor([[PAD, PAD, 5, 9]])
    with_real_pad = generate(policy, given, PAD, config, attention_mask=torch.tensor([[0, 1, 1, 1]]))[1]
    assert_allclose(with_real_pad, generate(policy, torch.tensor([[PAD, 5, 9]]), 99, config)[1], rtol=1e-4, atol=1e-5)
    assert (with_real_pad - generate(policy, given, PAD, config)[1]).abs().max() > 0.01


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_batch_generation_does_not_depend_on_the_parts(rows: int) -> None:
    """With a stop token, parts may come out shorter: ids are filled with PAD, scores with 0."""
    policy, config = tiny_policy(), GenerationConfig(**GREEDY)
    whole, scores = generate(policy, queries(), PAD, config)
    stop = int(whole[1, 5])  # the second row's second token
    config.eos_token_id = stop
    expected, all_scores = generate(policy, queries(), PAD, config)
    sequences, batch_scores = batch_generation(policy, queries(), rows, PAD, config)
    assert torch.equal(sequences, expected)
    assert batch_scores.shape == all_scores.shape and scores.shape[1] >= batch_scores.shape[1]
    for row, length in enumerate((expected[:, 4:] == stop).int().argmax(dim=1).tolist()):
        real = length + 1 if stop in expected[row, 4:] else expected.shape[1] - 4
        assert_allclose(batch_scores[row, :real], all_scores[row, :real], rtol=1e-4, atol=1e-5)
    if rows == 1:
        assert not batch_scores[1, 2:].any()


@pytest.mark.parametrize("pad", [PAD, EOS, 10**6])
def test_forward_equals_the_model_on_unpadded_rows(pad: int) -> None:
    """Padding on both sides; it may be EOS (pad == eos) or lie outside the vocabulary."""
    ids = torch.tensor([[pad, pad, 5, 9, 4], [3, 8, 7, pad, pad], [pad, 6, 2, 2, pad]])
    torch.manual_seed(0)
    absolute = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2)).eval()
    for model in (tiny_policy(), tiny_scorer(), absolute):
        output = forward(model, ids, pad)
        assert len(output.hidden_states) == 3 and output.hidden_states[-1].shape == (3, 5, 32)
        for row, real in enumerate(ids != pad):
            own = model.base_model(input_ids=ids[row][real][None]).last_hidden_state[0]
            assert_allclose(output.hidden_states[-1][row][real].detach(), own.detach(), rtol=1e-4, atol=1e-5)
    logits = forward(tiny_policy(), ids, pad).logits
    assert_allclose(
        logits[0, 2:].detach(), tiny_policy()(input_ids=ids[:1, 2:]).logits[0].detach(), rtol=1e-4, atol=1e-5
    )


def test_forward_takes_a_mask_where_pad_is_a_real_token_too() -> None:
    ids, mask = torch.tensor([[EOS, 5, EOS, 9]]), torch.tensor([[0, 1, 1, 1]])
    own = tiny_policy()(input_ids=ids[:, 1:]).logits.detach()
    logits = forward(tiny_policy(), ids, EOS, attention_mask=mask).logits[:, 1:].detach()
    assert_allclose(logits, own, rtol=1e-4, atol=1e-5)
    assert (forward(tiny_policy(), ids, EOS).logits[:, 3].detach() - own[:, 2]).abs().max() > 0.01
