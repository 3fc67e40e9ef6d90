"""Scores of responses: the batch and the answers that reward sources read, their weighted sum, and its shaping."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor

from rlhf_ppo.algorithm.advantages import (
    ScoreMoments,
    clip_scores,
    penalize_missing_eos,
    replace_missing_eos,
    zero_outside,
)
from rlhf_ppo.config.checks import WEIGHTS, check_range, suggestion
from rlhf_ppo.data.conversation import EPISODE_COLUMN
from rlhf_ppo.data.prompts import (
    MARK,
    is_conversation,
    silent_ids,
    spoken_texts,
    template_settings,
    text_of_content,
    written_texts,
)
from rlhf_ppo.data.rollout import Prompts, Responses, Rollout, selected

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_ppo.config import PPOConfig


MAX_SCORE = 1e12
"""The largest absolute value of a score: its squares, summed over a batch, are still finite in float32."""


@dataclass(frozen=True)
class ScoringBatch:
    """Prompts and responses for a reward source, already truncated after the stop token.

    The masks, never the ids, tell which tokens are real. Sources read the whole response, including the tokens of
    tools and environments; token rewards are paid only for tokens that the policy wrote.

    Attributes:
        responses: `B` prompts with their responses, and their masks.
        prompts: The prompts of the same rows, with the data set's other columns.
        ended: Whether the response ended with a stop token or a stop string, bool `(B,)`, see
            `rlhf_ppo.generation.sampling.SpecialTokens.ended`.
        stops: The tokens that end a response, which texts leave out if they are special.
        tokenizer: The policy's tokenizer, which decodes.
        template_kwargs: The run's further arguments of the chat template, or None.
    """

    responses: Responses
    prompts: Prompts
    ended: Tensor
    stops: Sequence[int]
    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.responses)

    def prompt_ids(self) -> list[list[int]]:
        """Return the real token ids of each prompt, in new lists."""
        return [list(ids) for ids in self._rows[0]]

    def response_ids(self) -> list[list[int]]:
        """Return the real token ids of each response, whoever wrote them, in new lists."""
        return [list(ids) for ids in self._rows[1]]

    @cached_property
    def prompt_texts(self) -> list[str]:
        """Each prompt's text, without special tokens, decoded once for all sources."""
        return written_texts(self.tokenizer, self._rows[0], skip_special_tokens=True)

    @cached_property
    def answers(self) -> list[Answer]:
        """The rows as answers, made once for all sources."""
        prompt_ids, response_ids = self.prompt_ids(), self.response_ids()
        silent = silent_ids(self.tokenizer, self.stops)
        texts = spoken_texts(self.tokenizer, response_ids, silent)
        columns, names = self.prompts.columns, ("prompt", "tools", "chat_template_kwargs")
        records = columns.get(EPISODE_COLUMN)
        answers: list[Answer] = []
        for row, text in enumerate(texts):
            read: dict[str, Any] = {name: columns[name][row] for name in names if columns.get(name)}
            answer = Answer(
                prompt=read.get("prompt"),
                response=text,
                ended=self.has_ended[row],
                prompt_ids=prompt_ids[row],
                response_ids=response_ids[row],
                tokenizer=self.tokenizer,
                written=self.written[row],
                messages=None if records is None else records[row].messages,
                silent=silent,
                settings=settings_of_row(read, self.template_kwargs),
            )
            answers.append(answer)
        return answers

    @property
    def written(self) -> list[list[bool]]:
        """For each response, whether the policy wrote each of its real tokens."""
        return self._rows[2]

    @property
    def has_ended(self) -> list[bool]:
        """For each response, whether it ended: `ended` on the host."""
        return self._rows[3]

    @cached_property
    def _rows(self) -> tuple[list[list[int]], list[list[int]], list[list[bool]], list[bool]]:
        """Return real ids of prompts and responses, which the policy wrote, and which rows ended; one copy."""
        masks, context = self.responses.masks, self.responses.context_length
        together = torch.cat([self.responses.query_responses, self.ended[:, None].long()], dim=1).cpu()
        ids, real = together[:, :-1], torch.from_numpy(masks.attention)
        return (
            selected(ids[:, :context], real[:, :context]),
            selected(ids[:, context:], real[:, context:]),
            selected(torch.from_numpy(masks.response), real[:, context:]),
            together[:, -1].bool().tolist(),
        )


