"""Where a rotary embedding changes for all rows of a batch, no row gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.lengths import PositionLimit
from rlhf_ppo.models.passes import hidden_states
from rlhf_ppo.models.positions import position_limit, positions
from tests.conftest import tiny_policy, tiny_scorer
from tests.models.architectures import tiny_model

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


def test_the_reason_is_said() -> None:
    limit = position_limit(phi3())
    assert limit is not None and limit.reason == (
        "beyond 16 the rotary embedding (longrope) of Phi3ForCausalLM changes for all rows of a batch"
    )
    assert positions(phi3(max_position_embeddings=8)) == 8  # the smaller of both
    plain = position_limit(tiny_policy())
    assert plain == PositionLimit(64, "the model has 64")
    assert positions(tiny_model("bloom")) is None


def test_each_type_of_layer_has_its_own_rope() -> None:
    ropes = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    model = tiny_policy()
    model.config.rope_parameters = ropes
    assert positions(model) == 16


@pytest.mark.parametrize("argument", ["model", "ref_model", "value_model", "reward_model"])
def test_runs_that_may_cross_it_are_refused_at_construction(argument: str, make_trainer: Any) -> None:
    def trainer(response_length: int) -> PPOTrainer:
        scores = argument in ("value_model", "reward_model")
        made = phi3() if not scores else scorer()
        return make_trainer(
            **{argument: made}, response_length=response_length, train_dataset=[{"input_ids": [5] * 6}] * 8
        )

    def scorer() -> Any:
        model = tiny_scorer()
        model.config.rope_parameters = LONGROPE
        return model

    trainer(10)
    with pytest.raises(ValueError, match=r"take 17 positions, but beyond 16 .*longrope.*: set max_prompt_length=5"):
        trainer(11)
