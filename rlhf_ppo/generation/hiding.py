"""A generation_config that is stored with a model, kept from having a say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import GenerationConfig

from rlhf_ppo.models.unwrapping import transformers_model


@contextmanager
def own_generation_config_hidden(policy: nn.Module) -> Iterator[Any]:
    """Hide the model's generation_config, from which `generate` fills every field that it is not given.

    A repetition penalty or a list of EOS tokens stored with the model would otherwise sample from a distribution that
    the log-probabilities do not describe.

    Args:
        policy: A causal language model, or a `PeftModel` around one.

    Yields:
        The transformers model to call `generate` on.
    """
    model = transformers_model(policy)
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield model
    finally:
        model.generation_config = own
