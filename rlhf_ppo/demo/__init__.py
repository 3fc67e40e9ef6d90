"""The demonstration: from nothing to a small story teller trained with PPO, on any machine, in minutes."""
