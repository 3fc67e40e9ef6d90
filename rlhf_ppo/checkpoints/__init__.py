"""Checkpoints of a run: its directory, the saved state of its loop, and atomic writes."""

from rlhf_ppo.checkpoints.directory import last_complete_checkpoint

__all__ = ["last_complete_checkpoint"]
