"""Loggers whose messages name the rank where there are several."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from accelerate import PartialState
from accelerate.logging import MultiProcessAdapter

from rlhf_ppo.terminal.foreign import visible_logger


class RankedLogger(MultiProcessAdapter):
    """accelerate's logger, which speaks on the main process alone unless `main_process_only=False`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank before a message of several processes; one process has none to tell from."""
        if PartialState().num_processes > 1:
            return super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)  # as there: the place in the code is the caller's
        return logging.LoggerAdapter.process(self, msg, kwargs)


def get_logger(name: str) -> RankedLogger:
    """Return the logger of a module."""
    return RankedLogger(visible_logger(name), {})
