"""Environments of several turns and tools: discovery, pool, a round's calls, and waiting with a time limit."""
