"""What a model's generation needs, found out by generating a few tokens: whether it minds padding, and what it caches.

The log-probabilities that PPO learns from are those of the forward pass. A response must have been drawn from the same
distributions, alone or beside longer prompts, also after the rows that have ended were dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from rlhf_ppo.generation.cache import roomy_cache
from rlhf_ppo.generation.dropping import rows_of_cache
from rlhf_ppo.generation.hiding import own_generation_config_hidden
from rlhf_ppo.generation.protocol import generating
from rlhf_ppo.models.consistency import deviation, rounding
from rlhf_ppo.models.logprobs import logits
from rlhf_ppo.models.modes import in_eval_mode
from rlhf_ppo.models.passes import hidden_states
from rlhf_ppo.models.unwrapping import text_config, transformers_model
from rlhf_ppo.processes.random_numbers import rng_kept

_PROMPTS = (3, 7)
"""Tokens of the prompts; the shorter one is generated from alone and beside the longer one."""
_NEW_TOKENS = 4
_FOUND, _ROOMY = "generation_needs", "takes_roomy_cache"


class GenerationNeeds(NamedTuple):
    """How a model must be generated from.

    Attributes:
        equal_lengths: Whether the prompts of a call must be of one length: padding before them changes what follows.
        one_by_one: Whether each prompt needs a call of its own: other rows change what follows, even of its length.
        keeps_cache: Whether some rows' part of its cache can be kept; else their tokens are read again.
    """

    equal_lengths: bool = False
    one_by_one: bool = False
    keeps_cache: bool = True


class _Forces(LogitsProcessor):
    """Makes `generate` choose given tokens, long `(B, T)`."""

    def __init__(self, tokens: Tensor, prompt_length: int) -> None:
        self.tokens, self.prompt_length = tokens, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[:, input_ids.shape[1] - self.prompt_length]
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)


@torch.no_grad()
def generation_needs(policy: nn.Module) -> GenerationNeeds:
    """Find out, once for each model, how it must be generated from; where parameters are sharded, all ranks together.

    Args:
        policy: A causal language model, or a `PeftModel` around one.

    Raises:
        ValueError: Even alone it generates from other distributions than those of its forward pass.
    """
    model = transformers_model(policy)
    if (found := vars(model).get(_FOUND)) is None:
        with in_eval_mode(policy), rng_kept(), own_generation_config_hidden(policy):
            found = _find_out(policy)
        setattr(model, _FOUND, found)
    return found


@torch.no_grad()
def cache_maker(policy: nn.Module) -> Callable[[], Cache | None]:
    """Return what makes a cache for the policy's `generate`: with room where that gives the same logits, else None.

    Tried once for each model and each type that autocast casts to.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
    """
    model = transformers_model(policy)
    device = next(policy.parameters()).device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    tried = vars(model).setdefault(_ROOMY, {})
    if dtype not in tried:
        with in_eval_mode(policy), rng_kept(), own_generation_config_hidden(policy):
            tried[dtype] = _gives_the_same_with_room(policy)
    return functools.partial(roomy_cache, model) if tried[dtype] else lambda: None


def _gives_the_same_with_room(policy: nn.Module) -> bool:
    cache = roomy_cache(transformers_model(policy))
    if cache is None:
        return False
    prompts = _prompts(policy)
    expected = _by_generation(policy, *prompts)
    if expected.device.type != "cpu":  # kernels of an accelerator may add up in any order
        return _agree(policy, lambda: _by_generation(policy, *prompts, past_key_values=cache), expected)
    try:
        return torch.equal(_by_generation(policy, *prompts, past_key_values=cache), expected)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
        return False


def _find_out(policy: nn.Module) -> GenerationNeeds:
    ids, mask, forced = _prompts(policy)
    expected = _by_forward_pass(policy, ids, mask, forced)
    short = slice(-_PROMPTS[0], None)
    alone = _by_generation(policy, ids[:1, short], mask[:1, short], forced[:1])
    if not (expected.isfinite().all() and alone.isfinite().all()):
        return GenerationNeeds()  # broken weights are named where they are used
    if (error := deviation(alone, expected[:1])) > _rounding(policy):
        raise ValueError(
            f"{type(transformers_model(policy)).__name__} generates from other distributions than those of its "
            f"forward pass (logits differ by {error:.2g} of their size), so that PPO would learn from wrong "
            "probabilities; use another architecture"
        )
    if _agree(policy, lambda: _by_generation(policy, ids, mask, forced), expected):
        needs = GenerationNeeds()
    elif _agree(policy, lambda: _by_generation(policy, ids[1:], mask[1:], forced[1:]), expected[1:]):
        needs = GenerationNeeds(equal_lengths=True)
    else:
        return GenerationNeeds(one_by_one=True)
    return needs._replace(
        keeps_cache=_agree(policy, lambda: _dropping_the_first(policy, ids, forced), expected[2:, -1:])
    )


def _prompts(policy: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return left-padded ids and mask `(3, C)` of a short and two long prompts, and what must follow, `(3, T)`."""
    device = next(policy.parameters()).device
    lengths = torch.tensor([_PROMPTS[0], _PROMPTS[1], _PROMPTS[1]], device=device)
    width = _PROMPTS[1] + _NEW_TOKENS
    ids = (torch.arange(3 * width, device=device).view(3, width) * 5 + 1) % text_config(policy).vocab_size
    mask = torch.arange(_PROMPTS[1], device=device) >= _PROMPTS[1] - lengths[:, None]
    return ids[:, : _PROMPTS[1]].masked_fill(~mask, 0), mask, ids[:, _PROMPTS[1] :]


