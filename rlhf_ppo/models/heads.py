"""Heads: values of tokens, scores of texts, and linear layers that multiply in float32.

A value head gives one number per token, or with `value_loss="hl_gauss"` the logits of a distribution over bins, whose
expectation is the value (Farebrother et al., 2403.03950). With `critic_ensemble` several heads share the model, and
their mean is the value. The layout is in the model's configuration, so that a saved critic needs no other file.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from rlhf_ppo.algorithm.masked import masked_range
from rlhf_ppo.data.rollout import PackedIndices
from rlhf_ppo.models.capabilities import LENGTHS, rounding
from rlhf_ppo.models.packing import hidden_states
from rlhf_ppo.models.unwrapping import (
    autocast_if_stored_in_16_bits,
    backbone,
    gathered,
    in_eval_mode,
    is_peft_model,
    is_sharded,
    output_layer,
    probe_ids,
    probe_rows,
    text_config,
    transformers_model,
)
from rlhf_ppo.processes.distributed import get_logger, preserve_rng

if TYPE_CHECKING:
    from rlhf_ppo.config import PPOConfig

logger = get_logger(__name__)

_MARGIN = 0.1
"""Margin around the returns in a running range, as a share of their range."""
_LEAST_MARGIN = 1e-3
"""Margin if all returns are equal, in the reward's unit."""


# ---- Layout of a value head ----


class HeadValues(NamedTuple):
    """Values computed from the heads' outputs.

    Attributes:
        values: The value, or the mean of the heads' values, float32 `(...)`, in the reward's unit.
        logits: Logits of the bins, float32 `(..., num_bins)`, or `(..., num_heads, num_bins)` of several heads; None
            without bins.
        of_heads: The value of each head, float32 `(..., num_heads)`; None for a single head.
    """

    values: Tensor
    logits: Tensor | None
    of_heads: Tensor | None = None


class ValueHead(NamedTuple):
    """Layout of a value model's output layer.

    Attributes:
        centers: Centers of the bins, of equal width, in the reward's unit; None: the output is the value.
        num_heads: Number of heads, whose outputs follow each other.
    """

    centers: tuple[float, ...] | None = None
    num_heads: int = 1

    @classmethod
    def of(cls, config: PreTrainedConfig | SimpleNamespace) -> Self:
        """Read the layout from a model's configuration."""
        centers: Any = getattr(config, "value_centers", None)
        return cls(None if centers is None else tuple(centers), getattr(config, "value_heads", 1))

    @classmethod
    def with_bins(cls, num_bins: int, low: float, high: float, num_heads: int = 1) -> Self:
        """Cut the range from `low` to `high` into bins of equal width."""
        width = (high - low) / num_bins
        return cls(tuple(low + width * (index + 0.5) for index in range(num_bins)), num_heads)

    @classmethod
    def asked_for(cls, args: PPOConfig) -> Self:
        """Return the layout of `value_loss`, `value_bins`, `value_range` and `critic_ensemble`."""
        if args.value_loss == "mse":
            return cls(num_heads=args.critic_ensemble)
        return cls.with_bins(args.value_bins, *(args.value_range or (0.0, 0.0)), num_heads=args.critic_ensemble)

    @property
    def num_bins(self) -> int:
        """Outputs of each head: the number of bins, or 1."""
        return 1 if self.centers is None else len(self.centers)

    @property
    def num_outputs(self) -> int:
        """Rows of the layer's weight."""
        return self.num_heads * self.num_bins

    @property
    def range(self) -> tuple[float, float]:
        """Outer edges of the bins, in the reward's unit; equal before the first returns."""
        first, *_, last = self.centers or (0.0, 0.0)
        half = (last - first) / (2 * max(1, self.num_bins - 1))
        return first - half, last + half

    def write_to(self, config: PreTrainedConfig) -> None:
        """Write the layout into a model's configuration."""
        config.num_labels = self.num_outputs
        if self.centers is not None:
            config.value_centers = list(self.centers)  # pyright: ignore[reportAttributeAccessIssue]
        if self.num_heads > 1:
            config.value_heads = self.num_heads  # pyright: ignore[reportAttributeAccessIssue]

    def centers_on(self, device: torch.device) -> Tensor:
        """Return the centers of the bins, float32 `(num_bins,)`, computed on the device."""
        first, *_, last = self.centers or (0.0, 0.0)
        return torch.linspace(first, last, self.num_bins, device=device)

    def read(self, outputs: Tensor) -> HeadValues:
        """Compute values from the layer's outputs, float32 `(..., num_outputs)`.

        V_h = z_h, or sum_i softmax(z_h)_i center_i        V = mean_h V_h
        """
        if self.num_heads > 1:
            outputs = outputs.unflatten(-1, (self.num_heads, self.num_bins))
        logits = None if self.centers is None else outputs
        values = outputs.squeeze(-1) if logits is None else outputs.softmax(-1) @ self.centers_on(outputs.device)
        return HeadValues(values, logits) if self.num_heads == 1 else HeadValues(values.mean(-1), logits, values)


