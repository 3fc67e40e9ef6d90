"""What Trainer is told about PPO."""
