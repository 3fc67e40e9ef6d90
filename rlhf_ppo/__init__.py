"""RLHF with PPO as a `transformers.Trainer`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_ppo.compat.trl import batch_generation, forward, generate, truncate_response
    from rlhf_ppo.config import PPOConfig
    from rlhf_ppo.config.presets import preset
    from rlhf_ppo.trainer import PPOTrainer

__version__ = "0.1.0"

__all__ = ["PPOConfig", "PPOTrainer", "batch_generation", "forward", "generate", "preset", "truncate_response"]

_MODULES = {
    "PPOConfig": "rlhf_ppo.config",
    "PPOTrainer": "rlhf_ppo.trainer",
    "batch_generation": "rlhf_ppo.compat.trl",
    "forward": "rlhf_ppo.compat.trl",
    "generate": "rlhf_ppo.compat.trl",
    "preset": "rlhf_ppo.config.presets",
    "truncate_response": "rlhf_ppo.compat.trl",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only for a name that needs them: `rlhf-ppo --help` needs neither."""
    if name not in _MODULES:
        message = f"module 'rlhf_ppo' has no attribute {name!r}"
        if name[:1] != "_" and name in (hints := import_module("rlhf_ppo.config.checks").IMPORT_HINTS):
            raise ImportError(f"{message}: {hints[name]}")  # `from rlhf_ppo import` hides an AttributeError's message
        raise AttributeError(message)
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
