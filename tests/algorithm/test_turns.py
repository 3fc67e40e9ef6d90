"""GAE over turns: by hand, and in cases in which it equals something simpler."""

from __future__ import annotations

import pytest
import torch

from rlhf_ppo.algorithm.advantages import gae, turn_gae, turn_starts

MASK = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0, 1, 0]]).bool()
"""Three turns of the policy, of two, three and one token; then padding."""
REWARDS = torch.tensor([[1.0, 2, 99, 99, 0, -1, 3, 99, 4, 99]])
VALUES = torch.tensor([[0.5, 77, 999, 999, 1, 77, 77, 999, 2, 999]])


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers])


def test_by_hand() -> None:
    """r = (3, 2, 4), V = (0.5, 1, 2); delta = (3 + .5 - .5, 2 + 1 - 1, 4 - 2) at gamma 0.5; lam 0.5."""
    advantages, returns = turn_gae(REWARDS, VALUES, MASK, gamma=0.5, lam=0.5)
    last, second, first = 2.0, 2 + 0.25 * 2, 3 + 0.25 * 2.5
    assert torch.equal(advantages, row(first, first, 0, 0, second, second, second, 0, last, 0))
    assert torch.equal(returns, row(first + 0.5, 0, 0, 0, second + 1, 0, 0, 0, last + 2, 0))


def test_a_response_that_was_cut_goes_on_from_its_last_value() -> None:
    """Once after the last turn: delta = (3 + 1 - .5, 2 + 2 - 1, 4 + 5 - 2) at gamma 1; lam 0."""
    advantages, _ = turn_gae(REWARDS, VALUES, MASK, gamma=1.0, lam=0.0, bootstrap_values=torch.tensor([5.0]))
    assert torch.equal(advantages, row(3.5, 3.5, 0, 0, 3, 3, 3, 0, 7, 0))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.3)])
def test_one_turn_is_a_bandit(gamma: float, lam: float) -> None:
    rewards, values = torch.randn(3, 6), torch.randn(3, 6)
    mask = torch.arange(6) < torch.tensor([[6], [1], [4]])
    advantages, returns = turn_gae(rewards, values, mask, gamma, lam)
    paid = (rewards * mask).sum(dim=1, keepdim=True)
    torch.testing.assert_close(advantages, (paid - values[:, :1]) * mask)
    torch.testing.assert_close(returns[:, :1], paid)
    assert not returns[:, 1:].any()


def test_turns_of_one_token_are_tokens() -> None:
    torch.manual_seed(0)
    rewards, values, after = torch.randn(4, 9), torch.randn(4, 9), torch.randn(4)
    mask = (torch.arange(9) % 2 == 0) & (torch.arange(9) < torch.tensor([[9], [1], [4], [7]]))
    given = rewards, values, mask, 0.9, 0.7, after
    for of_turns, of_tokens in zip(turn_gae(*given), gae(*given), strict=True):
        assert torch.equal(of_turns, of_tokens)


def test_a_turn_starts_where_a_run_does() -> None:
    assert turn_starts(MASK).tolist() == [[True, False, False, False, True, False, False, False, True, False]]
    assert not turn_starts(~MASK & False).any()
