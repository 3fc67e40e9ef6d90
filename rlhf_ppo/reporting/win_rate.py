"""Win rates: statistics of a judge's verdicts on a model's responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rlhf_ppo.reporting.judgements import FEW, wilson_interval


@dataclass(frozen=True)
class WinRate:
    """Counts of verdicts on all prompts, each judged in both orders.

    Attributes:
        wins: Number of prompts whose better response is the model's.
        losses: Number of prompts whose better response is the opponent's.
        ties: Number of prompts with a tie, or with contradicting orders.
        failed: Number of prompts without a verdict.
        length_controlled: See `length_controlled_rate`; None if nothing was judged.
        agreement: See `agreement`; None if the order cannot matter, or is not known.
    """

    wins: int
    losses: int
    ties: int
    failed: int
    length_controlled: float | None = field(default=None, compare=False)
    agreement: float | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        verdicts: Sequence[float | None],
        lengths: Sequence[int] = (),
        others: Sequence[int] = (),
        orders: Sequence[tuple[float | None, float | None]] = (),
    ) -> WinRate:
        """Count verdicts.

        Args:
            verdicts: For each prompt above 0 if the model's response is better, below 0 if the opponent's is, 0 for a
                tie, None for a failed verdict.
            lengths: Characters of the model's responses; empty: no length-controlled rate.
            others: Characters of the opponent's responses.
            orders: The verdicts in both orders, whose means are `verdicts`; empty: no agreement.
        """
        judged = [(row, float(np.sign(verdict))) for row, verdict in enumerate(verdicts) if verdict is not None]
        signs = [sign for _, sign in judged]
        controlled = None
        if judged and lengths:
            differences = [lengths[row] - others[row] for row, _ in judged]
            controlled = length_controlled_rate([(1 + sign) / 2 for sign in signs], differences)
        failed = len(verdicts) - len(judged)
        return cls(signs.count(1.0), signs.count(-1.0), signs.count(0.0), failed, controlled, agreement(orders))

    @property
    def judged(self) -> int:
        """Number of prompts with a verdict."""
        return self.wins + self.losses + self.ties

    @property
    def rate(self) -> float:
        """Share of judged prompts won, with a tie as half; NaN if nothing was judged."""
        return (self.wins + self.ties / 2) / self.judged if self.judged else float("nan")

    def interval(self) -> tuple[float, float]:
        """Compute the bootstrap's 95% percentile interval of `rate` (Efron and Tibshirani 1993, chapter 13).

        A resample of `n` prompts with replacement has multinomially many wins, losses and ties. With few prompts, or
        equal verdicts, resamples vary too little: the interval is then Wilson's, so that a few wins prove nothing.
        """
        if not self.judged:
            return float("nan"), float("nan")
        shares = np.array([self.wins, self.losses, self.ties]) / self.judged
        if shares.max() == 1 or self.judged < FEW:
            return wilson_interval(self.rate, self.judged)
        counts = np.random.default_rng(0).multinomial(self.judged, shares, size=10_000)
        rates = (counts[:, 0] + counts[:, 2] / 2) / self.judged
        low, high = np.quantile(rates, [0.025, 0.975])
        return float(low), float(high)

    def __str__(self) -> str:
        """Return the win rate with its interval; on further lines the length-controlled rate and the agreement."""
        if not self.judged:
            return f"Model win rate: none, as nothing was judged; {self.failed} failed verdicts"
        low, high = self.interval()
        line = (
            f"Model win rate: {100 * self.rate:.1f}% (95% interval {100 * low:.1f} to {100 * high:.1f}; {self.judged} "
            f"judged: {self.wins} wins, {self.losses} losses, {self.ties} ties; {self.failed} failed verdicts)"
        )
        if self.length_controlled is not None:
            line += f"\nLength-controlled win rate: {100 * self.length_controlled:.1f}%"
        if self.agreement is not None:
            line += f"\nBoth orders agree on {100 * self.agreement:.1f}% of the judged pairs"
        return line


def agreement(orders: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Compute the share of pairs whose two orders prefer the same response, or both are a tie.

    A low share shows that the judge prefers a position rather than a response.

    Args:
        orders: For each pair, the verdicts with the model's response first and second: above 0 if it is better, below
            0 if the opponent's is, None: failed.

    Returns:
        The share of the pairs with two verdicts; None if there are none.
    """
    both = [(first, second) for first, second in orders if first is not None and second is not None]
    return float(np.mean([np.sign(first) == np.sign(second) for first, second in both])) if both else None


def length_controlled_rate(outcomes: Sequence[float], differences: Sequence[int]) -> float:
    """Estimate the win rate against responses of equal length (Dubois et al. 2404.04475, without their task terms).

        P(win) = sigmoid(theta + phi tanh(d / std(d))),    rate = sigmoid(theta)

    with `d` the difference of lengths. `theta` and `phi` maximise the likelihood, with a tie as half, and a standard
    normal prior on `phi`.

    Args:
        outcomes: 1 for a win, 0 for a loss, 0.5 for a tie.
        differences: `d`, the model's length less the opponent's.
    """
    won = torch.tensor(outcomes, dtype=torch.float64)
    length = torch.tensor(differences, dtype=torch.float64)
    spread = length.std(correction=0)
    length = torch.tanh(length / spread) if spread > 0 else torch.zeros_like(length)
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = weights[0] + weights[1] * length
        value = functional.binary_cross_entropy_with_logits(logits, won, reduction="sum") + weights[1] ** 2 / 2
        value.backward()
        return value

    optimizer.step(loss)  # pyright: ignore[reportArgumentType]
    return float(torch.sigmoid(weights[0]).detach())
