"""Log-probabilities and entropies of tokens from hidden states: the head and the softmax in one operation.

Only one tile of logits, some tokens by some of the vocabulary, exists at a time, forward and backward. The tiles of a
range of the vocabulary follow each other: each part of the head's weight is read and cast, and its gradient written,
once. Chunks of tokens would do this with the whole weight for each chunk.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_ppo.models.unwrapping import autocast_dtype

_BLOCK_ON_CPU, _BLOCK_ELSEWHERE = 2**19, 2**21
"""Logits of a block, tokens x vocabulary: three blocks in float32, of 8 MiB on a GPU, fit into its cache."""
_ROWS_ON_CPU, _ROWS_ELSEWHERE = 1, 2**13
"""Smallest number of tokens of a tile: with few tokens each read of the weights serves few. On a CPU reading weights
takes little of the time, and a tile has the whole vocabulary whenever it can."""


class HeadFactors(NamedTuple):
    """A head as factors: `logits = sum_i states_i @ weight_i^T + bias`.

    Attributes:
        states: The hidden states `(N, H)`, and for each adapter its inner activations `(N, r)`.
        weights: The head's weight `(V, H)`, and for each adapter its outer weight `(V, r)`.
        bias: The head's bias `(V,)`, or None.
        in_float32: Multiply in float32, whatever autocast.
    """

    states: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    in_float32: bool = False


class LogitScaling(NamedTuple):
    """Scaling of the head's output before the softmax: `z = cap tanh(factor x / cap) / temperature`.

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

    The logits of the last tile are kept for the backward pass; the others are computed again.

    Args:
        head: The hidden states of `N` tokens and the head's weights.
        targets: The tokens that followed, long `(N,)`.
        scaling: Scaling of the logits before the softmax.
        max_elements: Logits held at once, tokens x vocabulary.
        with_entropy: Compute the entropies, otherwise NaN.

    Returns:
        Log-probabilities and entropies in nats, float32 `(N,)`, both differentiable.
    """
    factors = [tensor for pair in zip(head.states, head.weights, strict=True) for tensor in pair]
    dtype = torch.float32 if head.in_float32 else autocast_dtype(targets.device.type) or head.states[0].dtype
    with torch.autocast(targets.device.type, enabled=False) if head.in_float32 else nullcontext():
        return _FusedLogprobs.apply(  # pyright: ignore
            targets, scaling, dtype, max_elements, with_entropy, head.bias, *factors
        )


class _FusedLogprobs(torch.autograd.Function):
    """The inputs after the bias are `states_1, weight_1, states_2, weight_2, ...`."""

    @staticmethod
    def forward(
        ctx: Any,
        targets: Tensor,
        scaling: LogitScaling,
        dtype: torch.dtype,
        max_elements: int,
        with_entropy: bool,
        bias: Tensor | None,
        *factors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # the entropy is mostly only logged
        logits = _Logits(bias, factors, scaling, dtype, max_elements)
        at_target = torch.empty(targets.shape, device=targets.device, dtype=torch.float32)
        sums: dict[int, list[_Sums]] = defaultdict(list)
        scaled = None
        for tile in logits.tiles():
            scaled = logits.of(tile, scaled)
            sums[tile.rows.start].append(_merged(_sums(scaled, with_entropy)))
            index, is_inside = tile.columns_of(targets)
            gathered = scaled.gather(1, index).squeeze(1)
            at_target[tile.rows] = torch.where(is_inside.squeeze(1), gathered, at_target[tile.rows])
        merged = [_merged(parts) for parts in sums.values()]
        log_total, entropy = (
            torch.cat([getattr(part, name)() for part in merged]) if merged else torch.empty_like(at_target)
            for name in ("log_total", "entropy")
        )
        ctx.save_for_backward(targets, log_total, entropy, bias, *factors)
        ctx.scaling, ctx.max_elements, ctx.dtype = scaling, max_elements, dtype
        ctx.last_tile = scaled if any(ctx.needs_input_grad) else None
        return at_target - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprobs: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        targets, log_total, entropy, bias, *factors = ctx.saved_tensors
        logits = _Logits(bias, factors, ctx.scaling, ctx.dtype, ctx.max_elements)
        gradients = _Gradients(logits, bias, factors, ctx.needs_input_grad[5:])
        buffer, ctx.last_tile = ctx.last_tile, None  # its memory is written to: a second backward computes it again
        is_kept, rounded = buffer is not None, None
        for tile in logits.tiles(backwards=True):
            buffer = buffer if is_kept else logits.of(tile, buffer)
            is_kept = False
            if ctx.dtype != torch.float32:
                rounded = _matrix_in(rounded, (len(buffer), buffer.shape[1]), ctx.dtype, buffer.device)
            by_logits = buffer if rounded is None else rounded
            _to_gradients(
                buffer,
                by_logits,
                ctx.scaling,
                tile.columns_of(targets),
                _Outputs.of(tile.rows, log_total, entropy, by_logprobs, by_entropy),
            )
            gradients.add(tile, by_logits)
        return None, None, None, None, None, *gradients.finished()


class _Tile(NamedTuple):
    """Some tokens, a range of the vocabulary, and its rows of the weights in the type of products."""

    rows: slice
    columns: slice
    weights: list[Tensor]

    def columns_of(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of the targets `(n, 1)`, and whether they are in the tile; others have any column."""
        index = targets[self.rows, None] - self.columns.start
        width = self.columns.stop - self.columns.start
        return index.clamp(0, width - 1), (index >= 0) & (index < width)


