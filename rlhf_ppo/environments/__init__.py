"""Environments of several turns and tools: discovery, pool, a round's calls, processes, and adapters."""
