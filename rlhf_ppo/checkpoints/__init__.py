"""Checkpoints: what they hold beyond Trainer's files, when one is whole, and which run it belongs to."""

from rlhf_ppo.checkpoints.whole import last_whole_checkpoint, what_is_missing

__all__ = ["last_whole_checkpoint", "what_is_missing"]
