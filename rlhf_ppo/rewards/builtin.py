"""Built-in rewards by name: those of AITraining's `rl_reward_fn` and environments, and TRL's.

Each is a picklable object with `GRPOTrainer`'s signature; metrics and weights use its `__name__`. Their table is on
the page *Rewards*.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlhf_ppo.data.prompts import Messages, text_of_content
from rlhf_ppo.rewards.limited import limited, matches
from rlhf_ppo.rewards.scorer import Answer
from rlhf_ppo.terminal import visible_logger

logger = visible_logger(__name__)


class TextReward(ABC):
    """A reward function of the response's text alone."""

    @abstractmethod
    def score(self, text: str) -> float:
        """Score one response."""

    def __call__(self, completions: Sequence[str | Messages], **_: object) -> list[float]:
        """Score every response."""
        return [self.score(text) for text in response_texts(completions)]


@dataclass(frozen=True)
class LengthPenalty(TextReward):
    """Penalty for long responses: `-penalty * max(0, words(y) - max_words)`.

    Attributes:
        max_words: Number of words without a penalty.
        penalty: Penalty for each further word.
    """

    __name__: ClassVar[str] = "length_penalty"
    max_words: int = 50
    penalty: float = 0.01

    def score(self, text: str) -> float:
        """Return a score of at most 0."""
        return -self.penalty * max(0, len(text.split()) - self.max_words)


@dataclass(frozen=True)
class Default(LengthPenalty):
    """AITraining's default reward: the length penalty, plus `bonus` if the response has any of `.`, `!`, `?`.

    Attributes:
        bonus: Reward for the end of a sentence.
    """

    __name__: ClassVar[str] = "default"
    bonus: float = 0.5

    def score(self, text: str) -> float:
        """Return a score of at most `bonus`."""
        return super().score(text) + self.bonus * bool(re.search("[.!?]", text))


@dataclass(frozen=True)
class Length(TextReward):
    """Reward for long responses: `words(y) / unit`.

    Attributes:
        unit: Number of words with a reward of 1.
    """

    __name__: ClassVar[str] = "length"
    unit: int = 100

    def score(self, text: str) -> float:
        """Return a score of at least 0."""
        return len(text.split()) / self.unit


@dataclass(frozen=True)
class Correctness:
    """1 if the `final_answer` of the response is that of the data set, else 0.

    An answer may be a list of accepted answers. Rows whose answer is None are not scored. If the data set has neither
    default column, no row is scored, and one warning is logged.

    Attributes:
        mode: "exact" compares texts, ignoring case, spacing and a final full stop; "numeric" compares numbers; "auto"
            is "numeric" in rows whose answer is a number and "exact" in others; "math" uses the package math-verify.
        column: The column with the answers; None takes `answer`, or else `solution`.
    """

    __name__: ClassVar[str] = "correctness"
    mode: str = "auto"
    column: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in _AGREE:
            raise ValueError(f"correctness: mode={self.mode!r} must be one of {list(_AGREE)}")

    def __call__(self, completions: Sequence[str | Messages], **columns: Any) -> list[float | None]:
        """Score every response.

        Raises:
            ValueError: The data set has no column `column`.
        """
        names = ("answer", "solution") if self.column is None else (self.column,)
        present = [name for name in names if name in columns]
        if not present:
            problem = f"correctness finds no column {' or '.join(map(repr, names))} with the answers"
            if self.column is not None:
                raise ValueError(f"{problem}; add it to the data set, or name another with column=...")
            logger.warning_once(
                f"{problem}, so it scores no response; add one to the data set, or name another with column=..."
            )
            return [None] * len(completions)
        agree, scores = _AGREE[self.mode], list[float | None]()
        for text, wanted in zip(response_texts(completions), columns[present[0]], strict=True):
            answers = [str(one) for one in (wanted if isinstance(wanted, list) else [wanted]) if one is not None]
            scores.append(float(any(agree(text, one) for one in answers)) if answers else None)
        return scores


@dataclass(frozen=True)
class Formatting(TextReward):
    r"""1 if the response matches a pattern, else 0.

    Attributes:
        pattern: A regular expression, searched anywhere in the response and in the beginning that the chat template
            has written, such as `<think>`; 0 if that takes longer than `limited.SECONDS`. The default finds an
            announced answer.
    """

    __name__: ClassVar[str] = "formatting"
    pattern: str = r"Answer:|####|\\boxed\{"

    def __call__(
        self, completions: Sequence[str | Messages], policy_answers: Sequence[Answer] | None = None, **_: object
    ) -> list[float]:
        """Score every response."""
        return [self.score(text) for text in _whole_texts(completions, policy_answers)]

    def score(self, text: str) -> float:
        """Return 0 or 1."""
        is_plain = self.pattern == Formatting.pattern  # which is fast
        return float(matches(self.pattern, text) if is_plain else limited("matches", self.pattern, text))


