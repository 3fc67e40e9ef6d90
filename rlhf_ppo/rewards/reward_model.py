"""Reward models as reward sources: loading, their tokenizers, scoring, and the tokens that they read.

A reward model reads the same tokens in training, as a judge and in `rlhf-ppo judge`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase, ProcessorMixin

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.images import ImageChats, RowImages, as_blocks, image_blocks, without_placeholders
from rlhf_ppo.data.prompts import MARK, Messages, as_the_template_reads, is_conversation, text_of_content
from rlhf_ppo.data.rollout import PositionLimit, pad_right
from rlhf_ppo.models.adapters import base_of_adapter, is_adapter_directory, origin
from rlhf_ppo.models.capabilities import position_limit
from rlhf_ppo.models.loading import CODE_IS_RUN_IF, load_classifier, wants_code
from rlhf_ppo.models.unwrapping import transformers_model
from rlhf_ppo.rewards.scorer import MAX_SCORE, Answer, ScoringBatch, WrongRewardError
from rlhf_ppo.terminal import visible_logger

logger = visible_logger(__name__)

TokenizerFor = Callable[[Answer], PreTrainedTokenizerBase | None]


@dataclass(frozen=True)
class LoadedRewardModel:
    """A loaded reward model and its tokenizer.

    Attributes:
        argument: Name of the caller's argument, for errors.
        model: The sequence-classification model, with one label.
        tokenizer: Its own tokenizer; None if it reads the policy's tokens.
        template: Its saved tokenizer, if that has the policy's tokens and a chat template; None: the policy's is used.
        scorer: The module that computes its scores; None until all models, which may share its weights, are made, or
            until a backend shards it.
        processor: Its own processor of images and text, or None.
    """

    argument: str
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    template: PreTrainedTokenizerBase | None = None
    scorer: nn.Module | None = None
    processor: ProcessorMixin | None = None

    def limit(self, prompt: Answer, chats: ImageChats | None, stop_is_silent: bool = True) -> PositionLimit | None:
        """Return the longest prompt and response that the model reads, in the policy's tokens.

        A chat template may write more around a response than the prompt and the stop token hold. In the model's own
        tokens only the prompt's length is known: a prompt that leaves no room makes the limit its own length.

        Args:
            prompt: The prompt with its ids and an empty response.
            chats: Encodes conversations with images for the model; None in a run without images.
            stop_is_silent: Whether the last token of a response that ended is not part of its text.
        """
        limit, ids = position_limit(self.model), prompt.prompt_ids or ()
        if limit is None:
            return None
        if self.tokenizer is not None:
            begun = replace(prompt, ended=False)
            prompt_ids = encoded_answer(begun, chats).ids if chats else reward_model_ids(begun, self.tokenizer)
            if len(prompt_ids) < limit.tokens:
                return None
            reads = f"{self.argument}, which has its own tokens, reads {len(prompt_ids)} for the prompt alone"
            reason = f"{reads} and has {limit.tokens}"
            return PositionLimit(len(ids), reason, limit.remedy, is_of_prompts=True)
        reader: Any = chats.processor if chats else self.template or prompt.tokenizer
        if not is_conversation(prompt.prompt) or reader.chat_template is None:
            return limit
        more = _tokens_of_template(prompt, reader, chats, stop_is_silent) - len(ids)
        if more <= 0:
            return limit
        reason = f"{self.argument} has {limit.tokens}, of which its chat template takes {more} more"
        return PositionLimit(limit.tokens - more, reason, limit.remedy)


def _tokens_of_template(prompt: Answer, reader: Any, chats: ImageChats | None, stop_is_silent: bool) -> int:
    """Count the tokens of a chat template around a response, without a silent stop token; 0 if it leaves it out."""
    before, mark, after = _templated(replace(prompt, response=MARK), reader).rpartition(MARK)
    if not mark:
        return 0
    if chats is None:
        opening, ending = (len(_ids(reader(text, add_special_tokens=False))) for text in (before, after))
    else:
        pictures = [block["image"] for block in image_blocks(prompt.prompt)]
        opening, ending = len(chats.of_text(before, pictures).ids), len(chats.of_text(after, []).ids)
    return opening + max(0, ending - stop_is_silent)


def load_reward_models(
    args: PPOConfig, reward_model: object, reward_processing_classes: object, tokenizer: PreTrainedTokenizerBase
) -> Iterator[LoadedRewardModel]:
    """Load the reward models one by one, and choose their tokenizers.

    Args:
        args: With `share_base_model`, adapters in directories are not merged into their base models.
        reward_model: None, or one or a list of models, directories and hub names.
        reward_processing_classes: None, one tokenizer or processor, or a list with one or None for each model. For
            None, the tokenizer saved with the model is used if its tokens are not the policy's.
        tokenizer: The policy's tokenizer.

    Raises:
        ValueError: The lists have different lengths, or a model cannot be loaded.
    """
    specs = _as_list(reward_model)
    tokenizers = _as_list(reward_processing_classes) or [None] * len(specs)
    if len(tokenizers) != len(specs):
        raise ValueError(f"reward_processing_classes has {len(tokenizers)} entries for {len(specs)} reward models")
    for number, (spec, reader) in enumerate(zip(specs, tokenizers, strict=True)):
        argument = "reward_model" if len(specs) == 1 else f"reward_model[{number}]"
        model = load_classifier(spec, argument, merges_adapter=not args.share_base_model)
        template = None
        if reader is None and (beside := _tokenizer_of(spec, model)) is not None:
            if not shares_tokens(tokenizer, beside):
                reader = beside
            elif beside.chat_template is not None:
                template = beside
        processor = reader if isinstance(reader, ProcessorMixin) else None
        reader = reader.tokenizer if isinstance(reader, ProcessorMixin) else reader
        yield LoadedRewardModel(argument, model, reader, template, processor=processor)


@dataclass(eq=False, repr=False)
class RewardModel:
    """Scores prompt and response with a reward model.

    Attributes:
        scorer: Computes scores `(B,)` from token ids and mask `(B, L)`: a `FrozenScorer` on its device.
        rows_per_pass: Number of rows in one forward pass.
        autocast: Returns the context of the forward passes.
        tokenizer: The model's own tokenizer; None if it reads the policy's tokens.
        max_positions: Longest text for the model, in its own tokens; None if there is no limit.
        together: Returns a context that raises one rank's error on all ranks, because ranks with a sharded model enter
            each forward pass together; every rank enters it the same number of times.
        chats: Encodes conversations with images for the model; None in a run without images.
        template: Formats conversations in the policy's tokens; None: the policy's tokenizer does.
    """

    name = "reward_model"
    exchanges_errors = True
    """Its passes may wait for all ranks, so errors are exchanged only before and after them."""

    scorer: nn.Module
    rows_per_pass: int
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    tokenizer: PreTrainedTokenizerBase | None = None
    max_positions: int | None = None
    together: Callable[[], AbstractContextManager[object]] = nullcontext
    chats: ImageChats | None = None
    template: PreTrainedTokenizerBase | None = None

    @torch.no_grad()
    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Score every row.

        Args:
            batch: `B` prompts and truncated responses.

        Returns:
            Scores, float32 `(B,)`; NaN for rows with more tokens than the model has positions.

        Raises:
            WrongRewardError: A score is not finite.
        """
        is_text = not any(map(is_conversation, batch.prompts.columns.get("prompt", ())))
        if self.tokenizer is None and is_text:  # as `reward_model_ids`, for the whole batch
            return self._scores(batch.responses.query_responses, batch.responses.attention_mask.bool())
        with self.together():
            of_chats = self.template if self.tokenizer is None else self.tokenizer
            rows = self._padded(batch.answers, lambda one: of_chats if is_conversation(one.prompt) else self.tokenizer)
        return self._scores_of(rows, batch.responses.query_responses.device)

    @torch.no_grad()
    def score_answers(self, answers: Sequence[Answer], tokenizer_for: TokenizerFor) -> Tensor:
        """Score answers as `__call__` scores a batch.

        Args:
            answers: `B` answers.
            tokenizer_for: Returns the model's own tokenizer, or None if it reads the tokens of the answer's policy.

        Returns:
            Scores, float32 `(B,)`, as those of `__call__`.
        """
        return self._scores_of(self._padded(answers, tokenizer_for), next(self.scorer.parameters()).device)

    def _scores_of(self, rows: tuple[Tensor, Tensor, list[RowImages] | None, Tensor], device: torch.device) -> Tensor:
        ids, mask, images, fits = rows
        return self._scores(ids.to(device), mask.to(device), images).masked_fill(~fits.to(device), math.nan)

    def _scores(self, ids: Tensor, mask: Tensor, images: Sequence[RowImages] | None = None) -> Tensor:
        scores: list[Tensor] = []
        with getattr(self.scorer, "offload", nullcontext)(), self.autocast():
            for start in range(0, len(ids), self.rows_per_pass):
                rows = slice(start, start + self.rows_per_pass)
                used = mask[rows].any(dim=0)  # skip columns that are padding in every row
                shown = () if images is None else (images[rows],)
                scores.append(self.scorer(ids[rows][:, used], mask[rows][:, used], *shown))
        with self.together():
            return self._checked(torch.cat(scores).float())

    def _checked(self, score: Tensor) -> Tensor:
        usable = score.abs() <= MAX_SCORE  # NaN is not
        if not usable.all():
            row = int(usable.int().argmin())
            raise WrongRewardError(
                f"the reward model's score of row {row} is {score[row].item()}: load it in float32 or bfloat16, and "
                "check its weights"
            )
        return score

    def _padded(
        self, answers: Sequence[Answer], tokenizer_for: TokenizerFor
    ) -> tuple[Tensor, Tensor, list[RowImages] | None, Tensor]:
        """Return ids, mask and images, and which rows fit; one token replaces each other row, for equal passes."""
        rows: list[Tensor] = []
        fits: list[bool] = []
        images: list[RowImages] | None = None
        if (chats := self.chats) is not None:
            images = [
                encoded_answer(answer, chats)
                if is_conversation(answer.prompt)
                else chats.of_ids(reward_model_ids(answer, tokenizer_for(answer)))
                for answer in answers
            ]
        for row, answer in enumerate(answers):
            ids = reward_model_ids(answer, tokenizer_for(answer)) if images is None else images[row].ids
            fits.append(self.max_positions is None or len(ids) <= self.max_positions)
            if not fits[-1]:
                ids = ids[:1]
                if images is not None and self.chats is not None:
                    images[row] = self.chats.of_ids(ids)
            rows.append(torch.tensor([ids], dtype=torch.long))
        if not all(fits):
            logger.warning(
                f"{fits.count(False)} of {len(fits)} answers are not scored, because they have more tokens than the "
                f"reward model has positions, {self.max_positions}"
            )
        return pad_right(rows), pad_right([torch.ones_like(row) for row in rows]).bool(), images, torch.tensor(fits)


