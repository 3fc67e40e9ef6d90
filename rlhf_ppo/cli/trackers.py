"""No run needs an account: where nobody is logged in to W&B it is recorded here."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from rlhf_ppo.config.trackers import check_keys, is_logged_in_to_wandb
from rlhf_ppo.terminal.foreign import visible_logger

logger = visible_logger(__name__)


def settle_trackers(args: TrainingArguments) -> None:
    """Let W&B record into `./wandb` where it would else ask for a login, or end the run; says so once.

    Args:
        args: Gives `report_to`.

    Raises:
        ValueError: Another tracker has no key.
    """
    if "wandb" in (args.report_to or []) and not is_logged_in_to_wandb():
        import wandb

        settings: Any = wandb.setup().settings
        settings.mode = "offline"
        logger.warning_once(
            "report_to=['wandb'], but nobody is logged in to W&B here: the run is recorded in ./wandb and not "
            "uploaded. Log in with `wandb login`, upload it later with `wandb sync`, or report to none."
        )
    check_keys(args)
