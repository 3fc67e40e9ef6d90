"""Processes, signals and random streams: every room may import them, and they import only `terminal`."""
