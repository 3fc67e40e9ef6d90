"""Logged numbers of several ranks; those of one are among the numbers of tests/test_first_update.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss
from rlhf_ppo.data.rollout import Experience, Responses, Rollout
from rlhf_ppo.models.policy_and_value import PolicyAndValueOutput
from rlhf_ppo.reporting.metrics import UpdateStatistics, sampling_metrics, unique_fraction

NAN = float("nan")
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)


LOGPROBS = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -0.25, -0.25], [-3.0, -9.0, -9.0]])


def rollout(sampling_logprobs: Tensor | None = None) -> Rollout:
    """Three responses of 2, 3 and 1 tokens; the third was not scored by source b."""
    attention_mask = torch.cat((torch.ones(3, 1, dtype=torch.bool), MASK), dim=1)
    return Rollout(
        responses=Responses(attention_mask.long(), attention_mask, MASK, sampling_logprobs=sampling_logprobs),
        ended=torch.tensor([True, False, True]),
        logprobs=LOGPROBS,
        ref_logprobs=torch.zeros(3, 3),
        values=torch.zeros(3, 3),
        final_values=torch.zeros(3),
        scores=torch.tensor([1.0, 5.0, 3.0]),
        token_scores=torch.zeros(3, 3),
        scores_by_source={"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([0.0, 3.0, NAN])},
    )


# ---- The engine's log-probabilities ----


def test_sampling_metrics_by_hand_over_the_real_tokens_of_two_ranks() -> None:
    # Real tokens differ by 0.5, 0.25 / 0, 0.125, 1 / 0; padding does not count, whatever stands there.
    difference = torch.tensor([[0.5, -0.25, 9.0], [0.0, 0.125, -1.0], [0.0, 9.0, NAN]])
    weights = torch.tensor([[1.5, 0.75, 9.0], [1.0, 1.25, 0.5], [1.0, 0.0, NAN]])
    one = rollout(LOGPROBS - difference)

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
    part = Experience(
        responses=Responses(attention_mask.long(), attention_mask, real),
        ended=real[:, 0],
        **{name: figures() for name in ("logprobs", "values", "rewards", "advantages", "returns")},
        loss_mask=real,
    )
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
    masks = [part.loss_mask for part, *_ in MICRO_BATCHES]
    return np.concatenate([value[mask].double().numpy() for value, mask in zip(values, masks, strict=True)])


def expected_metrics() -> dict[str, float]:
    moved = [output.logprobs - part.logprobs for part, output, *_ in MICRO_BATCHES]
    ratios = [float(policy.ratio[part.loss_mask].mean()) for part, _, policy, _ in MICRO_BATCHES]
    return {
        "policy/approxkl_avg": (tokens(moved) ** 2).mean() / 2,
        "policy/clipfrac_avg": tokens([policy.clipped for *_, policy, _ in MICRO_BATCHES]).mean(),
        "policy/entropy_avg": tokens([output.entropy for _, output, *_ in MICRO_BATCHES]).mean(),
        "loss/policy_avg": tokens([policy.loss for *_, policy, _ in MICRO_BATCHES]).mean(),
        "loss/value_avg": tokens([value.loss for *_, value in MICRO_BATCHES]).mean(),
        "val/clipfrac_avg": tokens([value.clipped for *_, value in MICRO_BATCHES]).mean(),
        "val/ratio": tokens([policy.ratio for *_, policy, _ in MICRO_BATCHES]).mean(),
        "val/ratio_var": np.var(ratios, ddof=1),
        "val/first_logratio": float(moved[0][MICRO_BATCHES[0][0].loss_mask].double().pow(2).mean().sqrt()),
        "batch/shared_frac": 0.2,
    }


def identity(tensor: Tensor) -> Tensor:
    return tensor


def test_update_metrics_are_those_of_all_ranks() -> None:
    """Three ranks, one micro-batch each, exchange sums, and the micro-batches' ratios."""
    ranks = [statistics(part) for part in MICRO_BATCHES]
    assert [rank.num_read for rank in ranks] == [(9, 9), (2, 2), (3, 3)]
    total = torch.cat([torch.stack([rank.sums[0] for rank in ranks]).sum(dim=0), torch.tensor([50.0, 40.0, 6.0, 4.0])])
    gathered = torch.stack([rank.sums[0][[6, 0, -1]] for rank in ranks])
    for rank in ranks:
        metrics = rank.metrics(lambda tensor: total.view_as(tensor), lambda tensor: gathered)
        expected = expected_metrics()
        of_all = {"val/first_logratio": (2 * expected["policy/approxkl_avg"]) ** 0.5}  # all are first ones here
        of_all["loss/ptx_avg"] = 1.5
        assert metrics == pytest.approx(expected | of_all, rel=1e-5)


def test_the_share_of_different_responses_is_counted_over_all_ranks() -> None:
    """The same tokens in another order, or fewer of them, are another response."""
    ids = torch.tensor([[5, 6, 7], [5, 7, 6], [5, 6, 7], [5, 6, 9]])
    responses: Any = SimpleNamespace(response_ids=ids, response_mask=torch.ones_like(ids).bool())
    responses.response_mask[3, 2] = False
    assert unique_fraction(responses, identity) == 3 / 4
    of_another_rank = unique_sums(torch.tensor([[5, 6, 7]]))
    assert unique_fraction(responses, lambda sums: torch.cat((sums, of_another_rank))) == 3 / 5
    distinct = torch.cartesian_prod(*[torch.arange(10)] * 4)
    responses = SimpleNamespace(response_ids=distinct, response_mask=torch.ones_like(distinct).bool())
    assert unique_fraction(responses, identity) == 1


def unique_sums(ids: Tensor) -> Tensor:
    """What a rank sends of its responses."""
    sent: list[Tensor] = []
    responses: Any = SimpleNamespace(response_ids=ids, response_mask=torch.ones_like(ids).bool())
    unique_fraction(responses, lambda sums: sent.append(sums) or sums)
    return sent[0]
