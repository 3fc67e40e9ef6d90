"""Checkpoints of a run: files, saved state, the run that they belong to, and complete checkpoints."""

from rlhf_ppo.checkpoints.complete import last_complete_checkpoint, why_incomplete

__all__ = ["last_complete_checkpoint", "why_incomplete"]
