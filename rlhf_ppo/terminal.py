"""Text before it is displayed or written: control characters are escaped, and secrets are hidden."""

from __future__ import annotations

import copy
import html
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, Self, TextIO

from rich.console import Console
from rich.text import Text

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that `visible` escapes."""


def visible(text: str, *, one_line: bool = False) -> str:
    r"""Escape control characters as in Python source, such as `\x1b`.

    These are the control characters of C0 and C1 and DEL, with which escape sequences begin, line separators, changes
    of the writing direction, and lone surrogates, which cannot be encoded.

    Args:
        text: Any text.
        one_line: Whether to escape newlines and tabs too.
    """
    text = CONTROL.sub(lambda match: repr(match[0])[1:-1], text)
    return text.replace("\n", "\\n").replace("\t", "\\t") if one_line else text


def escape_error(error: BaseException) -> None:
    """Escape the texts of an error of a user's code, in place: a model may have written them."""
    error.args = tuple(visible(argument) if isinstance(argument, str) else argument for argument in error.args)


def markdown(value: object) -> str:
    """Escape a text for a cell of a Markdown table; newlines become `<br>`."""
    return html.escape(visible(str(value))).replace("|", "&#124;").replace("\n", "<br>")


def cell(value: object, style: str = "") -> Text:
    """Return a value as text for a terminal table, without rich's markup such as `[red]`."""
    return Text(visible(str(value)), style)


def print_text(text: object, file: TextIO | None = None, style: str = "") -> None:
    """Print an escaped text; a terminal gets colours.

    Args:
        text: The text.
        file: The stream; None is stdout.
        style: A style of rich, such as "bold red"; other streams than a terminal get plain text.
    """
    Console(file=file or sys.stdout).print(cell(text, style), soft_wrap=True)


def visible_logger(name: str) -> Any:
    """Return the logger of a module; it escapes its messages."""
    from transformers.utils import logging as transformers_logging  # its import takes a second

    logger: Any = transformers_logging.get_logger(name)
    logger.addFilter(_escape)
    return logger


def _escape(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if (shown := visible(message)) != message:
        record.msg, record.args = shown, None
    return True


# ---- Secrets ----


HIDDEN = "***"
"""Replacement of a secret."""

_WHOLE_WORDS = "RLHF_PPO_HIDDEN_WORDS"
_SPECIAL_TOKENS = "stop|eos|bos|pad|unk|sep|cls|mask|image|video|audio|start|end|decoder_start"
_SECRET = re.compile(
    rf"(?<!\w)(?!(?:{_SPECIAL_TOKENS})_token(?!\w))"
    r"(?:\w*_)?(?:token|bearer|secret|password|passwd|passphrase|pwd|cookie|credentials?|api_?key|access_?key|private_?key|secret_?key|key"
    r"|authorization|auth)(?!\w)",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>,;)\]}]+", re.IGNORECASE)
_SETTING = re.compile(
    rf"(?P<name>{_SECRET.pattern})(?P<between>[\"']?\s*[:=]\s*)"
    r"(?:\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[^\s,;&)}\]]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.+/=~-]+", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return whether a setting of this name holds a secret: `hub_token` does, `stop_token` does not."""
    return _SECRET.fullmatch(name.replace("-", "_")) is not None


def redact_url(address: str) -> str:
    """Return a URL without user, password, query and fragment.

    Args:
        address: A URL, valid or not.
    """
    scheme, _, rest = address.partition("://")
    place = re.split("[?#]", rest, maxsplit=1)[0]
    host, slash, path = place.partition("/")
    if "@" in path:  # an unescaped slash in a password
        host, slash, path = place.rpartition("@")[2].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def redact_urls(text: str) -> str:
    """Return a text with redacted URLs."""
    return _ADDRESS.sub(lambda match: redact_url(match[0]), text)


def redact_text(text: str) -> str:
    """Return a text with redacted URLs and hidden values of secret settings."""
    text = _BEARER.sub(rf"\1 {HIDDEN}", redact_urls(text))
    return _SETTING.sub(lambda match: f"{match['name']}{match['between']}{HIDDEN}", text)


def redacted(value: object, name: str = "") -> Any:
    """Return a value without its secrets.

    Args:
        value: A setting; items of dicts, lists and tuples are redacted too.
        name: Its name, which may mark it as secret.
    """
    if value is not None and not isinstance(value, bool | float) and is_secret(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(redacted(item) for item in value)
    return _shown_value(value) if type(value) is str else value


def redact_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with hidden secrets."""
    return [_shown_word(word, before) for before, word in pairwise(["", *words])]


def _shown_word(word: str, before: str) -> str:
    if before.startswith("--") and "=" not in before and is_secret(before.lstrip("-")):
        return HIDDEN
    option, equals, value = word.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={HIDDEN if is_secret(option.lstrip('-')) else _shown_value(value)}"
    return _shown_value(word)


def _shown_value(text: str) -> str:
    """Return a redacted text; a JSON object or list is redacted item by item."""
    try:
        content = json.loads(text) if text.lstrip()[:1] in ("{", "[") else None
    except (ValueError, RecursionError):
        content = None
    if content is None:
        return redact_text(text)
    hidden = redacted(content)
    return text if hidden == content else json.dumps(hidden)


def hide_from_ps(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Move the secrets of a command line, which every user of the machine can read, to the environment.

    Args:
        words: A subcommand of `rlhf-ppo` and its options.

    Returns:
        The words with hidden secrets, and an environment variable with the original words; empty without secrets.
    """
    hidden = redact_words(words)
    whole = {index: word for index, word in enumerate(words) if word != hidden[index]}
    return hidden, {_WHOLE_WORDS: json.dumps(whole)} if whole else {}


def restore_hidden_words(words: Sequence[str]) -> list[str]:
    """Undo `hide_from_ps` in the started process, and remove the environment variable.

    Args:
        words: A subcommand of `rlhf-ppo` and its options, as in the command line.
    """
    whole: dict[str, str] = json.loads(os.environ.pop(_WHOLE_WORDS, "{}"))
    return [whole.get(str(index), word) for index, word in enumerate(words)]


class RedactsSecrets:
    """Base of `TrainingArguments` that are written to files, logs and trackers without secrets.

    Pickled arguments (Trainer's `training_args.bin`) have None for secrets, and redacted URLs; copies in memory are
    complete.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {name: _state_of(name, value) for name, value in self.__dict__.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = self.__copy__()
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as JSON values, without secrets."""
        written = super().to_dict()  # pyright: ignore[reportAttributeAccessIssue]
        unhidden = {name: getattr(self, name) for name in written if name.endswith("_token") and not is_secret(name)}
        return {name: redacted(value, name) for name, value in (written | unhidden).items()}

    def __str__(self) -> str:
        values = asdict(self)  # pyright: ignore[reportArgumentType]
        lines = [f"{name}={redacted(value, name)},\n" for name, value in sorted(values.items())]
        return f"{type(self).__name__}(\n{''.join(lines)})"

    __repr__ = __str__


def _state_of(name: str, value: object) -> Any:
    if is_secret(name) and isinstance(value, str):
        return None
    # The object that holds DeepSpeed's configuration, which may contain the key of a tracker.
    config = getattr(value, "config", getattr(value, "deepspeed_config", None))
    if isinstance(config, dict):
        return value if redacted(config) == config else None
    return redacted(value)
