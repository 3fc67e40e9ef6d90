"""Tokens and texts that end a response."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.prompts import eos_id, pad_id
from rlhf_ppo.data.rollout import Responses
from rlhf_ppo.generation.sampling import StopStrings, ended
from rlhf_ppo.run.distributed import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids for generation and truncation.

    Attributes:
        pad: Pads prompts, and responses after their stop token; may equal `stop`, or lie outside the vocabulary.
        stop: Responses are cut after this token; or None.
        end: `missing_eos_penalty` and `missing_eos_score` apply without this token: the stop token, or EOS without
            one.
        stop_strings: Responses are also cut after these texts; or None.
    """

    pad: int
    stop: int | None
    end: int | None
    stop_strings: StopStrings | None = None

    def ended(self, responses: Responses) -> Tensor:
        """Return which responses ended by themselves, bool `(B,)`; every part uses this definition."""
        return responses.ended if responses.ended is not None else ended(responses, self.end, self.stop_strings)


def special_tokens(args: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Return the special tokens from arguments and tokenizer.

    Raises:
        TypeError: `processing_class` is not a tokenizer.
        ValueError: The tokenizer has neither PAD nor EOS, or lacks the EOS that an argument needs.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"processing_class must be a tokenizer, got {type(tokenizer).__name__}; pass AutoTokenizer's")
    eos = eos_id(tokenizer)
    pad = pad_id(tokenizer)
    filling = eos if pad is None else pad
    if filling is None:
        raise ValueError(
            "processing_class has neither a pad_token nor an eos_token; set tokenizer.pad_token to a token that "
            "prompts do not use"
        )
    if eos is None and args.stop_token == "eos":
        raise ValueError("stop_token='eos', but processing_class has no eos_token; set stop_token_id instead")
    stop = eos if args.stop_token == "eos" else args.stop_token_id
    end = eos if stop is None else stop
    for name in ("missing_eos_penalty", "missing_eos_score"):
        if end is None and not args.stop_strings and getattr(args, name) is not None:
            raise ValueError(
                f"{name}={getattr(args, name)} needs something that ends a response; set stop_token_id, stop_strings, "
                "or an eos_token"
            )
    if stop is None and eos is not None and not args.stop_strings:
        logger.warning_once(
            "No stop token is set: every response has response_length tokens, also if EOS comes earlier. Set "
            "stop_token='eos' to end responses at EOS."
        )
    strings = StopStrings(tokenizer, tuple(args.stop_strings)) if args.stop_strings else None
    return SpecialTokens(pad=filling, stop=stop, end=end, stop_strings=strings)
