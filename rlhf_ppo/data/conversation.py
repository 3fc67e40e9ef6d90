"""Tokens of conversations with tools and environments: prompts, answers between two turns, and parsed turns.

As in TRL's `GRPOTrainer`, turns of the policy are never decoded and tokenized again. The tokens of an answer are those
that it adds to a conversation rendered with the chat template.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import compare_versions
from transformers import PreTrainedTokenizerBase

from rlhf_ppo.data.prompts import (
    MARK,
    Messages,
    Prompt,
    PromptEncoder,
    as_the_template_reads,
    is_conversation,
    is_special,
    prompt_column,
    renders_chats,
    silent_ids,
    spoken_texts,
    template_settings,
    text_of_content,
    turn_end,
)
from rlhf_ppo.terminal import CONTROL

EPISODE_COLUMN = "<episode>"
"""Column of a rollout's prompts with the record of each row's episode; reward functions do not receive it."""

EMPTY_PROMPT = [{"role": "user", "content": ""}]
"""The prompt of a row without the column `prompt`."""

_REWRITES = (
    "the chat template of processing_class renders the earlier messages differently once an answer follows: set "
    "processing_class.chat_template to one that does not change them"
)

NEEDS = {"trl": "1.16", "transformers": "5.13"}
"""Lowest versions that tools and environments need, above the package's own."""


def check_versions() -> None:
    """Raise a `ValueError` if TRL or transformers is too old for tools and environments."""
    for name, lowest in NEEDS.items():
        if compare_versions(name, "<", lowest):
            raise ValueError(
                f"tools and environment_factory need {name} {lowest} or newer: `pip install -U {name}`, or leave both "
                "None"
            )