@dataclass(frozen=True)
class Keyword(TextReward):
    """Number of keywords in the response, each counted once, case-sensitive.

    Attributes:
        keywords: The keywords.

    Raises:
        ValueError: `keywords` is a text or is empty.
    """

    __name__: ClassVar[str] = "keyword"
    keywords: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.keywords, str) or not self.keywords:
            raise ValueError(f"keyword: keywords={self.keywords!r} must be a list of texts, such as ['yes']")

    def score(self, text: str) -> float:
        """Return a score from 0 to the number of keywords."""
        return float(sum(word in text for word in self.keywords))


class Custom:
    """A function of one row with AITraining's signature, `f(prompt, generated, full_text) -> float`.

    Pass a function with `GRPOTrainer`'s signature directly instead.

    Args:
        function: The function.
    """

    __name__ = "custom"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(
        self,
        prompts: Sequence[str | Messages],
        completions: Sequence[str | Messages],
        policy_answers: Sequence[Answer] | None = None,
        **_: object,
    ) -> list[float | None]:
        """Call the function for every response; `full_text` is the prompt's text followed by the response."""
        texts = response_texts(completions)
        behind = texts if policy_answers is None else [answer.continuation for answer in policy_answers]
        rows = zip(map(prompt_text, prompts), texts, behind, strict=True)
        return [
            self.function(prompt=prompt, generated=response, full_text=prompt + following)
            for prompt, response, following in rows
        ]


BUILTIN_REWARDS: dict[str, type] = {
    reward.__dict__["__name__"]: reward
    for reward in (Default, LengthPenalty, Length, Correctness, Formatting, Keyword, Custom)
}
"""The built-in rewards by name, without TRL's."""

TRL_REWARDS: tuple[str, ...] = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
)
"""The rewards of `trl.rewards`; those that begin with `get_` take settings."""


def builtin_reward(name: str, **settings: object) -> Callable[..., Any]:
    """Make a reward function by name.

    Args:
        name: A key of `BUILTIN_REWARDS`, or one of `TRL_REWARDS`.
        **settings: The attributes of the reward's class; TRL documents those of its rewards.

    Returns:
        A picklable callable with `GRPOTrainer`'s signature.
    """
    return TrlReward(name, settings) if name in TRL_REWARDS else BUILTIN_REWARDS[name](**settings)


class TrlReward:
    """One of TRL's rewards. They expect conversations; this class passes texts as messages.

    Args:
        name: Its name in `trl.rewards`.
        settings: Its arguments; for names that begin with `get_`, those of the factory.
    """

    def __init__(self, name: str, settings: dict[str, object]) -> None:
        import trl.rewards

        self.name, self.settings = name, settings
        reward = getattr(trl.rewards, name)
        self._call = reward(**settings) if name.startswith("get_") else functools.partial(reward, **settings)
        self.__name__ = getattr(self._call, "__name__", name)
        if name != "think_format_reward":  # which takes what `__call__` takes
            self.__signature__ = inspect.signature(self._call)  # the columns that it requires

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.settings)

    def __call__(
        self, completions: Sequence[str | Messages], policy_answers: Sequence[Answer] | None = None, **columns: object
    ) -> list[float | None]:
        """Score every response as TRL does; formats include the beginning that the chat template has written."""
        texts = _whole_texts(completions, policy_answers)
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        return self._call(completions=messages, **columns)


def response_texts(completions: Sequence[str | Messages]) -> list[str]:
    """Return the texts of responses; of a list of messages, the texts of the policy's turns.

    Args:
        completions: `B` texts, or `B` lists of messages `{"role", "content"}`.
    """
    return [item if isinstance(item, str) else _assistant_text(item) for item in completions]


def _whole_texts(completions: Sequence[str | Messages], policy_answers: Sequence[Answer] | None) -> list[str]:
    """Return the responses' texts, with the beginnings that the chat template has written into the prompts."""
    texts = response_texts(completions)
    begun = [one.prefilled for one in policy_answers] if policy_answers else [""] * len(texts)
    return [
        text if start.strip() and text.startswith(start.rstrip()) else start + text  # a data set's may be whole
        for start, text in zip(begun, texts, strict=True)
    ]


def _assistant_text(messages: Messages) -> str:
    """Return the assistant's messages, a line each, without the answers of tools and environments."""
    turns = [message for message in messages if message.get("role", "assistant") == "assistant"]
    return "\n".join(text for message in turns if (text := text_of_content(message.get("content") or "")))


