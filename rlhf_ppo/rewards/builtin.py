r"""Rewards by name: the ones that AITraining's `rl_reward_fn` and environments name, and TRL's own.

Each is a picklable object with `GRPOTrainer`'s signature whose `__name__` is the name that metrics and weights use.
`y` is the response's text, `words(y)` the number of its parts between white space.

| name | score of a response | range |
|---|---|---|
| `default` | `-0.01 max(0, words(y) - 50) + 0.5 [y holds one of . ! ?]` | at most 0.5 |
| `length_penalty` | `-0.01 max(0, words(y) - 50)` | at most 0 |
| `length` | `words(y) / 100` | at least 0 |
| `correctness` | `[the answer that y ends in is the data set's]` | 0 or 1 |
| `formatting` | `[y announces an answer]`: "Answer:", `####` or `\boxed{` | 0 or 1 |
| `keyword` | number of the given keywords that y holds | 0 to their number |
| `custom` | a function of `prompt`, `generated` and `full_text` | the function's |
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from rlhf_ppo.config.redaction import shown
from rlhf_ppo.rewards import answers
from rlhf_ppo.rewards.reading import Answer
from rlhf_ppo.terminal.foreign import visible_logger

logger = visible_logger(__name__)


@dataclass(frozen=True)
class LengthPenalty:
    """Punishes long responses: `-penalty * max(0, words(y) - max_words)`.

    Attributes:
        max_words: Number of words that cost nothing.
        penalty: Cost of each word beyond.
    """

    __name__: ClassVar[str] = "length_penalty"
    max_words: int = 50
    penalty: float = 0.01

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        """Score every response, at most 0."""
        return [-self.penalty * max(0, _num_words(text) - self.max_words) for text in response_texts(completions)]


@dataclass(frozen=True)
class Default:
    """AITraining's reward where nothing else is given: the length penalty, and `bonus` for any of `.`, `!`, `?`.

    Attributes:
        max_words: Number of words that cost nothing.
        penalty: Cost of each word beyond.
        bonus: What a sentence's end is worth.
    """

    __name__: ClassVar[str] = "default"
    max_words: int = 50
    penalty: float = 0.01
    bonus: float = 0.5

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        """Score every response, at most `bonus`."""
        brevity = LengthPenalty(self.max_words, self.penalty)(completions)
        return [
            score + self.bonus * bool(re.search("[.!?]", text))
            for score, text in zip(brevity, response_texts(completions), strict=True)
        ]


@dataclass(frozen=True)
class Length:
    """Favours long responses: `words(y) / unit`.

    Attributes:
        unit: Number of words that are worth 1.

    Raises:
        ValueError: `unit` is not above 0.
    """

    __name__: ClassVar[str] = "length"
    unit: int = 100

    def __post_init__(self) -> None:
        if not self.unit > 0:
            raise ValueError(f"length: unit={self.unit!r} must be above 0")

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        """Score every response, at least 0."""
        return [_num_words(text) / self.unit for text in response_texts(completions)]


@dataclass(frozen=True)
class Correctness:
    """1 where the response ends in the data set's answer, else 0; see `rlhf_ppo.rewards.answers` for what that is.

    A row whose answer is None is not scored, nor is any where the data set has neither default column, with one
    warning.

    Attributes:
        mode: "exact" compares texts (but for case, spacing and a closing full stop), "numeric" numbers; "auto" is
            "numeric" in rows whose answer is a number and "exact" in others; "math" asks the package math-verify.
        column: The data set's column with the answers; None takes `answer`, or else `solution`.

    Raises:
        ValueError: `mode` is none of these.
        ImportError: `mode="math"` without math-verify.
    """

    __name__: ClassVar[str] = "correctness"
    mode: str = "auto"
    column: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in _AGREE:
            raise ValueError(f"correctness: mode={self.mode!r} must be one of {list(_AGREE)}")
        if self.mode == "math":
            _require_math_verify("correctness: mode='math'")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score every response.

        Raises:
            ValueError: The data set has no such column as `column` names.
        """
        names = ("answer", "solution") if self.column is None else (self.column,)
        found = [name for name in names if name in columns]
        if not found:
            problem = f"correctness finds no column {' or '.join(map(repr, names))} with the answers"
            if self.column is not None:
                raise ValueError(f"{problem}; add it to the data set, or name another with column=...")
            logger.warning_once(
                f"{problem}, so it scores no response; add one to the data set, or name another with column=..."
            )
            return [None] * len(completions)
        agree = _AGREE[self.mode]
        return [
            None if wanted is None else float(agree(text, str(wanted)))
            for text, wanted in zip(response_texts(completions), columns[found[0]], strict=True)
        ]


@dataclass(frozen=True)
class Formatting:
    r"""1 where the response has the wanted form, else 0.

    Attributes:
        pattern: A regular expression to be found in it; the default finds an announced answer.

    Raises:
        ValueError: `pattern` is no regular expression.
    """

    __name__: ClassVar[str] = "formatting"
    pattern: str = r"Answer:|####|\\boxed\{"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"formatting: pattern={self.pattern!r} is no regular expression: {error}") from error

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        """Score every response, 0 or 1."""
        return [float(re.search(self.pattern, text) is not None) for text in response_texts(completions)]


