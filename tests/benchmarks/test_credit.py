"""The task in which each sentence has a reward of its own: which token gets it, and the baseline without a critic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import make_tokenizer

VALENCE = {"happy": 2.0, "sad": -2.0, "cried": -1.0}
TEXT = "Lily was happy. Tim was sad and cried! Then happy. She was sad. They were happy. And"


def decode(ids: list[int], skip_special_tokens: bool = False) -> str:
    """Return the text of tokens of three characters."""
    return "".join(TEXT[3 * number : 3 * number + 3] for number in ids)


def test_sentences_are_paid_in_turn_for_glad_and_sad_words() -> None:
    from credit import rewards_of

    two, three = 2 / 19**0.5, 3 / 24**0.5  # VADER's squashing, s / sqrt(s^2 + 15)
    assert rewards_of(TEXT, VALENCE) == pytest.approx([two, three, two, two])
    assert rewards_of("She was sad. It was happy. No end", VALENCE) == pytest.approx([-two, -two])


def test_a_sentence_is_paid_at_the_token_that_ends_it() -> None:
    from credit import at_tokens, rewards_of

    ids = list(range(-(-len(TEXT) // 3)))
    rewards = at_tokens(ids, VALENCE, decode)
    ends = [position for position, letter in enumerate(TEXT) if letter in ".!"][:4]
    assert {number: reward for number, reward in enumerate(rewards) if reward} == {
        end // 3: reward for end, reward in zip(ends, rewards_of(TEXT, VALENCE), strict=True)
    }


def test_without_a_critic_the_baseline_is_the_mean_at_the_same_position() -> None:
    from credit import NoCritic

    rewards = torch.tensor([[1.0, 0.0, 2.0], [0.0, 4.0, 0.0]])
    rollout: Any = SimpleNamespace(loss_mask=torch.tensor([[True, True, True], [True, True, False]]))
    compute: Any = NoCritic.compute_advantages
    advantages, returns = compute(None, rollout, rewards)
    assert returns.tolist() == [[3.0, 2.0, 2.0], [4.0, 4.0, 0.0]]
    assert advantages.tolist() == [[-0.5, -1.0, 0.0], [0.5, 1.0, 0.0]]


def test_the_rate_with_the_highest_objective_is_chosen() -> None:
    from credit import KL_COEF, SELECTION, SETTINGS, chosen_rate

    setting = SETTINGS["stories"]
    (*_, last), rates = setting.marks, setting.rates

    def row(rate: float, reward: float, kl: float) -> dict[str, Any]:
        return {"arm": "head", "seed": SELECTION[0], "rate": rate, "mark": last, "reward": reward, "kl": kl}

    kl = 0.2 / KL_COEF  # nats that cost 0.2
    rows = [row(rate, *figures) for rate, figures in zip(rates, [(1.0, 0.0), (1.1, kl), (0.5, 0.0)], strict=True)]
    assert chosen_rate("head", rows[:2], setting) is None
    assert chosen_rate("head", rows, setting) == rates[0]
    assert chosen_rate("head", [row(rates[0], 1.0, 2 * kl), *rows[1:]], setting) == rates[1]


def test_a_chat_model_is_asked_to_continue_the_beginnings() -> None:
    from credit import prompts_of

    tokenizer = make_tokenizer()
    plain = prompts_of(["a cat"], tokenizer)
    assert plain[0] == "<s>Once upon a time, there was a cat."
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    (first, *_), asked = prompts_of(["a cat"], tokenizer), "Continue with four short sentences: "
    assert first == f"[system]Write short sentences.[user]{asked}Once upon a time, there was a cat.[assistant]"