class Conversations:
    """Render prompts and answers, with or without a chat template, and parse the policy's turns.

    Args:
        tokenizer: The policy's tokenizer; it is not changed.
        has_tools: Whether the policy may call tools; the template must then render calls and answers.
        settings: Further arguments of the chat template.

    Attributes:
        silent: The `silent_ids`; other special tokens are the text of a turn.

    Raises:
        ValueError: The template cannot render calls and their answers, or TRL cannot parse its format.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, has_tools: bool, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer, self.settings, self.template = tokenizer, dict(settings or {}), None
        self.silent = silent_ids(tokenizer)
        if has_tools:
            self._prepare_tools(tokenizer)

    def _prepare_tools(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from trl.chat_template_utils import (
            add_response_schema,
            get_training_chat_template,
            is_chat_template_prefix_preserving,
            supports_tool_calling,
        )

        if tokenizer.chat_template is None or not supports_tool_calling(tokenizer):
            raise ValueError(
                "tools need a chat template that renders user, assistant with tool_calls, and tool: set "
                "processing_class.chat_template; or set takes_messages = True on the environment's class and define "
                "respond(text)"
            )
        self.tokenizer = copy.deepcopy(tokenizer)
        if not any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
            add_response_schema(self.tokenizer)
        if not is_chat_template_prefix_preserving(tokenizer):
            self.template = get_training_chat_template(tokenizer)

    def of_row(self, row: Mapping[str, object]) -> Conversations:
        """Return a copy for a row, whose own arguments of the chat template win; see `template_settings`."""
        same = copy.copy(self)
        same.settings = template_settings(row, self.settings)
        return same

    def ended_by(self, stops: Sequence[int]) -> Conversations:
        """Return a copy for turns that end with these tokens."""
        same = copy.copy(self)
        same.silent = silent_ids(self.tokenizer, stops)
        return same

    def default_prompt(self) -> Prompt:
        """Return the prompt of a row that has none."""
        return EMPTY_PROMPT if renders_chats(self.tokenizer) else ""

    def prompt_ids(self, prompt: Prompt, schemas: Sequence[object] | None) -> list[int]:
        """Return the tokens of a prompt, with the opening of the policy's turn.

        Args:
            prompt: A text or a conversation.
            schemas: The tools that the template shows, or None.
        """
        if isinstance(prompt, str):
            return self.text_ids(prompt, is_first=True) if prompt else []
        return self._rendered(prompt, add_generation_prompt=True, tools=schemas)

    def text_ids(self, text: str, is_first: bool = False) -> list[int]:
        """Return the tokens of a text without a template.

        Args:
            text: The text.
            is_first: Whether the text begins the sequence; the tokenizer may then add BOS.
        """
        encoded: Any = self.tokenizer(text, add_special_tokens=is_first)
        ids: list[int] = list(encoded["input_ids"])
        return ids[:-1] if is_first and ids[-1:] == [self.tokenizer.eos_token_id] else ids

    def _rendered(self, messages: Messages, **how: Any) -> list[int]:
        shown = as_the_template_reads(messages, self.tokenizer, self.template, self.settings)
        conversations: list[Any] = [shown]
        encoded: Any = self.tokenizer.apply_chat_template(
            conversations, chat_template=self.template, tokenize=True, return_dict=True, **how, **self.settings
        )
        return list(encoded["input_ids"][0])

    def parse(self, ids: list[int], before: list[int], schemas: Sequence[Any] | None) -> dict[str, Any]:
        """Return a turn as a message, with its `tool_calls`; a turn that cannot be parsed is plain text.

        Lone surrogates, which a call's JSON may escape, become `?`, as in the answers of tools.

        Args:
            ids: The turn.
            before: All tokens before it.
            schemas: The tools that the policy may call, or None.
        """
        if not any(getattr(self.tokenizer, name, None) for name in ("response_template", "response_schema")):
            return {"role": "assistant", "content": self.text_of(ids)}
        from trl.chat_template_utils import parse_response

        tools = None if schemas is None else list(schemas)
        try:
            message = parse_response(self.tokenizer, ids, prefix=before, tools=tools)
            return json.loads(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace"))
        except RecursionError:  # arguments nested a thousand deep
            return {"role": "assistant", "content": self.text_of(ids)}

    def text_of(self, ids: list[int]) -> str:
        """Return a turn's text as that of a single response, without its `silent_ids`."""
        return spoken_texts(self.tokenizer, [ids], self.silent)[0]

    # ---- Answers ----

    def answer_ids(self, answers: Messages, end: int) -> list[int]:
        """Return the tokens between two turns: the answers, and the opening of the policy's next turn.

        Args:
            answers: Messages of tools; in a text environment, of the user.
            end: The last token of the policy's turn.

        Raises:
            ValueError: The template does not preserve the tokens before the answers.
        """
        if answers[0]["role"] == "user":
            return self._behind_a_text(answers, end)
        # Some templates take the header from the name of the call.
        call = {"type": "function", "function": {"name": answers[0]["name"], "arguments": {}}}
        calling: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        before: list[dict[str, Any]] = [{"role": "user", "content": "dummy"}, calling]
        start = self._rendered(before, add_generation_prompt=False)
        eos = self.tokenizer.eos_token_id
        ends = [place for place, token in enumerate(start) if token == eos]
        start = start[: ends[-1] + 1] if ends else start
        whole = self._with_answers(before, answers)
        if whole[: len(start)] != start:
            raise ValueError(_REWRITES)
        return whole[self._num_written(start, end) :]

    def _num_written(self, turn: list[int], end: int) -> int:
        """Return how many tokens of a rendered turn the policy has written: not its end, if a stop string cut it."""
        if end in self.silent:
            return len(turn)
        if end in turn and self._added.fullmatch(str(self.tokenizer.decode([end]))):  # such as `</tool_call>`
            return len(turn) - turn[::-1].index(end)
        return len(turn) - is_special(self.tokenizer, turn[-1])

    def _behind_a_text(self, answers: Messages, end: int) -> list[int]:
        """Return what the template writes behind a turn, without the end of the turn, which the policy has written."""
        text = f"{MARK}-turn"
        turn = {"role": "assistant", "content": [{"type": "text", "text": text}]}  # some templates read blocks alone
        ids = self._with_answers([{"role": "user", "content": "dummy"}, turn], answers, behind=text)
        if ids[:1] != [end] and end not in self.silent:  # of a stop string, which is the turn's text
            return ids
        written = end if end in ids else turn_end(self.tokenizer, self.settings)
        if written is None:
            return ids
        if written not in ids:
            raise ValueError(_REWRITES)
        return ids[ids.index(written) + 1 :]

    def _with_answers(self, before: Messages, answers: Messages, behind: str = "") -> list[int]:
        """Return the tokens behind a text of a conversation, up to the opening of the policy's next turn."""
        texts = [text_of_content(answer["content"]) for answer in answers]
        injected = [match[0] for text in texts for match in self._added.finditer(text)]
        if injected:  # marks, which the template writes as any other text, take their places
            numbers = itertools.count()
            marked = [self._added.sub(lambda _: f"{MARK}-{next(numbers)}-", text) for text in texts]
            answers = [{**answer, "content": text} for answer, text in zip(answers, marked, strict=True)]
        shown: list[Any] = as_the_template_reads([*before, *answers], self.tokenizer, self.template, self.settings)
        how = {"chat_template": self.template, "tokenize": False, "add_generation_prompt": True} | self.settings
        rendered = str(self.tokenizer.apply_chat_template(shown, **how))
        if behind not in rendered:
            raise ValueError(_REWRITES)
        rendered = rendered[rendered.index(behind) + len(behind) :]
        ids: list[int] = []
        for number, token in enumerate(injected):  # split after its first character, as in `defused_ids`
            before_it, rendered = rendered.split(f"{MARK}-{number}-", 1)
            ids += self.text_ids(before_it + token[0])
            rendered = token[1:] + rendered
        return ids + self.text_ids(rendered)

    def defused_ids(self, text: str) -> list[int]:
        """Tokenize a text without special tokens: each one in it is split after its first character."""
        ids: list[int] = []
        start = 0
        for match in self._added.finditer(text):
            ids += self.text_ids(text[start : match.start() + 1])
            start = match.start() + 1
        return ids + self.text_ids(text[start:])

    @functools.cached_property
    def _added(self) -> re.Pattern[str]:
        """Pattern of the tokens added to the vocabulary, which answers must not inject; those of spaces are text."""
        tokenizer: Any = self.tokenizer
        added = sorted(filter(str.strip, tokenizer.get_added_vocab()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, added)) if added else r"(?!)")


