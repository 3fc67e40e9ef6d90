"""Log-probabilities and entropies of tokens straight from hidden states: the head and the softmax in one operation.

Logits exist for one chunk of tokens at a time, forward and backward; the gradients of the head are summed in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_ppo.models.head_factors import HeadFactors

_BLOCK_ON_CPU, _BLOCK_ELSEWHERE = 2**19, 2**23
"""Logits that the passes of one softmax go over at a time, tokens x vocabulary."""


class LogitScaling(NamedTuple):
    """What happens to the head's output before the softmax: `z = cap tanh(factor x / cap) / temperature`.

    Attributes:
        factor: Multiplies the head's output (Cohere's `logit_scale`, one over Granite's `logits_scaling`).
        cap: Gemma's `final_logit_softcapping`, or None.
        temperature: Sampling temperature, above 0.
    """

    factor: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    def apply_(self, logits: Tensor) -> Tensor:
        """Scale logits in place."""
        if self.cap is None:
            linear = self.factor / self.temperature
            return logits if linear == 1.0 else logits.mul_(linear)
        return logits.mul_(self.factor / self.cap).tanh_().mul_(self.cap / self.temperature)

    def slope(self, scaled: Tensor) -> Tensor | float:
        """Differentiate scaled logits by the head's output: `factor / temperature (1 - (z temperature / cap)^2)`."""
        linear = self.factor / self.temperature
        return linear if self.cap is None else linear - linear * (scaled * (self.temperature / self.cap)).square_()


