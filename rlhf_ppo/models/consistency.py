"""What PPO takes for granted of an architecture, found out by running it on a few tokens before any training.

A token's log-probability must follow from the tokens before it in its own row, and from nothing else: no randomness,
no later token, no padding, no other row. No list of names says so of an architecture; a few passes do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from rlhf_ppo.config.settled import settings_of
from rlhf_ppo.models.modes import as_in_learning, in_eval_mode
from rlhf_ppo.models.passes import run_padded
from rlhf_ppo.models.sharded import is_sharded
from rlhf_ppo.models.unwrapping import backbone, text_config, transformers_model
from rlhf_ppo.processes.logs import get_logger
from rlhf_ppo.processes.random_numbers import rng_kept

logger = get_logger(__name__)

LENGTHS = (3, 8, 8)
"""Tokens of the rows of a probe; the last two differ in their last token alone."""


@torch.no_grad()
def check_consistent(model: nn.Module, argument: str, args: TrainingArguments | None = None) -> None:
    """Check that a model computes the same from the same tokens, in learning as in evaluation, in any batch.

    Args:
        model: A causal language model or a value model, or a `PeftModel` around one; it stays as it was.
        argument: What the caller's argument is called, for error messages.
        args: Of a model that learns: `gradient_checkpointing` and `gradient_checkpointing_kwargs`.

    Raises:
        ValueError: It does not, or cannot recompute activations; names the architecture and says why.
    """
    name = type(transformers_model(model)).__name__
    if is_sharded(model):
        logger.info(
            f"{argument} ({name}) is sharded by ZeRO-3 and cannot run yet: that it is deterministic and causal and "
            "ignores padding is not checked."
        )
        return
    body = backbone(model)
    ids, mask = probe_rows(model)
    recomputing = args is not None and bool(args.gradient_checkpointing)
    how = settings_of(args.gradient_checkpointing_kwargs) if args is not None else None
    with rng_kept():
        with in_eval_mode(model):
            alone = run_padded(body, ids[:1, : LENGTHS[0]], mask[:1, : LENGTHS[0]])
        try:
            with as_in_learning(recomputing, how, model):
                first, second = (run_padded(body, ids, mask) for _ in range(2))
        except ValueError as error:
            if "support" not in str(error):
                raise
            raise ValueError(f"{argument}: {error} Set gradient_checkpointing=False") from error
        with in_eval_mode(model):
            evaluated = run_padded(body, ids, mask)
            if args is not None:
                _check_gradient(f"{argument} is a {name}", body, ids, mask)
    _check(f"{argument} is a {name}", alone, first, second, evaluated)


def probe_rows(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return ids and mask `(B, L)` of rows of `LENGTHS` tokens, padded on the right."""
    device = next(model.parameters()).device
    width = max(LENGTHS)
    ids = (torch.arange(len(LENGTHS) * width, device=device).view(-1, width) * 7 + 1) % text_config(model).vocab_size
    ids[2, :-1] = ids[1, :-1]
    ids[2, -1] = (ids[1, -1] + 1) % text_config(model).vocab_size
    return ids, torch.arange(width, device=device) < torch.tensor(LENGTHS, device=device)[:, None]


def deviation(states: Tensor, expected: Tensor) -> float:
    """Return how far states are from what they must be, as a share of these: `||x - y|| / ||y||`."""
    return float((states - expected).float().norm() / expected.float().norm().clamp(min=1e-30))


def rounding(states: Tensor) -> float:
    """Return the deviation that other kernels, or other shapes of a batch, may cause: much in 16 bits."""
    in_16_bits = states.dtype.itemsize == 2 or torch.is_autocast_enabled(states.device.type)
    return 0.3 if in_16_bits else 1e-3


def _check_gradient(what: str, body: nn.Module, ids: Tensor, mask: Tensor) -> None:
    """Check that gradients reach the first layers in the mode that modules learn in."""
    trained = [parameter for parameter in body.parameters() if parameter.requires_grad]
    if not trained:
        return
    try:
        with torch.enable_grad():
            states = run_padded(body, ids[:1], mask[:1])
            torch.autograd.grad(states.float().square().sum(), trained[:1], allow_unused=True)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{what}, whose gradients cannot be computed outside training mode: {error!s:.300}"
        ) from error


def _check(what: str, alone: Tensor, first: Tensor, second: Tensor, evaluated: Tensor) -> None:
    if not evaluated.isfinite().all():
        return  # broken weights, which are named where they are first sampled from
    tolerance = rounding(evaluated)
    # Kernels of an accelerator may add up in any order; on a CPU the same pass gives the same bits.
    repeated = 0.0 if first.device.type == "cpu" else tolerance
    if (error := deviation(second, first)) > repeated:
        raise ValueError(
            f"{what}, which computes at random: two passes over the same tokens differ by {error:.2g} of their "
            "states, so that the importance ratio would not start at 1; use another architecture"
        )
    if (error := deviation(first, evaluated)) > tolerance:
        raise ValueError(
            f"{what}, which computes something else in training than in evaluation (by {error:.2g} of its states), so "
            "that the importance ratio would not start at 1; use another architecture"
        )
    own, row, twin = evaluated.split(LENGTHS)
    if (error := deviation(twin[:-1], row[:-1])) > tolerance:
        raise ValueError(
            f"{what}, in which a token's state depends on later tokens (by {error:.2g}), so that it cannot generate "
            "from left to right; use a decoder (models of BERT's kind need is_decoder=True in their configuration)"
        )
    if (error := deviation(own, alone)) > tolerance:
        raise ValueError(
            f"{what}, in which a row's states depend on the padding behind it (by {error:.2g}): rows of different "
            "lengths cannot share a pass; use another architecture"
        )
