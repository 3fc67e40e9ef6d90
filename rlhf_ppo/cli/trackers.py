"""No run needs an account: where nobody is logged in to W&B it is recorded here."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

logger = logging.get_logger(__name__)


def settle_trackers(args: TrainingArguments) -> None:
    """Let W&B record into `./wandb` where it would else ask for a login, or end the run; says so once.

    Args:
        args: Gives `report_to`.
    """
    if "wandb" not in (args.report_to or []):
        return
    import wandb

    settings: Any = wandb.setup().settings
    if settings.mode in ("offline", "dryrun", "disabled") or _is_logged_in(wandb):
        return
    settings.mode = "offline"
    logger.warning_once(
        "report_to=['wandb'], but nobody is logged in to W&B here: the run is recorded in ./wandb and not uploaded. "
        "Log in with `wandb login`, upload it later with `wandb sync`, or report to none."
    )


def _is_logged_in(wandb: Any) -> bool:
    """Look for credentials without asking the user or the network."""
    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return wandb.api.api_key is not None  # before W&B 0.28
