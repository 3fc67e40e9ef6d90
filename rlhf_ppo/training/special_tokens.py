"""The token ids that generation and truncation need, and the one notion of a response that ended by itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.encoding import eos_id, pad_id
from rlhf_ppo.data.rollout import Responses
from rlhf_ppo.generation.sequences import ended
from rlhf_ppo.generation.stopping import StopStrings
from rlhf_ppo.processes.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class SpecialTokens:
    """The token ids that generation and truncation need.

    Attributes:
        pad: Fills short prompts and the rest of a response after its stop token; may equal `stop`, may lie outside the
            model's vocabulary.
        stop: The token after which a response is cut, or None.
        end: The token whose absence `missing_eos_penalty` and `missing_eos_score` punish: the stop token, or EOS where
            there is none.
        stop_strings: Texts after which a response is cut as well, or None.
    """

    pad: int
    stop: int | None
    end: int | None
    stop_strings: StopStrings | None = None

    def ended(self, responses: Responses) -> Tensor:
        """Tell which responses ended by themselves, bool `(B,)`: the one notion of it that everything goes by."""
        return ended(responses, self.end, self.stop_strings)


def special_tokens(args: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Read the special tokens off the arguments and the tokenizer.

    Raises:
        TypeError: `processing_class` is no tokenizer.
        ValueError: The tokenizer has neither PAD nor EOS, or lacks the EOS that an argument asks for.
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
            "No stop token is set, so every response has response_length tokens, whatever follows an EOS; set "
            "stop_token='eos' to end responses at EOS."
        )
    strings = StopStrings(tokenizer, tuple(args.stop_strings)) if args.stop_strings else None
    return SpecialTokens(pad=filling, stop=stop, end=end, stop_strings=strings)