def of_own_heads(of_heads: Tensor, own: Tensor) -> Tensor:
    """Select the figures of each row's own head.

    Args:
        of_heads: Figures of all heads, `(B, T, num_heads, ...)`.
        own: The head that learns from each row, long `(B,)`.

    Returns:
        `(B, T, ...)`.
    """
    return of_heads[torch.arange(len(own), device=own.device), :, own]


def value_head_of(model: nn.Module) -> ValueHead:
    """Return the layout of a value model's head."""
    return ValueHead.of(transformers_model(model).config)


def saved_value_head(path: str | os.PathLike[str]) -> ValueHead:
    """Return the layout of a saved value model's head, by its directory or hub name; a single number by default."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(os.fspath(path))
    except (OSError, ValueError):  # loading the model explains the error
        return ValueHead()
    return ValueHead.of(SimpleNamespace(**config))


def load_value_range(model: nn.Module, directory: str, has_fixed_range: bool) -> None:
    """Load the range of the bins that belongs to a value model's weights.

    Args:
        model: The value model, which has read the weights in the directory.
        directory: The directory that it was saved in.
        has_fixed_range: Whether the model's range is given, and must be the saved one.

    Raises:
        ValueError: It is another one.
    """
    if (own := value_head_of(model)).centers is not None:
        saved = saved_value_head(directory)
        if saved.num_bins == own.num_bins and saved.num_heads == own.num_heads:
            check_head_fits(saved, own, has_fixed_range)
            saved.write_to(transformers_model(model).config)


def cover_returns(model: nn.Module, returns: Tensor, mask: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
    """Widen the range of the bins, with a margin, if a return of any rank lies outside.

    The logits do not change, so values stretch with the range.

    Args:
        model: The value model; its configuration is changed.
        returns: Targets of the value model, `(B, T)`.
        mask: True on the tokens that are learned from, bool `(B, T)`.
        gather: Concatenates over ranks along the first dimension; every rank calls this.
    """
    first, last = masked_range(returns, mask, gather)
    head = value_head_of(model)
    low, high = head.range
    is_new = low == high
    if first > last or (not is_new and low <= first and last <= high):  # no tokens, or covered
        return
    widest = last - first if is_new else max(last, high) - min(first, low)
    room = max(_MARGIN * widest, _LEAST_MARGIN)
    low = low if not is_new and low <= first else first - room
    high = high if not is_new and last <= high else last + room
    ValueHead.with_bins(head.num_bins, low, high, head.num_heads).write_to(transformers_model(model).config)


# ---- Finding and applying a head ----


def scalar_head(model: nn.Module) -> nn.Module | None:
    """Return the linear layer that maps a hidden state to the outputs of `ValueHead`, or None."""
    base = transformers_model(model)
    if isinstance(head := getattr(base, "score", None), nn.Module):
        return head
    body, count = backbone(model), value_head_of(model).num_outputs
    linear = [each for each in base.children() if each is not body and getattr(each, "out_features", None) == count]
    return linear[0] if len(linear) == 1 else None


def multiply_scores_in_float32(model: nn.Module) -> None:
    """Make a model's scalar head, if it has one, multiply in float32, whatever the type of its weights."""
    if (head := scalar_head(model)) is not None:
        multiply_in_float32(head)


def head_of_scorer(model: nn.Module) -> nn.Module:
    """Return the `scalar_head` of a model; a `ValueError` if it has none."""
    head = scalar_head(model)
    if head is None:
        raise ValueError(f"{type(transformers_model(model)).__name__} has no linear head with one output")
    return head


def check_one_label(model: nn.Module, argument: str) -> None:
    """Check that a sequence-classification model has exactly one output.

    Raises:
        ValueError: It has several labels, or is not a sequence-classification model.
    """
    base = transformers_model(model)
    labels = getattr(base.config, "num_labels", None)
    if base.get_output_embeddings() is not None and scalar_head(model) is None:
        raise ValueError(
            f"{argument} is a {type(base).__name__}, a language model without a scalar head; load it with "
            "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
        )
    if labels != 1:
        names = list((base.config.id2label or {}).values())
        other_fix = f", or take one of its labels {names} with reward_head" * argument.startswith("reward_model")
        raise ValueError(
            f"{argument} has num_labels={labels}; a {argument} gives one number per text: load it with "
            f"AutoModelForSequenceClassification.from_pretrained(..., num_labels=1){other_fix}"
        )


