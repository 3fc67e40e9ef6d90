"""One label of a classifier that has several: the named head of a multi-label reward model."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from rlhf_ppo.models.modes import in_eval_mode
from rlhf_ppo.models.sharded import gathered, is_sharded
from rlhf_ppo.models.unwrapping import backbone, probe_ids, transformers_model


def num_labels(model: nn.Module) -> int:
    """Count a classifier's labels."""
    return int(transformers_model(model).config.num_labels or 0)


def label_index(config: PreTrainedConfig, label: str) -> int:
    """Return the position of a label.

    Args:
        config: The classifier's configuration, with `id2label`.
        label: A name in `id2label`, or the position itself as digits.

    Raises:
        ValueError: There is no such label.
    """
    names = [str(name) for _, name in sorted((config.id2label or {}).items())]
    if label in names:
        return names.index(label)
    if label.isdecimal() and int(label) < len(names):
        return int(label)
    raise ValueError(f"reward_head={label!r} is no label of the reward model, which has {names}; name one of them")


@torch.no_grad()
def keep_label(model: nn.Module, label: str) -> nn.Module:
    """Cut a classifier down to one of its labels, so that it is a model with one label to everything that follows.

    The last linear layer keeps the label's row; the model is changed in place.

    Args:
        model: A sequence-classification model with several labels, no `PeftModel`.
        label: As in `label_index`.

    Raises:
        ValueError: There is no such label, or the labels are not the rows of one linear layer.
    """
    base = transformers_model(model)
    index, count = label_index(base.config, label), num_labels(base)
    inside = {id(module) for module in backbone(base).modules()} if backbone(base) is not base else set()
    layers = [
        (name, module)
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == count and id(module) not in inside
    ]
    if len(layers) != 1:
        raise ValueError(
            f"reward_head={label!r}: {type(base).__name__} has {len(layers)} linear layers with {count} outputs "
            "beside its backbone, so the label's cannot be told; pass the model with one label"
        )
    expected = None if is_sharded(base) else _probe(base)[:, index]
    name, layer = layers[0]
    _replace(base, name, _row_of(layer, index))
    base.config.num_labels = cast(Any, base).num_labels = 1
    if expected is not None and not torch.allclose(_probe(base)[:, 0], expected, 1e-3, 1e-4, equal_nan=True):
        raise ValueError(
            f"reward_head={label!r}: {type(base).__name__} computes its labels from more than one linear layer; pass "
            "the model with one label"
        )
    return model


def _row_of(layer: nn.Linear, index: int) -> nn.Linear:
    with gathered(layer.parameters()):
        kept = nn.Linear(layer.in_features, 1, layer.bias is not None, layer.weight.device, layer.weight.dtype)
        kept.weight.copy_(layer.weight[index : index + 1])
        if layer.bias is not None:
            kept.bias.copy_(layer.bias[index : index + 1])
    return kept.train(layer.training)


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layer)


def _probe(model: nn.Module) -> torch.Tensor:
    with in_eval_mode(model):
        return model(input_ids=probe_ids(model)).logits.float()
