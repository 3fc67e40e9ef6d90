"""What may be shown and written: no tokens, passwords or keys, of arguments, of addresses or inside of texts."""

from __future__ import annotations

import copy
import json
import os
import re
import traceback
import urllib.parse
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import asdict
from typing import Any, Self

HIDDEN = "***"
"""What stands in place of a secret."""

_WHOLE_WORDS = "RLHF_PPO_HIDDEN_WORDS"
_SPECIAL_TOKENS = "stop|eos|bos|pad|unk|sep|cls|mask|image|video|audio|start|end|decoder_start"
_SECRET = re.compile(
    rf"(?<!\w)(?!(?:{_SPECIAL_TOKENS})_token(?!\w))"
    r"(?:\w*_)?(?:token|secret|password|passwd|passphrase|pwd|cookie|credentials?|api_?key|access_?key|private_?key|secret_?key|key"
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
    """Tell from its name whether a setting holds a secret: `hub_token` does, `stop_token` does not."""
    return _SECRET.fullmatch(name.replace("-", "_")) is not None


def shown_address(address: str) -> str:
    """Return an address without user, password, query and fragment.

    Args:
        address: An address, whether or not it is a valid one.
    """
    scheme, _, rest = address.partition("://")
    place = re.split("[?#]", rest, maxsplit=1)[0]
    host, slash, path = place.partition("/")
    if "@" in path:  # an unescaped slash in a password
        host, slash, path = place.rpartition("@")[2].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def shown_addresses(text: str) -> str:
    """Return a text with its addresses as `shown_address` has them."""
    return _ADDRESS.sub(lambda found: shown_address(found[0]), text)


def shown_text(text: str) -> str:
    """Return a text with its addresses as `shown_address` has them, and the values of secret settings hidden."""
    text = _BEARER.sub(rf"\1 {HIDDEN}", shown_addresses(text))
    return _SETTING.sub(lambda found: f"{found['name']}{found['between']}{HIDDEN}", text)


def shown(value: Any, name: str = "") -> Any:
    """Return a value without its secrets.

    Args:
        value: A setting; of dicts, lists and tuples every item is looked at.
        name: Its name, which may say that it is secret.
    """
    if value is not None and not isinstance(value, bool | float) and is_secret(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: shown(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(shown(item) for item in value)
    return _shown_value(value) if type(value) is str else value


def hide_in(words: MutableSequence[str]) -> None:
    """Hide the secrets of a command line in place; W&B writes `sys.argv` into a file.

    Args:
        words: The program's arguments.
    """
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        follows_secret = before.startswith("--") and "=" not in before and is_secret(before.lstrip("-"))
        words[index] = HIDDEN if follows_secret else _shown_word(word)


def _shown_word(word: str) -> str:
    option, equals, value = word.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={HIDDEN if is_secret(option.lstrip('-')) else _shown_value(value)}"
    return _shown_value(word)


def _shown_value(text: str) -> str:
    """Return a text as `shown_text` has it; a JSON object or list without the secrets of its items."""
    try:
        content = json.loads(text) if text.lstrip()[:1] in ("{", "[") else None
    except (ValueError, RecursionError):
        content = None
    if content is None:
        return shown_text(text)
    hidden = shown(content)
    return text if hidden == content else json.dumps(hidden)


def shown_words(words: Sequence[str]) -> list[str]:
    """Return a command line's words with its secrets hidden."""
    hidden = list(words)
    hide_in(hidden)
    return hidden


def hide_from_ps(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Move the secrets of a command line, which every user of the machine can read, into the environment.

    Args:
        words: A subcommand of `rlhf-ppo` and its options.

    Returns:
        The words with the secrets hidden, and the environment variable that holds the whole words; empty without
        secrets.
    """
    hidden = shown_words(words)
    whole = {index: word for index, word in enumerate(words) if word != hidden[index]}
    return hidden, {_WHOLE_WORDS: json.dumps(whole)} if whole else {}


def with_hidden_words(words: Sequence[str]) -> list[str]:
    """Undo `hide_from_ps` in the process that was started, and remove the variable from its environment.

    Args:
        words: A subcommand of `rlhf-ppo` and its options, as they stand in the command line.
    """
    whole: dict[str, str] = json.loads(os.environ.pop(_WHOLE_WORDS, "{}"))
    return [whole.get(str(index), word) for index, word in enumerate(words)]


def shown_traceback(error: BaseException) -> str:
    """Return an error's traceback whose messages, but not lines of code, are as `shown_text` has them."""
    lines = traceback.TracebackException.from_exception(error).format()
    return "".join(line if line.startswith("  File ") else shown_text(line) for line in lines)


def without(text: str, secrets: Iterable[str]) -> str:
    """Return a text in which each of these secrets is hidden."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def secrets_of(address: str) -> set[str]:
    """Return what of an address nobody may see: user, password, query and its values, as written and decoded."""
    parts = urllib.parse.urlsplit(address)
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    values = [value for _, value in urllib.parse.parse_qsl(parts.query)]
    found = {user, password, parts.query, parts.fragment, *values}
    return {text for secret in found for text in (secret, urllib.parse.unquote(secret)) if len(text) > 1}


class HidesSecrets:
    """Base of `TrainingArguments` that are written without secrets into files, logs and trackers.

    Pickled arguments (Trainer's `training_args.bin`) have None for them, and short addresses; copies in memory are
    whole.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {name: _state_of(name, value) for name, value in self.__dict__.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = self.__copy__()
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as JSON values, without secrets."""
        written = super().to_dict()  # pyright: ignore[reportAttributeAccessIssue]
        unhidden = {name: getattr(self, name) for name in written if name.endswith("_token") and not is_secret(name)}
        return {name: shown(value, name) for name, value in (written | unhidden).items()}

    def __str__(self) -> str:
        values = asdict(self)  # pyright: ignore[reportArgumentType]
        lines = [f"{name}={shown(value, name)},\n" for name, value in sorted(values.items())]
        return f"{type(self).__name__}(\n{''.join(lines)})"

    __repr__ = __str__


def _state_of(name: str, value: Any) -> Any:
    if is_secret(name) and isinstance(value, str):
        return None
    # What DeepSpeed's configuration was made into, which may hold the key of a tracker.
    config = getattr(value, "config", getattr(value, "deepspeed_config", None))
    if isinstance(config, dict):
        return value if shown(config) == config else None
    return shown(value)