def fused_logprobs(
    head: HeadFactors, targets: Tensor, scaling: LogitScaling, max_elements: int, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    r"""Compute `log p_t[y_t]` and `-sum_v p_t[v] log p_t[v]` with `p_t = softmax(scaling(W h_t + b))`.

    The logits of the last chunk are kept for the backward pass; those of the others are computed again.

    Args:
        head: The hidden states of `N` tokens and the head's weights.
        targets: The tokens that followed, long `(N,)`.
        scaling: What happens to the logits before the softmax.
        max_elements: Logits held at once, tokens x vocabulary.
        with_entropy: Whether to compute the entropies, which are else NaN.

    Returns:
        Log-probabilities and entropies in nats, float32 `(N,)`, both differentiable.
    """
    factors = [tensor for pair in zip(head.states, head.weights, strict=True) for tensor in pair]
    return _FusedLogprobs.apply(targets, scaling, max_elements, with_entropy, head.bias, *factors)  # pyright: ignore


class _FusedLogprobs(torch.autograd.Function):
    """The inputs after the bias are `states_1, weight_1, states_2, weight_2, ...`."""

    @staticmethod
    def forward(
        ctx: Any,
        targets: Tensor,
        scaling: LogitScaling,
        max_elements: int,
        with_entropy: bool,
        bias: Tensor | None,
        *factors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # the entropy is mostly only logged
        logits = _Logits(bias, factors, scaling, _compute_dtype(factors[0]))
        chunk = _even_chunk(len(targets), max(1, max_elements // logits.vocabulary))
        logprobs, entropy, log_total = (
            torch.empty(targets.shape, device=targets.device, dtype=torch.float32) for _ in range(3)
        )
        scaled = None
        for rows in _slices(len(targets), chunk):
            scaled = logits.of(rows, scaled)
            log_total[rows], entropy[rows] = _log_total_and_entropy(scaled, with_entropy)
            logprobs[rows] = scaled.gather(1, targets[rows, None]).squeeze(1) - log_total[rows]
        ctx.save_for_backward(targets, log_total, entropy, bias, *factors)
        ctx.scaling, ctx.chunk, ctx.dtype = scaling, chunk, logits.dtype
        ctx.last_chunk = scaled if any(ctx.needs_input_grad) else None
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprobs: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        targets, log_total, entropy, bias, *factors = ctx.saved_tensors
        needs_bias, *needs = ctx.needs_input_grad[4:]
        logits = _Logits(bias, factors, ctx.scaling, ctx.dtype)
        gradients = [
            torch.zeros(factor.shape, device=factor.device, dtype=torch.float32) if needed else None
            for factor, needed in zip(factors, needs, strict=True)
        ]
        by_bias = torch.zeros(logits.vocabulary, device=log_total.device) if needs_bias else None
        buffer, ctx.last_chunk = ctx.last_chunk, None  # its memory is written to: a second backward computes it again
        is_kept = buffer is not None
        for rows in reversed(list(_slices(len(targets), ctx.chunk))):
            buffer = buffer if is_kept else logits.of(rows, buffer)
            is_kept = False
            by_logits = _to_gradient_(
                buffer,
                ctx.scaling,
                targets[rows],
                log_total[rows, None],
                entropy[rows, None],
                None if by_logprobs is None else by_logprobs[rows, None],
                None if by_entropy is None else by_entropy[rows, None],
            )
            logits.add_gradients(gradients, by_logits, rows)
            if by_bias is not None:
                by_bias += by_logits.sum(dim=0)
        cast = [
            None if gradient is None else gradient.to(factor.dtype)
            for gradient, factor in zip(gradients, factors, strict=True)
        ]
        return None, None, None, None, None if by_bias is None or bias is None else by_bias.to(bias.dtype), *cast


def _log_total_and_entropy(scaled: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Compute `log sum_v exp z_v` and `-sum_v p_v log p_v`, or NaN, of each row, float32 `(n,)`."""
    largest = scaled.amax(dim=1, keepdim=True)
    total, weighted = torch.zeros_like(largest), torch.zeros_like(largest)
    for columns in _blocks(scaled):
        below = columns - largest
        weights = below.exp()
        total += weights.sum(dim=1, keepdim=True)
        if with_entropy:
            weighted += weights.mul_(below).nansum(dim=1, keepdim=True)  # a forbidden token, at -inf, adds 0 x -inf
    if not with_entropy:
        weighted.fill_(math.nan)
    return (total.log() + largest).squeeze(1), (total.log() - weighted / total).squeeze(1)


def _to_gradient_(
    scaled: Tensor,
    scaling: LogitScaling,
    targets: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    by_logprobs: Tensor | None,
    by_entropy: Tensor | None,
) -> Tensor:
    r"""Turn scaled logits, in place, into gradients by the head's output `(n, V)`.

    `(g (1[v = y] - p_v) - g' p_v (log p_v + H)) dz_v/dx_v` with the gradients `g` by log-probabilities and `g'` by
    entropies; all but the logits and the targets is `(n, 1)`.
    """
    at_target = scaled.gather(1, targets[:, None])
    for columns in _blocks(scaled):
        slope = scaling.slope(columns)
        by_distribution: Tensor | float = 0.0 if by_logprobs is None else by_logprobs
        columns.sub_(log_total)
        if by_entropy is not None:
            finite = columns.clamp(min=torch.finfo(torch.float32).min)
            by_distribution = finite.add_(entropy).mul_(by_entropy).add_(by_distribution)
        columns.exp_().mul_(-by_distribution * slope)
    if by_logprobs is not None:
        scaled.scatter_add_(1, targets[:, None], by_logprobs * scaling.slope(at_target))
    return scaled


def _blocks(chunk: Tensor) -> tuple[Tensor, ...]:
    """Part a chunk by columns: on a CPU the passes over one block find it in the cache."""
    size = _BLOCK_ON_CPU if chunk.device.type == "cpu" else _BLOCK_ELSEWHERE
    return chunk.split(max(1, size // len(chunk)), dim=1)


class _Logits:
    """Computes the head's scaled output for some of the tokens, and the gradients of what it came from."""

    def __init__(self, bias: Tensor | None, factors: Any, scaling: LogitScaling, dtype: torch.dtype) -> None:
        self.bias, self.scaling, self.dtype = bias, scaling, dtype
        self.states = [states.detach() for states in factors[::2]]
        self.weights = [weight.detach().to(dtype) for weight in factors[1::2]]
        self.vocabulary = self.weights[0].shape[0]

    def of(self, rows: slice, buffer: Tensor | None) -> Tensor:
        """Compute float32 `(n, V)`, in the memory of the chunk before where that is possible."""
        states = [states[rows].to(self.dtype) for states in self.states]
        num_rows, weight = len(states[0]), self.weights[0].t()
        has_room = buffer is not None and len(buffer) >= num_rows
        if self.dtype == torch.float32 and has_room:
            logits = torch.mm(states[0], weight, out=cast(Tensor, buffer)[:num_rows])
        elif self.dtype != torch.float32 and multiplies_into_float32(states[0].device.type, self.dtype):
            shape = num_rows, self.vocabulary
            out = cast(Tensor, buffer)[:num_rows] if has_room else states[0].new_empty(shape, dtype=torch.float32)
            logits = torch.mm(states[0], weight, out_dtype=torch.float32, out=out)  # pyright: ignore
        else:
            logits = torch.mm(states[0], weight).float()
        for extra, weight in zip(states[1:], self.weights[1:], strict=True):
            logits += extra @ weight.t()
        if self.bias is not None:
            logits += self.bias
        return self.scaling.apply_(logits)

    def add_gradients(self, gradients: list[Tensor | None], by_logits: Tensor, rows: slice) -> None:
        """Add a chunk's share to the gradients of states and weights, in the order of the factors."""
        by_logits = by_logits.to(self.dtype)
        for index, (states, weight) in enumerate(zip(self.states, self.weights, strict=True)):
            by_states, by_weight = gradients[2 * index : 2 * index + 2]
            if by_states is not None:
                by_states[rows] = by_logits @ weight
            if by_weight is not None:
                _add_product_(by_weight, by_logits.t(), states[rows].to(self.dtype))


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to a float32 tensor without rounding the product first: sums of rounded ones drift."""
    if total.device.type == "cuda" and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)  # pyright: ignore
    else:
        total.addmm_(left.float(), right.float())


@functools.cache
def multiplies_into_float32(device: str, dtype: torch.dtype) -> bool:
    """Tell whether a device gives products of 16-bit matrices as they are added up, in float32, without rounding them.

    Args:
        device: Its type; no CPU does.
        dtype: The matrices' type.
    """
    if device == "cpu":
        return False
    ones = torch.ones(8, 8, device=device, dtype=dtype)
    try:
        torch.mm(ones, ones, out_dtype=torch.float32, out=ones.float())  # pyright: ignore
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def _compute_dtype(states: Tensor) -> torch.dtype:
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def _even_chunk(length: int, largest: int) -> int:
    return max(1, math.ceil(length / max(1, math.ceil(length / largest))))


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
