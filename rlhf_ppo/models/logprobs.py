"""Log-probabilities and entropy of response tokens, without a `(batch, time, vocabulary)` tensor.

The backbone runs once; the head is applied to the response's real tokens only, a chunk of tokens at a time. While
training, the logits of all chunks but the last are recomputed in the backward pass instead of kept.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf_ppo.data.places import Places
from rlhf_ppo.models.fused import LogitScaling, fused_logprobs
from rlhf_ppo.models.head_factors import head_layers
from rlhf_ppo.models.modes import in_eval_mode
from rlhf_ppo.models.passes import hidden_states
from rlhf_ppo.models.sharded import is_managed, is_sharded
from rlhf_ppo.models.unwrapping import output_layer, probe_ids, text_config, transformers_model

MAX_CHUNK_ELEMENTS, MAX_CHUNK_ELEMENTS_ON_GPU = 2**24, 2**27
"""Logits computed at once, tokens x vocabulary: 64 and 512 MiB in float32. The fewer they are, the more often hidden
states and their gradients are read and written, with few tokens the head's weight and its gradient too."""


class ResponseLogprobs(NamedTuple):
    """What the policy says about the tokens of a response.

    Attributes:
        logprobs: Log-probability of each response token, nats, float32 `(B, T)`, 0 outside the mask.
        entropy: Entropy of the whole next-token distribution, nats, float32 `(B, T)`, 0 outside the mask; NaN in it
            where the entropy was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor


def response_logprobs(
    policy: nn.Module,
    query_responses: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    temperature: float,
    with_entropy: bool = True,
    places: Places | None = None,
) -> ResponseLogprobs:
    r"""Compute `log softmax(z_t / temperature)[y_t]` for every response token that the policy wrote.

    The temperature is that of sampling: PPO's ratio compares the distributions that were sampled from (N+
    Implementation Details, arXiv 2403.17031, section 3.1). Top-k and top-p are not applied: both sides of the ratio
    are full distributions.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
        query_responses: Token ids, long `(B, C + T)`.
        attention_mask: True on real tokens, bool `(B, C + T)`.
        response_mask: True on the response tokens that the policy wrote, bool `(B, T)`.
        temperature: Sampling temperature, above 0.
        with_entropy: Whether to compute the entropy.
        places: Where the real tokens are; None reads it from the device.

    Returns:
        Log-probabilities and entropy, both float32 `(B, T)`.
    """
    num_rows, length = response_mask.shape
    places = Places.of(attention_mask, response_mask) if places is None else places
    tokens = places.response_tokens
    states = hidden_states(policy, query_responses, attention_mask, places).flatten(0, 1).index_select(0, tokens - 1)
    per_token = token_logprobs(policy, states, query_responses.flatten()[tokens], temperature, with_entropy)
    zeros = torch.zeros(num_rows * length, device=states.device)
    return ResponseLogprobs(
        *(zeros.index_copy(0, places.responses, each).view(num_rows, length) for each in per_token)
    )


def token_logprobs(
    policy: nn.Module, states: Tensor, targets: Tensor, temperature: float, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Apply the head to `N` hidden states, chunk by chunk.

    Args:
        policy: The model whose head reads the states.
        states: Hidden states before each token `(N, H)`.
        targets: The tokens that followed, long `(N,)`.
        temperature: Sampling temperature.
        with_entropy: Whether to compute the entropies, which are else NaN.

    Returns:
        Log-probabilities and entropies in nats, float32 `(N,)` each.
    """
    head = head_layers(output_layer(policy), states)
    if head is None:
        return _logprobs_of_called_head(policy, states, targets, temperature, with_entropy)
    scaling = logit_scaling(policy, temperature)
    return head.apply(
        lambda factors: fused_logprobs(factors, targets, scaling, max_chunk_elements(states), with_entropy)
    )


def max_chunk_elements(states: Tensor) -> int:
    """Return how many logits are computed at once where the states are."""
    return MAX_CHUNK_ELEMENTS_ON_GPU if states.device.type == "cuda" else MAX_CHUNK_ELEMENTS


def _logprobs_of_called_head(
    policy: nn.Module, states: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Do what `token_logprobs` does with a head that can only be called, leaving the gradients to autograd."""
    chunk = max(1, max_chunk_elements(states) // text_config(policy).vocab_size)
    num_chunks = _same_on_all_ranks(policy, math.ceil(len(states) / chunk))
    recompute = torch.is_grad_enabled() and num_chunks > 1

    def one_chunk(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_distribution = (logits(policy, states) / temperature).log_softmax(dim=-1)
        logprobs = log_distribution.gather(1, targets[:, None]).squeeze(1)
        if not with_entropy:
            return logprobs, torch.full_like(logprobs, math.nan)
        finite = log_distribution.clamp(min=torch.finfo(torch.float32).min)  # a forbidden token has -inf
        return logprobs, -(log_distribution.exp() * finite).sum(dim=-1)

    parts = [
        checkpoint(one_chunk, *part, use_reentrant=False) if recompute else one_chunk(*part)
        for part in zip(states.tensor_split(num_chunks), targets.tensor_split(num_chunks), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _same_on_all_ranks(policy: nn.Module, num_chunks: int) -> int:
    """Under ZeRO-3 each call of a head gathers its weight from all ranks: all must call it equally often."""
    if not is_managed(policy):
        return num_chunks
    largest = torch.tensor(num_chunks, device=next(policy.parameters()).device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return int(largest)


def logits(policy: nn.Module, states: Tensor) -> Tensor:
    """Apply the language-model head, with the scalings that some architectures put after it.

    Args:
        policy: The model whose head reads the states.
        states: Hidden states `(..., H)`.

    Returns:
        Logits before the temperature, float32 `(..., V)`.
    """
    result = output_layer(policy)(states).float()
    factor, cap, _ = logit_scaling(policy)
    return result * factor if cap is None else cap * torch.tanh(result * factor / cap)


def logit_scaling(policy: nn.Module, temperature: float = 1.0) -> LogitScaling:
    """Read from the configuration what the architecture does to its logits after the head.

    Args:
        policy: The model.
        temperature: Sampling temperature.
    """
    config = text_config(policy)
    factor = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        factor *= getattr(config, name, None) or 1.0
    for name in ("logits_scaling", "logits_mup_width_multiplier"):
        factor /= getattr(config, name, None) or 1.0
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    cap = next((cap for name in names if (cap := getattr(config, name, None))), None)
    return LogitScaling(factor, cap, temperature)


@torch.no_grad()
def check_logits(policy: nn.Module) -> None:
    """Check once that head(backbone(ids)) is what the model itself calls its logits.

    Raises:
        ValueError: The architecture does something to its logits that `logits` does not know.
    """
    if is_sharded(policy):
        return
    ids = probe_ids(policy)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with in_eval_mode(policy):
        ours = logits(policy, hidden_states(policy, ids, mask))
        theirs = transformers_model(policy)(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits.float()
    if not theirs.isfinite().all():
        return  # numbers that overflow, which are named where they are first sampled from
    tolerance = 1e-2 if next(policy.parameters()).dtype.itemsize == 2 else 1e-4
    if ours.shape != theirs.shape or not torch.allclose(
        ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max())
    ):
        raise ValueError(
            f"{type(transformers_model(policy)).__name__} changes its logits after the head (they differ from "
            f"head(backbone(ids)) by {float((ours - theirs).abs().max()):.3g}), in a way rlhf_ppo does not know; add "
            "its scaling to rlhf_ppo.models.logprobs.logit_scaling"
        )
