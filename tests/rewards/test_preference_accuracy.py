"""Accuracy of a reward model on preference pairs: counted by hand, with Wilson's interval."""

from __future__ import annotations

import pytest
import torch

from rlhf_ppo.rewards.reward_model import preference_accuracy, wilson_interval
from tests.conftest import make_tokenizer, tiny_scorer

WORDS = ["w4", "w5", "w6", "w7", "w8", "w9"]


def test_accuracy_counts_the_chosen_responses_with_the_higher_score() -> None:
    model, tokenizer = tiny_scorer().train(), make_tokenizer()

    def score(word: str) -> float:
        ids = torch.tensor([tokenizer(f"w3 {word}")["input_ids"] + [tokenizer.eos_token_id]])
        with torch.no_grad():
            return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.item()

    by_score = sorted(WORDS, key=score)
    assert len({score(word) for word in WORDS}) == len(WORDS)
    low, high = by_score[0], by_score[-1]
    pairs = [{"prompt": "w3 ", "chosen": chosen, "rejected": rejected} for chosen, rejected in [(high, low)] * 3]
    pairs += [{"prompt": "w3 ", "chosen": low, "rejected": high}, {"prompt": "w3 ", "chosen": low, "rejected": low}]
    model.train()

    found = preference_accuracy(model, tokenizer, pairs, batch_size=3)

    assert (found.accuracy, found.num_pairs, found.ties) == (0.7, 5, 1)
    assert found.interval == wilson_interval(0.7, 5)
    assert str(found).startswith("70.0% of 5 pairs (95% interval ")
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    too_long = {"prompt": "w3 w4 ", "chosen": "w5", "rejected": "w6"}
    assert preference_accuracy(model, tokenizer, [*pairs, too_long], max_length=3).num_pairs == 5
    with pytest.raises(ValueError, match="no preference pair is left"):
        preference_accuracy(model, tokenizer, [too_long], max_length=3)


@pytest.mark.parametrize(
    ("share", "count", "low", "high"), [(0.5, 100, 0.4038, 0.5962), (1.0, 10, 0.7225, 1.0), (0.0, 10, 0.0, 0.2775)]
)
def test_the_interval_is_wilsons(share: float, count: int, low: float, high: float) -> None:
    assert wilson_interval(share, count) == pytest.approx((low, high), abs=1e-4)