class _Sums(NamedTuple):
    """Sums of each row over a range of ids, `(n, 1)`: `m = max z`, `sum exp(z - m)`, `sum exp(z - m) (z - m)`."""

    largest: Tensor
    total: Tensor
    weighted: Tensor

    def log_total(self) -> Tensor:
        """Return `log sum_v exp z_v`, float32 `(n,)`."""
        return (self.total.log() + self.largest).squeeze(1)

    def entropy(self) -> Tensor:
        """Return `-sum_v p_v log p_v`, or NaN where `weighted` is, float32 `(n,)`."""
        return (self.total.log() - self.weighted / self.total).squeeze(1)


def _sums(scaled: Tensor, with_entropy: bool) -> list[_Sums]:
    """Compute the sums of each block of a tile; without the entropy `weighted` is NaN."""
    # On a GPU each block has its own maximum, found while it is in the cache: one read of the tile less.
    whole = _largest(scaled) if _is_on_cpu(scaled) else None
    return [_sums_of_block(columns, whole, with_entropy) for columns in _blocks(scaled)]


def _sums_of_block(columns: Tensor, largest: Tensor | None, with_entropy: bool) -> _Sums:
    """Compute the sums of a block; its memory is freed, and the next block finds the same memory in the cache."""
    largest = _largest(columns) if largest is None else largest
    below = columns - largest
    weights = below.exp() if with_entropy else below.exp_()
    total = weights.sum(dim=1, keepdim=True)
    if not with_entropy:
        return _Sums(largest, total, torch.full_like(total, math.nan))
    # A forbidden token, at -inf, adds 0 x -inf.
    return _Sums(largest, total, weights.mul_(below).nansum(dim=1, keepdim=True))


def _largest(scaled: Tensor) -> Tensor:
    return scaled.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)


def _merged(parts: list[_Sums]) -> _Sums:
    """Merge the sums over several parts of the vocabulary."""
    if len(parts) == 1:
        return parts[0]
    largest, total, weighted = (torch.stack(sums) for sums in zip(*parts, strict=True))
    highest = largest.amax(dim=0)
    below = largest.sub_(highest)
    weighted, shares = weighted.add_(below * total), below.exp_()
    return _Sums(
        highest,
        functools.reduce(torch.add, total.mul_(shares).unbind()),
        functools.reduce(torch.add, weighted.mul_(shares).unbind()),
    )


class _Outputs(NamedTuple):
    """Results and their gradients for some rows in the backward pass, `(n, 1)` each."""

    log_total: Tensor
    entropy: Tensor
    by_logprobs: Tensor | None
    by_entropy: Tensor | None

    @classmethod
    def of(cls, rows: slice, *all_rows: Tensor | None) -> _Outputs:
        """Select the rows."""
        return cls(*(None if column is None else column[rows, None] for column in all_rows))  # pyright: ignore


