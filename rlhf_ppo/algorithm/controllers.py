"""The coefficient of the KL penalty, and what moves it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Protocol


class KLController(Protocol):
    """Sets the coefficient of the KL penalty from update to update."""

    @property
    def coef(self) -> float:
        """Reward per nat, of the update to come, finite and at least 0; an attribute will do."""
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

        coef <- coef (1 + clip(KL / target - 1, -0.2, 0.2) min(n / horizon, 1))

    after each update of n episodes. Ziegler et al., 1909.08593, section 2.2, where updates are shorter than the
    horizon; the limit of one horizon keeps the factor between 0.8 and 1.2, so the coefficient stays positive.

    Args:
        coef: Reward per nat, of the first update; positive.
        target: KL of a response, summed over its tokens, nats; positive.
        horizon: Episodes; the fewer, the faster it moves. At least 1.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, mean_kl: float, num_episodes: int) -> None:
        """Move the coefficient towards the target by at most a fifth, times the episodes' share of the horizon.

        A KL of NaN says nothing: the coefficient stays.
        """
        if math.isnan(mean_kl):
            return
        error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
        moved = self.coef * (1 + error * min(num_episodes, self.horizon) / self.horizon)
        self.coef = min(max(moved, sys.float_info.min), sys.float_info.max)

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient; target and horizon are those of the arguments."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with a coefficient."""
        self.coef = state["coef"]


def check_coefficient(controller: KLController) -> None:
    """Check that a controller's coefficient is one that a run can use.

    Raises:
        ValueError: It is negative, which would reward divergence, or not finite.
    """
    coef = float(controller.coef)
    if not 0 <= coef < math.inf:
        raise ValueError(
            f"kl_controller: {type(controller).__name__}.coef={coef} must be finite and at least 0, or the penalty "
            "would reward divergence; bound it in the controller's update()"
        )
