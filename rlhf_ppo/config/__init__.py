"""Arguments of a run and their validation."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_ppo.config.ppo_config import RANGES, PPOConfig

__all__ = ["RANGES", "PPOConfig"]


def __getattr__(name: str) -> Any:
    """Import transformers with the first name that needs it: the command line's errors need none."""
    if name not in __all__:
        raise AttributeError(f"module 'rlhf_ppo.config' has no attribute {name!r}")
    from rlhf_ppo.config import ppo_config

    return getattr(ppo_config, name)
