"""`debug="underflow_overflow"`: the module whose numbers first become NaN or infinite ends the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainingArguments
from transformers.debug_utils import DebugOption, DebugUnderflowOverflow


class DetectsOverflow(DebugUnderflowOverflow):
    """transformers' hooks, which take the absolute value of all tensors, for models that are given masks.

    Args:
        model: The model to watch, with all its modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.handles: list[RemovableHandle] = []
        super().__init__(model)

    def create_frame(self, module: nn.Module, input: Any, output: Any) -> None:
        """Write down a module; of the whole only its name: an entropy that was not asked for is NaN there."""
        if module is self.model:
            self.save_frame(f"{self.prefix} {type(module).__name__}")
        else:
            super().create_frame(module, input, output)

    def analyse_variable(self, var: Any, ctx: str) -> None:
        """Look at one parameter, input or output."""
        has_numbers = not hasattr(var, "is_floating_point") or (var.is_floating_point() and var.numel() > 0)
        if has_numbers:
            super().analyse_variable(var, ctx)
        else:
            self.expand_frame(f"{'not numbers':>17} {ctx}")

    def _register_forward_hook(self, module: nn.Module) -> None:
        self.handles.append(module.register_forward_hook(self.forward_hook))


@contextmanager
def detecting_overflow(model: nn.Module, args: TrainingArguments) -> Iterator[None]:
    """Watch the model where `args.debug` asks for it, in the place of Trainer's hooks, and take the hooks off after.

    Args:
        model: The model that is trained.
        args: Gives `debug`, which does not name `underflow_overflow` inside the block.

    Raises:
        ValueError: A parameter, an input or an output of a module is NaN or infinite; what led there is printed.
    """
    given: Any = args.debug
    if DebugOption.UNDERFLOW_OVERFLOW not in given:
        yield
        return
    detector = DetectsOverflow(model)
    args.debug = [option for option in given if option != DebugOption.UNDERFLOW_OVERFLOW]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        args.debug = given
        for handle in detector.handles:
            handle.remove()