@dataclass(frozen=True)
class Keyword:
    """Number of the given keywords that the response holds, each counted once, upper and lower case told apart.

    Attributes:
        keywords: The keywords.

    Raises:
        ValueError: They are one text, there is none, or one is empty or no text.
    """

    __name__: ClassVar[str] = "keyword"
    keywords: Sequence[str] = ()

    def __post_init__(self) -> None:
        is_list = isinstance(self.keywords, Sequence) and not isinstance(self.keywords, str)
        if not is_list or not self.keywords or not all(isinstance(word, str) and word for word in self.keywords):
            raise ValueError(f"keyword: keywords={self.keywords!r} must be a list of texts, such as ['yes']")

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        """Score every response, from 0 to the number of keywords."""
        return [float(sum(word in text for word in self.keywords)) for text in response_texts(completions)]


class Custom:
    """A function of one row with AITraining's signature, `f(prompt, generated, full_text) -> float`.

    A function with `GRPOTrainer`'s signature needs no such cover: pass it as it is.

    Args:
        function: The function.

    Raises:
        TypeError: It does not take these arguments.
    """

    __name__ = "custom"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        try:
            inspect.signature(function).bind(prompt="", generated="", full_text="")
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"custom: function={function!r} must take `prompt`, `generated` and `full_text` and return a number; "
                "pass a function with GRPOTrainer's signature itself as one of reward_funcs"
            ) from error

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        policy_answers: Sequence[Answer] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Call the function for every response; `full_text` is the prompt's text with the response behind it."""
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
"""The rewards that `builtin_reward` makes, by name; TRL's come on top."""

TRL_REWARDS: tuple[str, ...] = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
)
"""The rewards of `trl.rewards`; those that begin with `get_` take settings. Older versions of TRL have fewer."""

_COMPARING = ("accuracy_reward", "reasoning_accuracy_reward", "get_cosine_scaled_reward")


def builtin_reward(name: str, **settings: Any) -> Callable[..., Any]:
    """Make a reward function by name.

    Args:
        name: A key of `BUILTIN_REWARDS`, or one of `TRL_REWARDS`, the settings of which are documented by TRL.
        **settings: The reward's own, see its class.

    Returns:
        A picklable callable with `GRPOTrainer`'s signature. TRL's get their completions as messages, as they expect.

    Raises:
        ValueError: There is no such reward, or it has no such setting.
        ImportError: The reward needs math-verify, which is not installed.
    """
    if name not in BUILTIN_REWARDS and name not in TRL_REWARDS:
        raise ValueError(f"there is no reward {name!r}; choose one of {[*BUILTIN_REWARDS, *TRL_REWARDS]}")
    try:
        return TrlReward(name, settings) if name in TRL_REWARDS else BUILTIN_REWARDS[name](**settings)
    except TypeError as error:
        raise ValueError(f"the reward {name!r} cannot be made with the settings {shown(settings)}: {error}") from error


class TrlReward:
    """One of TRL's rewards, which read conversations, for responses that are texts too.

    Args:
        name: Its name in `trl.rewards`.
        settings: Arguments of those that begin with `get_`; none for the others.

    Raises:
        ValueError: The installed TRL has no such reward.
        TypeError: It does not take these settings.
        ImportError: The reward compares answers, and math-verify is not installed.
    """

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        import trl.rewards

        if not hasattr(trl.rewards, name):
            raise ValueError(f"the installed version of TRL has no trl.rewards.{name}; update it")
        if name in _COMPARING:
            _require_math_verify(f"trl.rewards.{name}")
        self.name, self.settings = name, settings
        found = getattr(trl.rewards, name)
        is_factory = name.startswith("get_")
        if is_factory:
            self._call = made = found(**settings)
            self.__name__ = made.__name__
        else:
            self._call, self.__name__ = functools.partial(found, **_accepted(found, settings)), name
        self.__signature__ = inspect.signature(self._call)  # the columns that it requires

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.settings)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score every response as TRL does."""
        messages = [[{"role": "assistant", "content": text}] for text in response_texts(completions)]
        return self._call(completions=messages, **columns)


def response_texts(completions: Sequence[Any]) -> list[str]:
    """Return the texts of responses that may be texts or messages.

    Args:
        completions: `B` texts, or `B` lists of messages `{"role", "content"}`.
    """
    return [item if isinstance(item, str) else "".join(message["content"] for message in item) for item in completions]


def prompt_text(prompt: Any) -> str:
    """Return a prompt as one text: itself, or its messages as paragraphs that begin with the speaker."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n\n" for message in prompt)


def _require_math_verify(what: str) -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(f"{what} needs the package math-verify; pip install math-verify (or rlhf_ppo[math])")


def _num_words(text: str) -> int:
    return len(text.split())


def _math_verified(answer: str, reference: str) -> bool:
    import math_verify

    # Its time limits are signals, which only a program's main thread may set; responses are short.
    parse = functools.partial(math_verify.parse, parsing_timeout=cast(Any, None))
    wanted = parse(f"${final}$") if (final := answers.final_answer(reference)) else []
    return bool(math_verify.verify(wanted, parse(answer), timeout_seconds=None))


def _agree_auto(answer: str, reference: str) -> bool:
    agree = answers.same_number if answers.is_number(reference) else answers.same_text
    return agree(answer, reference)


_AGREE: dict[str, Callable[[str, str], bool]] = {
    "auto": _agree_auto,
    "exact": answers.same_text,
    "numeric": answers.same_number,
    "math": _math_verified,
}


def _accepted(function: Callable[..., Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings; a TypeError if one is no parameter with a default, which columns would fill."""
    known = {p.name for p in inspect.signature(function).parameters.values() if p.default is not p.empty}
    if unknown := settings.keys() - (known - {"log_extra"}):
        raise TypeError(f"it takes no {sorted(unknown)}")
    return settings
