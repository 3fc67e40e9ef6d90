"""Count the bytes that a pass of the language-model head moves on a GPU, forward and backward, against the minimum.

The count runs on a CPU with all lengths divided by 16. Tensors of two lengths (logits, weights, hidden states), and
with them every byte, are then divided by 256, as are the cache and the limits on tiles and blocks. (Tensors with one
number per token are 16 times too large in comparison: a 16th of them is counted, outside the cache.) Products of
16-bit matrices into float32, which a CPU does not have, are computed in float32 and counted as they are on a GPU. Run
with MALLOC_MMAP_THRESHOLD_=16384: a block's memory is then given to the next one whole, as PyTorch does it on a GPU.

The minimum is that of any head whose logits do not fit into the cache. Forward: the stored weight is read and, if
products have another type, also written and read in that type; hidden states are read; logits are written by the
product and read by the softmax. Backward: weight, states and logits again, except one tile of logits that was kept;
gradients by logits are written, and read by each product; gradients by states are written, and those by the weight if
it is trained.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SCALE = 16
CACHE = 40 * 2**20
"""Bytes of an A100's second level; an H100's has 50."""
TEMPERATURE = 0.7
_LINE = 64
aten = torch.ops.aten
_MOVING_NOTHING = (aten.empty, aten.empty_like, aten.new_empty, aten._unsafe_view)
_OF_FEW = (aten.gather, aten.scatter_)
"""They touch one number of each row."""


class Shape(NamedTuple):
    """A pass of a head.

    Attributes:
        tokens: Response tokens of a micro-batch.
        width: The hidden size.
        vocabulary: Tokens of the vocabulary.
        stored: The type that the weight is stored in; products are in bfloat16.
        trained: Whether it is trained.
    """

    tokens: int
    width: int
    vocabulary: int
    stored: torch.dtype = torch.float32
    trained: bool = True

    def __str__(self) -> str:
        """Name the shape in a table."""
        kind = f"{'float32' if self.stored == torch.float32 else 'bf16'}, {'trained' if self.trained else 'frozen'}"
        return f"{self.tokens} tokens x {self.width} x {self.vocabulary}, {kind}"


SHAPES = (
    Shape(512, 1024, 49152),
    Shape(2048, 2048, 49152),
    Shape(8192, 4096, 147456),
    Shape(8192, 4096, 147456, torch.bfloat16),
    Shape(8192, 4096, 147456, torch.bfloat16, trained=False),
    Shape(2048, 4096, 147456, torch.bfloat16, trained=False),
    Shape(32768, 2048, 147456),
)


class Traffic(TorchDispatchMode):
    """Counts the bytes that pass between memory and a cache which keeps what was touched last.

    Each operation reads its inputs and writes its outputs once; what is in the cache is neither read from memory nor
    written to it before something else takes its place.

    Args:
        size: Bytes of the cache.

    Attributes:
        total: Bytes so far.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.total, self._capacity = 0, size // _LINE
        self._is_changed: OrderedDict[int, bool] = OrderedDict()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do one operation, and count it."""
        kwargs = kwargs or {}
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = _into_float32(func, args, **kwargs) if "dtype" in func._overloadname else func(*args, **kwargs)
        if func.is_view or func.overloadpacket in _MOVING_NOTHING:
            return result
        if "out" in kwargs and (kwargs["out"] is not args[0] or kwargs.get("beta") == 0):
            read = [each for each in read if each is not kwargs["out"]]
        if func.overloadpacket in _OF_FEW:
            self.total += 2 * args[2].numel() * args[0].element_size()
            return result
        for tensor, changes in [*((each, False) for each in read), *((each, True) for each in tree_leaves(result))]:
            self._touch(tensor, changes)
        return result

    def emptied(self) -> int:
        """Write what is changed to memory, forget all, and return the bytes so far."""
        self.total += _LINE * sum(self._is_changed.values())
        self._is_changed.clear()
        return self.total

    def _touch(self, tensor: Any, changes: bool) -> None:
        lines = self._is_changed
        if not isinstance(tensor, Tensor):
            return
        if tensor.dim() < 2 or tensor.shape[-1] == 1:
            self.total += tensor.nbytes // SCALE
            return
        for line in _lines(tensor):
            if line in lines:
                lines.move_to_end(line)
                lines[line] |= changes
                continue
            self.total += 0 if changes else _LINE
            lines[line] = changes
            if len(lines) > self._capacity and lines.popitem(last=False)[1]:
                self.total += _LINE


def _lines(tensor: Tensor) -> Iterator[int]:
    """Yield the addresses of a tensor's stretches of memory, in lines."""
    dense = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride and size > 1]
    dense.sort(key=lambda dimension: dimension[1])
    length, starts = 1, [0]
    for size, stride in dense:
        if stride == length:
            length *= size
        else:
            starts = [start + index * stride for index in range(size) for start in starts]
    first, item = tensor.data_ptr(), tensor.element_size()
    for start in starts if tensor.numel() else ():
        yield from range((first + start * item) // _LINE, (first + (start + length) * item - 1) // _LINE + 1)


def _into_float32(func: Any, args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    """Compute a product that a CPU does not have."""
    matrices = [each.float() for each in args if isinstance(each, Tensor)]
    compute: Any = torch.mm if func.overloadpacket is aten.mm else torch.addmm
    return out.copy_(compute(*matrices, **kwargs))


@contextmanager
def _as_a_small_gpu() -> Iterator[None]:
    """Let the head choose as it does on a GPU, with tiles and blocks for lengths that are divided."""
    from rlhf_ppo.models import fused

    smaller = {
        "_is_on_cpu": lambda tensor: False,
        "_BLOCK_ELSEWHERE": fused._BLOCK_ELSEWHERE // SCALE**2,
        "_ROWS_ELSEWHERE": fused._ROWS_ELSEWHERE // SCALE,
        "multiplies_into_float32": lambda device, dtype: True,
    }
    with ExitStack() as stack:
        for name, value in smaller.items():
            stack.enter_context(mock.patch.object(fused, name, value))
        yield


def count(shape: Shape, elements: int = 2**27) -> tuple[float, float, list[Tensor]]:
    """Count the bytes of a forward pass as in the rollout, and of a forward and a backward pass, with the entropy.

    Args:
        shape: The pass.
        elements: Logits held at once.

    Returns:
        Both counts, and log-probabilities, targets, states and weight, the last two with their gradients.
    """
    from rlhf_ppo.models.fused import HeadFactors, LogitScaling, fused_logprobs

    tokens, width, vocabulary = (length // SCALE for length in shape[:3])
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, width, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).mul_(width**-0.5).to(shape.stored)
    weight.requires_grad_(shape.trained)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    head, counts = HeadFactors((states,), (weight,), None), []
    for learns in (False, True):
        with _as_a_small_gpu(), Traffic(CACHE // SCALE**2) as traffic, torch.autocast("cpu", torch.bfloat16):
            logprobs, _ = fused_logprobs(
                head, targets, LogitScaling(temperature=TEMPERATURE), elements // SCALE**2, with_entropy=learns
            )
            if learns:
                logprobs.backward(torch.linspace(-1, 1, tokens))
            counts.append(traffic.emptied() * SCALE**2)
    return *counts, [logprobs.detach(), targets, states, weight]


def ideal(shape: Shape, elements: int = 2**27) -> tuple[float, float]:
    """Give the least bytes of a forward pass, and of a forward and a backward pass."""
    tokens, width, vocabulary, stored, trained = shape
    logits, states, weight = tokens * vocabulary, tokens * width, vocabulary * width
    cast = 0 if stored == torch.bfloat16 else (stored.itemsize + 2) * weight
    forward = cast + 2 * weight + 2 * states + 2 * 4 * logits
    computed_again = 1 - min(1.0, elements / logits)
    by_logits = 4 * logits * (1 + computed_again) + 2 * logits * (2 + trained)
    products = cast + 2 * 2 * weight + (stored.itemsize * weight if trained else 0) + (2 + 2 * trained) * states
    return forward, forward + by_logits + products


def table() -> list[list[str]]:
    """Count all shapes, and make the lines of a table in GB."""
    lines = []
    for shape in SHAPES:
        for what, here, least in zip(("forward", "and backward"), count(shape)[:2], ideal(shape), strict=True):
            lines.append([str(shape), what, f"{here / 1e9:.1f}", f"{least / 1e9:.1f}", f"{here / least:.2f}"])
    return lines


if __name__ == "__main__":
    for line in [["head", "pass", "GB", "least", "times"], ["---"] * 5, *table()]:
        print(f"| {' | '.join(line)} |", flush=True)
