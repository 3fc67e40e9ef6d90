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