def _to_gradients(
    scaled: Tensor, into: Tensor, scaling: LogitScaling, targets: tuple[Tensor, Tensor], outputs: _Outputs
) -> None:
    r"""Compute the gradients by the head's output `(n, V)` from a tile's scaled logits, in place or into other memory.

    `(g (1[v = y] - p_v) - g' p_v (log p_v + H)) dz_v/dx_v` with the gradients `g` by log-probabilities and `g'` by
    entropies. The gradient at the target is rounded once: its two terms may nearly cancel.
    """
    index, is_inside = targets
    at_target = scaled.gather(1, index)
    for columns, block in zip(_blocks(scaled), _blocks(into), strict=True):
        _gradient_by_distribution(columns, block, scaling, outputs, in_place=scaled is into)
    if outputs.by_logprobs is not None:
        by_target = into.gather(1, index) if scaled is into else torch.empty_like(at_target)
        if scaled is not into:
            _gradient_by_distribution(at_target, by_target, scaling, outputs, in_place=False)
        by_target += outputs.by_logprobs * scaling.slope(at_target)
        into.scatter_(1, index, torch.where(is_inside, by_target.to(into.dtype), into.gather(1, index)))


def _gradient_by_distribution(
    scaled: Tensor, into: Tensor, scaling: LogitScaling, outputs: _Outputs, in_place: bool
) -> None:
    """Write `-p_v (g + g' (log p_v + H)) dz_v/dx_v`."""
    slope = scaling.slope(scaled)
    by_distribution: Tensor | float = 0.0 if outputs.by_logprobs is None else outputs.by_logprobs
    logprobs = torch.sub(scaled, outputs.log_total, out=scaled if in_place else None)
    if outputs.by_entropy is not None:
        finite = logprobs.clamp(min=torch.finfo(torch.float32).min)
        by_distribution = finite.add_(outputs.entropy).mul_(outputs.by_entropy).add_(by_distribution)
    torch.mul(logprobs.exp_(), by_distribution * -slope, out=into)


