"""Logged numbers by hand: sums of episodes, means of tokens, windows between two logs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss
from rlhf_ppo.data.rollout import Experience, Rollout
from rlhf_ppo.models.policy_and_value import PolicyAndValueOutput
from rlhf_ppo.reporting.metrics import (
    MetricWindow,
    UpdateStatistics,
    episode_columns,
    rollout_metrics,
    sampling_metrics,
    unique_fraction,
)

NAN = float("nan")
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)


def rollout(**overrides: Any) -> Rollout:
    """Three responses of 2, 3 and 1 tokens; the third was not scored by source b."""
    values = {
        "query_responses": torch.ones(3, 4, dtype=torch.long),
        "attention_mask": torch.cat((torch.ones(3, 1, dtype=torch.bool), MASK), dim=1),
        "response_mask": MASK,
        "ended": torch.tensor([True, False, True]),
        "logprobs": torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -0.25, -0.25], [-3.0, -9.0, -9.0]]),
        "ref_logprobs": torch.zeros(3, 3),
        "values": torch.zeros(3, 3),
        "final_values": torch.zeros(3),
        "scores": torch.tensor([1.0, 5.0, 3.0]),
        "token_scores": torch.zeros(3, 3),
        "scores_by_source": {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([0.0, 3.0, NAN])},
    }
    return Rollout(**{**values, **overrides})


KL = torch.tensor([[0.1, 0.3, 0.0], [0.2, -0.5, 0.6], [1.0, 0.0, 0.0]])


def columns() -> dict[str, Tensor]:
    penalized = torch.tensor([1.0, 4.0, 3.0])
    return episode_columns(rollout(), penalized, KL, 0.1)


def test_episode_columns_by_hand() -> None:
    expected = {
        "scores": [1.0, 4.0, 3.0],
        "kl": [0.4, 0.3, 1.0],
        "entropy": [3.0, 1.0, 3.0],
        "non_score_reward": [-0.04, -0.03, -0.1],
        "length": [2.0, 3.0, 1.0],
        "ended": [1.0, 0.0, 1.0],
        "rewards/a": [1.0, 2.0, 3.0],
        "rewards/b": [0.0, 3.0, NAN],
    }
    ours = columns()
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        assert ours[name].tolist() == pytest.approx(values, nan_ok=True), name


def test_rollout_metrics_by_hand() -> None:
    expected = {
        "objective/kl": 1.7 / 3,
        "objective/entropy": 7 / 3,
        "objective/non_score_reward": -0.17 / 3,
        "objective/rlhf_reward": (8 - 0.17) / 3,
        "objective/scores": 8 / 3,
        "val/num_eos_tokens": 2,
        "response/length_mean": 2,
        "response/length_min": 1,
        "response/length_max": 3,
        "response/ended_frac": 2 / 3,
        "rewards/a/mean": 2,
        "rewards/a/std": 1,
        "rewards/b/mean": 1.5,
        "rewards/b/std": np.std([0, 3], ddof=1),
    }
    assert rollout_metrics(columns()) == pytest.approx(expected, rel=1e-6)


# ---- The engine's log-probabilities ----


def test_sampling_metrics_by_hand_over_the_real_tokens_of_two_ranks() -> None:
    # Real tokens differ by 0.5, 0.25 / 0, 0.125, 1 / 0; padding does not count, whatever stands there.
    difference = torch.tensor([[0.5, -0.25, 9.0], [0.0, 0.125, -1.0], [0.0, 9.0, NAN]])
    weights = torch.tensor([[1.5, 0.75, 9.0], [1.0, 1.25, 0.5], [1.0, 0.0, NAN]])
    one = rollout()
    one = rollout(sampling_logprobs=one.logprobs - difference)

    def reduce_sum(sums: Tensor) -> Tensor:  # the other rank: two tokens that differ by 1 and have weights 2 and 0.25
        return sums + torch.tensor([2.0, 2.25, 2.0])

    def gather(rows: Tensor) -> Tensor:
        return torch.cat((rows, torch.tensor([[1.0, -0.25, 2.0]])))

    metrics = sampling_metrics(one, weights, reduce_sum, gather)

    assert metrics == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": (1.875 + 2) / 8,
            "sampling/sampling_logp_difference/max": 1.0,
            "sampling/importance_sampling_ratio/min": 0.25,
            "sampling/importance_sampling_ratio/mean": (6 + 2.25) / 8,
            "sampling/importance_sampling_ratio/max": 2.0,
        }
    )
    alone = sampling_metrics(one, weights, identity, identity)
    assert alone["sampling/importance_sampling_ratio/max"] == 1.5
    assert alone["sampling/importance_sampling_ratio/min"] == 0.5
    assert sampling_metrics(rollout(), None, identity, identity) == {}


# ---- Updates ----


def micro_batch(mask: list[list[int]], seed: int) -> tuple[Experience, PolicyAndValueOutput, PolicyLoss, ValueLoss]:
    """Random figures on real tokens, NaN elsewhere."""
    real, random = torch.tensor(mask, dtype=torch.bool), torch.Generator().manual_seed(seed)

    def figures() -> Tensor:
        return torch.rand(real.shape, generator=random).masked_fill(~real, NAN)

    attention_mask = torch.cat((torch.ones(len(mask), 1, dtype=torch.bool), real), dim=1)
    part = Experience(attention_mask.long(), attention_mask, real, *(figures() for _ in range(5)), real)
    output = PolicyAndValueOutput(figures(), figures(), figures(), torch.zeros(len(mask)))
    clipped = [torch.rand(real.shape, generator=random) > 0.5 for _ in range(2)]
    return part, output, PolicyLoss(figures(), figures(), clipped[0]), ValueLoss(figures(), clipped[1])


MICRO_BATCHES = [micro_batch([[1, 1, 1, 1], [1, 1, 1, 0]], 0), micro_batch([[1, 0]], 1), micro_batch([[1, 1]], 2)]


def statistics(*parts: Any) -> UpdateStatistics:
    result = UpdateStatistics()
    for part in parts:
        result.add(*part)
    return result


def tokens(values: list[Tensor]) -> Any:
    """The real tokens' figures of all micro-batches, concatenated."""
    masks = [part.response_mask for part, *_ in MICRO_BATCHES]
    return np.concatenate([value[mask].double().numpy() for value, mask in zip(values, masks, strict=True)])


