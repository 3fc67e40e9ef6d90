"""A run: its construction, its checkpoints, optimizer steps, and `step`."""
