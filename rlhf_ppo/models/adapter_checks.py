"""What must hold of a model with adapters: shown by running it on a few tokens, not read off the adapter's kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlhf_ppo.models.modes import in_eval_mode
from rlhf_ppo.models.sharded import is_managed, is_sharded
from rlhf_ppo.models.unwrapping import is_peft_model, probe_ids, transformers_model, with_adapters
from rlhf_ppo.processes.logs import get_logger

logger = get_logger(__name__)

PROMPT_LEARNING = "prompt learning adds virtual tokens to the sequence itself; use a method like LoRA"
"""Why such adapters are refused, and what to do."""

_LORA_WEIGHT = re.compile(r"\.lora_(embedding_)?[AB]\.")
_LORA_FACTOR = re.compile(r"\.lora_(B|embedding_A)\.")
"""The factor that is 0 in a new adapter."""

_NOISE = 0.05
"""Standard deviation of what is added to trainable parameters to see what they change."""

_MOST_TRAINED_TOKENS = 29
"""How many tokens with trained embeddings of their own a model is tried on, at most."""


def check_adapter(model: nn.Module, argument: str) -> None:
    """Check that a model's active adapter acts in the layers alone, and on each row by itself.

    Models are run from their backbone up, past `PeftModel.forward`: what is done there (virtual tokens, the weights of
    a mixture of adapters, task ids) would be left out without a word. A new adapter often does nothing yet, so the
    trainable parameters are moved for the comparison.

    Args:
        model: Any model; one without adapters passes.
        argument: What the caller's argument is called, for the error message.

    Raises:
        ValueError: The adapter is of a kind that does something else.
    """
    if not is_peft_model(model):
        return
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(f"{argument} has an adapter of the kind {adapter_kind(model)}: {PROMPT_LEARNING}")
    if is_sharded(model):
        return
    ids = probe_tokens(model)
    try:
        with moved(model):
            ours, theirs = probe(transformers_model(model), ids), probe(model, ids)
            beside_another = probe(model, torch.cat((ids, ids.flip(1))))[:1]
    except Exception as error:  # each kind has errors of its own
        raise ValueError(
            f"{argument} has an adapter of the kind {adapter_kind(model)}, which cannot run on token ids alone "
            f"({type(error).__name__}: {error!s:.300}); use a method like LoRA"
        ) from error
    if not agree(ours, theirs):
        raise ValueError(
            f"{argument} has an adapter of the kind {adapter_kind(model)} that works in PeftModel.forward, outside "
            "the layers, which rlhf_ppo runs by themselves; use a method like LoRA, without such options"
        )
    if not agree(beside_another, theirs):
        raise ValueError(
            f"{argument} has an adapter of the kind {adapter_kind(model)} that mixes the rows of a batch: each "
            "response's log-probabilities would depend on the others; use a method like LoRA"
        )


def warn_of_rank_allocation(policy: nn.Module) -> None:
    """Say that nothing here calls what AdaLoRA and AdaMSS spread their ranks with."""
    if is_peft_model(policy) and hasattr(policy.base_model, "update_and_allocate"):
        logger.warning(
            f"The policy's adapter is of the kind {adapter_kind(policy)}, which spreads its ranks when "
            "base_model.update_and_allocate(step) is called after each optimizer step: unless a callback does so, all "
            "ranks stay as they are."
        )


def adapter_kind(model: nn.Module) -> str:
    """Return PEFT's name of the kind of a `PeftModel`'s active adapter, such as `LORA`."""
    from peft import PeftType

    return PeftType(with_adapters(model).active_peft_config.peft_type).value


def adds_nothing(model: nn.Module) -> bool:
    """Tell whether a model with a LoRA adapter gives the bits that it gives without, as a new one does.

    `W x + B A x = W x` to the bit where `B = 0` (for embeddings, `A = 0`). Read off the weights, up to the first that
    is not 0. False where it is not certain: other kinds and variants, several adapters, more that is trained, sharded
    weights.

    Args:
        model: Any model.
    """
    if not is_peft_model(model) or adapter_kind(model) != "LORA" or is_managed(model):
        return False
    if len(model.active_adapters) > 1 or any(getattr(part, "lora_variant", 0) for part in model.modules()):
        return False
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    of_adapter = all(_LORA_WEIGHT.search(name) and type(weight) is nn.Parameter for name, weight in trained.items())
    return (
        bool(trained)
        and of_adapter
        and not any(weight.any() for name, weight in trained.items() if _LORA_FACTOR.search(name))
    )


@contextmanager
@torch.no_grad()
def moved(model: nn.Module) -> Iterator[None]:
    """Have noise on all trainable parameters while a context lasts; they come back bit for bit.

    Args:
        model: The model; the noise is the same at each call.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trainable]
    try:
        for parameter in trainable:
            generator = torch.Generator(parameter.device).manual_seed(0)
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.add_(noise.to(parameter.dtype), alpha=_NOISE)
        yield
    finally:
        for parameter, value in zip(trainable, before, strict=True):
            parameter.copy_(value)


@torch.no_grad()
def probe(model: nn.Module, ids: Tensor) -> Tensor:
    """Return a model's logits; a base in 16 bits may be below a head in 32.

    Args:
        model: A transformers model, or a `PeftModel` around one.
        ids: Token ids, long `(B, L)`.
    """
    in_16_bits = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    with in_eval_mode(model), torch.autocast(ids.device.type, torch.bfloat16, enabled=in_16_bits):
        return model(input_ids=ids, use_cache=False).logits


def probe_tokens(model: nn.Module) -> Tensor:
    """Return a few tokens, long `(1, L)`, among them those whose embeddings an adapter trains one by one."""
    by_layer = (getattr(module, "token_indices", None) for module in model.modules())
    by_adapter = [ids for layer in by_layer if isinstance(layer, dict) for ids in layer.values()]
    trained = sorted({index for ids in by_adapter for index in ids})[:_MOST_TRAINED_TOKENS]
    ids = probe_ids(model)
    return torch.cat((ids, ids.new_tensor([trained], dtype=ids.dtype)), dim=1)


def agree(ours: Tensor, theirs: Tensor) -> bool:
    """Tell whether two tensors are the same up to rounding, of the largest number; NaN is the same as NaN."""
    is_exact = theirs.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    within = 1e-4 if is_exact else 3e-2
    largest = float(theirs.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(ours, theirs, rtol=within, atol=within * largest, equal_nan=True)