def expected_metrics() -> dict[str, float]:
    moved = [output.logprobs - part.logprobs for part, output, *_ in MICRO_BATCHES]
    ratios = [float(policy.ratio[part.response_mask].mean()) for part, _, policy, _ in MICRO_BATCHES]
    return {
        "policy/approxkl_avg": (tokens(moved) ** 2).mean() / 2,
        "policy/clipfrac_avg": tokens([policy.clipped for *_, policy, _ in MICRO_BATCHES]).mean(),
        "policy/entropy_avg": tokens([output.entropy for _, output, *_ in MICRO_BATCHES]).mean(),
        "loss/policy_avg": tokens([policy.loss for *_, policy, _ in MICRO_BATCHES]).mean(),
        "loss/value_avg": tokens([value.loss for *_, value in MICRO_BATCHES]).mean(),
        "val/clipfrac_avg": tokens([value.clipped for *_, value in MICRO_BATCHES]).mean(),
        "val/ratio": tokens([policy.ratio for *_, policy, _ in MICRO_BATCHES]).mean(),
        "val/ratio_var": np.var(ratios, ddof=1),
        "val/first_logratio": float(moved[0][MICRO_BATCHES[0][0].response_mask].double().pow(2).mean().sqrt()),
    }


def identity(tensor: Tensor) -> Tensor:
    return tensor


