"""The value model of any language model, its backbone and a linear head; models with TRL's interface."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.modeling_utils import set_zero3_state
from transformers.utils import WEIGHTS_NAME

from rlhf_ppo.models.heads import last_real
from rlhf_ppo.models.unwrapping import backbone, transformers_model

SUFFIX = "ForTokenValues"
"""End of the names of classes whose checkpoints only `value_model=` loads; the backbone's name precedes it."""

_CLASSIFIER = AutoModelForSequenceClassification.__name__


class ValueModel(PreTrainedModel):
    """A backbone and a linear head: `v_t = w h_t`.

    `_joined` adds a family's own `PreTrainedModel`, so that it attends, shards, saves and loads as the family does.
    """

    body_class: type[Any]
    reads_last_token = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        body = self.body_class._from_config(config)
        setattr(self, self.base_model_prefix, body)
        width = body.get_decoder().get_input_embeddings().embedding_dim  # OPT's states have it, not `hidden_size`
        self.score = nn.Linear(width, self.num_labels, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: object
    ) -> SequenceClassifierOutput:
        """Return the head's output at each row's last real token as `logits`, `(B, 1)`."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        options = {name: value for name, value in kwargs.items() if value is not None}  # PEFT passes all that it knows
        states = self.base_model(input_ids=input_ids, attention_mask=mask, **(options | {"return_dict": True}))[0]
        last = last_real(mask.bool())
        return SequenceClassifierOutput(logits=self.score(states)[torch.arange(len(last), device=last.device), last])


def new_value_model(language_model: nn.Module) -> ValueModel:
    """Make a float32 value model with new weights, of a language model's architecture.

    Args:
        language_model: The language model, or a `PeftModel` around one.
    """
    base, body = transformers_model(language_model), backbone(language_model)
    config: Any = copy.deepcopy(body.config)
    config.num_labels = 1
    return _joined(type(body), config, base)._from_config(config, dtype=torch.float32)


def _joined(
    body_class: type[Any], config: PreTrainedConfig, source: PreTrainedModel | None = None
) -> type[ValueModel]:
    """Make the class for a backbone.

    It has the name of the family's sequence classifier where that has the same weights, and so writes its checkpoints.
    """
    family = [kind for kind in body_class.__mro__ if issubclass(kind, PreTrainedModel)][-2]
    prefix = body_class.base_model_prefix
    members: dict[str, Any] = {
        "body_class": body_class,
        "config_class": type(config),
        "base_model_prefix": prefix if prefix.isidentifier() else "model",
        "__module__": body_class.__module__,  # transformers reads its source
    }
    kind: Any = type(body_class.__name__ + SUFFIX, (ValueModel, family), members)
    theirs: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if runs_code := getattr(source, "_auto_class", None) is not None:  # which the user has let run: it is loaded
        named = _classes_in_code(config).get(_CLASSIFIER, "").rpartition(".")[2]
        theirs = getattr(sys.modules[type(source).__module__], named, None)
    if theirs is not None and _names_of_weights(theirs, config) == _names_of_weights(kind, config):
        kind.__name__ = kind.__qualname__ = theirs.__name__
        kind.__module__ = theirs.__module__
        kind._auto_class = _CLASSIFIER if runs_code else None  # so that the code is saved with it
    return kind


def _names_of_weights(kind: Callable[[PreTrainedConfig], nn.Module], config: PreTrainedConfig) -> list[str]:
    """Return the names; none where transformers cannot make the class, as the one of Qwen 3.5 in its version 5.6."""
    with torch.device("meta"), set_zero3_state(), contextlib.suppress(AttributeError):  # without ZeRO-3's shards
        return [*kind(copy.deepcopy(config)).state_dict()]
    return []


# ---- TRL's interface ----


class TRLModel(PreTrainedModel):
    """A module with TRL's interface: `module.score(backbone(...).last_hidden_state)` is a number for each token.

    The number also serves as the hidden state, with an identity as its head.

    Args:
        module: Has `base_model_prefix`, the backbone's name, and `score`.
    """

    reads_last_token = supports_gradient_checkpointing = True

    def __init__(self, module: Any) -> None:
        of_body = getattr(self._body(module), "config", None)
        sizes = ("vocab_size", sys.maxsize), ("max_position_embeddings", None)
        known = {name: getattr(of_body, name, default) for name, default in sizes}
        super().__init__(PreTrainedConfig.from_dict({"num_labels": 1, **known}))
        self.module, self.score = module, nn.Identity()
        self._no_split_modules = getattr(self._body(module), "_no_split_modules", None)
        self._weight_conversions: list[Any] = []  # saved as it is
        with no_init_weights():
            self.post_init()

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *, state_dict: Mapping[str, Tensor] | None = None, **_: object
    ) -> None:
        """Write the state as `torch.save` does, which keeps tied weights."""
        os.makedirs(save_directory, exist_ok=True)
        torch.save(self.state_dict() if state_dict is None else state_dict, os.path.join(save_directory, WEIGHTS_NAME))

    @staticmethod
    def _body(module: nn.Module) -> nn.Module:
        return getattr(module, str(module.base_model_prefix))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, **_: object) -> BaseModelOutput:
        """Call the backbone and the head as TRL does; `last_hidden_state` is their result `(B, L, 1)`."""
        output = self._body(self.module)(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            return_dict=True,
            output_hidden_states=True,
            use_cache=False,
        )
        states = getattr(output, "last_hidden_state", None)  # TRL before 1.13 read the other
        return BaseModelOutput(self.module.score(output.hidden_states[-1] if states is None else states))


# ---- Loading ----


class AutoClassifier:
    """Loads sequence classifiers and value models: `AutoModelForSequenceClassification` for every family."""

    @staticmethod
    def from_pretrained(path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Load a model; its head is new if it is not in the directory.

        Args:
            path: A directory, or a hub name.
            **kwargs: For `from_pretrained`.
        """
        of_files = {name: kwargs[name] for name in ("revision", "trust_remote_code") if name in kwargs}
        config = AutoConfig.from_pretrained(path, **of_files)
        if (kind := _value_model_class(config)) is None:
            return AutoModelForSequenceClassification.from_pretrained(path, **kwargs)
        config.num_labels = kwargs.pop("num_labels", config.num_labels)
        kwargs.pop("trust_remote_code", None)
        return kind.from_pretrained(path, config=config, **kwargs)

    @staticmethod
    def from_config(config: PreTrainedConfig, **kwargs: Any) -> Any:
        """Make a model with new weights."""
        kind = _value_model_class(config)
        auto: Any = AutoModelForSequenceClassification
        return auto.from_config(config, **kwargs) if kind is None else kind._from_config(config, dtype=kwargs["dtype"])


def _value_model_class(config: PreTrainedConfig) -> type[ValueModel] | None:
    """Return the class of this package for a configuration, or None if transformers' classifier is to be loaded."""
    name = (config.architectures or [""])[0]
    has_theirs = type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or _CLASSIFIER in _classes_in_code(config)
    if has_theirs and not name.endswith(SUFFIX):
        return None
    body_class: Any = MODEL_MAPPING.get(type(config), None)
    if name.endswith(SUFFIX) and name != f"{getattr(body_class, '__name__', '')}{SUFFIX}":  # a part, as a decoder
        modeling = type(config).__module__.replace(".configuration_", ".modeling_")
        body_class = getattr(importlib.import_module(modeling), name.removesuffix(SUFFIX))
    if body_class is None:
        raise ValueError(f"transformers has no AutoModel of a {type(config).__name__}")
    return _joined(body_class, config)


def _classes_in_code(config: PreTrainedConfig) -> dict[str, str]:
    """Return the classes in code that comes with a model, by the auto class that loads them."""
    return getattr(config, "auto_map", None) or {}
