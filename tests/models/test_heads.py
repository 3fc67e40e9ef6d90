"""Scalar heads: which architectures read single tokens, and that the right ones are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_ppo.models.heads import check_one_label, last_token_score, reads_last_token, scalar_head, token_values
from rlhf_ppo.models.loading import load_scalar_model
from rlhf_ppo.models.passes import hidden_states
from tests import oracles
from tests.conftest import tiny_policy, tiny_scorer
from tests.oracles import Llama

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "num_labels": 1,
}
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gemma2": {"head_dim": 4},
    "qwen2": {},
    "mistral": {},
    "phi3": {},
}
POOLING: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"max_position_embeddings": 66},
    "distilbert": {"dim": 16},
}


def tiny_classifier(model_type: str, auto_class: Any = AutoModelForSequenceClassification, **overrides: Any) -> Any:
    values = {**SIZES, **CAUSAL.get(model_type, POOLING.get(model_type, {})), **overrides}
    torch.manual_seed(0)
    return auto_class.from_config(AutoConfig.for_model(model_type, **values)).eval()


def ragged_batch() -> tuple[Tensor, Tensor]:
    """Rows with 6, 3 and 4 real tokens: not padded, on the left, on both sides. Some are id 0, the model's PAD."""
    ids = torch.randint(1, 32, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    ids[0, -1] = ids[1, -1] = ids[2, 2] = 0
    return ids, mask


@pytest.mark.parametrize("model_type", CAUSAL)
def test_the_score_is_what_the_model_itself_says_of_the_unpadded_row(model_type: str) -> None:
    model, (ids, mask) = tiny_classifier(model_type), ragged_batch()
    assert reads_last_token(model)
    model.config.pad_token_id = -1  # or the model would take a real 0 at the end for padding
    own = torch.cat([model(input_ids=row[real][None]).logits[0] for row, real in zip(ids, mask, strict=True)])
    scores = last_token_score(model, ids, mask)
    assert scores.dtype == torch.float32 and scores.shape == (3,)
    assert_allclose(scores.detach(), own.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", CAUSAL)
def test_values_are_the_head_on_each_state_counted_from_the_right(model_type: str) -> None:
    model, (ids, mask) = tiny_classifier(model_type), ragged_batch()
    values = token_values(model, ids, mask, last=3)
    assert values.dtype == torch.float32 and values.shape == (3, 3)
    for row in range(3):
        real = mask[row].nonzero().squeeze(1)
        states = model.base_model(input_ids=ids[row, real][None]).last_hidden_state[0]
        own = scalar_head(model)(states).squeeze(1)
        for position, value in zip(real.tolist(), own, strict=True):
            if position >= 3:
                assert_allclose(values[row, position - 3].detach(), value.detach(), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_head_computes_in_float32_whatever_the_layers_below_compute_in() -> None:
    model, (ids, mask) = tiny_classifier("llama"), ragged_batch()
    with torch.autocast("cpu", torch.bfloat16):
        states = hidden_states(model, ids, mask)
        values, scores = token_values(model, ids, mask, last=6), last_token_score(model, ids, mask)
    expected = (states.float() @ model.score.weight.T)[..., 0]
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scores, torch.stack([expected[0, 5], expected[1, 5], expected[2, 4]]))


def test_values_and_scores_of_llama_equal_numpy() -> None:
    model, (ids, mask) = tiny_scorer(), ragged_batch()
    llama, weights = Llama.of(model.config), oracles.weights_of(model)
    scores, values = last_token_score(model, ids, mask), token_values(model, ids, mask, last=6)
    for row in range(3):
        tokens = ids[row][mask[row]].tolist()
        exact = (llama.states(weights, tokens) @ weights["score.weight"].T)[:, 0]
        assert_allclose(values[row][mask[row]].detach(), exact, rtol=1e-5, atol=1e-5)
        assert_allclose(scores[row].detach(), exact[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", POOLING)
def test_models_that_pool_do_not_read_the_last_token(model_type: str) -> None:
    assert not reads_last_token(tiny_classifier(model_type))


def test_a_head_that_says_something_else_is_not_trusted() -> None:
    """Its name and shape are right, but the model itself adds to what the head says."""

    class Shifted(type(tiny_scorer())):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + 1
            return output

    model = tiny_scorer()
    assert reads_last_token(model)
    model.__class__ = Shifted
    assert not reads_last_token(model)


@pytest.mark.parametrize("pad_token_id", [None, 0, 1, 3])
def test_probing_depends_on_no_padding_id_and_leaves_the_model_as_it_was(pad_token_id: int | None) -> None:
    model = tiny_scorer(pad_token_id=pad_token_id).train()
    assert reads_last_token(model)
    assert model.training and model.config.pad_token_id == pad_token_id


def test_models_without_a_one_number_head() -> None:
    assert scalar_head(tiny_classifier("llama")) is not None
    backbone = tiny_classifier("llama", AutoModel)
    assert not reads_last_token(backbone)
    with pytest.raises(ValueError, match="LlamaModel has no linear head with one output"):
        last_token_score(backbone, *ragged_batch())


def test_a_head_under_another_name_is_found() -> None:
    """Some classes call it neither `score` nor `classifier`."""
    model = tiny_scorer()
    expected = last_token_score(model, *ragged_batch())
    model.value_head = model.score
    del model.score
    assert_allclose(last_token_score(model, *ragged_batch()).detach(), expected.detach())
    model.another = nn.Linear(32, 1)
    assert scalar_head(model) is None


@pytest.mark.parametrize("argument", ["value_model", "reward_model"])
def test_two_labels_are_an_error_that_names_argument_and_number(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} has num_labels=2; .* num_labels=1"):
        check_one_label(tiny_scorer(num_labels=2), argument)
    with pytest.raises(ValueError, match=f"{argument} has num_labels=2"):
        load_scalar_model(tiny_scorer(num_labels=2), argument)
    check_one_label(tiny_scorer(), argument)


def test_a_language_model_is_no_scalar_model() -> None:
    with pytest.raises(ValueError, match="reward_model is a LlamaForCausalLM, a language model without a scalar head"):
        check_one_label(tiny_policy(), "reward_model")
    one_label = tiny_classifier("gpt2", AutoModelForCausalLM)
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        check_one_label(one_label, "value_model")
