"""Probe of a model's generation: a few forced tokens, compared with the forward pass.

PPO learns from the log-probabilities of the forward pass. Generation must draw from the same distributions: alone,
beside longer prompts, and after finished rows have left the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from rlhf_ppo.generation.caches import KeptCaches, preallocated_cache, rows_of_cache
from rlhf_ppo.generation.protocol import generating
from rlhf_ppo.generation.sampling import default_generation_config
from rlhf_ppo.generation.transformers_engine import GenerationNeeds
from rlhf_ppo.models.capabilities import deviation, rounding
from rlhf_ppo.models.logprobs import logits
from rlhf_ppo.models.packing import hidden_states
from rlhf_ppo.models.unwrapping import in_eval_mode, text_config, transformers_model
from rlhf_ppo.processes.distributed import preserve_rng

_SHORT, _LONG = 3, 7
"""Tokens of the prompts; the short prompt is generated from alone and beside the long ones."""
_NEW_TOKENS = 4


class _ForcedTokens(LogitsProcessor):
    """Makes `generate` choose given tokens, long `(B, T)`."""

    def __init__(self, tokens: Tensor, prompt_length: int) -> None:
        self.tokens, self.prompt_length = tokens, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[:, input_ids.shape[1] - self.prompt_length]
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)


@torch.no_grad()
def probe_generation(policy: nn.Module, known: GenerationNeeds | None, dtype: torch.dtype | None) -> GenerationNeeds:
    """Find out how a model must be generated from; where parameters are sharded, all ranks together.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
        known: Earlier answers; only the cache is then tried under the type that autocast now casts to.
        dtype: That type, or None.

    Raises:
        ValueError: Even a single prompt gets other distributions than those of the forward pass.
    """
    with in_eval_mode(policy), preserve_rng(), default_generation_config(policy):
        needs = _probe_batches(policy) if known is None else known
        needs.preallocates[dtype] = _takes_preallocated_cache(policy)
    return needs


@torch.no_grad()
def probe_continuing(policy: nn.Module) -> bool:
    """Find out whether rows can be continued from keys and values that were kept, beside other rows than before."""
    with in_eval_mode(policy), preserve_rng(), default_generation_config(policy):
        if not preallocated_cache(transformers_model(policy), keeps_all=True):
            return False
        ids, mask, forced = _prompts(policy)
        whole = torch.cat((mask, torch.ones_like(forced, dtype=torch.bool)), dim=1)
        states = hidden_states(policy, torch.cat((ids, forced), dim=1), whole)
        return _agree(policy, lambda: _continued_logits(policy, ids, mask, forced), logits(policy, states[:, -2:-1]))


def _continued_logits(policy: nn.Module, ids: Tensor, mask: Tensor, forced: Tensor) -> Tensor:
    """Return the logits `(3, 1, V)` of the last forced token; the first is a turn, those between are its answer.

    The short row, and the two long ones in the other order, continue in calls of their own.
    """
    model, found, kept = transformers_model(policy), [], {}
    rows = KeptCaches(kept, [0, 1, 2])
    output = _generate(policy, ids, mask, forced[:, :1], **rows.cache(model, ids, mask.long()))
    rows.keep(torch.arange(3), torch.ones(3, dtype=torch.bool), output.past_key_values, output.sequences, mask.long())
    for names in ([0], [2, 1]):
        start = int((~mask[names[0]]).sum())
        context = torch.cat((ids[names, start:], forced[names, :-1]), dim=1)
        real = torch.ones_like(context)
        cache = KeptCaches(kept, names).cache(model, context, real)
        found.append(_generated_logits(policy, context, real, forced[names, -1:], **cache))
    return torch.cat((found[0], found[1].flip(0)))


def _takes_preallocated_cache(policy: nn.Module) -> bool:
    cache = preallocated_cache(transformers_model(policy))
    if not cache:
        return False
    prompts = _prompts(policy)
    expected = _generated_logits(policy, *prompts)
    if expected.device.type != "cpu":  # kernels of an accelerator may add up in any order
        return _agree(policy, lambda: _generated_logits(policy, *prompts, **cache), expected)
    try:
        return torch.equal(_generated_logits(policy, *prompts, **cache), expected)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
        return False


def _probe_batches(policy: nn.Module) -> GenerationNeeds:
    ids, mask, forced = _prompts(policy)
    whole = torch.cat((mask, torch.ones_like(forced, dtype=torch.bool)), dim=1)
    states = hidden_states(policy, torch.cat((ids, forced), dim=1), whole)
    expected = logits(policy, states[:, -_NEW_TOKENS - 1 : -1])
    alone = _generated_logits(policy, ids[:1, -_SHORT:], mask[:1, -_SHORT:], forced[:1])
    if not (expected.isfinite().all() and alone.isfinite().all()):
        return GenerationNeeds()  # broken weights are reported where they are used
    if (error := deviation(alone, expected[:1])) > _rounding(policy):
        raise ValueError(
            f"{type(transformers_model(policy)).__name__} generates from other distributions than those of its "
            f"forward pass (logits differ by {error:.2g} of their size), so that PPO would learn from wrong "
            "probabilities; use another architecture"
        )
    needs = GenerationNeeds()
    if not _agree(policy, lambda: _generated_logits(policy, ids, mask, forced), expected):
        if not _agree(policy, lambda: _generated_logits(policy, ids[1:], mask[1:], forced[1:]), expected[1:]):
            return GenerationNeeds(one_by_one=True)
        needs.equal_lengths = True
    needs.keeps_cache = _agree(policy, lambda: _logits_of_kept_row(policy, ids, forced), expected[2:, -1:])
    return needs


def _prompts(policy: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return left-padded ids and mask `(3, C)` of a short and two long prompts, and their forced tokens `(3, T)`."""
    device = next(policy.parameters()).device
    width = _LONG + _NEW_TOKENS
    ids = (torch.arange(3 * width, device=device).view(3, width) * 5 + 1) % text_config(policy).vocab_size
    lengths = torch.tensor([_SHORT, _LONG, _LONG], device=device)
    mask = torch.arange(_LONG, device=device) >= _LONG - lengths[:, None]
    return ids[:, :_LONG].masked_fill(~mask, 0), mask, ids[:, _LONG:]


