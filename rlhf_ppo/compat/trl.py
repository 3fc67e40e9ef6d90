"""Helper functions of TRL's documented PPO interface, with the same argument names.

The trainer uses explicit masks. These functions take padded ids and derive the mask from `ids != pad_token_id` unless
a mask is passed: pass it if PAD is also a real token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.utils.generic import ModelOutput

from rlhf_ppo.data.rollout import pad_right
from rlhf_ppo.generation.protocol import Generates
from rlhf_ppo.generation.sampling import response_mask
from rlhf_ppo.models.packing import position_ids


def generate(
    lm_backbone: Generates,
    queries: Tensor,
    pad_token_id: int,
    generation_config: GenerationConfig,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generate responses that do not depend on padding.

    Args:
        lm_backbone: A causal language model.
        queries: Prompt ids, long `(B, C)`, left-padded.
        pad_token_id: The padding token.
        generation_config: Sampling settings.
        attention_mask: True on real tokens `(B, C)`; None: `queries != pad_token_id`.

    Returns:
        Prompts with their responses, long `(B, C + T)`, and the processed scores that each token was sampled from,
        `(B, T, V)`.
    """
    mask = (queries != pad_token_id) if attention_mask is None else attention_mask.bool()
    output = lm_backbone.generate(
        input_ids=queries.masked_fill(~mask, 0),
        attention_mask=mask.long(),
        generation_config=generation_config,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return torch.cat((queries, output.sequences[:, queries.shape[1] :]), dim=1), torch.stack(output.scores, dim=1)


def _accepts_batch_size(function: Callable[..., Any]) -> Callable[..., Any]:
    """Accept `local_rollout_forward_batch_size` as `batch_size` too."""
    name = "local_rollout_forward_batch_size"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "batch_size" in kwargs:
            return function(*args, **{name: kwargs.pop("batch_size")}, **kwargs)
        return function(*args, **kwargs)

    return call


@_accepts_batch_size
@torch.no_grad()
def batch_generation(
    model: Generates,
    queries: Tensor,
    local_rollout_forward_batch_size: int,
    pad_token_id: int,
    generation_config: GenerationConfig,
) -> tuple[Tensor, Tensor]:
    """Generate responses in batches.

    Args:
        model: A causal language model.
        queries: Prompt ids, long `(B, C)`, left-padded.
        local_rollout_forward_batch_size: Prompts per batch; also called `batch_size`.
        pad_token_id: The padding token; pads shorter batches on the right.
        generation_config: Sampling settings.

    Returns:
        Prompts with their responses, long `(B, C + T)`, and scores `(B, T, V)`, 0 where a batch was shorter.

    Raises:
        TypeError: The batch size is given under both names, or under none.
    """
    parts = [
        generate(model, part, pad_token_id, generation_config)
        for part in queries.split(local_rollout_forward_batch_size)
    ]
    longest = max(scores.shape[1] for _, scores in parts)
    scores = [nn.functional.pad(scores, (0, 0, 0, longest - scores.shape[1])) for _, scores in parts]
    return pad_right([ids for ids, _ in parts], padding_value=pad_token_id), torch.cat(scores)


def forward(
    model: nn.Module, query_responses: Tensor, pad_token_id: int, attention_mask: Tensor | None = None
) -> ModelOutput:
    """Run a model on padded ids with explicit positions.

    Args:
        model: A transformers model.
        query_responses: Token ids, long `(B, L)`.
        pad_token_id: The padding token; may be outside of the vocabulary.
        attention_mask: True on real tokens `(B, L)`; None: `query_responses != pad_token_id`.

    Returns:
        The model's output, with hidden states.
    """
    mask = (query_responses != pad_token_id) if attention_mask is None else attention_mask.bool()
    return model(
        input_ids=query_responses.masked_fill(~mask, 0),
        attention_mask=mask.long(),
        position_ids=position_ids(mask),
        return_dict=True,
        output_hidden_states=True,
    )


def truncate_response(stop_token_id: int, pad_token_id: int, responses: Tensor) -> Tensor:
    """Replace all tokens after the first stop token by PAD; the stop token stays.

    Args:
        stop_token_id: The token that ends a response.
        pad_token_id: Id of the padding; may equal the stop token.
        responses: Sampled ids, long `(B, T)`.

    Returns:
        Long `(B, T)`.
    """
    return responses.masked_fill(~response_mask(responses, stop_token_id), pad_token_id)