def _by_forward_pass(policy: nn.Module, ids: Tensor, mask: Tensor, forced: Tensor) -> Tensor:
    """Return the logits `(B, T, V)` of the tokens that follow."""
    whole = torch.cat((mask, torch.ones_like(forced, dtype=torch.bool)), dim=1)
    states = hidden_states(policy, torch.cat((ids, forced), dim=1), whole)
    return logits(policy, states[:, -forced.shape[1] - 1 : -1])


def _by_generation(policy: nn.Module, ids: Tensor, mask: Tensor, forced: Tensor, **cache: Any) -> Tensor:
    return _logits(_generate(policy, ids, mask, forced, **cache))


def _dropping_the_first(policy: nn.Module, ids: Tensor, forced: Tensor) -> Tensor:
    """Return the logits `(1, 1, V)` of the last token of the last row, once the row before it was dropped."""
    rows, mask = slice(1, None), torch.ones_like(ids[1:], dtype=torch.bool)
    output = _generate(policy, ids[rows], mask, forced[rows, :-1])
    cache = rows_of_cache(output, torch.tensor([1], device=ids.device))
    ids, mask = output.sequences[1:], torch.ones_like(output.sequences[1:], dtype=torch.bool)
    return _logits(_generate(policy, ids, mask, forced[2:, -1:], **cache))


def _logits(output: GenerateDecoderOnlyOutput) -> Tensor:
    return torch.stack(output.logits or (), dim=1).float()


def _generate(policy: nn.Module, ids: Tensor, mask: Tensor, forced: Tensor, **cache: Any) -> GenerateDecoderOnlyOutput:
    config = GenerationConfig(
        max_new_tokens=forced.shape[1],
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return generating(policy).generate(
        input_ids=ids,
        attention_mask=mask.long(),
        generation_config=config,
        logits_processor=LogitsProcessorList([_Forces(forced, ids.shape[1])]),
        **cache,
    )


def _rounding(policy: nn.Module) -> float:
    """Return what logits may be off by, which are float32 whatever they were computed in."""
    return rounding(next(weight for weight in policy.parameters() if weight.is_floating_point()))


def _agree(policy: nn.Module, generate: Callable[[], Tensor], expected: Tensor) -> bool:
    try:
        return deviation(generate(), expected) <= _rounding(policy)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):  # shapes that the model cannot work with
        return False
