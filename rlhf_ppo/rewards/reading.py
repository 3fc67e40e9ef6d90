"""What a reward model reads of a prompt and a response: the same in training, as a judge and in `rlhf-ppo judge`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_ppo.data.encoding import eos_id, is_conversation
from rlhf_ppo.models.adapters import base_of_adapter, is_adapter_directory
from rlhf_ppo.models.loading import CODE_IS_RUN_IF, wants_code
from rlhf_ppo.rewards.scorer import ScoringBatch


@dataclass(frozen=True)
class Answer:
    """A response to a prompt: as a policy gave it, in tokens, or as a data set has it, in text.

    Attributes:
        prompt: The data set's prompt, a text or a conversation; None where there are only its ids.
        response: The response's text, decoded apart from the prompt, without special tokens.
        ended: Whether it ended by itself, as `rlhf_ppo.generation.sequences.ended` says; one from a data set has.
        prompt_ids: The prompt in the policy's tokens; None for an answer from a data set, as the next two.
        response_ids: The response in the policy's tokens, the stop token and what tools and environments wrote
            included.
        tokenizer: The policy's tokenizer.
        written: Which of `response_ids` the policy wrote; None: all of them.
    """

    prompt: Any
    response: str
    ended: bool = True
    prompt_ids: Sequence[int] | None = None
    response_ids: Sequence[int] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    written: Sequence[bool] | None = None

    @property
    def asked(self) -> Any:
        """The prompt, a text or a conversation."""
        return self._decode(self.prompt_ids or ()) if self.prompt is None else self.prompt

    @property
    def continuation(self) -> str:
        """The response as it goes on from the prompt: some tokenizers drop the space before a text's first word."""
        if self.prompt_ids is None or self.response_ids is None:
            return self.response
        before, whole = self._decode(self.prompt_ids), self._decode([*self.prompt_ids, *self.response_ids])
        text = whole[len(before) :] if whole.startswith(before) else self._decode(self.response_ids)
        # Some drop a text's last space too, and put it before the word that follows.
        lacks_space = self._text_before.endswith(" ") and not before.endswith(" ")
        return text.removeprefix(" ") if lacks_space else text

    @property
    def text(self) -> str:
        """A text prompt and its response, as one text."""
        return self.asked + self.continuation

    @property
    def _text_before(self) -> str:
        """What the response goes on from, where it is known as text."""
        if is_conversation(self.prompt):
            return self.prompt[-1]["content"] if self.prompt[-1].get("role") == "assistant" else ""
        return self.prompt if isinstance(self.prompt, str) else ""

    def _decode(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            raise ValueError("the answer has token ids, but no tokenizer to read them with")
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return "".join(self.tokenizer.decode(list(ids), **options))


def answers_of(batch: ScoringBatch, tokenizer: PreTrainedTokenizerBase) -> list[Answer]:
    """Return a batch's rows one by one, to all who ask in the same list.

    Args:
        batch: `B` prompts and truncated responses.
        tokenizer: The policy's tokenizer.
    """
    return batch.once("answers", tokenizer, lambda: _answers(batch, tokenizer))


def _answers(batch: ScoringBatch, tokenizer: PreTrainedTokenizerBase) -> list[Answer]:
    prompt_ids, response_ids = batch.prompt_ids(), batch.response_ids()
    prompts = batch.columns.get("prompt", [None] * len(batch))
    texts = tokenizer.batch_decode(response_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    written = batch.written
    rows = zip(prompts, texts, batch.ended.tolist(), prompt_ids, response_ids, strict=True)
    return [Answer(*row, tokenizer, own) for row, own in zip(rows, written, strict=True)]


def reward_model_ids(answer: Answer, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return the token ids that a reward model reads.

    Without a tokenizer of its own it reads the policy's tokens. With one, a text prompt and its response are one text,
    behind which the tokenizer's EOS stands if the response ended; a conversation gets the response as its last message
    and goes through the tokenizer's chat template, which closes that message only if the response ended. An answer
    without ids is read as such a text in either case.

    Args:
        answer: The answer.
        tokenizer: The reward model's own tokenizer; None where it reads the policy's tokens.

    Raises:
        ValueError: The prompt is a conversation, and the tokenizer has no chat template or the template rejects it; or
            the answer has no ids, and there is no tokenizer.
    """
    if tokenizer is None:
        if answer.prompt_ids is not None and answer.response_ids is not None:
            return [*answer.prompt_ids, *answer.response_ids]
        tokenizer = answer.tokenizer
    if tokenizer is None:
        raise ValueError("there is no tokenizer beside the reward model, which is to read a text; save it there")
    if is_conversation(answer.prompt):
        return _templated(answer, tokenizer)
    ids, eos = _ids(tokenizer(answer.text)), eos_id(tokenizer)
    return [*ids, eos] if answer.ended and eos is not None and ids[-1:] != [eos] else ids


def _templated(answer: Answer, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.chat_template is None:
        raise ValueError(
            "the prompt is a conversation, and the reward model's tokenizer has no chat template: set its "
            "chat_template in reward_processing_classes"
        )
    # Arrow gives every message the union of all messages' keys, and templates ask whether a key is defined.
    messages: list[Any] = [
        {key: value for key, value in message.items() if value is not None} for message in answer.prompt
    ]
    response = answer.response
    if messages[-1].get("role") == "assistant":
        response = messages.pop()["content"] + answer.continuation
    goes_on = not answer.ended and bool(response.strip())
    whole = [*messages, {"role": "assistant", "content": response}] if answer.ended or goes_on else messages
    try:
        encoded = tokenizer.apply_chat_template(
            whole, continue_final_message=goes_on, add_generation_prompt=whole is messages, return_dict=True
        )
    except Exception as error:
        raise ValueError(f"the reward model's chat template rejects it: {error}") from error
    return _ids(encoded)


def tokenizer_beside(
    path: str | os.PathLike[str] | None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that was saved with a model, or return None if there is none.

    Args:
        path: The model's directory or hub name; of an adapter, the base's tokenizer serves where it has none itself.
        trust_remote_code: Whether to run code that comes with it.

    Raises:
        ValueError: It comes with code, which may not be run.
    """
    if not path:
        return None
    try:
        found = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        if found.get_vocab().keys() - set(found.all_special_tokens):  # without files Qwen2's has only special tokens
            return found
    except (OSError, ValueError, KeyError) as error:
        if wants_code(error):
            raise ValueError(f"the tokenizer of {os.fspath(path)!r} {CODE_IS_RUN_IF}") from error
    return tokenizer_beside(base_of_adapter(path), trust_remote_code) if is_adapter_directory(path) else None


def shares_tokens(policy_tokenizer: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether every token of the policy but a PAD of its own has the same id in the reward model's tokenizer."""
    ids = tokenizer.get_vocab()
    own_pad = policy_tokenizer.pad_token if policy_tokenizer.pad_token != policy_tokenizer.eos_token else None
    return all(ids.get(token) == number for token, number in policy_tokenizer.get_vocab().items() if token != own_pad)


def _ids(encoded: Any) -> list[int]:
    return list(encoded["input_ids"])
