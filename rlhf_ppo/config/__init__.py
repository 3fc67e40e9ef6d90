"""Arguments of a run and their validation."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_ppo.config.ppo_config import RANGES, PPOConfig

__all__ = ["RANGES", "PPOConfig"]


def __getattr__(name: str) -> Any:
    """Import transformers only for a name that needs it: errors of the command line need none."""
    return getattr(importlib.import_module("rlhf_ppo.config.ppo_config"), name)
