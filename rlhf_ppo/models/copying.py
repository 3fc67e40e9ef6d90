"""Copies of models, also of those whose parameters ZeRO-3 has taken apart."""

from __future__ import annotations

import copy

import torch
from torch import nn

from rlhf_ppo.models.sharded import gathered, is_sharded
from rlhf_ppo.models.unwrapping import transformers_model


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model; the copy of a sharded model is sharded too, and no rank ever holds more than one whole parameter.

    Args:
        model: A transformers model.
    """
    if not is_sharded(model):
        return copy.deepcopy(model)
    original = transformers_model(model)
    twin = type(original)._from_config(copy.deepcopy(original.config))
    copy_weights(original, twin)
    return twin.train(original.training)


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy parameters and buffers by name, one at a time.

    Args:
        source: Has at least the parameters and buffers of `target`.
        target: Receives them.
    """
    for name, parameter in target.named_parameters():
        original = source.get_parameter(name)
        with gathered([original, parameter], modify=True):
            parameter.copy_(original)
    for name, buffer in target.named_buffers():
        buffer.copy_(source.get_buffer(name))
