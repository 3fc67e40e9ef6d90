"""Compatibility with TRL's PPO helpers and AITraining's parameters and environments."""
