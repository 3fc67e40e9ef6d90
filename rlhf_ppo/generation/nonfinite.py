"""Logits that no token can be sampled from are an error with a name, not a random token or a crash of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor


class NonFiniteLogitsError(RuntimeError):
    """A model's logits are NaN, infinite, or minus infinity for every token."""


class ChecksLogits(LogitsProcessor):
    """Notes rows whose largest logit is not finite; it stands before all other processors.

    On a CPU such a row is an error at once. Elsewhere asking would make the host wait for each token, and drawing from
    NaN would end the process: the row gets logits of 0 there, and `check` raises the error after generation.
    """

    def __init__(self) -> None:
        self._failed: Tensor | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Check logits `(B, V)`."""
        failed = ~scores.amax(dim=-1).isfinite()  # the largest of a row is NaN if any is
        self._failed = failed.any() if self._failed is None else self._failed | failed.any()
        if scores.device.type == "cpu":
            self.check()
            return scores
        return scores.masked_fill_(failed[:, None], 0.0)

    def check(self) -> None:
        """Raise a `NonFiniteLogitsError` if any row failed."""
        if self._failed is not None and bool(self._failed):
            raise NonFiniteLogitsError("its logits are NaN or infinite")


@contextmanager
def naming_the_model(model: torch.nn.Module, role: str, moment: str) -> Iterator[None]:
    """Say which model's logits were not finite, and when.

    Args:
        model: The model that generates.
        role: What it is, such as `policy`.
        moment: When it generates, such as `update 3`.
    """
    try:
        yield
    except NonFiniteLogitsError as error:
        path = getattr(getattr(model, "config", None), "_name_or_path", "")
        name = f"{type(model).__name__}{f' from {path}' if path else ''}"
        raise NonFiniteLogitsError(
            f"{moment}: the {role} ({name}) gives no probabilities to sample from: {error}. Its weights are NaN or "
            "too large: lower learning_rate or max_grad_norm, and go on from an earlier checkpoint"
        ) from error