def check_critic_head(model: nn.Module, argument: str) -> None:
    """Check that a sequence-classification model has one output, or those that its configuration describes.

    Raises:
        ValueError: It has others, or is not a sequence-classification model.
    """
    head = value_head_of(model)
    if head == ValueHead() or transformers_model(model).config.num_labels != head.num_outputs:
        check_one_label(model, argument)


@torch.no_grad()
def reads_last_token(model: nn.Module) -> bool:
    """Return whether the model's score is its head applied to the last token's hidden state.

    True for causal models (`score(h_last)`), False for encoders that pool (BERT's `classifier(pooler(h_0))`). Runs the
    model on three tokens. The head's name decides for a sharded model, which cannot run yet, and non-finite scores.
    """
    if scalar_head(model) is None:
        return False
    base = transformers_model(model)
    by_name = isinstance(getattr(base, "score", None), nn.Module)
    if is_sharded(model):
        return by_name
    ids = probe_ids(model)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with in_eval_mode(model), _no_id_is_padding(base):
        ours = _last_token_outputs(model, ids, mask)
        with autocast_if_stored_in_16_bits(base):
            theirs = base(input_ids=ids, attention_mask=mask.long()).logits.float()[:, : ours.shape[1]]
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        return by_name
    return torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3)


@contextmanager
def _no_id_is_padding(base: Any) -> Iterator[None]:
    """Keep a classifier from reading an id of the probe as padding, which would end the text."""
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
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, last: int, places: PackedIndices | None = None
) -> HeadValues:
    """Apply the value model's head to the last `last` positions.

    Args:
        model: A model with a per-token head.
        input_ids: Token ids, long `(B, L)`.
        attention_mask: True on real tokens, bool `(B, L)`.
        last: Number of positions, counted from the right.
        places: Indices of the real tokens; None reads them from the device.

    Returns:
        One value per position, float32 `(B, last)`, with the logits of its bins and the values of several heads.
    """
    states = hidden_states(model, input_ids, attention_mask, places)[:, -last:]
    return value_head_of(model).read(_apply_head(model, states))


def last_token_score(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Apply the scalar head to each row's last real token, found from the mask, never from ids.

    Args:
        model: A model with a per-token scalar head.
        input_ids: Token ids, long `(B, L)`, padded on either side or both.
        attention_mask: True on real tokens, bool `(B, L)`.

    Returns:
        One score per row, float32 `(B,)`.
    """
    return _last_token_outputs(model, input_ids, attention_mask).squeeze(-1)


def _last_token_outputs(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    states = hidden_states(model, input_ids, attention_mask)
    return _apply_head(model, states[torch.arange(len(states), device=states.device), last_real(attention_mask)])


def last_real(mask: Tensor) -> Tensor:
    """Return the column of the last True of each row of a bool `(B, L)` mask, long `(B,)`."""
    return mask.shape[1] - 1 - mask.flip(1).to(torch.int8).argmax(dim=1)


def pooled_score(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Compute the model's own score, with the real tokens moved to the left: encoders read the first token (CLS).

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
    """Check that a text's score does not depend on padding, and on the other texts of a batch.

    Args:
        model: A sequence-classification model with one label.
        argument: Name of the caller's argument, for error messages.

    Raises:
        ValueError: It does (convolutions or Fourier transforms over padding), or the model cannot score token ids.
    """
    if is_sharded(model):
        return
    what = f"{argument} is a {type(transformers_model(model)).__name__}"
    score = last_token_score if reads_last_token(model) else pooled_score
    ids, mask = probe_rows(model, LENGTHS)
    with in_eval_mode(model), preserve_rng():
        try:
            beside = score(model, ids, mask)
            rows = [row[real][None] for row, real in zip(ids, mask, strict=True)]
            alone = torch.cat([score(model, row, torch.ones_like(row, dtype=torch.bool)) for row in rows])
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{what}, which cannot score the ids of any text: {error!s:.300}") from error
    tolerance = rounding(next(model.parameters()))
    if alone.isfinite().all() and not torch.allclose(beside, alone, tolerance, tolerance * float(alone.abs().max())):
        raise ValueError(
            f"{what}, whose score of a text depends on the padding behind it, and thus on the other texts of a batch "
            f"(by {float((beside - alone).abs().max()):.2g}); use a model that masks its padding"
        )


def _apply_head(model: nn.Module, states: Tensor) -> Tensor:
    head = head_of_scorer(model)
    if not is_in_float32(head):
        states = states.to(next(head.parameters()).dtype)  # a base in 16 bits may be below a head in 32
    with torch.autocast(states.device.type, enabled=False):  # at values near 5 bfloat16's steps are .03
        return head(states).float()


class StoredLinear(nn.Linear):
    """A frozen linear layer with weights in 16 bits that computes in the type of its input outside autocast."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply `(..., in_features)` by the weight."""
        if input.dtype == self.weight.dtype or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return nn.functional.linear(input, self.weight.to(input.dtype), bias)


# ---- Float32 products ----


class Float32Linear(nn.Linear):
    """A linear layer that multiplies in float32, whatever autocast and the type of its weights."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply `(..., in_features)` by the weight, into float32."""
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(input.float(), self.weight.float(), bias)


LINEAR_KINDS = nn.Linear, StoredLinear, Float32Linear


def multiply_head_in_float32(policy: nn.Module, in_float32: bool) -> None:
    """Make a policy's head and its adapters multiply in float32, or in the model's own type again.

        z = float32(W) float32(h) + float32(b)

    16-bit arithmetic rounds logits to 16 bits: near 20, bfloat16 has steps of 1/8. The kernels of sampling and of
    learning then disagree about a token's probability. MiniMax-M1, 2506.13585; ScaleRL, 2510.13786. States and weights
    that are stored in 16 bits stay as exact as they are.

    Args:
        policy: A causal language model, or a `PeftModel` around one; its linear layers are changed in place.
        in_float32: Multiply in float32.

    Raises:
        ValueError: `in_float32`, but the head is not a linear layer of torch.
    """
    head = output_layer(policy)
    if in_float32:
        own = head
        while (inner := getattr(own, "base_layer", getattr(own, "original_module", None))) is not None:
            own = inner
        if type(own) not in LINEAR_KINDS:
            raise ValueError(
                f"lm_head_float32=True, but the head of {type(transformers_model(policy)).__name__} is a "
                f"{type(own).__name__}, which multiplies in a type of its own; leave it False, or load the model "
                "with its head in 16 or 32 bits (llm_int8_skip_modules=['lm_head'])"
            )
        multiply_in_float32(head)
    else:
        for layer in head.modules():
            if type(layer) is Float32Linear:
                layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]


