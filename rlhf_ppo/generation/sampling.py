"""Sampling of a token: top-p, inverse-CDF sampling, non-finite logits, the head's dtype, stored generation configs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf_ppo.algorithm.masked import exact_type
from rlhf_ppo.models.heads import Float32Linear
from rlhf_ppo.models.unwrapping import autocast_dtype, transformers_model

_UNIT = 2**52
"""A probability of 1 as an integer: a double's digits; sums over a vocabulary stay below 2^63."""


class IntegerTopP(LogitsProcessor):
    """Masks the tokens that transformers' `TopPLogitsWarper` masks, with sums of integers, equal in any order.

        S_v = sum_{w: p_w <= p_v} round(2^52 p_w),    v stays where S_v > 2^52 (1 - p); the likeliest always stays

    A GPU adds floats up in an order that changes from run to run. Nucleus sampling: Holtzman et al., 1904.09751.

    Args:
        top_p: Probability that stays, 0 to 1.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Set the logits of unlikely tokens, `(B, V)`, to minus infinity."""
        ascending, tokens = scores.sort(dim=-1, stable=True)
        shares = ascending.softmax(dim=-1, dtype=exact_type(scores.device)).mul_(_UNIT).round_().long()
        is_unlikely = shares.cumsum(dim=-1) <= round((1 - self.top_p) * _UNIT)
        is_unlikely[:, -1] = False
        return scores.masked_fill(is_unlikely.gather(1, tokens.argsort(dim=-1)), -torch.inf)


# ---- Inverse-CDF sampling ----


class InverseCDFSampling(LogitsProcessor):
    r"""Draws each row's token and masks all others: greedy decoding then takes it.

    `y = min {v : F_v > u F_V}` with `F_v = sum_{w <= v} p_w` in float64 and one `u ~ U[0, 1)` a row (inverse transform
    sampling; Devroye 1986, III.2): a token of probability 0 is never drawn.
    """

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Draw from `softmax(scores)`, `(B, V)`."""
        cumulative = scores.softmax(dim=-1).double().cumsum_(dim=-1)
        total = cumulative[:, -1:]
        drawn = torch.rand_like(total) * total
        tokens = torch.searchsorted(cumulative, torch.minimum(drawn, total.nextafter(total * 0)), right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


def sampling_processors(
    config: GenerationConfig, device: torch.device
) -> tuple[GenerationConfig, LogitsProcessorList]:
    """Return the configuration and processors with which `generate` samples.

    On a CPU a processor draws the token and `generate` is greedy. Elsewhere `generate` draws by itself: an accelerator
    makes random numbers fast, but its sums of floats differ from run to run. Under `full_determinism`, `top_p` adds
    integers up.

    Args:
        config: The sampling distribution: `do_sample`, `temperature`, `top_k`, `top_p` and `min_p`.
        device: The device of the logits.
    """
    if not config.do_sample:
        return config, LogitsProcessorList()
    if device.type == "cpu":
        greedy = changed(config, do_sample=False, temperature=None, top_k=None, top_p=None, min_p=None)
        return greedy, LogitsProcessorList([*_warpers(config, TopPLogitsWarper), InverseCDFSampling()])
    if _cuts(config.top_p) and torch.are_deterministic_algorithms_enabled():
        plain = changed(config, temperature=1.0, top_k=0, top_p=1.0, min_p=None)
        return plain, LogitsProcessorList(_warpers(config, IntegerTopP))
    return config, LogitsProcessorList()


def changed(config: GenerationConfig, **changes: Any) -> GenerationConfig:
    """Return a copy of a configuration with other values."""
    result = copy.deepcopy(config)
    result.update(**changes)
    return result


def _cuts(top_p: float | None) -> TypeGuard[float]:
    return top_p is not None and top_p < 1.0


def _warpers(config: GenerationConfig, nucleus: Callable[[float], LogitsProcessor]) -> Iterator[LogitsProcessor]:
    """Make the processors that `generate` applies when it samples, in its order."""
    if config.temperature not in (None, 1.0):
        yield TemperatureLogitsWarper(config.temperature)
    if config.top_k:
        yield TopKLogitsWarper(config.top_k)
    if _cuts(config.top_p):
        yield nucleus(config.top_p)
    if config.min_p is not None:
        yield MinPLogitsWarper(config.min_p)


# ---- Non-finite logits ----


class NonFiniteLogitsError(RuntimeError):
    """A model's logits are NaN, infinite, or minus infinity for every token."""


