"""A run: its construction, its checkpoints, signals, ranks, optimizer steps, and `step`."""
