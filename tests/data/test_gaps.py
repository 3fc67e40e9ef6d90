"""Response masks with holes: tokens of tools between the policy's turns are context, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_ppo.data.rollout import Experience, Responses, Rollout
from rlhf_ppo.reporting.metrics import UpdateStatistics
from rlhf_ppo.rewards.scorer import scaling_scores
from tests.runs import MakeTrainer, assert_identical

# ---- What stands in the gaps ----


@st.composite
def written_masks(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Masks of 2 to 4 responses of up to 8 tokens: all that is real, and what the policy wrote of it."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=2, max_size=4))
    width = max(lengths)
    real = torch.tensor([[t < length for t in range(width)] for length in lengths])
    written = torch.tensor([draw(st.lists(st.booleans(), min_size=width, max_size=width)) for _ in lengths]) & real
    for row, length in enumerate(lengths):
        written[row, draw(st.integers(0, length - 1))] = True
    return real, written


def a_rollout(real: Tensor, written: Tensor, seed: int) -> Rollout:
    """Random figures behind prompts of two tokens; 0 where the policy wrote nothing."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(real)

    def figures(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        return drawn.masked_fill(~written, 0.0) if len(shape) == 2 else drawn

    scores, ended = figures(rows), torch.arange(rows) % 2 == 0
    responses = Responses(
        torch.randint(3, 32, (rows, 2 + real.shape[1]), generator=generator),
        torch.cat((torch.ones(rows, 2).bool(), real), dim=1),
        written,
        sampling_logprobs=figures(*real.shape),
    )
    return Rollout(
        responses=responses,
        ended=ended,
        logprobs=figures(*real.shape),
        ref_logprobs=figures(*real.shape),
        values=figures(*real.shape),
        final_values=figures(rows),
        scores=scores,
        token_scores=figures(*real.shape),
        scores_by_source={"one": scores},
    )


def filled(batch: Any, names: tuple[str, ...], value: float) -> Any:
    """Put a number at all tokens that the policy did not write."""
    responses, gaps = batch.responses, ~batch.responses.response_mask
    responses = dataclasses.replace(responses, sampling_logprobs=responses.sampling_logprobs.masked_fill(gaps, value))
    figures = {name: getattr(batch, name).masked_fill(gaps, value) for name in names}
    return dataclasses.replace(batch, responses=responses, **figures)


SHAPED: dict[str, Any] = {
    "whiten_rewards": True,
    "score_scaling": True,
    "score_clip": 2.0,
    "missing_eos_penalty": 0.7,
    "bootstrap_truncated": True,
    "gamma": 0.9,
    "lam": 0.8,
    "kl_coef": 0.3,
    "importance_sampling_correction": True,
}


def estimated(trainer: Any, rollout: Rollout) -> tuple[Experience, dict[str, float]]:
    """The experience of a rollout, as the first of a run, and the metrics of it."""
    trainer._run.stateful.start(None)
    trainer._check_and_count_scores(rollout)
    experience = trainer.estimate_advantages(rollout)
    return experience, trainer._rollout_metrics.record(rollout, experience, trainer.kl_controller, trainer._score_unit)


@pytest.mark.parametrize("value", [999.0, float("nan")])
def test_figures_in_the_gaps_change_nothing(make_trainer: MakeTrainer, value: float) -> None:
    trainer: Any = make_trainer(**SHAPED)

    @settings(deadline=None, max_examples=25)
    @given(masks=written_masks(), seed=st.integers(0, 2**16))
    def compare(masks: tuple[Tensor, Tensor], seed: int) -> None:
        rollout = a_rollout(*masks, seed)
        odd = filled(rollout, ("logprobs", "ref_logprobs", "values", "token_scores"), value)
        assert torch.equal(*(scaling_scores(each, trainer.args) for each in (odd, rollout)))
        clean, metrics = estimated(trainer, rollout)
        experience, odd_metrics = estimated(trainer, odd)
        assert odd_metrics == metrics
        for name in ("advantages", "returns", "loss_mask"):
            assert torch.equal(getattr(experience, name), getattr(clean, name)), name
        weights = clean.importance_weights, experience.importance_weights
        assert torch.equal(*(each[rollout.response_mask] for each in weights if each is not None))

    compare()


@pytest.mark.parametrize("value", [999.0, float("nan")])
def test_figures_in_the_gaps_have_no_gradient(make_trainer: MakeTrainer, value: float) -> None:
    trainer: Any = make_trainer(importance_sampling_correction=True)
    names = ("logprobs", "values", "advantages", "returns", "importance_weights")

    def learned(experience: Experience) -> Any:
        statistics = UpdateStatistics()
        trainer.model.zero_grad()
        loss, parts = trainer.compute_loss(trainer.model, experience, return_outputs=True)
        loss.backward()
        statistics.add(experience, *parts)
        gradients = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
        return loss.detach(), gradients, statistics.sums

    @settings(deadline=None, max_examples=10)
    @given(masks=written_masks(), seed=st.integers(0, 2**16))
    def compare(masks: tuple[Tensor, Tensor], seed: int) -> None:
        experience, _ = estimated(trainer, a_rollout(*masks, seed))
        clean = learned(experience)
        assert_identical(learned(filled(experience, names, value)), clean)
        assert any(gradient.any() for gradient in clean[1].values())

    compare()


# ---- The masks themselves ----


def responses(*rows: str, context: int = 2, **overrides: Any) -> Responses:
    """Rows such as ".pPt.": padding, prompt, policy, tool."""
    ids = torch.arange(len(rows) * len(rows[0])).view(len(rows), -1) + 3
    attention = torch.tensor([[letter != "." for letter in row] for row in rows])
    written = torch.tensor([[letter == "P" for letter in row[context:]] for row in rows])
    return Responses(**{"query_responses": ids, "attention_mask": attention, "response_mask": written, **overrides})


def test_trimming_keeps_every_token_that_attention_sees() -> None:
    batch = responses(".pPtP..", ".ptPtt.", ".pP....")
    trimmed = batch.trimmed()
    assert trimmed.context_length == 1 and trimmed.attention_mask.tolist() == [
        [True, True, True, True, False],
        [True, True, True, True, True],
        [True, True, False, False, False],
    ]
    assert trimmed.response_mask.shape == (3, 4)
    assert torch.equal(trimmed.query_responses, batch.query_responses[:, 1:6])
    assert batch.lengths.tolist() == [4, 5, 2] and batch.longest_first() == [1, 0, 2]
    assert [part.response_ids.shape[1] for part in batch.parts(1)] == [3, 4, 1]
    assert batch.episode_mask.sum(dim=1).tolist() == [3, 4, 1]
