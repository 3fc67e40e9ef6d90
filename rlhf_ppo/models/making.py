"""Models that are given by a function that makes them, so that each trial of a search has new ones."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from transformers.trainer_utils import number_of_arguments


def is_function(model: Any) -> bool:
    """Tell whether a model is given by a function that makes it."""
    return callable(model) and not isinstance(model, nn.Module)


def made(model: Any, argument: str, trial: Any = None) -> Any:
    """Call the function that makes a model, if it is given by one.

    Args:
        model: A model, a path, None, or a function that takes the trial or nothing.
        argument: What the caller's argument is called, for the error message.
        trial: The trial of a search, or None.

    Raises:
        TypeError: The function takes more than one argument, or returns neither a model nor a path.
    """
    if not is_function(model):
        return model
    num_arguments = number_of_arguments(model)
    if num_arguments > 1:
        raise TypeError(f"{argument} is a function of {num_arguments} arguments; it may take the trial, or nothing")
    result = model(trial) if num_arguments else model()
    if not isinstance(result, nn.Module | str | os.PathLike):
        raise TypeError(f"{argument} is a function that returned {result!r}, neither a model nor a path")
    return result
