"""Prompts and responses in the words of a reward model whose tokenizer is not the policy's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_ppo.models.adapters import base_of_adapter, is_adapter_directory
from rlhf_ppo.prompts import is_conversation
from rlhf_ppo.rewards.scorer import ScoringBatch


class Retokenizer:
    """Decodes prompts and responses and tokenizes their text anew, as the reward model was trained to read it.

    A text prompt and its response are one text, behind which the reward tokenizer's EOS stands if the response ended.
    A conversation gets the response as its last message and goes through the reward tokenizer's chat template, which
    closes that message only if the response ended.

    Args:
        policy_tokenizer: Decodes.
        tokenizer: The reward model's own.
        end: The token id that ends a response, or None.
    """

    def __init__(
        self, policy_tokenizer: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase, end: int | None
    ) -> None:
        self.policy_tokenizer, self.tokenizer, self.end = policy_tokenizer, tokenizer, end

    def __call__(self, batch: ScoringBatch) -> list[list[int]]:
        """Return each row's token ids for the reward model.

        Raises:
            ValueError: A prompt is a conversation, and the tokenizer has no chat template or the template rejects it.
        """
        prompt_ids, response_ids = batch.prompt_ids(), batch.response_ids()
        prompts = batch.columns.get("prompt")
        encoded: list[list[int]] = []
        for row, (prompt, response) in enumerate(zip(prompt_ids, response_ids, strict=True)):
            asked = None if prompts is None else prompts[row]
            ended = response[-1:] == [self.end]
            if is_conversation(asked):
                encoded.append(self._conversation(cast(Any, asked), self._decode(response), ended, row))
            else:
                text = asked if isinstance(asked, str) else self._decode(prompt)
                encoded.append(self._text(text + self._continuation(prompt, response), response, ended))
        return encoded

    def _text(self, text: str, response: Sequence[int], ended: bool) -> list[int]:
        ids, eos = _ids(self.tokenizer(text)), cast("int | None", self.tokenizer.eos_token_id)
        # A stop token that is no special token stands in the text itself.
        dropped = ended and response[-1] in self.policy_tokenizer.all_special_ids
        return ids if eos is None or not dropped or ids[-1:] == [eos] else [*ids, eos]

    def _conversation(self, prompt: Sequence[Mapping[str, Any]], response: str, ended: bool, row: int) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"row {row} is a conversation, and the reward model's tokenizer has no chat template: set its "
                "chat_template in reward_processing_classes"
            )
        # Arrow gives every message the union of all messages' keys, and templates ask whether a key is defined.
        messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        if messages[-1].get("role") == "assistant":
            response = messages.pop()["content"] + response
        goes_on = not ended and bool(response.strip())
        whole = messages if not ended and not goes_on else [*messages, {"role": "assistant", "content": response}]
        try:
            encoded = self.tokenizer.apply_chat_template(
                whole, continue_final_message=goes_on, add_generation_prompt=whole is messages, return_dict=True
            )
        except Exception as error:
            raise ValueError(f"the reward model's chat template rejects row {row}: {error}") from error
        return _ids(encoded)

    def _continuation(self, prompt: list[int], response: list[int]) -> str:
        """Decode a response behind its prompt: some tokenizers drop the space before a text's first word."""
        before, whole = self._decode(prompt), self._decode(prompt + response)
        return whole[len(before) :] if whole.startswith(before) else self._decode(response)

    def _decode(self, ids: list[int]) -> str:
        return cast(
            str, self.policy_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


def tokenizer_beside(path: str | os.PathLike[str] | None) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that was saved with a model, or return None if there is none.

    Args:
        path: The model's directory or hub name; of an adapter, the base's tokenizer serves where it has none itself.
    """
    if not path:
        return None
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError):
        return tokenizer_beside(base_of_adapter(path)) if is_adapter_directory(path) else None


def shares_tokens(policy_tokenizer: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether every token of the policy but a PAD of its own has the same id in the reward model's tokenizer."""
    ids = tokenizer.get_vocab()
    own_pad = policy_tokenizer.pad_token if policy_tokenizer.pad_token != policy_tokenizer.eos_token else None
    return all(ids.get(token) == number for token, number in policy_tokenizer.get_vocab().items() if token != own_pad)


def _ids(encoded: Any) -> list[int]:
    return list(encoded["input_ids"])