def prompt_text(prompt: str | Messages) -> str:
    """Return a prompt as one text; the messages of a conversation become paragraphs that begin with the role."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message['role'].capitalize()}: {_text_shown(message.get('content'))}\n\n" for message in prompt)


def _text_shown(content: Any) -> str:
    """Return a message's text; a block of another kind is its type in brackets, such as `[image]`."""
    if content is None or isinstance(content, str):
        return content or ""
    named = [{"type": "text", "text": f"[{part['type']}]"} if _is_no_text(part) else part for part in content]
    return text_of_content(named)


def _is_no_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") != "text"


# Answer extraction

MARKERS = re.compile(r"####|\banswer\s+is\b:?|\banswer:", re.IGNORECASE)
"""Markers of an answer: GSM8K's `####`, "the answer is", "Answer:"."""

_BOXED = "\\boxed{"
_NUMBER_PATTERN = re.compile(
    r"(?:(?<![\w.)])[-+\N{MINUS SIGN}])?"  # a sign, but not the minus between two numbers
    r"(?:[$€£]\s?)?"
    r"(?<![\w.])(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+)"
    r"(?:\s?/\s?(?P<denominator>\d+))?"
)


def final_answer(text: str) -> str:
    r"""Return the last announced answer of a text, or the whole text if it announces none.

    An announced answer is the rest of the line after `####`, "the answer is" or "Answer:", without the asterisks of
    bold type, or the content of `\boxed{}`.
    """
    boxed = text.rfind(_BOXED)
    marked = [match.end() for match in MARKERS.finditer(text)]
    if boxed >= 0 and boxed + len(_BOXED) >= max(marked, default=0):
        return _until_closing_brace(text[boxed + len(_BOXED) :]).strip()
    if not marked:
        return text.strip()
    line = text[marked[-1] :].lstrip("* \t\n").split("\n")[0].rstrip()
    stop = line[-1:] if line.endswith((".", "!", "?")) else ""
    return line.removesuffix(stop).rstrip("* \t") + stop  # bold type may end before the full stop


def same_text(answer: str, reference: str) -> bool:
    """Return whether two texts have the same final answer, ignoring case, spacing and a final full stop."""
    return _normalized(final_answer(answer)) == _normalized(final_answer(reference))


def same_number(answer: str, reference: str) -> bool:
    """Return whether two texts have the same final number: whole numbers exactly, fractions to one part in a million.

    Numbers may have thousands separators, a sign, a currency and units; `3/4` is 0.75. The final number is the first
    number of an announced answer (after its last `=`, if it has one), or else the last number of the text.
    """
    number, wanted = final_number(answer), final_number(reference)
    if number is None or wanted is None:
        return False
    if number.is_integer() and wanted.is_integer():
        return number == wanted  # with a tolerance of one part in a million, 1,000,001 would be 1,000,000
    return math.isclose(number, wanted, rel_tol=1e-6, abs_tol=1e-9)


def final_number(text: str) -> float | None:
    """Return the final number of a text, see `same_number`, or None if it has no finite one."""
    announced = final_answer(text)
    is_announced = announced != text.strip()
    segment = announced.rpartition("=")[2] if is_announced else announced
    numbers = list(_NUMBER_PATTERN.finditer(_without_latex(segment)))
    value = _match_value(numbers[0 if is_announced else -1]) if numbers else math.nan
    return value if math.isfinite(value) else None


def is_number(text: str) -> bool:
    """Return whether a text's final answer is one number, with at most a currency or a percent sign."""
    answer = _without_latex(final_answer(text)).rstrip(".% ")
    return _NUMBER_PATTERN.fullmatch(answer) is not None


def _match_value(match: re.Match[str]) -> float:
    value = float(match["digits"].replace(",", ""))
    if match["denominator"] is not None:
        denominator = float(match["denominator"])
        value = value / denominator if denominator else math.nan
    return -value if match[0][0] in "-\N{MINUS SIGN}" else value


def _without_latex(text: str) -> str:
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\$", "$").replace("\\%", "%")
    return re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)


def _normalized(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(". ")


def _until_closing_brace(text: str) -> str:
    """Return the text up to the brace that closes an open one, or all of it."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:index]
    return text


def _math_verified(answer: str, reference: str) -> bool:
    return limited("same_formula", final_answer(reference), answer)


def _agree_auto(answer: str, reference: str) -> bool:
    agree = same_number if is_number(reference) else same_text
    return agree(answer, reference)


_AGREE: dict[str, Callable[[str, str], bool]] = {
    "auto": _agree_auto,
    "exact": same_text,
    "numeric": same_number,
    "math": _math_verified,
}
