"""Episodes: turns of the policy, and answers of tools and environments between them.

`EpisodePlayer` runs all episodes of a batch in parallel, in rounds. A round samples one turn of each running episode,
calls tools and environments, and appends the tokens of their answers. Turns are never tokenized again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_ppo.data.conversation import EPISODE_COLUMN, Conversations, Prompt, with_observation
from rlhf_ppo.data.prompts import Messages, is_conversation, text_of_content
from rlhf_ppo.data.rollout import PositionLimit, Prompts, Responses
from rlhf_ppo.environments.pool import Episode, EpisodeError, Round, answer_turns
from rlhf_ppo.generation.protocol import MAX_ROUNDING, ROW_COLUMN, Sampled
from rlhf_ppo.generation.sampling import StopStrings

Sample = Callable[[Prompts, int], Sampled]
"""Takes prompts and the maximum number of tokens to sample after each."""

CUTS = ("length", "calls", "time", "environment")
"""Reasons of a cut: `response_length`, `max_tool_calling_iterations`, `tool_timeout`, or the environment."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of turns and episodes.

    Attributes:
        response_length: Maximum tokens after the prompt, including answers.
        max_rounds: Maximum rounds of calls; None: any number.
        stops: Tokens that end a turn.
        stop_strings: Texts that also end a turn, or None.
        longest_sequence: Maximum tokens that the models support, or None.
        pad: Id of the padding.
    """

    response_length: int
    max_rounds: int | None
    stops: tuple[int, ...]
    stop_strings: StopStrings | None
    longest_sequence: PositionLimit | None
    pad: int


@dataclass
class EpisodeRecord:
    """A running or finished episode.

    Attributes:
        episode: Its environment and tools.
        prompt: The prompt with the text of `reset`.
        prompt_ids: Tokens of the prompt.
        room: Maximum tokens after the prompt.
        conversations: Renders its answers.
        ids: Tokens after the prompt.
        written: Whether the policy wrote each of them.
        logprobs: The engine's log-probabilities of the policy's tokens, nats; 0 for other tokens.
        messages: Turns and answers as messages.
        turn_ends: Number of tokens up to the end of each turn.
        turn_rewards: The environment's reward for each turn.
        calls: Name of the tool, failure and seconds of each answered call.
        ended: Whether the episode ended by itself.
        cut: One of `CUTS`, or empty.
    """

    episode: Episode
    prompt: Prompt
    prompt_ids: list[int]
    room: int
    conversations: Conversations
    ids: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    calls: list[tuple[str, bool, float]] = field(default_factory=list)
    ended: bool = False
    cut: str = ""

    @property
    def left(self) -> int:
        """Tokens that still fit."""
        return self.room - len(self.ids)

    @property
    def turn_start(self) -> int:
        """Start of the current turn: the end of the last answer."""
        gaps = (place for place in range(len(self.ids), 0, -1) if not self.written[place - 1])
        return next(gaps, 0)

    @property
    def is_over(self) -> bool:
        """Whether the episode has ended or was cut."""
        return self.ended or bool(self.cut)

    @property
    def summary(self) -> dict[str, Any]:
        """Entries for tables and files as JSON values: `messages`, `turn_reward` for each turn, and `end`.

        `end` is the reason of a cut, `done` if the environment ended the episode, or `answer` if the policy did.
        """
        by_policy = not self.episode.kind.takes_messages and self.messages[-1]["role"] == "assistant"
        end = self.cut or ("answer" if by_policy else "done")
        return {"messages": self.messages, "turn_reward": self.turn_rewards, "end": end}

    def extend(self, ids: Sequence[int], written: bool, logprobs: Sequence[float] | None = None) -> None:
        """Append tokens of the policy, or of an answer."""
        self.ids += ids
        self.written += [written] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


@dataclass(frozen=True)
class Ranks:
    """Exchange of the ranks in each round, if all must sample the same numbers of rows and tokens; none by default.

    Attributes:
        most: Returns the largest of each number over all ranks.
        together: Raises an error of one rank in its block on all ranks.
    """

    most: Callable[[list[int]], list[int]] = list
    together: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class EpisodePlayer:
    """Run the episodes of a batch.

    Attributes:
        sample: Samples the turns.
        conversations: Renders prompts and answers.
        limits: Limits of turns and episodes.
        ranks: Exchange of the ranks in each round.
        calling: Returns the context in which tools and environments are called.
        seconds: Seconds of tools and environments.
    """

    sample: Sample
    conversations: Conversations
    limits: EpisodeLimits
    ranks: Ranks = Ranks()
    calling: Callable[[], AbstractContextManager[Any]] = nullcontext
    seconds: float = 0.0
    _knows_logprobs: bool = field(default=True, init=False)

    def begin(self, prompts: Prompts, episodes: Sequence[Episode]) -> list[EpisodeRecord]:
        """Tokenize the prompts of a batch.

        Args:
            prompts: `B` rows; their ids are ignored, because the prompt includes the text of `reset`.
            episodes: Their environments, after `reset`.

        Raises:
            EpisodeError: A prompt is empty, or leaves no room for a token.
        """
        names = [name for name in ("prompt", "chat_template_kwargs") if name in prompts.columns]
        rows = [{name: prompts.columns[name][number] for name in names} for number in range(len(prompts))]
        return [self._begun(episode, row) for episode, row in zip(episodes, rows, strict=True)]

    def play(self, prompts: Prompts, records: list[EpisodeRecord]) -> tuple[Responses, Prompts]:
        """Play a batch's episodes to their ends.

        Args:
            prompts: `B` rows.
            records: The result of `begin`.

        Returns:
            The responses, with gaps for answers, and their prompts. The column `prompt` includes the texts of `reset`;
            `EPISODE_COLUMN` has the `EpisodeRecord` of each row.
        """
        device, running = prompts.input_ids.device, records
        while (num_and_most := self._of_all_ranks(running))[0]:
            self._take_turns(running, *num_and_most, device)
            with self.ranks.together():
                self._answer(running)
                running = [record for record in running if not record.is_over]
        played_columns = {"prompt": [record.prompt for record in records], EPISODE_COLUMN: records}
        ids = [record.prompt_ids for record in records]
        played = Prompts.of_rows(ids, self.limits.pad, device, dict(prompts.columns) | played_columns)
        logprobs = [record.logprobs for record in records] if self._knows_logprobs else None
        ended = [record.ended for record in records]
        ids, written = ([getattr(record, name) for record in records] for name in ("ids", "written"))
        return responses_of(played, ids, written, logprobs, self.limits.pad, ended), played

    def _begun(self, episode: Episode, row: Mapping[str, Any]) -> EpisodeRecord:
        conversations = self.conversations.of_row(row)
        prompt: Prompt = conversations.default_prompt() if row.get("prompt") is None else row["prompt"]
        whole = with_observation(prompt, episode.observation)
        if isinstance(prompt, str):  # tokenized separately, or a token could span both texts
            ids = conversations.prompt_ids(prompt, None)
            observed = "" if episode.observation is None else text_of_content(episode.observation)
            if observed:
                ids = ids + conversations.text_ids(observed, is_first=not ids)
        else:
            ids = conversations.prompt_ids(whole, episode.kind.schemas)
        limit = self.limits.longest_sequence
        room = (
            self.limits.response_length if limit is None else min(self.limits.response_length, limit.tokens - len(ids))
        )
        if not ids or room < 1:
            reason = "is empty" if limit is None or not ids else f"takes {len(ids)} tokens, but {limit.reason}"
            raise EpisodeError(f"{episode.description}: the prompt with the text of reset {reason}")
        return EpisodeRecord(episode, whole, ids, room, conversations)

    # ---- Turns ----

    def _of_all_ranks(self, running: Sequence[EpisodeRecord]) -> tuple[int, int]:
        """Return rows and maximum tokens of the next call; a longer turn continues in the next round."""
        limit, left = self.limits.longest_sequence, [record.left for record in running]
        longest = max((len(record.prompt_ids) + len(record.ids) for record in running), default=1)
        of_rank = [len(running), max(left, default=1), longest]
        number, most, longest = self.ranks.most(of_rank)
        return number, most if limit is None else min(most, limit.tokens - longest)

    def _take_turns(self, running: Sequence[EpisodeRecord], number: int, most: int, device: torch.device) -> None:
        """Sample the next turn of each running episode, and append its tokens."""
        rows = [record.prompt_ids + record.ids for record in running]
        filling = [[0]] * (number - len(rows))  # PAD may be outside the vocabulary; the answers are dropped
        names = [*(record.episode.row for record in running), *[-1] * len(filling)]
        sampled = self.sample(Prompts.of_rows([*rows, *filling], self.limits.pad, device, {ROW_COLUMN: names}), most)
        ids = sampled.ids.tolist()
        self._knows_logprobs = self._knows_logprobs and sampled.logprobs is not None
        logprobs = None if sampled.logprobs is None else sampled.logprobs.tolist()
        lengths = [len(row) for row in ids] if sampled.lengths is None else sampled.lengths.tolist()
        for row, record in enumerate(running):
            turn = self._cut(ids[row][: int(lengths[row])], record)
            record.extend(turn, True, None if logprobs is None else logprobs[row][: len(turn)])

    def _cut(self, ids: list[int], record: EpisodeRecord) -> list[int]:
        """Cut sampled ids after a stop token or stop string, and at the episode's length."""
        ends = [place + 1 for place, token in enumerate(ids) if token in self.limits.stops]
        ids = ids[: min([*ends[:1], record.left])]
        if self.limits.stop_strings is not None:
            before = record.ids[record.turn_start :]
            end = self.limits.stop_strings.end(before + ids)
            ids = ids if end is None else ids[: end - len(before)]
        return ids

    # ---- Answers ----

    def _answer(self, running: Sequence[EpisodeRecord]) -> None:
        """Call tools and environments for finished turns."""
        acting: list[EpisodeRecord] = []
        acts: list[str | list[dict[str, Any]]] = []
        for record in running:
            turn, strings = record.ids[record.turn_start :], self.limits.stop_strings
            stopped = turn[-1] in self.limits.stops or (strings is not None and strings.is_completed(turn))
            if not stopped and record.left > 0:
                continue  # the turn is unfinished
            record.turn_ends.append(len(record.ids))
            record.turn_rewards.append(0.0)
            if record.episode.kind.takes_messages:
                act = self.conversations.text_of(turn) if stopped else None
                record.messages.append({"role": "assistant", "content": self.conversations.text_of(turn)})
            else:
                before = record.prompt_ids + record.ids[: record.turn_start]
                message = self.conversations.parse(turn, before, record.episode.kind.schemas)
                record.messages.append(message)
                act = (message.get("tool_calls") or None) if stopped else None  # a cut call is not the policy's
                record.ended = act is None and stopped
            if act is None:
                record.cut = "" if record.ended else "length"
            elif self.limits.max_rounds is not None and len(record.turn_ends) > self.limits.max_rounds:
                record.cut = "calls"
            else:
                acting.append(record)
                acts.append(act)
        start = time.perf_counter()
        with self.calling():
            rounds = answer_turns([record.episode for record in acting], acts)
        self.seconds += time.perf_counter() - start
        for record, result in zip(acting, rounds, strict=True):
            self._take(record, result)

    def _take(self, record: EpisodeRecord, result: Round) -> None:
        """Add the turn's reward, and append the answers unless the episode is over or they do not fit."""
        record.turn_rewards[-1] += result.turn_reward
        record.calls += [(answer.name, answer.failed, answer.seconds) for answer in result.answers]
        messages = [answer.message for answer in result.answers]
        if record.episode.kind.takes_messages:
            messages = [{"role": "user", "content": answer.content} for answer in result.answers if answer.content]
        if result.done:
            record.messages += messages
            record.ended = True
            return
        if result.lost or result.truncated:
            record.cut = "time" if result.lost else "environment"
        ids = self._answer_ids(record, messages, is_last=bool(record.cut))
        if ids is None:
            record.cut = record.cut or "length"
            return
        record.messages += messages
        record.extend(ids, False)
        if record.left == 0 and not record.cut:
            record.cut = "length"

    def _answer_ids(self, record: EpisodeRecord, messages: Messages, is_last: bool) -> list[int] | None:
        """Return the tokens between two turns, or None if they do not fit."""
        if is_conversation(record.prompt):
            ids = record.conversations.answer_ids(messages, record.ids[-1]) if messages else []
        else:
            ids = [
                token
                for message in messages
                for token in self.conversations.defused_ids(text_of_content(message["content"]))
            ]
        if not ids and not is_last:
            raise EpisodeError(f"{record.episode.description}: an answer has no tokens; return some text")
        return ids if len(ids) <= record.left else None


