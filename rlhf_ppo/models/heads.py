"""Scalar heads: a value for every token (value model) or for the last one (reward model)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_ppo.data.places import Places
from rlhf_ppo.models.consistency import probe_rows, rounding
from rlhf_ppo.models.float32_head import is_in_float32, multiply_in_float32
from rlhf_ppo.models.frozen import Frozen
from rlhf_ppo.models.modes import in_eval_mode
from rlhf_ppo.models.passes import hidden_states
from rlhf_ppo.models.sharded import is_sharded
from rlhf_ppo.models.unwrapping import backbone, probe_ids, text_config, transformers_model
from rlhf_ppo.processes.random_numbers import rng_kept


class FrozenScorer(Frozen):
    """A reward model whose forward pass gives one score per text.

    A causal model's score is its head at the last real token, found from the mask; an encoder's is whatever it pools.

    Args:
        model: A sequence-classification model with one label; it is frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._score = last_token_score if reads_last_token(model) else pooled_score
        multiply_scores_in_float32(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Score texts.

        Args:
            input_ids: Token ids, long `(B, L)`, padded on either side or both.
            attention_mask: True on real tokens, bool `(B, L)`.

        Returns:
            One score per row, float32 `(B,)`.
        """
        return self._score(self.model, input_ids, attention_mask)


def scalar_head(model: nn.Module) -> nn.Module | None:
    """Return the linear layer that maps one hidden state to one number, or None if the model has no such layer."""
    base = transformers_model(model)
    if isinstance(head := getattr(base, "score", None), nn.Module):
        return head
    body = backbone(model)
    linear = [child for child in base.children() if child is not body and getattr(child, "out_features", None) == 1]
    return linear[0] if len(linear) == 1 else None


def multiply_scores_in_float32(model: nn.Module) -> None:
    """Let a model's scalar head, if it has one, multiply in float32, whatever type its weights are stored in."""
    if (head := scalar_head(model)) is not None:
        multiply_in_float32(head)


def head_of_scorer(model: nn.Module) -> nn.Module:
    """Return the `scalar_head` of a model that is known to have one; a `TypeError` if it has none."""
    head = scalar_head(model)
    if head is None:
        raise TypeError(f"{type(model).__name__} has no layer that maps a hidden state to one number")
    return head


def check_one_label(model: nn.Module, argument: str) -> None:
    """Check that a sequence-classification model has exactly one output.

    Raises:
        ValueError: It has several labels, or it is no sequence-classification model.
    """
    base = transformers_model(model)
    labels, reward = getattr(base.config, "num_labels", None), argument.startswith("reward_model")
    if base.get_output_embeddings() is not None and scalar_head(model) is None:
        raise ValueError(
            f"{argument} is a {type(base).__name__}, a language model without a scalar head; load it with "
            "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
        )
    if labels != 1:
        raise ValueError(
            f"{argument} has num_labels={labels}; a {argument} gives one number per text: load it with "
            "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
            + (
                f", or take one of its labels {list((base.config.id2label or {}).values())} with reward_head"
                if reward
                else ""
            )
        )


@torch.no_grad()
def reads_last_token(model: nn.Module) -> bool:
    """Tell whether the model's score is its head applied to the last token's hidden state.

    True for causal models (`score(h_last)`); False for encoders that pool (BERT's `classifier(pooler(h_0))`). The
    model is asked once, on three tokens. Its head's name tells it of a sharded model, which cannot run yet, and of one
    whose scores are not finite, which are equal to nothing.
    """
    if scalar_head(model) is None:
        return False
    base = transformers_model(model)
    by_name = isinstance(getattr(base, "score", None), nn.Module)
    if is_sharded(model):
        return by_name
    ids = probe_ids(model)
    mask = torch.ones_like(ids, dtype=torch.bool)
    dtype = next(base.parameters()).dtype
    with in_eval_mode(model), _no_id_is_padding(base):
        ours = last_token_score(model, ids, mask)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=dtype in (torch.bfloat16, torch.float16)):
            theirs = base(input_ids=ids, attention_mask=mask.long()).logits[:, 0].float()  # its head may be in 32 bits
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        return by_name
    return torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3)