def test_update_metrics_are_means_over_real_tokens_not_over_micro_batches() -> None:
    """Micro-batches of 7, 1 and 2 tokens; padding is NaN."""
    ours = statistics(*MICRO_BATCHES).metrics(identity, identity)
    assert ours == pytest.approx(expected_metrics(), rel=1e-5)
    alone = [statistics(part).metrics(identity, identity) for part in MICRO_BATCHES]
    assert abs(np.mean([each["val/ratio"] for each in alone]) - ours["val/ratio"]) > 0.01
    assert {each["val/ratio_var"] for each in alone} == {0.0}


def test_update_metrics_are_those_of_all_ranks() -> None:
    """Three ranks, one micro-batch each, exchange sums, and the micro-batches' ratios."""
    ranks = [statistics(part) for part in MICRO_BATCHES]
    total = torch.stack([rank.sums[0] for rank in ranks]).sum(dim=0)
    gathered = torch.stack([rank.sums[0][[6, 0, -1]] for rank in ranks])
    for rank in ranks:
        metrics = rank.metrics(lambda tensor: total.view_as(tensor), lambda tensor: gathered)
        expected = expected_metrics()
        of_all = {"val/first_logratio": (2 * expected["policy/approxkl_avg"]) ** 0.5}  # all are first ones here
        assert metrics == pytest.approx(expected | of_all, rel=1e-5)


def test_the_share_of_different_responses_is_counted_over_all_ranks() -> None:
    """The same tokens in another order, or fewer of them, are another response."""
    responses = torch.tensor([[5, 6, 7], [5, 7, 6], [5, 6, 7], [5, 6, 9]])
    mask = torch.ones_like(responses, dtype=torch.bool)
    mask[3, 2] = False
    rollout: Any = SimpleNamespace(query_responses=torch.cat((torch.arange(8).view(4, 2), responses), 1))
    rollout.response_mask = mask
    assert unique_fraction(rollout, identity) == 3 / 4
    of_another_rank = unique_sums(torch.tensor([[5, 6, 7]]))
    assert unique_fraction(rollout, lambda sums: torch.cat((sums, of_another_rank))) == 3 / 5
    distinct = torch.cartesian_prod(*[torch.arange(10)] * 4)
    rollout = SimpleNamespace(query_responses=distinct, response_mask=torch.ones_like(distinct, dtype=torch.bool))
    assert unique_fraction(rollout, identity) == 1


def unique_sums(responses: Tensor) -> Tensor:
    """What a rank sends of its responses."""
    sent: list[Tensor] = []
    rollout: Any = SimpleNamespace(query_responses=responses, response_mask=torch.ones_like(responses).bool())
    unique_fraction(rollout, lambda sums: sent.append(sums) or sums)
    return sent[0]


def test_a_micro_batch_without_scores_changes_nothing() -> None:
    part, *figures = micro_batch([[1, 1, 0], [1, 1, 1]], 5)
    unscored = replace(part, loss_mask=torch.zeros_like(part.loss_mask))
    ours = statistics(*MICRO_BATCHES, (unscored, *figures)).metrics(identity, identity)
    assert ours == pytest.approx(expected_metrics(), rel=1e-5)
    assert UpdateStatistics().metrics(identity, identity) == {}


# ---- Windows ----


def test_a_window_gives_means_extremes_and_the_latest() -> None:
    window = MetricWindow()
    window.add({"objective/kl": 1.0, "response/length_min": 3, "response/length_max": 9, "lr": 0.3, "episode": 8})
    window.add({"objective/kl": 2.0, "response/length_min": 2, "response/length_max": 5, "lr": 0.2, "episode": 16})
    window.add({"objective/kl": 6.0, "response/length_min": 4, "response/length_max": 6, "lr": 0.1, "episode": 24})
    assert window.drain() == {
        "objective/kl": 3.0,
        "response/length_min": 2,
        "response/length_max": 9,
        "lr": 0.1,
        "episode": 24,
    }
    assert window.drain() == {}