def responses_of(
    prompts: Prompts,
    ids: Sequence[Sequence[int]],
    written: Sequence[Sequence[bool]],
    logprobs: Sequence[Sequence[float]] | None,
    pad: int,
    ended: Sequence[bool] | None = None,
) -> Responses:
    """Stack episodes behind their prompts, with their masks.

    Args:
        prompts: The prompts of `B` episodes.
        ids: The tokens of each, `T_i` of the policy and of tools.
        written: Whether the policy wrote each token.
        logprobs: Log-probabilities of each token, nats; None if the engine has not returned all.
        pad: Id of the padding.
        ended: Whether each episode ended by itself, if known.
    """
    device, width = prompts.input_ids.device, max(map(len, ids))

    def stacked(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=dtype).to(device)

    real = stacked([[True] * len(row) for row in ids], False, torch.bool)
    return Responses(
        torch.cat((prompts.input_ids, stacked(ids, pad, torch.long)), dim=1),
        torch.cat((prompts.attention_mask, real), dim=1),
        stacked(written, False, torch.bool),
        sampling_logprobs=None if logprobs is None else stacked(logprobs, 0.0, torch.float32),
        ended=None if ended is None else torch.tensor(ended, device=device),
    )


# ---- rollout_func ----


def responses_of_function(returned: Any, num_rows: int, prompts: Prompts, pad: int) -> tuple[Responses, Prompts]:
    """Check and stack the result of a `rollout_func`.

    Args:
        returned: A dict with `prompt_ids`, `completion_ids`, `logprobs` (or None), optionally `env_mask`, and columns.
        num_rows: Number of rows that it was given.
        prompts: Their prompts.
        pad: Id of the padding.

    Raises:
        ValueError: A key is missing, an entry has the wrong number of rows or tokens, or a log-probability is above 0.
    """
    needed = ("prompt_ids", "completion_ids", "logprobs")
    per_token = {key: returned.get(key) for key in (*needed, "env_mask")}
    optional = {"env_mask"} | ({"logprobs"} & returned.keys())
    for key, values in per_token.items():
        if values is None and key in optional:
            continue
        number = None if values is None else len(values)
        if number != num_rows:
            raise ValueError(
                f"rollout_func returned {'no' if number is None else number} rows as {key!r}: return one row for each "
                f"of {num_rows} prompts"
            )
    rows = {key: [_plain_row(row) for row in values] for key, values in per_token.items() if values is not None}
    for key in rows.keys() & {"logprobs", "env_mask"}:
        for row, (values, ids) in enumerate(zip(rows[key], rows["completion_ids"], strict=True)):
            if len(values) != len(ids):
                raise ValueError(
                    f"rollout_func returned {len(values)} {key} for the {len(ids)} completion_ids of row {row}: "
                    "return one for each token"
                )
    extra = {key: value for key, value in returned.items() if key not in (*needed, "env_mask")}
    columns = dict(prompts.columns) | {
        key: list(value) if isinstance(value, list) and len(value) == num_rows else [value] * num_rows
        for key, value in extra.items()
    }
    played = Prompts.of_rows(rows["prompt_ids"], pad, prompts.input_ids.device, columns)
    ids = rows["completion_ids"]
    masks = [list(map(bool, mask)) for mask in rows.get("env_mask", [[1] * len(row) for row in ids])]
    logprobs = None
    if "logprobs" in rows:
        logprobs = [_known(row, *each) for row, each in enumerate(zip(rows["logprobs"], masks, strict=True))]
    responses = responses_of(played, ids, masks, logprobs, pad)
    return replace(responses, on_host=responses.masks), played


def _known(row: int, logprobs: list[Any], written: list[bool]) -> list[float]:
    """Return a row's log-probabilities, NaN for None, as vLLM may write it, and 0 where the policy did not write."""
    known = [math.nan if number is None else number for number in logprobs]
    known = [number if by_policy else 0.0 for number, by_policy in zip(known, written, strict=True)]
    if any(number > MAX_ROUNDING for number in known):
        raise ValueError(
            f"rollout_func returned logprobs[{row}]={known!r:.80}: return natural logarithms of probabilities, "
            "which are at most 0"
        )
    return known


def _plain_row(row: Any) -> list[Any]:
    values = row.tolist() if isinstance(row, Tensor) else list(row)
    return [value[0] if isinstance(value, list | tuple) else value for value in values]
