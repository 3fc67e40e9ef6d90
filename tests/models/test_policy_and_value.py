"""The module that holds both trained models: its outputs, and what Trainer asks of it."""

from __future__ import annotations

import torch

from rlhf_ppo.models.policy_and_value import PolicyAndValue
from tests.conftest import tiny_policy, tiny_scorer
from tests.models.test_logprobs import ragged_batch


def test_the_value_model_is_left_out_where_only_the_policy_is_asked_for() -> None:
    model, batch = PolicyAndValue(tiny_policy(), tiny_scorer(), temperature=0.7), ragged_batch()
    calls: list[int] = []
    model.value_model.model.register_forward_hook(lambda *_: calls.append(1))
    of_policy = model(*batch, only="policy")
    assert not calls and of_policy._fields == ("logprobs", "entropy")
    whole = model(*batch)
    assert calls and torch.equal(of_policy.logprobs, whole.logprobs) and torch.equal(of_policy.entropy, whole.entropy)


def test_padding_gets_no_gradient() -> None:
    """Neither model's embedding of an id that stands only under the mask."""
    model = PolicyAndValue(tiny_policy(pad_token_id=None), tiny_scorer(pad_token_id=None), temperature=1.0)
    ids, attention_mask, response_mask = ragged_batch()
    ids = ids.clamp(min=1, max=30).masked_fill(~attention_mask, 31)
    output = model(ids, attention_mask, response_mask)
    (output.logprobs.sum() + output.values.square().sum() + output.final_values.sum()).backward()
    used = set(ids[attention_mask].tolist())
    for embedding in (model.policy.model.embed_tokens, model.value_model.model.embed_tokens):
        touched = set(embedding.weight.grad.any(dim=1).nonzero().squeeze(1).tolist())
        assert touched <= used and 31 not in touched and 0 not in touched
