"""How many tokens a model can place so that a row's numbers do not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from rlhf_ppo.data.lengths import PositionLimit, smallest
from rlhf_ppo.models.unwrapping import text_config, transformers_model


def position_limit(model: nn.Module) -> PositionLimit | None:
    """Return the longest sequence that a model can place, or None if it states no limit.

    Longrope (Phi-3 with 128k) and dynamic NTK scaling turn all positions of a pass by other angles as soon as the
    longest row of the pass exceeds the original length. Beyond it a row's log-probabilities would depend on the rows
    beside it, and keys that were cached before a response grew past it would not fit those of the forward pass.

    Args:
        model: A transformers model, or a `PeftModel` around one.
    """
    config, name = text_config(model), type(transformers_model(model)).__name__
    limits = [
        PositionLimit(original, f"beyond {original} the {kind} of {name} changes for all rows of a batch")
        for kind, original in _changing_ropes(config)
    ]
    if most := getattr(config, "max_position_embeddings", None):
        limits.append(PositionLimit(most, f"the model has {most}"))
    return smallest(limits)


def positions(model: nn.Module) -> int | None:
    """Return the tokens of `position_limit`."""
    limit = position_limit(model)
    return None if limit is None else limit.tokens


def _changing_ropes(config: Any) -> Iterable[tuple[str, int]]:
    """Yield type and original length of rotary embeddings that transformers computes anew for longer batches."""
    given = getattr(config, "rope_parameters", None) or {}
    for parameters in (given, *given.values()):  # of all layers, or of each type of layer
        kind = parameters.get("rope_type", "default") if isinstance(parameters, dict) else "default"
        if kind == "longrope" or "dynamic" in kind:
            original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
            yield f"rotary embedding ({kind})", int(original)
