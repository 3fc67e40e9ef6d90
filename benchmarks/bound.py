"""The time that an update cannot go below: useful FLOPs over the measured rate, decoded bytes over the bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def best_seconds(function: Callable[[], Any], repeats: int = 5) -> float:
    """Time a function; the shortest of several calls."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def matmul_rate(size: int = 1024) -> float:
    """Measure float32 matrix multiplication, FLOP/s, with as many threads as torch has now."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / best_seconds(lambda: left @ right)


def bandwidth(size: int = 2**26) -> float:
    """Measure reading memory, bytes/s."""
    values = torch.randn(size)
    return 4 * size / best_seconds(values.sum)


def forward_flops(model: dict[str, Any], prompts: torch.Tensor, responses: torch.Tensor) -> tuple[float, float]:
    """Count the FLOPs of one forward pass over real tokens.

    Args:
        model: Arguments of the models' configuration, with `H` hidden and `F` inner numbers, `V` tokens, `L` layers.
        prompts: Tokens of each prompt, `(B,)`.
        responses: Tokens of each response, `(B,)`.

    Returns:
        Of the layers over all tokens, `L (2 n (4 H^2 + 3 H F) + 2 H n (n + 1))` a row with causal attention, and of
        the head over the response's tokens, `2 H V`.
    """
    width, inner, layers = model["hidden_size"], model["intermediate_size"], model["num_hidden_layers"]
    lengths = (prompts + responses).double()
    body = layers * (2 * lengths * (4 * width**2 + 3 * width * inner) + 2 * width * lengths * (lengths + 1))
    return float(body.sum()), 2.0 * width * model["vocab_size"] * float(responses.sum())


def update_flops(
    model: dict[str, Any], prompts: torch.Tensor, responses: torch.Tensor, num_ppo_epochs: int
) -> tuple[float, float]:
    """Count the useful FLOPs of one PPO update.

    Args:
        model: As in `forward_flops`.
        prompts: Tokens of each prompt, `(B,)`.
        responses: Tokens of each response, `(B,)`.
        num_ppo_epochs: Passes over the batch.

    Returns:
        Of the whole update and of its learning phase. Generation, policy, reference, value and reward model each run
        forward once, three of them with the head; learning is policy and value model forward and backward (3 x).
    """
    body, head = forward_flops(model, prompts, responses)
    learning = 3 * num_ppo_epochs * (2 * body + head)
    return 5 * body + 3 * head + learning, learning


def decoded_bytes(model: dict[str, Any], num_steps: int) -> float:
    """Count the float32 weights that decoding reads, once a step."""
    width, inner, layers = model["hidden_size"], model["intermediate_size"], model["num_hidden_layers"]
    return 4.0 * num_steps * (layers * (4 * width**2 + 3 * width * inner) + width * model["vocab_size"])
