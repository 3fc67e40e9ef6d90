"""One uniform number a row draws from the same distribution as `generate`, and never a token of probability 0."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from rlhf_ppo.generation.inversion import DrawsByInversion, sampling_processors
from tests.conftest import tiny_policy

SAMPLINGS = {
    "plain": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "temperature": {"temperature": 0.6, "top_k": 0, "top_p": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 3, "top_p": 1.0},
    "top_p": {"temperature": 1.0, "top_k": 0, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.2},
    "all": {"temperature": 1.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
}


def with_uniform(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, value))


def drawn(logits: torch.Tensor) -> torch.Tensor:
    scores = DrawsByInversion()(None, logits)
    assert scores.isfinite().sum(dim=1).tolist() == [1] * len(logits)
    return scores.argmax(dim=1)


def test_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """`F = (0, 0.25, 0.25, 0.75, 1, 1)`."""
    logits = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).log()
    for uniform, token in ((0.0, 1), (0.2, 1), (0.26, 3), (0.74, 3), (0.76, 4), (1 - 2**-53, 4), (1.0, 4)):
        with_uniform(monkeypatch, uniform)
        assert drawn(logits).item() == token, uniform


def test_each_row_has_a_number_of_its_own() -> None:
    torch.manual_seed(0)
    assert len(set(drawn(torch.zeros(64, 4096)).tolist())) > 55


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_frequencies_are_those_of_generate(sampling: dict[str, float]) -> None:
    """Of 40000 draws; the processors of `generate` itself say which probabilities."""
    config = GenerationConfig(do_sample=True, **sampling)
    model = tiny_policy()
    theirs = model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    greedy, ours = sampling_processors(config, torch.device("cpu"))
    assert greedy.do_sample is False and config.do_sample is True
    torch.manual_seed(1)
    logits = torch.randn(1, 12) * 2
    probabilities = theirs(torch.zeros(1, 1, dtype=torch.long), logits.clone()).softmax(dim=-1)[0].double()
    num_draws = 40000
    tokens = ours(torch.zeros(num_draws, 1, dtype=torch.long), logits.repeat(num_draws, 1)).argmax(dim=1)
    counts = tokens.bincount(minlength=12).double()
    assert (counts[probabilities == 0] == 0).all()
    spread = (num_draws * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - num_draws * probabilities).abs() <= 4.5 * spread).all()


@pytest.mark.parametrize(
    ("config", "device"), [({"do_sample": True, "top_k": 3}, "cuda"), ({"do_sample": False}, "cpu")]
)
def test_generate_is_left_to_itself_on_an_accelerator_and_when_greedy(config: dict[str, float], device: str) -> None:
    config = GenerationConfig(**config)
    assert sampling_processors(config, torch.device(device)) == (config, [])