def multiply_in_float32(head: nn.Module) -> None:
    """Make the linear layers of a head and of its adapters multiply in float32.

    In bfloat16 values and scores near 5 have steps of .03. Engines store all trained weights in 16 bits.
    """
    for layer in head.modules():
        if type(layer) in LINEAR_KINDS:
            layer.__class__ = Float32Linear


def is_in_float32(head: nn.Module) -> bool:
    """Return whether a head, which may have adapters, multiplies in float32."""
    return any(type(layer) is Float32Linear for layer in head.modules())


# ---- The trained value model ----

_ATTENTION = r"(^|\.)(self_?)?(attn|attention)\."
"""Parameters of attention layers, by transformers' names; a norm beside attention is not one."""


def freeze_critic(value_model: nn.Module, policy: nn.Module, pattern: str) -> None:
    """Keep parameters of the value model at their initial values: they get no gradient and no optimizer state.

    A frozen attention keeps a value model from overfitting: SAO, 2607.07508.

    Args:
        value_model: The value model; changed in place.
        policy: The trained language model, which may share weights.
        pattern: "none", "attention", or a regular expression found in the names of the parameters to freeze.

    Raises:
        ValueError: The pattern is not a regular expression, matches no trainable parameter or all of them, or matches
            a trainable parameter of the policy.
    """
    if pattern == "none":
        return
    given = f"critic_freeze={pattern!r}"
    try:
        frozen = re.compile(_ATTENTION if pattern == "attention" else pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(
            f"{given} is not a regular expression ({error}); use 'attention', or one like 'layers.0'"
        ) from error
    trainable = {name: each for name, each in value_model.named_parameters() if each.requires_grad}
    found = {name: each for name, each in trainable.items() if frozen.search(name)}
    if not found or len(found) == len(trainable):
        raise ValueError(
            f"{given} matches {'all' if found else 'none of the'} trainable parameters of the value model; the names "
            f"are like {next(iter(trainable))} and {list(trainable)[-1]}"
        )
    of_policy = {id(each) for each in policy.parameters()}
    if shared := next((name for name, each in found.items() if id(each) in of_policy), None):
        raise ValueError(f"{given} matches {shared}, which the policy trains too; leave it out of the pattern")
    for parameter in found.values():
        parameter.requires_grad_(False)


def empty_classifier(model: nn.Module) -> nn.Module:
    """Make a float32 classifier with one label and new weights, of a language model's architecture.

    Args:
        model: The language model, or a `PeftModel` around one.

    Raises:
        ValueError: The architecture has no sequence-classification class.
    """
    base = transformers_model(model)
    config = copy.deepcopy(base.config)
    config.num_labels = 1
    kind = AutoModelForSequenceClassification.__name__
    if getattr(base, "_auto_class", None):  # code that the user has let run: its module is loaded
        named = (getattr(config, "auto_map", None) or {}).get(kind, "")
        own: Any = getattr(sys.modules[type(base).__module__], named.rpartition(".")[2], None)
        if own is not None:
            own.register_for_auto_class(kind)  # so that its code is saved with it
            return own._from_config(config, dtype=torch.float32)
    try:
        # None would ask on stdin.
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"value_model=None, but transformers has no sequence-classification class for {type(base).__name__}; pass "
            "value_model"
        ) from error


