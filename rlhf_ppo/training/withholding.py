"""Arguments that Trainer is not to see for a while."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhf_ppo.config import PPOConfig


class WithheldArguments:
    """Arguments with other values for a while; what is written to disk keeps those that were given.

    Args:
        args: The arguments.
    """

    def __init__(self, args: PPOConfig) -> None:
        self.args = args
        self._given: dict[str, Any] = {}

    @contextmanager
    def instead(self, **values: Any) -> Iterator[None]:
        """Give arguments other values while the context lasts."""
        self._given = {name: getattr(self.args, name) for name in values}
        try:
            _set(self.args, values)
            yield
        finally:
            _set(self.args, self._given)
            self._given = {}

    def as_given(self) -> PPOConfig:
        """Return a copy with the values that were given."""
        args = copy.copy(self.args)
        _set(args, self._given)
        return args


def _set(args: PPOConfig, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(args, name, value)
