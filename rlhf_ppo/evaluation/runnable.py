"""The model that an evaluation runs, in training and before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.sharded import gathered


@contextmanager
def runnable(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Give the prepared model, or, before training, the plain one with all its parameters on a device.

    Args:
        model: The `PolicyAndValue`, prepared or not.
        device: This rank's.
    """
    if isinstance(model, PolicyAndValue) and not isinstance(model, FSDPModule):
        with gathered(model.parameters()):
            yield model.to(device)
    else:
        yield model
