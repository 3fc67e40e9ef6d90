"""The callbacks through which a run is watched: what it prints, and its health."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers import Trainer

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.reporting.health import HealthCallback, Surroundings
from rlhf_ppo.terminal.progress import use_console


def watch_run(trainer: Trainer, args: PPOConfig, num_episodes: int) -> None:
    """Let a trainer print its logs as `log_console` says, and check its health before other callbacks get a log.

    Args:
        trainer: A `PPOTrainer` with the callbacks that Trainer has given it; a `HealthCallback` of the user's stays.
        args: Its arguments.
        num_episodes: Episodes of an update.
    """
    use_console(trainer, args.log_console)
    health = trainer.pop_callback(HealthCallback)
    if health is None and args.health_checks:
        health = HealthCallback(args.made_thresholds(), surroundings(args, num_episodes))
    if health is not None:
        trainer.callback_handler.callbacks.insert(0, health)


def health_settings(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return what a run's health checks go by, as JSON values: `thresholds` and `run`; nothing without them."""
    found = (callback for callback in callbacks if isinstance(callback, HealthCallback))
    return next(({"thresholds": asdict(each.thresholds), "run": asdict(each.run)} for each in found), {})


def surroundings(args: PPOConfig, num_episodes: int) -> Surroundings:
    """Return what the figures of a run are compared with."""
    stops = (args.stop_token, args.stop_token_id, args.stop_strings)
    return Surroundings(
        response_length=args.response_length,
        max_grad_norm=args.max_grad_norm,
        num_episodes=num_episodes,
        can_end=any(stop is not None for stop in stops),
        end_counts=args.missing_eos_penalty is not None or args.missing_eos_score is not None,
        judge=args.health_judge,
        clips_tokens=args.policy_loss != "gspo",
    )