@dataclass(frozen=True)
class Answer:
    """A response to a prompt: tokens from a policy, or a text from a data set.

    Attributes:
        prompt: The data set's prompt, a text or a conversation; None if only its ids are known.
        response: The response's text, decoded apart from the prompt, without its `silent_ids`.
        ended: Whether it ended with a stop token or stop string; True for an answer from a data set.
        prompt_ids: The prompt in the policy's tokens; None for an answer from a data set.
        response_ids: The whole response in the policy's tokens, including the stop token and the tokens of tools and
            environments; None for an answer from a data set.
        tokenizer: The policy's tokenizer; None for an answer from a data set.
        written: Whether the policy wrote each of `response_ids`; None: all.
        messages: The turns and answers of an episode; None for a single response.
        silent: Tokens that the response's text leaves out.
        settings: The further arguments of the chat template, with the row's tools, or None.
    """

    prompt: Any
    response: str
    ended: bool = True
    prompt_ids: Sequence[int] | None = None
    response_ids: Sequence[int] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    written: Sequence[bool] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    silent: Collection[int] = ()
    settings: Mapping[str, Any] | None = None

    @property
    def asked(self) -> Any:
        """The prompt, a text or a conversation."""
        return self._decode(self.prompt_ids or (), skip_special_tokens=True) if self.prompt is None else self.prompt

    @property
    def prefilled(self) -> str:
        """The beginning of the response that stands in the prompt: a turn's, or what the template opens it with."""
        if self._text_before or self.tokenizer is None or not is_conversation(self.prompt):
            return self._text_before
        user, answer = {"role": "user", "content": "dummy"}, {"role": "assistant", "content": MARK}
        try:
            text = str(self.tokenizer.apply_chat_template([user, answer, user], tokenize=False))
        except Exception:  # the template needs other messages
            return ""
        header = text.partition(MARK)[0].partition("dummy")[2].partition("<think>")[0]
        whole = written_texts(self.tokenizer, [list(self.prompt_ids or ())])[0]  # the header holds silent tokens, too
        _, has_header, beginning = whole.rpartition(header or MARK)
        return beginning if has_header else ""

    @property
    def continuation(self) -> str:
        """The response as the prompt's continuation: some tokenizers drop the space before a text's first word."""
        if self.prompt_ids is None or self.response_ids is None:
            return self.response
        before, whole = self._decode(self.prompt_ids), self._decode([*self.prompt_ids, *self.response_ids])
        text = whole[len(before) :] if whole.startswith(before) else self._decode(self.response_ids)
        # Some also move a text's last space before the next word.
        lacks_space = self._text_before.endswith(" ") and not before.endswith(" ")
        return text.removeprefix(" ") if lacks_space else text

    @property
    def completion(self) -> str:
        """The response as a reward function reads it: what follows a text or a begun turn, else a whole message."""
        return self.continuation if self._text_before or not is_conversation(self.prompt) else self.response

    @property
    def text(self) -> str:
        """A text prompt followed by its response."""
        return self.asked + self.continuation

    @property
    def _text_before(self) -> str:
        """The text before the response, if it is known as text."""
        if is_conversation(self.prompt):
            return text_of_content(self.prompt[-1]["content"]) if self.prompt[-1].get("role") == "assistant" else ""
        return self.prompt if isinstance(self.prompt, str) else ""

    def _decode(self, ids: Sequence[int], **options: bool) -> str:
        assert self.tokenizer is not None  # the policy's, which comes with ids
        return spoken_texts(self.tokenizer, [ids], self.silent, **options)[0]


