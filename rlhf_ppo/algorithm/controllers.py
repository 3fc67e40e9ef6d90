"""The coefficient of the KL penalty, and what moves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class KLController(Protocol):
    """Sets the coefficient of the KL penalty from update to update."""

    @property
    def coef(self) -> float:
        """Reward per nat, of the update to come; an attribute will do."""
        ...

    def update(self, mean_kl: float, num_episodes: int) -> None:
        """Set `coef` for the next update.

        Args:
            mean_kl: KL of a response, summed over its tokens, the mean over the update's episodes of all ranks, nats.
            num_episodes: Episodes of the update, of all ranks.
        """
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a resumed run needs, as tensors, numbers, texts, lists and dicts of these."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        ...


class HasKLCoefficient(Protocol):
    """Arguments with a coefficient."""

    kl_coef: float


class FixedKLController:
    """Keeps the coefficient of the arguments.

    Args:
        args: Gives `kl_coef`, reward per nat.
    """

    def __init__(self, args: HasKLCoefficient) -> None:
        self._args = args

    @property
    def coef(self) -> float:
        """Reward per nat."""
        return self._args.kl_coef

    def update(self, mean_kl: float, num_episodes: int) -> None:
        """Change nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a resumed run takes the coefficient of its own arguments."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read nothing."""


class AdaptiveKLController:
    """Moves the coefficient until the KL of a response is the target.

        coef <- coef (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)

    after each update of n episodes. Ziegler et al., 1909.08593, section 2.2.

    Args:
        coef: Reward per nat, of the first update; positive.
        target: KL of a response, summed over its tokens, nats.
        horizon: Episodes; the fewer, the faster it moves.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, mean_kl: float, num_episodes: int) -> None:
        """Move the coefficient towards the target by at most a fifth, times the episodes' share of the horizon."""
        error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_episodes / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient; target and horizon are those of the arguments."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with a coefficient."""
        self.coef = state["coef"]
