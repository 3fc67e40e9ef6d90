"""What libraries print that says nothing to the user, kept back for the time of a call of ours.

Each is named here with its reason. All other warnings pass, deprecations that concern the user among them, and the
user's own filters are as before after the block.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from transformers.utils import logging as transformers_logging

FEWEST_ROWS_WITH_BAR = 5000
"""Data sets of fewer rows are tokenized in about a second."""

SAYS_NOTHING = (
    # PEFT asks a model of transformers by the old name; neither is the user's to change.
    ("`is_gradient_checkpointing` is deprecated", FutureWarning),
    # TRL's configurations switch it on by that name.
    ("`gradient_checkpointing` is deprecated", FutureWarning),
)
"""Beginnings and kinds of the warnings that `quiet_calls` keeps back."""

SAYS_NOTHING_IN_LOGS = (
    # accelerate imports DeepSpeed where it is installed, also in runs without it; on a machine without a GPU it then
    # warns that it takes the CPU.
    ("DeepSpeed", "Setting accelerator to CPU"),
    # Trainer misses a head that is the embeddings; weights that are really missing are an error of ours before.
    ("transformers.trainer", "There were missing keys in the checkpoint model loaded"),
)
"""Loggers, and the beginnings of the messages of theirs, that `quiet_calls` keeps back."""


@contextmanager
def quiet_calls() -> Iterator[None]:
    """Keep back `SAYS_NOTHING` and `SAYS_NOTHING_IN_LOGS` for the block."""
    held = [(logging.getLogger(name), _HoldsBack(beginning)) for name, beginning in SAYS_NOTHING_IN_LOGS]
    for logger, holds_back in held:
        logger.addFilter(holds_back)
    try:
        with warnings.catch_warnings():
            for beginning, category in SAYS_NOTHING:
                warnings.filterwarnings("ignore", beginning, category)
            yield
    finally:
        for logger, holds_back in held:
            logger.removeFilter(holds_back)


class _HoldsBack(logging.Filter):
    def __init__(self, beginning: str) -> None:
        super().__init__()
        self.beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.beginning)


@contextmanager
def no_bars_of_models() -> Iterator[None]:
    """Let transformers show no bar in the block, as for the one file of a model that is saved in a second."""
    # Its public switch is that of the hub's downloads too, and would forget which of those the user has switched off.
    name = "_tqdm_active"
    before = getattr(transformers_logging, name, None)
    if before is None:
        yield
        return
    setattr(transformers_logging, name, False)
    try:
        yield
    finally:
        setattr(transformers_logging, name, before)


@contextmanager
def bars_of_models_on_terminals() -> Iterator[None]:
    """Let transformers show bars in the block only where a terminal shows them."""
    if is_terminal(sys.stderr):
        yield
        return
    with no_bars_of_models():
        yield


@contextmanager
def bars_of_data_on_terminals() -> Iterator[None]:
    """Let datasets show bars in the block only where a terminal shows them."""
    with bars_of_long_data(FEWEST_ROWS_WITH_BAR):
        yield


@contextmanager
def bars_of_long_data(num_rows: int) -> Iterator[None]:
    """Let datasets show bars in the block only for many rows, and only where a terminal shows them."""
    shows = num_rows >= FEWEST_ROWS_WITH_BAR and is_terminal(sys.stderr)
    if shows or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def is_terminal(stream: object) -> bool:
    """Tell whether a stream is a terminal, on which a line can be written over."""
    isatty = getattr(stream, "isatty", None)
    return isatty is not None and bool(isatty())
