"""Token ids that all models can read: what prompts may hold, and what is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_ppo.models.unwrapping import transformers_model
from rlhf_ppo.processes.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Vocabulary:
    """Token ids that all models embed.

    Models of one family have embeddings of different lengths, padded to sizes that suit their hardware. No text makes
    the ids of the padding, but a policy has logits for them.

    Attributes:
        size: Number of these ids, which are 0 to `size - 1`.
        limited_by: The model that has no more, as error messages call it.
        num_logits: Number of ids that the policy or the reference could sample.
    """

    size: int
    limited_by: str
    num_logits: int

    @property
    def never_sampled(self) -> list[int] | None:
        """The ids that some model could not read, or None where all can read all."""
        return list(range(self.size, self.num_logits)) or None


def vocab_size(model: nn.Module) -> int:
    """Return the number of token ids that a model embeds."""
    return transformers_model(model).config.get_text_config().vocab_size


def vocabulary_of(policy: nn.Module) -> Vocabulary:
    """Return the token ids that a policy embeds."""
    return Vocabulary(vocab_size(policy), "the policy", vocab_size(policy))


def shared_vocabulary(
    models: Mapping[str, nn.Module],
    reference: nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    pad: int,
    stop: int | None,
) -> Vocabulary:
    """Find the token ids that all models embed, and check that the tokenizer makes no others.

    Args:
        models: All models that read the policy's tokens, by their arguments' names; `model` is the policy.
        reference: The reference if it is a model of its own.
        tokenizer: The policy's tokenizer.
        pad: The padding token, which is always masked and may lie outside.
        stop: The token that ends a response, or None.

    Raises:
        ValueError: A model cannot read what the tokenizer makes, or the stop token would never be sampled.
    """
    policy = vocabulary_of(models["model"])
    sizes = {"the policy": policy.size} | {name: vocab_size(each) for name, each in models.items() if name != "model"}
    if reference is not None:
        sizes["ref_model"] = vocab_size(reference)
    largest = max(token_id for token_id in tokenizer.get_vocab().values() if token_id != pad)
    if pad >= policy.size:
        logger.info(f"The PAD token {pad} lies outside the policy's vocabulary; it is masked and never embedded.")
    for name, size in sizes.items():
        if size <= min(largest, policy.size - 1):
            raise ValueError(
                f"{name} has {size} token ids, but processing_class makes ids up to {largest}: it was trained with "
                "another tokenizer; call model.resize_token_embeddings(len(tokenizer)), or pass a reward model's "
                "tokenizer as reward_processing_classes"
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