@contextmanager
def _no_id_is_padding(base: Any) -> Iterator[None]:
    """Keep a classifier from taking an id of the probe for padding, which would end the text."""
    configs = [config for config in (base.config, text_config(base)) if hasattr(config, "pad_token_id")]
    before = [config.pad_token_id for config in configs]
    for config in configs:
        config.pad_token_id = -1
    try:
        yield
    finally:
        for config, pad_token_id in zip(configs, before, strict=True):
            config.pad_token_id = pad_token_id


def token_values(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, last: int, places: Places | None = None
) -> Tensor:
    """Apply the scalar head to the last `last` positions.

    Args:
        model: A model with a per-token scalar head.
        input_ids: Token ids, long `(B, L)`.
        attention_mask: True on real tokens, bool `(B, L)`.
        last: How many positions, counted from the right.
        places: Where the real tokens are; None reads it from the device.

    Returns:
        One number per position, float32 `(B, last)`.
    """
    states = hidden_states(model, input_ids, attention_mask, places)[:, -last:]
    return _apply_head(model, states)


def last_token_score(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Apply the scalar head to each row's last real token, found from the mask, never from ids.

    Args:
        model: A model with a per-token scalar head.
        input_ids: Token ids, long `(B, L)`, padded on either side or both.
        attention_mask: True on real tokens, bool `(B, L)`.

    Returns:
        One score per row, float32 `(B,)`.
    """
    states = hidden_states(model, input_ids, attention_mask)
    return _apply_head(model, states[torch.arange(len(states), device=states.device), last_real(attention_mask)])


def last_real(mask: Tensor) -> Tensor:
    """Return the column of the last True of each row of a bool `(B, L)` mask, long `(B,)`."""
    return mask.shape[1] - 1 - mask.flip(1).to(torch.int8).argmax(dim=1)


def pooled_score(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Ask the whole model, with the real tokens moved to the left: encoders read their first token (CLS).

    Args:
        model: A sequence-classification model with one label.
        input_ids: Token ids, long `(B, L)`, padded on either side or both.
        attention_mask: True on real tokens, bool `(B, L)`.

    Returns:
        One score per row, float32 `(B,)`.
    """
    order = (~attention_mask).to(torch.int8).argsort(dim=1, stable=True)
    mask = attention_mask.gather(1, order)
    ids = input_ids.gather(1, order).masked_fill(~mask, 0)
    return model(input_ids=ids, attention_mask=mask.long()).logits[:, 0].float()


@torch.no_grad()
def check_classifier(model: nn.Module, argument: str) -> None:
    """Check that a text's score does not depend on the texts beside it, whose length it is padded to.

    Args:
        model: A sequence-classification model with one label.
        argument: What the caller's argument is called, for error messages.

    Raises:
        ValueError: It does (convolutions and Fourier transforms over padding), or the model cannot score token ids.
    """
    if is_sharded(model):
        return
    what = f"{argument} is a {type(transformers_model(model)).__name__}"
    score = last_token_score if reads_last_token(model) else pooled_score
    ids, mask = probe_rows(model)
    with in_eval_mode(model), rng_kept():
        try:
            beside = score(model, ids, mask)
            rows = [row[real][None] for row, real in zip(ids, mask, strict=True)]
            alone = torch.cat([score(model, row, torch.ones_like(row, dtype=torch.bool)) for row in rows])
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{what}, which cannot score the ids of any text: {error!s:.300}") from error
    tolerance = rounding(next(model.parameters()))
    if alone.isfinite().all() and not torch.allclose(beside, alone, tolerance, tolerance * float(alone.abs().max())):
        raise ValueError(
            f"{what}, whose score of a text depends on the padding behind it, and so on the other texts of a pass (by "
            f"{float((beside - alone).abs().max()):.2g}); use a model that masks its padding"
        )


def _apply_head(model: nn.Module, states: Tensor) -> Tensor:
    head = scalar_head(model)
    if head is None:
        raise ValueError(f"{type(transformers_model(model)).__name__} has no linear head with one output")
    if not is_in_float32(head):
        states = states.to(next(head.parameters()).dtype)  # a base in 16 bits may be below a head in 32
    with torch.autocast(states.device.type, enabled=False):  # at values near 5 bfloat16's steps are .03
        return head(states).squeeze(-1).float()
