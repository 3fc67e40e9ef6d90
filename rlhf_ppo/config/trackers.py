"""What experiment trackers need: their package where arguments are made, their key before a model is loaded."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import huggingface_hub
from transformers import TrainingArguments
from transformers.integrations import integration_utils


def _pip(*packages: str) -> str:
    return f"`pip install {' '.join(packages)}`, or report to 'none'"


_PACKAGES: dict[str, str] = {
    "azure_ml": _pip("azureml-sdk"),
    "comet_ml": _pip("-U", "comet-ml"),
    "dagshub": _pip("dagshub", "mlflow"),
    "flyte": _pip("flytekit"),
    "kubeflow": "Kubeflow's trainer sets KUBEFLOW_TRAINER_SERVER_URL; elsewhere report to 'none'",
}
"""How to get what a tracker needs, where that is not the package of its name."""


def missing_package(tracker: str) -> str | None:
    """Say how to get what a tracker needs, where it is not there; only W&B and Comet are imported for it."""
    return None if _is_there(tracker) else _PACKAGES.get(tracker, _pip(tracker))


def _is_there(tracker: str) -> bool:
    if tracker == "comet_ml":  # Trainer's own question is also whether there is a key
        return integration_utils._is_comet_installed and integration_utils._is_comet_recent_enough
    package = {"azure_ml": "azureml", "flyte": "flytekit"}.get(tracker, tracker)
    return getattr(integration_utils, f"is_{package}_available", lambda: True)()


def check_keys(args: TrainingArguments) -> None:
    """Check that the main process can log in to the trackers that need it: W&B, Comet, and Trackio's spaces.

    Args:
        args: Gives `report_to`; any training arguments.

    Raises:
        ValueError: There is no key, and nobody who could be asked for one.
    """
    for tracker in args.report_to or () if args.process_index == 0 else ():
        if tracker in _KEYS and (missing := _KEYS[tracker](args)) is not None:
            raise ValueError(f"report_to={args.report_to!r} has {tracker!r}, but {missing}, or report to 'none'")


def is_logged_in_to_wandb() -> bool:
    """Tell whether W&B has a key, or needs none, without asking the user or the network."""
    if os.environ.get("WANDB_MODE") in _WITHOUT_LOGIN:
        return True
    import wandb

    if wandb.run is not None or wandb.setup().settings.mode in _WITHOUT_LOGIN:
        return True
    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return wandb.api.api_key is not None  # before W&B 0.28


def _wandb(_: TrainingArguments) -> str | None:
    if is_logged_in_to_wandb():
        return None
    from wandb.errors import term

    if getattr(term, "can_use_terminput", sys.stdin.isatty)():  # the oldest versions lack it
        return None  # it asks
    return (
        "nobody is logged in to W&B here: log in with `wandb login` or set WANDB_API_KEY, set WANDB_MODE=offline to "
        "record into ./wandb"
    )


def _comet(_: TrainingArguments) -> str | None:
    import comet_ml  # pyright: ignore[reportMissingImports]

    has_key, is_online = comet_ml.get_config("comet.api_key"), comet_ml.get_config("comet.start.online")
    if has_key or is_online is False or comet_ml.get_running_experiment() is not None:
        return None
    return (
        "Comet has no key here: set COMET_API_KEY or call comet_ml.login(), set COMET_START_ONLINE=0 to record into a "
        "local file"
    )


def _trackio(args: TrainingArguments) -> str | None:
    space = args.trackio_space_id or os.environ.get("TRACKIO_SPACE_ID")
    if not space or huggingface_hub.get_token() is not None:
        return None
    return (
        f"nobody is logged in to the hub, where its space {space!r} is (trackio_space_id): run `hf auth login` "
        "or set HF_TOKEN, leave trackio_space_id None to record here"
    )


_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")
_KEYS: dict[str, Callable[[Any], str | None]] = {"wandb": _wandb, "comet_ml": _comet, "trackio": _trackio}
