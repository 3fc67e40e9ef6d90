"""Several processes, signals and random numbers."""