def _logits_of_kept_row(policy: nn.Module, ids: Tensor, forced: Tensor) -> Tensor:
    """Return the logits `(1, 1, V)` of the last token of the last row, after the row before it has left the batch."""
    mask = torch.ones_like(ids[1:], dtype=torch.bool)
    output = _generate(policy, ids[1:], mask, forced[1:, :-1])
    cache = rows_of_cache(output, torch.tensor([1], device=ids.device))
    ids, mask = output.sequences[1:], torch.ones_like(output.sequences[1:], dtype=torch.bool)
    return _generated_logits(policy, ids, mask, forced[2:, -1:], **cache)


def _generated_logits(policy: nn.Module, ids: Tensor, mask: Tensor, forced: Tensor, **cache: Any) -> Tensor:
    """Return the logits `(B, T, V)` of the forced tokens."""
    return torch.stack(_generate(policy, ids, mask, forced, **cache).logits or (), dim=1).float()


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
        logits_processor=LogitsProcessorList([_ForcedTokens(forced, ids.shape[1])]),
        **cache,
    )


def _rounding(policy: nn.Module) -> float:
    """Return the rounding of logits, which are float32 whatever they were computed in."""
    return rounding(next(weight for weight in policy.parameters() if weight.is_floating_point()))


def _agree(policy: nn.Module, generate: Callable[[], Tensor], expected: Tensor) -> bool:
    try:
        return deviation(generate(), expected) <= _rounding(policy)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):  # shapes that the model cannot work with
        return False