def _tokenizer_of(spec: nn.Module | str | os.PathLike[str], model: nn.Module) -> PreTrainedTokenizerBase | None:
    path = origin(model) if isinstance(spec, nn.Module) else spec
    runs_code = type(transformers_model(model)).__module__.startswith("transformers_modules")  # as the user allowed
    return tokenizer_beside(path, trust_remote_code=runs_code)


def _as_list(value: object) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


# Tokenization


def reward_model_ids(answer: Answer, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return the token ids that a reward model reads: for an answer that ended, those of TRL's `RewardTrainer`.

    A conversation gets the response as its last message, or all messages of an episode, and goes through the chat
    template; what the template writes after an answer is left out if the response did not end. A text in the policy's
    tokens stays as sampled. With its own tokenizer the text is prompt + response, and EOS if the response ended. An
    answer without ids is always read as text.

    Args:
        answer: The answer.
        tokenizer: The reward model's own tokenizer; None if it reads the policy's tokens, and template.

    Raises:
        ValueError: The answer has no ids, and there is no tokenizer; or the tokenizer has no chat template.
    """
    if tokenizer is None:
        tokenizer = answer.tokenizer
        is_read_as_sampled = not is_conversation(answer.prompt) or getattr(tokenizer, "chat_template", "") is None
        if answer.prompt_ids is not None and answer.response_ids is not None and is_read_as_sampled:
            return [*answer.prompt_ids, *answer.response_ids]
    if tokenizer is None:
        raise ValueError("the reward model needs a tokenizer to read a text: save one in its directory")
    if is_conversation(answer.prompt):
        return _ids(tokenizer(_templated(answer, tokenizer), add_special_tokens=False))
    text, eos = answer.text, tokenizer.eos_token or ""
    # Written out: some tokenizers also close each text themselves, whether it ended or not.
    return _ids(tokenizer(f"{text}{eos}" if answer.ended and not text.endswith(str(eos)) else text))


def encoded_answer(answer: Answer, chats: ImageChats) -> RowImages:
    """Return the tokens and images of a conversation with its answer, for a reward model; see `reward_model_ids`."""
    pictures = [block["image"] for block in image_blocks(answer.prompt)]
    return chats.of_text(_templated(answer, chats.processor), pictures)


def _templated(answer: Answer, tokenizer: PreTrainedTokenizerBase | ProcessorMixin) -> str:
    whole: list[Any] = [*answer.prompt, *(answer.messages or ())]
    if answer.messages is None:
        response = answer.response
        if whole[-1].get("role") == "assistant":
            response = text_of_content(whole.pop()["content"]) + answer.continuation
        if isinstance(tokenizer, ProcessorMixin):
            response = without_placeholders(response, tokenizer)
        if not answer.ended and not response.strip():
            return _rendered(whole, tokenizer, answer.settings, True)
        whole.append({"role": "assistant", "content": response})
    text, last = _rendered(whole, tokenizer, answer.settings), whole[-1]
    written = next((name for name in ("content", "reasoning_content", "thinking") if last.get(name)), None)
    if not answer.ended and last["role"] == "assistant" and written and not last.get("tool_calls"):
        marked = _rendered([*whole[:-1], {**last, written: MARK}], tokenizer, answer.settings)
        text = text.removesuffix(marked.rpartition(MARK)[2])
    return text


def _rendered(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    settings: Mapping[str, Any] | None = None,
    opens: bool = False,
) -> str:
    how = settings or {}
    reads_images = isinstance(tokenizer, ProcessorMixin)
    shown = as_blocks(messages) if reads_images else as_the_template_reads(messages, tokenizer, settings=how)
    return str(tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=opens, **how))


def tokenizer_beside(
    path: str | os.PathLike[str] | None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that was saved with a model, or return None if there is none.

    Args:
        path: The model's directory or hub name. An adapter without a tokenizer uses that of its base model.
        trust_remote_code: Whether to run code of the tokenizer.

    Raises:
        ValueError: It comes with code, which is not allowed to run.
    """
    if not path:
        return None
    try:
        saved = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        if saved.get_vocab().keys() - set(saved.all_special_tokens):  # without files Qwen2's has only special tokens
            return saved
    except (OSError, ValueError, KeyError) as error:
        if wants_code(error):
            raise ValueError(f"the tokenizer of {os.fspath(path)!r} {CODE_IS_RUN_IF}") from error
    return tokenizer_beside(base_of_adapter(path), trust_remote_code) if is_adapter_directory(path) else None


def shares_tokens(policy_tokenizer: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the policy's tokens, except its own PAD, have the same ids in the reward model's tokenizer."""
    ids = tokenizer.get_vocab()
    own_pad = policy_tokenizer.pad_token if policy_tokenizer.pad_token != policy_tokenizer.eos_token else None
    return all(ids.get(token) == number for token, number in policy_tokenizer.get_vocab().items() if token != own_pad)


def _ids(encoded: BatchEncoding) -> list[int]:
    return list(encoded["input_ids"])
