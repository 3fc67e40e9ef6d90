"""Rewards of responses from reward models, Python functions, servers and judges."""

from rlhf_ppo.rewards.functions import RewardFunction
from rlhf_ppo.rewards.resolve import resolve_reward
from rlhf_ppo.rewards.reward_model import RewardModel
from rlhf_ppo.rewards.scorer import RewardSource, Scorer, Scores, ScoringBatch

__all__ = ["RewardFunction", "RewardModel", "RewardSource", "Scorer", "Scores", "ScoringBatch", "resolve_reward"]
