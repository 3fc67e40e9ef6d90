"""Checks of a model before training: longest sequence, vocabulary, independence of rows and padding."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlhf_ppo.data.rollout import PositionLimit, smallest
from rlhf_ppo.models.heads import ValueHead
from rlhf_ppo.models.packing import looked_at, takes
from rlhf_ppo.models.policy_and_value import logits
from rlhf_ppo.models.unwrapping import backbone, is_sharded, share_of_rank, text_config, transformers_model
from rlhf_ppo.ranks.processes import get_logger


def position_limit(model: nn.Module) -> PositionLimit | None:
    """Return the longest sequence of a model, or None if it states no limit.

    Args:
        model: A transformers model, or a `PeftModel` around one.
    """
    limit = stated_limit(text_config(model), type(transformers_model(model)).__name__)
    parts = model.named_modules()
    padding = (getattr(part, "padding_idx", None) for name, part in parts if name.endswith("position_embeddings"))
    if limit is None or (last := next(padding, None)) is None:
        return limit
    usable = limit.tokens - last - 1
    return PositionLimit(usable, f"the model counts positions from {last + 1}, which leaves {usable}")


def stated_limit(config: PreTrainedConfig, name: str) -> PositionLimit | None:
    """Return the longest sequence that a configuration states.

    Longrope (Phi-3 with 128k) and dynamic NTK scaling change the angles of all positions of a pass once its longest
    row exceeds the original length. A row's log-probabilities would then depend on the other rows, and earlier cached
    keys would differ from those of the forward pass.

    Args:
        config: Of the language model.
        name: The model's name in errors.
    """
    limits = [
        PositionLimit(original, f"beyond {original} the {kind} of {name} changes for all rows of a batch")
        for kind, original in _changing_ropes(config)
    ]
    if (most := getattr(config, "max_position_embeddings", None) or 0) > 0:  # XLNet states -1
        limits.append(PositionLimit(most, f"the model has {most}"))
    return smallest(limits)


def reads_images(model: nn.Module) -> bool:
    """Return whether a model has a vision tower; a `ValueHead` reads the policy's states."""
    return isinstance(model, ValueHead) or takes(type(backbone(model)), "pixel_values")


def positions(model: nn.Module) -> int | None:
    """Return the tokens of `position_limit`."""
    limit = position_limit(model)
    return None if limit is None else limit.tokens


def _changing_ropes(config: PreTrainedConfig) -> Iterable[tuple[str, int]]:
    """Yield type and original length of rotary embeddings that transformers recomputes for longer batches."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for parameters in (ropes, *ropes.values()):  # of all layers, or of each type of layer
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
        image_token: The token that the policy reads as an image, or None.
    """

    size: int
    limited_by: str
    num_logits: int
    image_token: int | None = None

    @functools.cached_property
    def never_sampled(self) -> list[int] | None:
        """The ids that some model cannot read, or None."""
        return list(range(self.size, self.num_logits)) or None


def check_rows(rows: Mapping[str, Sequence[Tensor]], vocabulary: Vocabulary, limit: PositionLimit | None) -> None:
    """Check prompts and responses from the user's code; a GPU would only say that an assertion failed.

    Args:
        rows: Token ids of each row, by the name of the argument: of the prompts, and of the responses.
        vocabulary: Ids that all models embed.
        limit: Longest prompt and response together; None without a limit.

    Raises:
        ValueError: An id is outside the vocabulary or an image's, or a row is too long.
    """
    for name, parts in rows.items():
        for row, ids in enumerate(parts):
            is_outside = len(ids) and not 0 <= int(ids.long().min()) <= int(ids.long().max()) < vocabulary.size
            if is_outside or vocabulary.image_token in ids.tolist():
                texts = "" if is_outside else f" without {vocabulary.image_token}, an image's: pass texts only"
                raise ValueError(
                    f"{name}[{row}] holds something other than the token ids 0 to {vocabulary.size - 1} of "
                    f"{vocabulary.limited_by}{texts}: {ids!r:.80}"
                )
    lengths = [sum(map(len, parts)) for parts in zip(*rows.values(), strict=True)]
    if limit is not None and max(lengths) > limit.tokens:
        longest = lengths.index(max(lengths))
        names = " and ".join(f"{name}[{longest}]" for name in rows)
        raise ValueError(
            f"{names} have {max(lengths)} tokens together, but {limit.reason}: shorten them, or {limit.remedy}"
        )


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
    of_policy = text_config(models["model"]).vocab_size
    sizes = {"the policy": of_policy}
    for name, model in {**models, "ref_model": reference}.items():
        if model is not None and name != "model":
            sizes[name] = text_config(model).vocab_size
    largest = max(token_id for token_id in tokenizer.get_vocab().values() if token_id != pad)
    if pad >= of_policy:
        logger.info(f"The PAD token {pad} lies outside the policy's vocabulary; it is masked and never embedded.")
    for name, size in sorted(sizes.items()):  # a reward model before the value model that is a copy of it
        if size <= min(largest, of_policy - 1):
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
    image_token = getattr(transformers_model(models["model"]).config, "image_token_id", None)
    shared = Vocabulary(sizes[limited_by], limited_by, max(of_policy, sizes.get("ref_model", 0)), image_token)
    if shared.never_sampled:
        logger.info(
            f"The ids {shared.size} to {shared.num_logits - 1} are never sampled: no text holds them, and "
            f"{limited_by} does not have them."
        )
    return shared


# ---- Independence of rows and padding ----


def check_consistent(model: nn.Module, argument: str) -> None:
    """Check that a token's state depends on the earlier tokens of its row only, and that the head is known.

    Args:
        model: A causal language model or a value model, or a `PeftModel` around one.
        argument: Name of the caller's argument, for error messages.

    Raises:
        ValueError: It depends on others; the message names the architecture and the reason.
    """
    if is_sharded(model):
        return
    base = transformers_model(model)
    fault = looked_at(model, None if base.get_output_embeddings() is None else logits).fault
    if fault is not None:
        raise ValueError(f"{argument} is a {type(base).__name__}, {fault}")


# ---- Non-finite weights ----


def weights_not_finite(model: nn.Module) -> list[str]:
    """Name the weights that are not finite; of a sharded model, in this rank's share.

    Args:
        model: Any model; quantized weights are skipped.
    """
    shares = {name: share_of_rank(parameter) for name, parameter in model.named_parameters()}
    floats = {
        name: share
        for name, share in shares.items()
        if share.is_floating_point() and share.element_size() > 1 and share.numel() > 0 and not share.is_meta
    }
    if not floats or bool(torch.stack([_is_finite(share) for share in floats.values()]).all()):
        return []
    return [name for name, share in floats.items() if not _is_finite(share)]


def _is_finite(share: Tensor) -> Tensor:
    """Return whether all numbers are finite; `isfinite` takes 50 times as long on a CPU."""
    lowest, highest = share.aminmax()  # NaN if one number is
    return lowest.isfinite() & highest.isfinite()
