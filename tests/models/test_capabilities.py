"""Checks of a model: independence of rows, longest sequence, vocabulary."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_ppo.models.capabilities import check_consistent, positions
from rlhf_ppo.models.frozen import FrozenScorer
from rlhf_ppo.models.packing import hidden_states
from tests.conftest import tiny_policy, tiny_scorer
from tests.models.architectures import tiny_model
from tests.runs import QUICK, MakeTrainer, train_and_record

pytestmark = pytest.mark.usefixtures("each_model_is_looked_at")


def hooked(change: Any) -> Any:
    """A model whose embeddings are changed."""
    model = tiny_policy()
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: change(output))
    return model


def test_a_state_that_depends_on_later_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="depends on later tokens"):
        check_consistent(hooked(lambda x: x + x.mean(dim=1, keepdim=True)), "model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "jamba", "phimoe"])
def test_sound_models_pass_and_nothing_of_it_stays(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype).train()
    state, python_state = torch.get_rng_state(), random.getstate()
    check_consistent(model, "model")
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_state
    assert all(module.training for module in model.modules())


# ---- Longest sequence ----


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [4.0, 40.0], "rope_theta": 10000.0,
            "original_max_position_embeddings": 16}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


def phi3(**changes: Any) -> Any:
    given = {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "vocab_size": 32, **changes}
    return tiny_model("phi3", rope_parameters=LONGROPE, **given)


def states_beside(model: Any, row: int, other: int) -> torch.Tensor:
    """The states of a row of `row` tokens in one pass with one of `other`."""
    mask = torch.arange(max(row, other)) < torch.tensor([[row], [other]])
    ids = torch.arange(mask.numel()).view(mask.shape) % 31
    with torch.no_grad():
        return hidden_states(model, ids, mask)[0, :row]


@pytest.mark.parametrize(("model", "limit"), [(lambda: phi3(), 16), (lambda: tiny_policy(rope_parameters=DYNAMIC,
                         max_position_embeddings=24), 24)], ids=["longrope", "dynamic"])  # fmt: skip
def test_up_to_the_limit_rows_do_not_depend_on_each_other_and_beyond_it_they_do(model: Any, limit: int) -> None:
    assert positions(model()) == limit
    inside = states_beside(model(), 8, limit)
    torch.testing.assert_close(inside, states_beside(model(), 8, 9), rtol=0, atol=1e-5)
    assert (states_beside(model(), 8, limit + 1) - inside).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["bert", "mpnet", "roberta"])
def test_a_classifier_reads_texts_up_to_its_limit(family: str) -> None:
    model = tiny_model(family, AutoModelForSequenceClassification, max_position_embeddings=24, pad_token_id=1)
    longest = positions(model)
    assert longest == (24 if family == "bert" else 22)  # others begin to count behind the padding's position
    score = FrozenScorer(model)
    score(torch.full((1, longest), 5), torch.ones(1, longest, dtype=torch.bool))
    with pytest.raises((IndexError, RuntimeError)):
        score(torch.full((1, longest + 1), 5), torch.ones(1, longest + 1, dtype=torch.bool))


def test_runs_that_may_cross_it_are_refused_at_construction(make_trainer: Any) -> None:
    rows = [{"input_ids": [5] * 6}] * 8
    make_trainer(model=phi3(), response_length=10, train_dataset=rows)
    ways = "lower response_length to 10, set max_prompt_length=5, or use a model with more"
    with pytest.raises(ValueError, match=rf"take 17 positions, but beyond 16 .*longrope.*: {ways}"):
        make_trainer(model=phi3(), response_length=11, train_dataset=rows)


# ---- Vocabularies of different sizes ----


SIZES = {"model": 40, "ref_model": 39, "value_model": 37, "reward_model": 35}
"""Rows of the embeddings; the tokenizer makes the ids 0 to 31."""


def family(**sizes: int) -> dict[str, Any]:
    """Models of one family, padded differently; the policy all but always says an id of the padding."""
    sizes = SIZES | sizes
    policy, reference = tiny_policy(vocab_size=sizes["model"]), tiny_policy(3, vocab_size=sizes["ref_model"])
    with torch.no_grad():
        policy.lm_head.weight[32:] *= 20
    scorers = {name: tiny_scorer(vocab_size=sizes[name]) for name in ("value_model", "reward_model")}
    return {"model": policy, "ref_model": reference, **scorers}


@pytest.mark.parametrize(
    ("smallest", "engine"),
    [
        ("ref_model", "transformers"),
        ("value_model", "transformers"),
        ("reward_model", "transformers"),
        pytest.param("reward_model", "continuous", marks=pytest.mark.thorough),
    ],
)
def test_ids_that_a_model_lacks_are_never_sampled(make_trainer: MakeTrainer, smallest: str, engine: str) -> None:
    trainer = make_trainer(
        **family(**{smallest: 34}), generation_engine=engine, **{**QUICK, "response_length": 20, "total_episodes": 4}
    )
    rollouts = train_and_record(trainer)

    sampled = [int(rollout.responses.response_ids[rollout.response_mask].max()) for rollout in rollouts]
    assert max(sampled) in (32, 33)  # as far as all models go, and not as far as the tokenizer
    first = next(log for log in trainer.state.log_history if "val/ratio" in log)
    assert first["val/ratio"] == pytest.approx(1, abs=1e-6)
    rollout = rollouts[0]
    ids = rollout.responses.query_responses[0][rollout.responses.attention_mask[0]]
    with torch.no_grad():  # the log-probabilities are those of the whole distribution
        whole = family()["model"].eval()(ids[None]).logits[0, -2] / trainer.args.temperature
    expected = float(whole.log_softmax(-1)[ids[-1]])
    assert float(rollout.logprobs[0][rollout.response_mask[0]][-1]) == pytest.approx(expected, abs=1e-4)
