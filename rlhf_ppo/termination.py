"""SIGTERM, which schedulers send before they take a machine away: save a checkpoint, then end the run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import TrainerCallback, TrainerControl

logger = get_logger(__name__)


class StopsOnSigterm(TrainerCallback):
    """Asks for a checkpoint and the end of training after the update in which any rank received SIGTERM.

    The run can then be resumed exactly. Further SIGTERMs change nothing: a scheduler may signal every process, and the
    launcher then passes its own on to processes that have had theirs.

    Args:
        reduce_sum: Adds a tensor up over all ranks, so that all of them stop after the same update.

    Attributes:
        stopped: Whether it ended training, on all ranks.
    """

    def __init__(self, reduce_sum: Callable[[Tensor], Tensor]) -> None:
        self.reduce_sum = reduce_sum
        self.received = self.stopped = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM while the context lasts; a thread other than the main one cannot, and does not."""
        self.received = self.stopped = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a checkpoint and the end, on all ranks together."""
        if self.reduce_sum(torch.tensor(float(self.received), device=args.device)) > 0:
            logger.warning(f"SIGTERM: saving a checkpoint after update {state.global_step}, then training ends.")
            control.should_save = control.should_training_stop = self.stopped = True

    def _note(self, number: int, frame: Any) -> None:
        self.received = True
