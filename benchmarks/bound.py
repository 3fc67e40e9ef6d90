"""The time that an update cannot go below: useful FLOPs over the measured rate, decoded bytes over the bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

NOMINAL_RATES = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
"""Peak of dense bfloat16 products by the GPU's name, FLOP/s; NVIDIA's data sheets say 312 TFLOP/s of A100, and with
sparsity, which doubles it, 1513 of H100 PCIe, 1979 of H100 SXM and H200."""


def read_clock(device: str) -> float:
    """Read the time in seconds: on a GPU once it has done all that it was given, on a CPU that of a busy thread.

    CPU seconds leave out what other work on the machine takes, as in the measured phases.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()


def best_seconds(function: Callable[[], Any], device: str = "cpu", repeats: int = 5) -> float:
    """Time a function; the shortest of several calls."""
    seconds = []
    for _ in range(repeats):
        start = read_clock(device)
        function()
        seconds.append(read_clock(device) - start)
    return min(seconds)


def matmul_rate(dtype: torch.dtype = torch.float32, device: str = "cpu") -> float:
    """Measure matrix multiplication, FLOP/s, on a CPU with as many threads as torch has now.

    The matrices have 1024 rows and columns on a CPU, and 8192 on a GPU, which smaller ones do not keep busy.
    """
    size = 1024 if device == "cpu" else 8192
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: left @ right, device)


def bandwidth(dtype: torch.dtype = torch.float32, device: str = "cpu") -> float:
    """Measure reading memory, bytes/s: 2^26 numbers on a CPU, 2^30 on a GPU, where starting to read takes its time."""
    values = torch.randn(2**26 if device == "cpu" else 2**30, dtype=dtype, device=device)
    return values.nbytes / best_seconds(values.sum, device)


def matrices(model: dict[str, Any]) -> list[tuple[int, int]]:
    """List the number of inputs and outputs of the matrices of one layer.

    Args:
        model: Arguments of the models' configuration, with `H` hidden and `F` inner numbers.

    Returns:
        Of a Llama `2 H^2 + 2 H K` of attention, with `K` numbers of its heads of keys, and `3 H F` of its MLP; of
        a GPT-NeoX `3 H^2 + H^2` and `2 H F`.
    """
    width, inner = model["hidden_size"], model["intermediate_size"]
    keys = width * model.get("num_key_value_heads", 1) // model.get("num_attention_heads", 1)
    return {
        "llama": [(width, width)] * 2 + [(width, keys)] * 2 + [(width, inner)] * 2 + [(inner, width)],
        "gpt_neox": [(width, 3 * width), (width, width), (width, inner), (inner, width)],
    }[model["model_type"]]


class Flops(NamedTuple):
    """What one forward pass over real tokens multiplies, FLOPs.

    Attributes:
        layers: Products with the layers' matrices.
        attention: Scores of positions and sums of values, which have no weights.
        head: The head, on the response's tokens.
        adapters: Products with the adapters on the layers' matrices; 0 without.
    """

    layers: float
    attention: float
    head: float
    adapters: float


def forward_flops(
    model: dict[str, Any], prompts: torch.Tensor, responses: torch.Tensor, lora_rank: int | None = None
) -> Flops:
    """Count the FLOPs of one forward pass over real tokens.

    Args:
        model: Arguments of the models' configuration, with `H` hidden numbers, `V` tokens, `L` layers.
        prompts: Tokens of each prompt, `(B,)`.
        responses: Tokens of each response, `(B,)`.
        lora_rank: `r`, of adapters on all matrices of the layers; None without.

    Returns:
        Of a row of `n` tokens `2 n L` for each weight of a layer, `2 L H n (n + 1)` with causal attention, `2 H V` for
        each token of the response, and for adapters `2 n L r (inputs + outputs)` of each matrix. Biases, norms and
        activations are not counted.
    """
    width, layers = model["hidden_size"], model["num_hidden_layers"]
    lengths = (prompts + responses).double()
    tokens = float(lengths.sum())
    return Flops(
        layers=2 * tokens * layers * sum(inputs * outputs for inputs, outputs in matrices(model)),
        attention=2 * layers * width * float((lengths * (lengths + 1)).sum()),
        head=2.0 * width * model["vocab_size"] * float(responses.sum()),
        adapters=2 * tokens * layers * (lora_rank or 0) * sum(sum(shape) for shape in matrices(model)),
    )


def update_flops(
    model: dict[str, Any],
    prompts: torch.Tensor,
    responses: torch.Tensor,
    num_ppo_epochs: int,
    lora_rank: int | None = None,
    scorer: dict[str, Any] | None = None,
    *,
    computed: float = 1.0,
    shares_prompts: bool = False,
    has_value_model: bool = True,
    has_reward_model: bool = True,
) -> tuple[float, float]:
    """Count the useful FLOPs of one PPO update.

    A trained matrix takes as much again for the gradient of its weights, and again for that of its inputs: learning is
    3 x forward. Under adapters the policy's own matrices and its head are frozen and have no gradient of weights: 2 x
    forward. Adapters, and attention, whose factors both need a gradient, remain at 3 x. (Gradients of what the first
    layer's matrices read, the frozen embeddings, are counted although nothing needs them.)

    Args:
        model: As in `forward_flops`.
        prompts: Tokens of each prompt, `(B,)`.
        responses: Tokens of each response, `(B,)`.
        num_ppo_epochs: Passes over the batch.
        lora_rank: Rank of the policy's adapters; None if its weights are trained.
        scorer: Value and reward model, where they are of another configuration.
        computed: Share of the tokens that layers compute where rows share beginnings; attention counts by this share,
            which is too little, as shared tokens stand first.
        shares_prompts: Whether sampling, too, computes only this share: a prompt once for all its responses.
        has_value_model: Whether the values come from a model of their own; a head is not counted.
        has_reward_model: Whether a model scores.

    Returns:
        Of the whole update and of its learning phase. Generation, policy, reference, value and reward model each run
        forward once, three of them with the head, none with adapters, which could be merged there; learning is policy
        and value model forward and backward. The value model's weights are all trained.
    """
    forward = forward_flops(model, prompts, responses, lora_rank)
    body = computed * (forward.layers + forward.attention)
    other = forward if scorer is None else forward_flops(scorer, prompts, responses)
    scoring = computed * (other.layers + other.attention)
    frozen = 0.0 if lora_rank is None else computed * forward.layers + forward.head
    policy = 3 * (body + forward.head + computed * forward.adapters) - frozen
    learning = num_ppo_epochs * (policy + 3 * scoring * has_value_model)
    sampling = body if shares_prompts else forward.layers + forward.attention
    scored = scoring * (has_value_model + has_reward_model)
    return sampling + 2 * body + scored + 3 * forward.head + learning, learning


def decoded_bytes(model: dict[str, Any], num_steps: int, dtype: torch.dtype = torch.float32) -> float:
    """Count the bytes of the weights that decoding reads, once a step."""
    layer = sum(inputs * outputs for inputs, outputs in matrices(model))
    weights = model["num_hidden_layers"] * layer + model["hidden_size"] * model["vocab_size"]
    return float(dtype.itemsize * num_steps * weights)
