"""Parts of the trainer: rollouts, learning, checkpoints, resuming, and the checks at construction."""
