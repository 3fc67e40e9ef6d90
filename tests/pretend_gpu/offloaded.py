"""What a process does whose weights or optimizer are on the host, and how a frozen model leaves it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from tests.distributed import scenarios
from tests.gpu.conftest import small_policy


class NoteDevices(TrainerCallback):
    """Notes on which devices the weights and the optimizer's moments are, between updates."""

    def __init__(self) -> None:
        self.weights: set[str] = set()
        self.moments: set[str] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self.weights |= {getattr(value, "ds_tensor", value).device.type for value in model.parameters()}
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        moments = [value for state in optimizer.state.values() for value in state.values()]
        self.moments |= {value.device.type for value in moments if isinstance(value, torch.Tensor) and value.dim()}


def train_with_checkpoints(**arguments: Any) -> dict[str, Any]:
    """Train as the scenario does; return the devices, too.

    DeepSpeed's Adam on the host multiplies the powers of its betas from step to step in float32, and computes them
    anew at the first step after a resume: their last bit differs then, and with it all that follows. Here it computes
    them anew at each step.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    step, devices = DeepSpeedCPUAdam.step, NoteDevices()

    def step_as_resumed(self: Any, closure: Any = None) -> Any:
        group = self.param_groups[0]
        how = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], self.adam_w_mode, False)
        self.ds_opt_adam.create_adam(self.opt_id, *how)
        return step(self, closure)

    DeepSpeedCPUAdam.step = step_as_resumed
    report = scenarios.train_with_checkpoints(given={"callbacks": [devices]}, **arguments)
    DeepSpeedCPUAdam.step = step
    return report | {"weights": devices.weights, "moments": devices.moments}


def shard_reference(**arguments: Any) -> dict[str, Any]:
    """Make a trainer with a reference of eight blocks; return the device's bytes after it and at most, and its own."""
    policy = small_policy(num_hidden_layers=8)
    blocks = {value for block in policy.model.layers for value in block.parameters()}
    sizes = {value: value.numel() * value.element_size() for value in policy.parameters()}
    whole, outside = sum(sizes.values()), sum(size for value, size in sizes.items() if value not in blocks)
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer = scenarios.make_trainer(given={"model": policy}, **arguments)
    most, now = torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start
    sizes = {"whole": whole, "largest": max(outside, (whole - outside) // 8), "now": now, "most": most}
    return scenarios.launched_as(trainer) | sizes
