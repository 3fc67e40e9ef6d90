"""Checks of a model before training: longest sequence, vocabulary, independence of rows and padding, finite weights.

In PPO a token's log-probability may depend on the earlier tokens of its row only: not on randomness, later tokens,
padding or other rows. A few forward passes check this.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from rlhf_ppo.config.ppo_config import settings_of
from rlhf_ppo.data.prompts import PositionLimit, smallest
from rlhf_ppo.data.rollout import PackedIndices
from rlhf_ppo.models.packing import run_padded
from rlhf_ppo.models.unwrapping import (
    as_in_learning,
    backbone,
    in_eval_mode,
    is_in_16_bits,
    is_sharded,
    own_share,
    probe_rows,
    text_config,
    transformers_model,
)
from rlhf_ppo.processes.distributed import get_logger, preserve_rng


def position_limit(model: nn.Module) -> PositionLimit | None:
    """Return the longest sequence of a model, or None if it states no limit.

    Longrope (Phi-3 with 128k) and dynamic NTK scaling change the angles of all positions of a pass once its longest
    row exceeds the original length. A row's log-probabilities would then depend on the other rows, and earlier cached
    keys would differ from those of the forward pass.

    Args:
        model: A transformers model, or a `PeftModel` around one.
    """
    config, name = text_config(model), type(transformers_model(model)).__name__
    limits = [
        PositionLimit(original, f"beyond {original} the {kind} of {name} changes for all rows of a batch")
        for kind, original in _changing_ropes(config)
    ]
    if most := getattr(config, "max_position_embeddings", None):
        limits.append(PositionLimit(most, f"the model has {most}"))
    return smallest(limits)


def positions(model: nn.Module) -> int | None:
    """Return the tokens of `position_limit`."""
    limit = position_limit(model)
    return None if limit is None else limit.tokens


def _changing_ropes(config: Any) -> Iterable[tuple[str, int]]:
    """Yield type and original length of rotary embeddings that transformers computes anew for longer batches."""
    given = getattr(config, "rope_parameters", None) or {}
    for parameters in (given, *given.values()):  # of all layers, or of each type of layer
        kind = parameters.get("rope_type", "default") if isinstance(parameters, dict) else "default"
        if kind == "longrope" or "dynamic" in kind:
            original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
            yield f"rotary embedding ({kind})", int(original)


# ---- Vocabulary ----

logger = get_logger(__name__)


@dataclass(frozen=True)
class Vocabulary:
    """Token ids that all models embed.

    Models of a family pad their embeddings to different lengths. No text has the ids of this padding, but a policy has
    logits for them.

    Attributes:
        size: Number of ids, 0 to `size - 1`.
        limited_by: Name of the model with the fewest ids, for error messages.
        num_logits: Number of ids that the policy or the reference could sample.
    """

    size: int
    limited_by: str
    num_logits: int

    @functools.cached_property
    def never_sampled(self) -> list[int] | None:
        """The ids that some model cannot read, or None."""
        return list(range(self.size, self.num_logits)) or None


def vocabulary_of(policy: nn.Module) -> Vocabulary:
    """Return the token ids that a policy embeds."""
    return Vocabulary(text_config(policy).vocab_size, "the policy", text_config(policy).vocab_size)


def shared_vocabulary(
    models: Mapping[str, nn.Module],
    reference: nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    pad: int,
    stop: int | None,
) -> Vocabulary:
    """Find the token ids that all models embed, and check the tokenizer's ids against them.

    Args:
        models: All models that read the policy's tokens, by their arguments' names; `model` is the policy.
        reference: The reference if it is a separate model.
        tokenizer: The policy's tokenizer.
        pad: The padding token, which is always masked and may lie outside.
        stop: The token that ends a response, or None.

    Raises:
        ValueError: A model cannot read an id of the tokenizer, or the stop token would never be sampled.
    """
    policy = vocabulary_of(models["model"])
    sizes = {"the policy": policy.size}
    for name, model in {**models, "ref_model": reference}.items():
        if model is not None and name != "model":
            sizes[name] = text_config(model).vocab_size
    largest = max(token_id for token_id in tokenizer.get_vocab().values() if token_id != pad)
    if pad >= policy.size:
        logger.info(f"The PAD token {pad} lies outside the policy's vocabulary; it is masked and never embedded.")
    for name, size in sorted(sizes.items()):  # a reward model before the value model that is a copy of it
        if size <= min(largest, policy.size - 1):
            is_reward = name.startswith("reward")
            raise ValueError(
                f"{name} has {size} token ids, but processing_class makes ids up to {largest}: if you added tokens, "
                f"call resize_token_embeddings(len(tokenizer)) of {name}; if it was trained with another tokenizer, "
                + ("pass that as reward_processing_classes" if is_reward else "use a model with the policy's tokens")
            )
    limited_by = min(sizes, key=lambda name: sizes[name])
    if stop is not None and stop >= sizes[limited_by]:
        raise ValueError(
            f"the stop token {stop} lies outside {limited_by}'s {sizes[limited_by]} ids and would never be sampled: "
            "set stop_token_id to a token that all models have"
        )
    shared = Vocabulary(sizes[limited_by], limited_by, max(policy.size, sizes.get("ref_model", 0)))
    if shared.never_sampled:
        logger.info(
            f"The ids {shared.size} to {shared.num_logits - 1} are never sampled: no text makes them, and "
            f"{limited_by} does not have them."
        )
    return shared


# ---- Independence of rows and padding ----

LENGTHS = (3, 8, 8)
"""Tokens of the rows of a probe; the last two rows differ in their last token."""


@torch.no_grad()
def check_consistent(model: nn.Module, argument: str, args: TrainingArguments | None = None) -> None:
    """Check that a model computes the same states from the same tokens: in learning, in evaluation, in any batch.

    Args:
        model: A causal language model or a value model, or a `PeftModel` around one; it stays as it was.
        argument: Name of the caller's argument, for error messages.
        args: Of a model that learns: `gradient_checkpointing` and `gradient_checkpointing_kwargs`.

    Raises:
        ValueError: It does not, or cannot recompute activations; names the architecture and the reason.
    """
    name = type(transformers_model(model)).__name__
    if is_sharded(model):
        logger.info(
            f"{argument} ({name}) is sharded by ZeRO-3 and cannot run yet: it was not tested whether it is "
            "deterministic, causal and independent of padding."
        )
        return
    body = backbone(model)
    ids, mask = probe_rows(model, LENGTHS)
    ids[2, :-1] = ids[1, :-1]
    ids[2, -1] = (ids[1, -1] + 1) % text_config(model).vocab_size
    recomputing = args is not None and bool(args.gradient_checkpointing)
    how = settings_of(args.gradient_checkpointing_kwargs) if args is not None else None
    places, of_first = PackedIndices.of(mask), PackedIndices.of(mask[:1])
    with preserve_rng():
        with in_eval_mode(model):
            alone = run_padded(body, ids[:1], of_first)
        try:
            # Without gradients, transformers 5.24 runs a layer that recomputes as it is: in training mode.
            with as_in_learning(recomputing, how, model), torch.enable_grad():
                first, second = (run_padded(body, ids, places).detach() for _ in range(2))
        except ValueError as error:
            if "support" not in str(error):
                raise
            raise ValueError(f"{argument}: {error} Set gradient_checkpointing=False") from error
        with in_eval_mode(model):
            evaluated = run_padded(body, ids, places)
            if args is not None:
                _check_gradient(f"{argument} is a {name}", body, ids[:1], of_first)
    _check(f"{argument} is a {name}", alone, first, second, evaluated)


def deviation(states: Tensor, expected: Tensor) -> float:
    """Return the relative difference of states from expected states: `||x - y|| / ||y||`."""
    return float((states - expected).float().norm() / expected.float().norm().clamp(min=1e-30))


def rounding(states: Tensor) -> float:
    """Return the deviation that other kernels or batch shapes may cause, which is large in 16 bits."""
    return 0.3 if is_in_16_bits(states) else 1e-3


def _check_gradient(what: str, body: nn.Module, ids: Tensor, places: PackedIndices) -> None:
    """Check that gradients reach the first layers in the modes of learning."""
    trained = [parameter for parameter in body.parameters() if parameter.requires_grad]
    if not trained:
        return
    try:
        with torch.enable_grad():
            states = run_padded(body, ids, places)
            torch.autograd.grad(states.float().square().sum(), trained[:1], allow_unused=True)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{what}, whose gradients cannot be computed outside training mode: {error!s:.300}"
        ) from error


def _check(what: str, alone: Tensor, first: Tensor, second: Tensor, evaluated: Tensor) -> None:
    if not evaluated.isfinite().all():
        return  # broken weights are reported at the first sampling
    tolerance = rounding(evaluated)
    # Kernels of an accelerator may add up in any order; on a CPU the same pass gives the same bits.
    repeated = 0.0 if first.device.type == "cpu" else tolerance
    own, row, twin = evaluated.split(LENGTHS)
    faults = (
        (second, first, repeated, "which computes at random: two passes over the same tokens differ by {} of their "
         "states, so that the importance ratio would not start at 1; use another architecture"),
        (first, evaluated, tolerance, "which computes something else in training than in evaluation (by {} of its "
         "states), so that the importance ratio would not start at 1; use another architecture"),
        (twin[:-1], row[:-1], tolerance, "in which a token's state depends on later tokens (by {}), so that it cannot "
         "generate from left to right; use a decoder (models of BERT's kind need is_decoder=True in their "
         "configuration)"),
        (own, alone, tolerance, "in which a row's states depend on the padding behind it (by {}): rows of different "
         "lengths cannot share a pass; use another architecture"),
    )  # fmt: skip
    for states, expected, most, fault in faults:
        if (error := deviation(states, expected)) > most:
            raise ValueError(f"{what}, {fault.format(f'{error:.2g}')}")


# ---- Non-finite weights ----


def weights_not_finite(model: nn.Module) -> dict[str, float]:
    """Find the weights that are not finite; of a sharded model, in this rank's share.

    Args:
        model: Any model; quantized weights are skipped.

    Returns:
        Number of non-finite weights by parameter name.
    """
    shares = {name: own_share(parameter) for name, parameter in model.named_parameters()}
    floats = {
        name: share
        for name, share in shares.items()
        if share.is_floating_point() and share.element_size() > 1 and share.numel() > 0 and not share.is_meta
    }
    if not floats or bool(torch.stack([_is_finite(share) for share in floats.values()]).all()):
        return {}
    return {name: int((~share.isfinite()).sum()) for name, share in floats.items() if not _is_finite(share)}


def _is_finite(share: Tensor) -> Tensor:
    """Return whether all numbers are finite; `isfinite` takes 50 times as long on a CPU."""
    lowest, highest = share.aminmax()  # NaN if one number is
    return lowest.isfinite() & highest.isfinite()