def settings_of_row(row: Mapping[str, object], defaults: Mapping[str, object] | None = None) -> dict[str, Any] | None:
    """Return an answer's `settings`, see `template_settings`; None for a text, which no template reads."""
    return template_settings(row, defaults) if is_conversation(row.get("prompt")) else None


# ---- Sources and scores ----


class RewardSource(Protocol):
    """Anything that scores responses by their token ids, many at once.

    An object in `reward_funcs` is a reward source if its class derives from this class, or if it has a `name` and
    takes one positional argument, the batch. Reward functions take their arguments by name.

    A slow source can have `is_async = True` and a method `submit(batch) -> Future`; it then runs concurrently.

    Attributes:
        name: Name of the source in metrics, tables and errors.
    """

    name: str

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Score every response.

        Returns:
            Float32 `(B,)`, one score per response; or `(B, T)`, one reward per response token. NaN leaves a response
            unscored; in a `(B, T)` result, NaN at the policy's first token is enough. Tokens that the policy did not
            write are not paid.
        """
        ...


def is_reward_source(candidate: object) -> TypeGuard[RewardSource]:
    """Return whether an object is a `RewardSource` rather than a reward function."""
    if isinstance(candidate, type):
        return False
    if RewardSource in type(candidate).__mro__:
        return True
    if not callable(candidate) or not isinstance(getattr(candidate, "name", None), str):
        return False
    parameters = list(inspect.signature(candidate).parameters.values())
    return len(parameters) == 1 and parameters[0].kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Scores:
    """Scores of a batch of responses.

    Attributes:
        scores: Weighted sum over the sources that gave the response one number, float32 `(B,)`: 0 if it has only token
            rewards, NaN if no source with a weight other than 0 scored it.
        token_scores: Weighted sum over the sources that reward tokens, float32 `(B, T)`, 0 outside the response mask.
        by_source: Each source's scores before weighting, float32 `(B,)`, NaN where it gave none; for a source that
            rewards tokens, their sum.
    """

    scores: Tensor
    token_scores: Tensor
    by_source: dict[str, Tensor]

    @property
    def total(self) -> Tensor:
        """Total score of each response, float32 `(B,)`; NaN if no source scored it."""
        return self.scores + self.token_scores.sum(dim=1)


class Scorer:
    """Computes the weighted sum of reward sources, over the sources `i` that scored response `b`.

        score_b = sum_i w_i s_ib        token_score_bt = sum_i w_i r_ibt

    Sources with the weight 0 are only logged.

    Args:
        sources: The reward sources; sources with the same name become `name`, `name_2`, ...
        weights: One weight per source, in their order or by name; None: all 1.
        together: Returns a context that raises an error of one rank in its block on all ranks.

    Raises:
        ValueError: `weights` does not have one weight per source, or a weight is not finite.
    """

    def __init__(
        self,
        sources: Sequence[RewardSource],
        weights: Sequence[float] | Mapping[str, float] | None = None,
        together: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.together = together
        self.names = _unique([source.name for source in sources])
        self.sources = dict(zip(self.names, sources, strict=True))
        self.weights = weights_by_name(self.names, weights)

    def start(self, batch: ScoringBatch) -> PendingScores:
        """Start the slow sources, so that they run while the caller continues."""
        running: dict[str, Future[Tensor]] = {}
        for name, source in self.sources.items():
            if getattr(source, "is_async", False):
                try:
                    running[name] = source.submit(batch)  # pyright: ignore[reportAttributeAccessIssue]
                except Exception as error:  # raised with the other errors of rewards, on all ranks
                    running[name] = Future()
                    running[name].set_exception(error)
        return PendingScores(self, batch, running)

    def __call__(self, batch: ScoringBatch) -> Scores:
        """Score a batch; see `PendingScores.result`."""
        with self.start(batch) as pending:
            return pending.result()

    def weighted_sum(self, results: Mapping[str, Tensor], batch: ScoringBatch) -> Scores:
        """Return the weighted sum of what the sources gave."""
        mask = batch.responses.response_mask.bool()
        summed, token_scores = (torch.zeros(shape, device=mask.device) for shape in ((len(batch),), mask.shape))
        by_source: dict[str, Tensor] = {}
        first = mask.to(torch.uint8).argmax(dim=1, keepdim=True)
        for name, scores in results.items():
            scores, weight = scores.to(mask.device, torch.float32), self.weights[name]
            if tuple(scores.shape) == (len(batch),):
                by_source[name] = scores
                if weight != 0:  # 0 times an infinite score is NaN
                    summed = summed + weight * torch.where(scores.isnan(), 0.0, scores)
            elif scores.shape == mask.shape:
                unscored = scores.gather(1, first).squeeze(1).isnan()
                scores = torch.where(mask & ~unscored[:, None], scores, 0.0)
                by_source[name] = scores.sum(dim=1).masked_fill(unscored, math.nan)
                if weight != 0:
                    token_scores = token_scores + weight * scores
            else:
                raise WrongRewardError(
                    f"reward {name!r} has shape {tuple(scores.shape)}, expected ({len(batch)},), or "
                    f"{tuple(mask.shape)} for rewards per token"
                )
        usable = (summed.abs() <= MAX_SCORE) & (token_scores.abs() <= MAX_SCORE).all(dim=1)
        if not usable.all():
            raise WrongRewardError(
                f"the weighted sum of the rewards of row {int(usable.int().argmin())} is beyond {MAX_SCORE:g}: return "
                f"smaller rewards, or lower reward_weights={self.weights}"
            )
        weighed = [scores for name, scores in by_source.items() if self.weights[name] != 0]
        unscored = torch.stack([scores.isnan() for scores in weighed or by_source.values()]).all(dim=0)
        return Scores(summed.masked_fill(unscored, math.nan), token_scores, by_source)


@dataclass(frozen=True)
class PendingScores:
    """Scores of a batch whose slow sources run; they are cancelled at the end of a `with` block.

    Attributes:
        scorer: Computes the weighted sum.
        batch: `B` prompts and truncated responses.
        running: The started sources, by name.
    """

    scorer: Scorer
    batch: ScoringBatch
    running: dict[str, Future[Tensor]]

    @torch.no_grad()
    def result(self) -> Scores:
        """Call the other sources, and collect all.

        Returns:
            The weighted sums and each source's scores, on the batch's device.

        Raises:
            WrongRewardError: A source returned another shape, or a weighted sum is beyond `MAX_SCORE`.
        """
        sources = self.scorer.sources
        of_models = {name for name, source in sources.items() if getattr(source, "exchanges_errors", False)}
        results = {name: sources[name](self.batch) for name in sources if name in of_models}
        with self.scorer.together():
            now = sources.keys() - of_models - self.running.keys()
            results |= {name: source(self.batch) for name, source in sources.items() if name in now}
            results |= {name: future.result() for name, future in self.running.items()}
            return self.scorer.weighted_sum({name: results[name] for name in sources}, self.batch)

    def __enter__(self) -> PendingScores:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self.running.values():
            future.cancel()  # no effect if it is done


def weights_by_name(names: Sequence[str], weights: Sequence[float] | Mapping[str, float] | None) -> dict[str, float]:
    """Return each reward source's weight by name.

    Args:
        names: The sources' names.
        weights: One number per name, in order or by name, or None: all 1.

    Raises:
        ValueError: There are too few or too many weights, a name is not a source, or a weight is not finite.
    """
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if not isinstance(weights, Mapping):
        if len(weights) != len(names):
            raise ValueError(
                f"reward_weights has {len(weights)} numbers ({list(weights)}) for {len(names)} rewards "
                f"({list(names)}): give one per reward, the reward models' first"
            )
        weights = dict(zip(names, weights, strict=True))
    unknown = [name for name in weights if name not in names]
    missing = [name for name in names if name not in weights]
    if unknown or missing:
        problems = [f"names {unknown}"] if unknown else []
        problems += [f"has no weight for {missing}"] if missing else []
        hint = "".join(suggestion(name, missing) for name in unknown)
        raise ValueError(
            f"reward_weights={dict(weights)} {' and '.join(problems)}: the rewards are {list(names)}"
            f"{hint}; give each a weight; 0 only logs a reward"
        )
    for name, weight in weights.items():
        check_range(f"reward_weights[{name!r}]", weight, WEIGHTS, "the factor of a reward in the score")
    return {name: float(weights[name]) for name in names}


def _unique(names: Sequence[str]) -> list[str]:
    unique: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in unique:
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


# Score validation


class WrongRewardError(ValueError):
    """A reward function cannot be called, or returned scores that cannot be used; the message names the fix."""


def check_scores(
    returned: object, who: str, lengths: Sequence[int], written: Sequence[Sequence[bool]] | None = None
) -> Tensor:
    """Convert a reward function's result to a tensor, and check it.

    Args:
        returned: A list, tensor, array, or other iterable with one entry per row: numbers and None; or lists of
            numbers, one per response token, and None.
        who: Name of the function in errors.
        lengths: Number of tokens of each of the `B` responses.
        written: For each response, whether the policy wrote each token; None: all. Rewards of other tokens, of a
            tool for example, are ignored: they may be None or NaN.

    Returns:
        Scores, float32 `(B,)`, NaN for None; or rewards per token, float32 `(B, max(lengths))`, a row of NaN for None
        and 0 after the last token.

    Raises:
        WrongRewardError: It is not a list, the number of scores is wrong, or one is not a number, not finite or beyond
            `MAX_SCORE`.
    """
    whole = _plain(returned)
    is_list = isinstance(whole, Iterable) and not isinstance(whole, str | Mapping)
    values = [_plain(value) for value in whole] if is_list else []
    if not is_list or len(values) != len(lengths):
        what = f"{len(values)} rewards" if is_list else f"{whole!r:.80}"
        raise WrongRewardError(
            f"{who} returned {what} for {len(lengths)} completions: return a list with one number per completion, and "
            "None for no score"
        )
    if isinstance(next((value for value in values if value is not None), None), list | tuple):
        return _per_token(values, who, lengths, written or [[True] * length for length in lengths])
    return torch.tensor(
        [math.nan if value is None else check_score(value, who, f"row {row}") for row, value in enumerate(values)]
    )


def _per_token(
    values: Sequence[object], who: str, lengths: Sequence[int], written: Sequence[Sequence[bool]]
) -> Tensor:
    rewards = torch.full((len(lengths), max(lengths)), math.nan)
    for row, (value, is_written) in enumerate(zip(values, written, strict=True)):
        if value is None:
            continue
        if not isinstance(value, list | tuple) or len(value) != len(is_written):
            what = f"{len(value)} rewards" if isinstance(value, list | tuple) else f"{value!r:.80}"
            raise WrongRewardError(
                f"{who} returned {what} for the {len(is_written)} tokens of row {row}: return one for each of "
                "completion_ids[row]; for one score per completion, return a tensor after .squeeze(-1)"
            )
        numbers = [
            check_score(number, who, f"row {row}, token {token}") if is_written[token] else 0.0
            for token, number in enumerate(value)
        ]
        rewards[row] = 0.0
        rewards[row, : len(is_written)] = torch.tensor(numbers)
    return rewards


def _plain(value: Any) -> Any:
    """Return a tensor or NumPy value as Python numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def check_score(value: object, who: str, place: str) -> float:
    """Return a score as a number.

    Args:
        value: The score.
        who: What gave it, in errors.
        place: What it is for, in errors.

    Raises:
        WrongRewardError: It is not a number, not finite or beyond `MAX_SCORE`.
    """
    number = _plain(value)
    if not isinstance(number, Real) or not abs(float(number)) <= MAX_SCORE:  # NaN too
        raise WrongRewardError(
            f"{who} returned {number!r:.80} for {place}: return a finite number of at most {MAX_SCORE:g}, or None for "
            "a completion that it does not score"
        )
    return float(number)


