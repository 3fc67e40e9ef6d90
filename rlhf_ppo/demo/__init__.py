"""Demo: a small story teller trained from scratch with SFT, a reward model and PPO."""
