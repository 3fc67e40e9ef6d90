"""Evaluation: what the policy says to held-out prompts."""
