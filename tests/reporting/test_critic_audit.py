"""The critic audit: its statistics on values that are known, and broken critics of a policy whose values are known."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.reporting.critic_audit import AuditedPrefixes, Estimate, audit, findings, pair_counts
from rlhf_ppo.run.auditor import batches_of, draw_cuts
from tests.conftest import prompt_rows, tiny_policy
from tests.runs import MakeTrainer

W4, W5, VOCABULARY, LENGTH = 7, 8, 32, 8


def count_of_w4(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(ids.count(W4) + ids.count(W5)) for ids in completion_ids]


def uniform_policy() -> Any:
    """A policy that always samples w4 and w5 with probability 1/4 each, and any other word with 1/60."""
    policy = tiny_policy()
    policy.model.norm.weight.data.zero_()  # hidden states 0, so that a bias alone decides
    policy.lm_head = torch.nn.Linear(32, VOCABULARY)
    policy.lm_head.weight.data.zero_()
    policy.lm_head.bias.data = torch.full((VOCABULARY,), 1 / 60).log()
    policy.lm_head.bias.data[[W4, W5]] = torch.tensor(1 / 4).log()
    return policy


def true_values(rollout: Rollout, tokens: tuple[int, ...] = (W4, W5), share: float = 0.5) -> Tensor:
    """Paid tokens so far, and `share` for each token to come."""
    paid = sum((rollout.responses.response_ids == token).float() for token in tokens)
    before = torch.cumsum(torch.as_tensor(paid), dim=1) - paid
    return before + share * (LENGTH - torch.arange(LENGTH))


@pytest.fixture
def make_audited(make_trainer: MakeTrainer) -> Callable[..., PPOTrainer]:
    def make(values: Callable[[Rollout], Tensor], **options: Any) -> PPOTrainer:
        class WithValues(PPOTrainer):
            def collect_rollout(self, *given: Any) -> Rollout:
                rollout = super().collect_rollout(*given)
                return dataclasses.replace(rollout, values=values(rollout))

        rows = {"model": uniform_policy(), "reward_funcs": count_of_w4, "value_model": None}
        sizes = {"response_length": LENGTH, "stop_token": None, "temperature": 1.0, "per_device_eval_batch_size": 160}
        held_out = {"eval_dataset": Dataset.from_list(prompt_rows(40, seed=5))}
        return make_trainer(WithValues, **{**rows, **sizes, **held_out, **options})

    return make


def test_audits_of_a_policy_whose_values_are_known(make_audited: Callable[..., PPOTrainer]) -> None:
    """160 prefixes x 16 continuations: the critic that knows the values is calibrated, whatever another one says.

    Two of the 40 rows have the same prompt. The mean of a prompt knows the prompt but no response: each prompt has one
    response, whose tokens count in the returns of all its prefixes.
    """

    def by_prompt(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        paid = count_of_w4(completion_ids)
        return [each + 3.0 * (len(prompt) % 2) for each, prompt in zip(paid, prompts, strict=True)]

    found = make_audited(true_values, kl_coef=0.0).audit_critic()
    assert (found.num_prompts, found.num_prefixes, found.num_continuations) == (39, 160, 16)
    assert found.findings == []
    assert found.figures["explained_variance"].value > 0.97
    assert found.figures["tau"].low > 0.8 * found.figures["tau_ceiling"].value
    assert found.figures["explained_variance_of_prompt"].value < 0.05 and found.figures["gain_over_prompt"].low > 0.7

    of_prompt = make_audited(true_values, kl_coef=0.0, reward_funcs=by_prompt).audit_critic()
    assert of_prompt.figures["explained_variance_of_prompt"].low > 0.3
    assert any("mean return of the prompt" in each for each in of_prompt.findings), of_prompt

    frozen = make_audited(lambda rollout: torch.full_like(rollout.values, 0.3), kl_coef=0.0, lam=0.5).audit_critic()
    assert any("head is frozen" in finding for finding in frozen.findings)
    for name in ("tau_ceiling", "explained_variance_of_prompt"):
        assert frozen.figures[name] == found.figures[name]


def test_returns_are_discounted_from_the_cut_on(make_audited: Callable[..., PPOTrainer]) -> None:
    """A reward for each token, so that what is paid before the cut does not count."""

    def per_token(completion_ids: list[list[int]], **columns: Any) -> list[list[float]]:
        return [[float(token in (W4, W5)) for token in ids] for ids in completion_ids]

    def discounted(rollout: Rollout) -> Tensor:
        return (0.5 * (1 - 0.7 ** (LENGTH - torch.arange(LENGTH))) / 0.3).expand_as(rollout.values)

    found = make_audited(discounted, kl_coef=0.0, gamma=0.7, reward_funcs=per_token).audit_critic()
    assert 0.9 < found.figures["explained_variance"].value < 1.1


def test_the_findings_say_whether_the_critic_is_worse_or_no_better() -> None:
    sure = Estimate(0.5, 0.4, 0.6)
    said = {}
    for gain in (
        Estimate(-0.2, -0.3, -0.1),
        Estimate(-0.1, -0.3, 0.1),
        Estimate(0.1, -0.1, 0.3),
        Estimate(0.2, 0.1, 0.3),
    ):
        figures = {"explained_variance": sure, "tau": sure, "gain_over_prompt": gain}
        said[gain.value] = findings(figures, 1.0, 1.0)
    assert said == {
        -0.2: ["The critic is worse than the mean return of the prompt."],
        -0.1: ["The critic is not better than the mean return of the prompt."],
        0.1: ["The critic is not clearly better than the mean return of the prompt."],
        0.2: [],
    }


def test_an_audit_repeats_and_leaves_training_alone(make_audited: Callable[..., PPOTrainer]) -> None:
    trainer = make_audited(true_values)
    state = torch.get_rng_state()
    first, second = (trainer.audit_critic(num_continuations=4) for _ in range(2))
    assert first == second and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("option", [{"gae_level": "turn"}, {"whiten_rewards": True}])
def test_values_of_other_tokens_or_units_are_not_audited(
    make_audited: Callable[..., PPOTrainer], option: dict[str, Any]
) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"{name}=.*values"):
        make_audited(true_values, **option).audit_critic(num_continuations=4)


def prefixes(values: Any, returns: Any, prompts: Any) -> AuditedPrefixes:
    return AuditedPrefixes(np.array(prompts), np.array(values), np.zeros(len(values)), np.array(returns))


def test_explained_variance_subtracts_the_noise_of_the_returns() -> None:
    """By hand: G = 0, 2, 4, 6 (variance 5), s^2 / M = 2 / 4; V = 0, 2, 4, 4: Var(G - V) = .75."""
    returns = [[mean - 1.0, mean + 1.0] * 2 for mean in (0.0, 2.0, 4.0, 6.0)]
    noise = 4 / 3 / 4
    found = audit(prefixes([0.0, 2.0, 4.0, 4.0], returns, [0, 0, 1, 1])).figures
    assert found["explained_variance"].value == pytest.approx(1 - (0.75 - noise) / (5 - noise))


def test_returns_without_a_signal_have_no_interval() -> None:
    """All prefixes are worth the same; some resamples show a signal by chance."""
    generator = np.random.default_rng(0)
    for returns in generator.normal(size=(50, 8, 4)):
        found = audit(prefixes(np.arange(8.0), returns, [0, 0, 1, 1, 2, 2, 3, 3]), num_resamples=50).figures
        explained = found["explained_variance"]
        assert np.isnan([explained.low, explained.high]).all() == np.isnan(explained.value)


def test_pairs_are_those_of_kendalls_tau() -> None:
    """Against a count over all pairs, with ties."""
    generator = np.random.default_rng(0)
    first, second = generator.integers(0, 4, 12).astype(float), generator.integers(0, 4, 12).astype(float)
    pairs = list(itertools.combinations(range(12), 2))
    signs = [(np.sign(first[i] - first[j]), np.sign(second[i] - second[j])) for i, j in pairs]
    expected = (sum(x * y for x, y in signs), sum(x != 0 for x, _ in signs), sum(y != 0 for _, y in signs))
    assert pair_counts(first, second) == expected


def test_cuts_lie_within_each_response_and_batches_hold_each_continuation_once() -> None:
    lengths = np.array([1, 3, 40])
    cuts = draw_cuts(lengths, 4, np.random.default_rng(0))
    assert (cuts >= 0).all() and (cuts < lengths[:, None]).all()
    assert (np.diff(cuts[2]) > 0).all() and (cuts[2] // 10 == np.arange(4)).all()
    batches = batches_of(cuts, 5, max_rows=8, slack=3)
    assert sorted((one.row, one.prefix, one.copy) for batch in batches for one in batch) == sorted(np.ndindex(3, 4, 5))
    assert all(len(batch) <= 8 and batch[-1].cut - batch[0].cut <= 3 for batch in batches)
