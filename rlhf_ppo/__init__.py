"""RLHF with PPO as a `transformers.Trainer`."""

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.generation.helpers import batch_generation, forward, generate
from rlhf_ppo.generation.sequences import truncate_response
from rlhf_ppo.trainer import PPOTrainer

__version__ = "0.1.0.dev0"

__all__ = ["PPOConfig", "PPOTrainer", "batch_generation", "forward", "generate", "truncate_response"]
