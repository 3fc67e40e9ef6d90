"""From weighted scores to what is paid, by hand: scaling, then clipping, then the missing stop token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_ppo import PPOConfig
from rlhf_ppo.algorithm.advantages import ScoreMoments
from rlhf_ppo.data.rollout import Responses, Rollout
from rlhf_ppo.rewards.scorer import scaling_scores, scores_in_reward_unit, shape_scores

NAN = float("nan")
FIRST = float(np.std([10, -10, 1], ddof=1))
SPREAD = float(np.std([8, 2], ddof=1))


def rollout(**overrides: Any) -> Rollout:
    """Four responses of two tokens: ended, cut, cut, and cut without a score."""
    real, zeros = torch.ones(4, 2, dtype=torch.bool), torch.zeros(4, 2)
    values = {
        "responses": Responses(torch.ones(4, 3, dtype=torch.long), torch.ones(4, 3, dtype=torch.bool), real),
        "ended": torch.tensor([True, False, False, False]),
        "logprobs": zeros,
        "ref_logprobs": zeros,
        "values": zeros,
        "final_values": torch.zeros(4),
        "scores": torch.tensor([8.0, -6.0, 1.0, NAN]),
        "token_scores": torch.tensor([[2.0, 0.0], [0.0, -4.0], [0.0, 0.0], [0.0, 0.0]]),
        "scores_by_source": {},
    }
    return Rollout(**{**values, **overrides})


@pytest.mark.parametrize(
    ("settings", "std", "expected"),
    [
        ({"score_scaling": True, "missing_eos_penalty": 1.5}, 2.0, [8 + 2, -6 - 3 - 4, 1 - 3, NAN]),
        ({"score_scaling": True, "missing_eos_score": -1.0}, 2.0, [8 + 2, -2 - 4, -2, NAN]),
        ({"score_scaling": True, "score_clip": 2.0, "missing_eos_penalty": 1.5}, 2.0, [6, -4 - 3 - 4, 1 - 3, NAN]),
        ({"score_clip": 2.0, "missing_eos_penalty": 1.5}, None, [2 + 2, -2 - 1.5 - 4, 1 - 1.5, NAN]),
        # Before the first update the moments are those of these scores.
        ({"score_scaling": True, "missing_eos_penalty": 1.0}, 0.0, [10, -10 - FIRST, 1 - FIRST, NAN]),
    ],
)
def test_an_evaluation_s_scores_keep_the_reward_s_unit(
    settings: dict[str, Any], std: float | None, expected: list[float]
) -> None:
    """A response's score is what training would pay for it, times the deviation."""
    args, made = PPOConfig(**settings), rollout()
    unit = None if std is None else ScoreMoments(2, 3.0, std**2) if std else ScoreMoments()
    ours = scores_in_reward_unit(made.scores, made.token_scores.sum(dim=1), made.ended, args, unit)
    assert ours.tolist() == pytest.approx(expected, nan_ok=True) and ours.dtype == torch.float32


def test_scores_that_are_never_paid_do_not_scale_the_others() -> None:
    """Two responses ended; the others are paid -1 standard deviation, whatever their rewards say."""
    args = PPOConfig(score_scaling=True, missing_eos_score=-1.0)
    made = rollout(
        ended=torch.tensor([True, True, False, False]), scores=torch.tensor([8.0, 2.0, -600.0, NAN]),
        token_scores=torch.zeros(4, 2),
    )  # fmt: skip
    unit = ScoreMoments()
    unit.add(scaling_scores(made, args), alone)
    assert unit.count == 2 and unit.std == pytest.approx(SPREAD)
    paid = [8 / SPREAD, 2 / SPREAD, -1, NAN]
    assert shape_scores(made, args, unit)[0].tolist() == pytest.approx(paid, nan_ok=True)
    evaluated = scores_in_reward_unit(made.scores, torch.zeros(4), made.ended, args, ScoreMoments())
    assert evaluated.tolist() == pytest.approx([8, 2, -SPREAD, NAN], nan_ok=True)


def alone(tensor: Tensor) -> Tensor:
    return tensor


def test_moments_of_batches_are_those_of_all_scores_together() -> None:
    random = np.random.default_rng(0)
    batches = [random.normal(1000, 3, size) for size in (5, 1, 0, 7, 2)]
    moments = ScoreMoments()
    for batch in batches:
        moments.add(torch.tensor(batch, dtype=torch.float32), alone)
    whole = np.concatenate(batches)
    assert moments.count == 15
    assert moments.mean == pytest.approx(whole.mean(), rel=1e-6)
    assert moments.std == pytest.approx(whole.std(ddof=1), rel=1e-4)


@pytest.mark.parametrize("score", [10.7, -0.1, 1e-30, 3e30])
def test_equal_scores_have_no_spread(score: float) -> None:
    """In float32 the mean of a hundred times 10.7 is another number, and the spread what was rounded away."""
    moments = ScoreMoments()
    for size in (100, 1, 37):
        moments.add(torch.full((size,), score), alone)
    assert moments == ScoreMoments(138, float(torch.tensor(score)), 0.0)
    assert moments.std == 1.0


def test_sums_that_differ_by_rounding_have_no_spread() -> None:
    """-1 for a response, spread over its tokens."""
    totals = torch.stack([torch.full((length,), -1 / length).sum() for length in range(1, 60)])
    assert len(totals.unique()) > 1
    moments = ScoreMoments()
    moments.add(totals, alone)
    assert moments.squares > 0 and moments.std == 1.0
