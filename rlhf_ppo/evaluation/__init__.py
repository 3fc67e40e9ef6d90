"""Evaluation of the policy on held-out prompts, sample tables, and win rates."""
