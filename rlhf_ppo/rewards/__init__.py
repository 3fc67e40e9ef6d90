"""Rewards: what a response is worth, from a reward model, Python functions, or several of both."""

from rlhf_ppo.rewards.functions import RewardFunction
from rlhf_ppo.rewards.resolve import resolve_reward
from rlhf_ppo.rewards.reward_model import RewardModel
from rlhf_ppo.rewards.scorer import RewardSource, Scorer, Scores, ScoringBatch

__all__ = ["RewardFunction", "RewardModel", "RewardSource", "Scorer", "Scores", "ScoringBatch", "resolve_reward"]