def with_observation(prompt: Prompt, observation: object) -> Prompt:
    """Return a new prompt whose last message ends with the unchanged result of `reset`.

    Args:
        prompt: A text or a conversation.
        observation: A text, a list of content blocks, or None.
    """
    if observation is None:
        return prompt
    if isinstance(prompt, str):
        return prompt + text_of_content(observation)
    content: Any = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    added: Any = observation
    return [*prompt[:-1], {**prompt[-1], "content": content + added}]


# Conversations as text


def as_json(messages: Messages) -> str:
    """Write messages as JSON; escape the characters that `visible` would change."""
    text = json.dumps(list(messages), ensure_ascii=False, default=str)
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def as_lines(messages: str) -> str:
    """Return JSON messages as text, one line each: the speaker, the text, and calls as `name(arguments)`."""
    lines: list[str] = []
    for message in json.loads(messages):
        calls = [call.get("function") or call for call in message.get("tool_calls") or ()]
        texts = [text_of_content(message.get("content") or "")]
        texts += [f"{call.get('name')}({json.dumps(call.get('arguments'), ensure_ascii=False)})" for call in calls]
        who = message.get("name") or message["role"]
        lines.append(f"{who}: {' '.join(' '.join(text.split()) for text in texts if text)}")
    return "\n".join(lines)


@dataclass(frozen=True)
class EpisodeEncoder(PromptEncoder):
    """Tokenization of prompts before `reset`; the rollout tokenizes them again, with the result of `reset`.

    Attributes:
        conversations: Renders the prompts.
        schemas: The tools of each environment by its name; by None if no column names environments.
        is_mixed: Whether the column `environment` names the environment of each row.
        needs_chat: Names of the environments whose prompts must be conversations.
        of_texts: Names of the environments that take whole messages.
        stops: The tokens that end a turn.
        needs_prompts: Whether each row must have a prompt, because no environment makes it.
    """

    conversations: Conversations = field(kw_only=True)
    schemas: Mapping[str | None, list[dict[str, Any]] | None] = field(kw_only=True)
    is_mixed: bool = field(kw_only=True)
    needs_chat: frozenset[str | None] = field(kw_only=True)
    of_texts: frozenset[str | None] = field(kw_only=True)
    stops: Sequence[int] = field(kw_only=True)
    needs_prompts: bool = field(kw_only=True)

    def check_prompt_column(self, columns: Sequence[str]) -> None:
        """Raise a `ValueError` if a column holds token ids, to which nothing can be appended, or none a prompt."""
        if "input_ids" in columns:
            raise ValueError(
                f"{self.name} has the column input_ids, but tools and environments write into the prompt: give it as "
                "the column `prompt`"
            )
        if self.needs_prompts:
            prompt_column(columns, self.name)

    def __call__(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return the new columns of a row: `input_ids`, and `prompt` if the prompt is in `text`."""
        self.check_prompt_column(list(row))
        name = row.get("environment") if self.is_mixed else None
        if name not in self.schemas:
            fix = f"write one of {list(self.schemas)} into the column `environment`, or add it to environment_factory"
            self._fail(index, f"has environment={name!r}, which environment_factory does not have", fix)
        column = prompt_column(row, self.name) if self.needs_prompts else "prompt"
        if row.get(column) is None and not self.needs_prompts:
            row = {**row, column: self.conversations.default_prompt()}
        prompt = row[column]
        if name in self.needs_chat and not is_conversation(prompt):
            fix = "give it as a list of messages {'role': ..., 'content': ...}"
            self._fail(index, f"has a prompt that is not a conversation ({prompt!r:.60}), which tools need", fix)
        if is_conversation(prompt) and prompt[-1].get("role") == "assistant":
            fix = "drop that message: with tools and environments the policy begins a new turn"
            self._fail(index, "ends with an assistant's message", fix)
        if is_conversation(prompt) and row.get("tools") is not None:
            fix = "rename or drop the column; the policy is shown the tools that it can call"
            self._fail(index, "has `tools`, which a run with tools or environments does not read", fix)
        self._check_blocks([] if isinstance(prompt, str) else prompt, index)
        if name in self.of_texts and is_conversation(prompt):
            _ = self._checked_answers
        conversations = self.conversations.of_row(row)
        ids = conversations.prompt_ids(prompt, self.schemas[name]) or [0]  # a placeholder for the observation
        self._check_vocabulary(ids, index)
        return {"input_ids": ids} | ({"prompt": prompt} if column == "text" else {})

    @functools.cached_property
    def _checked_answers(self) -> None:
        """None; the first access raises a `ValueError` if the template does not preserve a turn before an answer."""
        for end in self.stops:
            self.conversations.answer_ids([{"role": "user", "content": "dummy"}], end)