def fit_head(value_model: nn.Module, wanted: ValueHead, has_fixed_range: bool) -> None:
    """Replace a value model's head if it does not have the wanted layout.

    Each head of an ensemble starts as a copy of the model's head. A head of one number cannot become a head with bins:
    the new one has zero weights, and its values are the middle of the range.

    Args:
        value_model: A model with a per-token head, without an adapter over the head; changed in place.
        wanted: The layout.
        has_fixed_range: Whether the range is given; a running one continues from the model's.

    Raises:
        ValueError: The model's head has other bins or heads, or an adapter trains it.
    """
    own = value_head_of(value_model)
    check_head_fits(own, wanted, has_fixed_range)
    if own.num_outputs == wanted.num_outputs:
        return
    if is_peft_model(value_model):
        cause = "value_loss='hl_gauss'" if own.num_bins != wanted.num_bins else f"critic_ensemble={wanted.num_heads}"
        raise ValueError(
            f"{cause} makes a new head, which value_model cannot get below its adapter; pass the model without "
            "adapter, with value_peft_config for a new one, or value_model=None"
        )
    seed = cast(Any, head_of_scorer(value_model))
    if own.num_bins == wanted.num_bins:
        replace_head(value_model, own._replace(num_heads=wanted.num_heads))
        copies = cast(Any, head_of_scorer(value_model))
        with torch.no_grad(), gathered(list(seed.parameters())):
            for each, of_seed in zip(copies.parameters(), seed.parameters(), strict=True):
                each.copy_(of_seed.repeat(wanted.num_heads, *[1] * (of_seed.dim() - 1)))
        return
    if torch.count_nonzero(seed.weight):
        logger.info(f"The value model's head is new, with {wanted.num_bins} bins: one number cannot seed them.")
    replace_head(value_model, wanted)


def check_head_fits(own: ValueHead, wanted: ValueHead, has_fixed_range: bool) -> None:
    """Check that a value model's head can become one of the wanted layout.

    Args:
        own: The layout of the model's head.
        wanted: The wanted layout.
        has_fixed_range: Whether its range is given.

    Raises:
        ValueError: It has other bins or several heads.
    """
    if own.num_heads not in (1, wanted.num_heads):
        raise ValueError(
            f"value_model has {own.num_heads} heads, but critic_ensemble={wanted.num_heads}; set critic_ensemble="
            f"{own.num_heads}, or pass another value_model"
        )
    if own.centers is None:
        return
    if own.num_bins != wanted.num_bins:
        given = "value_loss='mse'" if wanted.centers is None else f"value_bins={wanted.num_bins}"
        raise ValueError(
            f"value_model has a head with {own.num_bins} bins, but {given}; set value_loss='hl_gauss' and "
            f"value_bins={own.num_bins}, or pass another value_model"
        )
    if has_fixed_range and own.centers != wanted.centers:
        raise ValueError(
            f"value_range={[*wanted.range]}, but the bins of value_model range from {own.range[0]:g} to "
            f"{own.range[1]:g}, and its values would stretch; leave value_range out, or pass another value_model"
        )


def replace_head(value_model: nn.Module, layout: ValueHead) -> None:
    """Replace a value model's head by one with zero weights and another layout, in place."""
    base, head = cast(Any, transformers_model(value_model)), cast(Any, head_of_scorer(value_model))
    name = next(name for name, module in base.named_modules() if module is head)
    new = nn.Linear(head.in_features, layout.num_outputs, head.bias is not None).to(head.weight)
    for parameter in new.parameters():
        nn.init.zeros_(parameter)
    base.set_submodule(name, new.train())
    layout.write_to(base.config)
    base.num_labels = layout.num_outputs