class FiniteLogitsCheck(LogitsProcessor):
    """Finds rows whose largest logit is not finite; the first of all processors.

    On a CPU it raises the error at once. On an accelerator that would make the host wait for each token, and drawing
    from NaN would end the process: the row gets logits of 0, and `check` raises the error after generation.
    """

    def __init__(self) -> None:
        self._failed: Tensor | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Check logits `(B, V)`."""
        failed = ~scores.amax(dim=-1).isfinite()  # the largest of a row is NaN if any is
        self._failed = failed.any() if self._failed is None else self._failed | failed.any()
        if scores.device.type == "cpu":
            self.check()
            return scores
        return scores.masked_fill_(failed[:, None], 0.0)

    def check(self) -> None:
        """Raise a `NonFiniteLogitsError` if any row failed."""
        if self._failed is not None and bool(self._failed):
            raise NonFiniteLogitsError("its logits are NaN or infinite")

    def check_beside(self, flags: Tensor) -> Tensor:
        """Like `check`, and return other flags, bool `(B,)`, on the host, which waits for the device once."""
        if self._failed is not None:
            flags = torch.cat((flags, self._failed[None]))
        flags = flags.cpu()
        if self._failed is not None:
            self._failed, flags = flags[-1], flags[:-1]
            self.check()
        return flags


@contextmanager
def naming_the_model(model: torch.nn.Module, role: str, moment: str) -> Iterator[None]:
    """Name the model and the moment in a `NonFiniteLogitsError`.

    Args:
        model: The model that generates.
        role: Its role, for example `policy`.
        moment: The moment, for example `update 3`.
    """
    try:
        yield
    except NonFiniteLogitsError as error:
        path = getattr(getattr(model, "config", None), "_name_or_path", "")
        name = f"{type(model).__name__}{f' from {path}' if path else ''}"
        raise NonFiniteLogitsError(
            f"{moment}: the {role} ({name}) gives no probabilities to sample from: {error}. Its weights are NaN or "
            "too large: lower learning_rate or max_grad_norm, and resume from an earlier checkpoint"
        ) from error


# ---- The head's dtype ----


@contextmanager
def frozen_head_cast(policy: nn.Module) -> Iterator[None]:
    """Store a frozen head in the type that autocast casts it to; products stay the same to the bit.

    Autocast caches its casts of trained weights, and casts frozen weights again for each token. `cast_frozen_weights`
    casts other linear layers, but no head that is tied to the embedding or saved with an adapter.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
    """
    head = transformers_model(policy).get_output_embeddings()
    layer: Any = getattr(head, "base_layer", head)
    dtype = None
    if type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and not layer.weight.requires_grad:
        dtype = autocast_dtype(layer.weight.device.type)
    with _weights_stored([layer] if dtype is not None else [], dtype or torch.float32):
        yield


@contextmanager
def float32_head_apart(policy: nn.Module) -> Iterator[None]:
    """Give a head that multiplies in float32 its own float32 weights, separate from a tied embedding.

    `Float32Linear` would convert 16-bit weights for each token.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
    """
    head = transformers_model(policy).get_output_embeddings()
    layers = [] if head is None else [layer for layer in head.modules() if isinstance(layer, Float32Linear)]
    with _weights_stored(layers, torch.float32):
        yield


@contextmanager
def _weights_stored(layers: Sequence[nn.Linear], dtype: torch.dtype) -> Iterator[None]:
    """Give layers, unless they are sharded, separate weights of another type inside a context."""
    own = [
        (layer, layer.weight)
        for layer in layers
        if type(layer.weight) is nn.Parameter and not hasattr(layer.weight, "ds_id")
    ]
    for layer, weight in own:
        layer.weight = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in own:
            layer.weight = weight


# ---- The model's own generation config ----


@contextmanager
def default_generation_config(policy: nn.Module) -> Iterator[Any]:
    """Replace the model's generation_config, from which `generate` fills unset fields, by transformers' default.

    With a stored repetition penalty or list of EOS tokens, `generate` would sample from a distribution that the
    log-probabilities do not describe.

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
