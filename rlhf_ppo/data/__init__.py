"""Prompts, rollouts and experience: what one PPO update works on."""