def _blocks(tile: Tensor) -> tuple[Tensor, ...]:
    """Split a tile by columns into blocks that fit into the cache."""
    size = _BLOCK_ON_CPU if _is_on_cpu(tile) else _BLOCK_ELSEWHERE
    return tile.split(max(1, size // len(tile)), dim=1)


class _Logits:
    """Computes the head's scaled output, tile by tile."""

    def __init__(
        self,
        bias: Tensor | None,
        factors: Sequence[Tensor],
        scaling: LogitScaling,
        dtype: torch.dtype,
        max_elements: int,
    ) -> None:
        self.bias, self.scaling, self.dtype = bias, scaling, dtype
        self.states = [states.detach() for states in factors[::2]]
        self.weights = [weight.detach() for weight in factors[1::2]]
        self.num_rows, self.vocabulary = len(self.states[0]), len(self.weights[0])
        most_rows = min(self.num_rows, _most_rows(self.vocabulary, max_elements, _is_on_cpu(self.states[0])))
        self.rows = _even_slices(self.num_rows, most_rows)
        self.columns = _even_slices(self.vocabulary, max_elements // max(1, most_rows))

    def tiles(self, backwards: bool = False) -> Iterator[_Tile]:
        """Yield all tiles, ordered by their range of the vocabulary."""
        order = reversed if backwards else iter
        for columns in order(self.columns):
            weights = [weight[columns].to(self.dtype) for weight in self.weights]
            yield from (_Tile(rows, columns, weights) for rows in order(self.rows))

    def of(self, tile: _Tile, buffer: Tensor | None) -> Tensor:
        """Compute float32 `(n, V)`, in the memory of the previous tile if possible."""
        states = [states[tile.rows].to(self.dtype) for states in self.states]
        weight, scaling = tile.weights[0].t(), self.scaling
        if self.dtype == torch.float32 or multiplies_into_float32(weight.device.type, self.dtype):
            logits = _matrix_in(buffer, (len(states[0]), weight.shape[1]), torch.float32, weight.device)
            if self._is_scaled_in_product:
                return _write_product(logits, states[0], weight, factor=scaling.factor / scaling.temperature)
            _write_product(logits, states[0], weight)
        else:
            logits = torch.mm(states[0], weight).float()
        for extra, weight in zip(states[1:], tile.weights[1:], strict=True):
            logits += extra @ weight.t()
        if self.bias is not None:
            logits += self.bias[tile.columns]
        return scaling.apply_(logits)

    @property
    def _is_scaled_in_product(self) -> bool:
        """Whether the matrix product can scale: only the product is scaled, on a GPU. A CPU may round otherwise."""
        is_all = len(self.weights) == 1 and self.bias is None and self.scaling.cap is None
        return is_all and not _is_on_cpu(self.states[0])


class _Gradients:
    """Sums of the gradients by bias, states and weights, tile by tile, from the last to the first.

    A sum over several tiles is float32, as sums of rounded products drift; a single product has its own type.
    """

    def __init__(self, logits: _Logits, bias: Tensor | None, factors: list[Tensor], needed: Sequence[bool]) -> None:
        self.logits, self.factors = logits, [bias, *factors]
        counts = [len(logits.columns), len(logits.rows)] * (len(factors) // 2)
        make = torch.empty if logits.rows else torch.zeros
        self.sums = [
            make(factor.shape, device=factor.device, dtype=_sum_dtype(factor.dtype, logits.dtype, count))
            if is_needed and factor is not None
            else None
            for factor, is_needed, count in zip(self.factors, needed, [2, *counts], strict=True)
        ]

    def add(self, tile: _Tile, by_logits: Tensor) -> None:
        """Add a tile's gradients."""
        first_of_columns, first_of_rows = tile.rows == self.logits.rows[-1], tile.columns == self.logits.columns[-1]
        by_bias, *sums = self.sums
        if by_bias is not None:
            share = by_logits.sum(dim=0, dtype=torch.float32)
            by_bias[tile.columns] = share if first_of_columns else by_bias[tile.columns] + share
        for states, weight, by_states, by_weight in zip(
            self.logits.states, tile.weights, sums[::2], sums[1::2], strict=True
        ):
            if by_states is not None:
                _write_product(by_states[tile.rows], by_logits, weight, adds=not first_of_rows)
            if by_weight is not None:
                right = states[tile.rows].to(self.logits.dtype)
                _write_product(by_weight[tile.columns], by_logits.t(), right, adds=not first_of_columns)

    def finished(self) -> list[Tensor | None]:
        """Return the gradients, each in its factor's type."""
        return [
            None if total is None or factor is None else total.to(factor.dtype)
            for total, factor in zip(self.sums, self.factors, strict=True)
        ]


def _write_product(into: Tensor, left: Tensor, right: Tensor, adds: bool = False, factor: float = 1.0) -> Tensor:
    """Write `factor left @ right`, or add it, without rounding it to 16 bits on the way to float32."""
    kind: dict[str, Any] = {}
    if into.dtype != left.dtype:
        if multiplies_into_float32(into.device.type, left.dtype):
            kind = {"out_dtype": into.dtype}
        else:
            left, right = left.float(), right.float()
    if adds or factor != 1.0:
        return torch.addmm(into, left, right, beta=1 if adds else 0, alpha=factor, out=into, **kind)
    return torch.mm(left, right, out=into, **kind)


def _matrix_in(buffer: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a matrix in a buffer's memory, if it is large enough."""
    rows, columns = shape
    if buffer is None or buffer.untyped_storage().nbytes() < rows * columns * buffer.itemsize:
        return torch.empty(rows, columns, dtype=dtype, device=device)
    return buffer.as_strided((rows, columns), (columns, 1))


def _sum_dtype(stored: torch.dtype, computed: torch.dtype, num_tiles: int) -> torch.dtype:
    return stored if num_tiles == 1 and stored == computed else torch.float32


def _most_rows(vocabulary: int, max_elements: int, on_cpu: bool) -> int:
    """Return the most tokens of a tile."""
    wanted = _ROWS_ON_CPU if on_cpu else _ROWS_ELSEWHERE
    return min(max_elements, max(wanted, max_elements // vocabulary))


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


@functools.cache
def multiplies_into_float32(device: str, dtype: torch.dtype) -> bool:
    """Return whether a device returns products of 16-bit matrices in float32, without rounding.

    Args:
        device: Its type; no CPU does.
        dtype: The matrices' type.
    """
    if device == "cpu":
        return False
    ones = torch.ones(8, 8, device=device, dtype=dtype)
    try:
        into = torch.mm(ones, ones, out_dtype=torch.float32, out=ones.float())  # pyright: ignore
        torch.addmm(into, ones, ones, beta=1, alpha=1.0, out_dtype=torch.float32, out=into)  # pyright: ignore
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def _even_slices(length: int, largest: int) -> list[slice]:
    size = max(1, math.ceil(length / max(1, math.ceil(length / max(1, largest)))))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