# Shaping, in this order: `score_scaling` divides by the standard deviation of the run's scores so far, also for token
# rewards; `score_clip` limits the score's absolute value, not that of token rewards; `missing_eos_penalty` lowers, or
# `missing_eos_score` replaces, the score of a response without the stop token. Replaced scores do not scale others.


def shape_scores(rollout: Rollout, args: PPOConfig, unit: ScoreMoments | None = None) -> tuple[Tensor, Tensor]:
    """Scale and clip the scores, and apply `missing_eos_penalty` or `missing_eos_score`.

    Args:
        rollout: `B` scored responses.
        args: Gives `score_clip`, `missing_eos_penalty` and `missing_eos_score`.
        unit: Moments for the scaling; None leaves the scores in the reward's unit.

    Returns:
        The scores, paid at the last token, float32 `(B,)`, NaN for responses that no source scored; and the token
        rewards, float32 `(B, T)`, 0 outside the response mask.
    """
    std = 1.0 if unit is None else unit.std
    return _shaped(rollout.scores, rollout.ended, args, unit), _of_tokens(rollout) / std


def scores_in_reward_unit(
    scores: Tensor, token_scores: Tensor, ended: Tensor, args: PPOConfig, unit: ScoreMoments | None
) -> Tensor:
    """Compute each response's shaped score, converted back to the reward's unit.

        score = std * shaped score + sum of token rewards

    `std` is 1 without scaling. Penalties and clip are thus
    multiples of the same standard deviation as in training.

    Args:
        scores: Weighted sums, before shaping, `(N,)`; NaN for responses that no source scored.
        token_scores: Sums of the token rewards, `(N,)`.
        ended: Whether the response has its stop token or stop string, bool `(N,)`.
        args: As for `shape_scores`.
        unit: The moments of the run so far; None without `score_scaling`. Without any scores,
            before the first update, the moments of these scores are used.

    Returns:
        float32 `(N,)`, in the reward's unit.
    """
    if unit is None:
        return _shaped(scores, ended, args) + token_scores
    if unit.count == 0:
        total = scores + token_scores
        unit = ScoreMoments()  # a new one: an evaluation changes no moments
        unit.add(_kept(total, ended, args), lambda summand: summand)
    return unit.std * _shaped(scores, ended, args, unit) + token_scores


def _shaped(scores: Tensor, ended: Tensor, args: PPOConfig, unit: ScoreMoments | None = None) -> Tensor:
    if unit is not None:
        scores = scores / unit.std
    scores = penalize_missing_eos(clip_scores(scores, args.score_clip), ended, args.missing_eos_penalty)
    return replace_missing_eos(scores, ended, args.missing_eos_score)


def scaling_scores(rollout: Rollout, args: PPOConfig) -> Tensor:
    """Return the scores whose deviation `score_scaling` divides by: total scores before shaping, float32 `(n,)`.

    They are those of the responses that have a score which `missing_eos_score` does not replace.
    """
    return _kept(rollout.scores + token_score_sums(rollout), rollout.ended, args)


def _kept(total: Tensor, ended: Tensor, args: PPOConfig) -> Tensor:
    is_kept = ended | (args.missing_eos_score is None)
    return total[is_kept & ~total.isnan()]


def token_score_sums(rollout: Rollout) -> Tensor:
    """Return the sum of each response's rewards of single tokens, before shaping, float32 `(B,)`."""
    return _of_tokens(rollout).sum(dim=1)


def _of_tokens(rollout: Rollout) -> Tensor:
    return zero_outside(rollout.token_scores, rollout.response_mask)
