"""User errors as one sentence and exit code 2; errors of the program keep their traceback."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rlhf_ppo.terminal import print_text, redact_urls

USER_ERRORS = (OSError, ValueError, TypeError, ImportError, RuntimeError)
"""Errors before training that count as user errors."""


_WRONG_VALUE = re.compile(
    r"argument --?([\w-]+)\S*: invalid (\w+)(?: value)?: (.+?)(?: \((choose from .+)\))?", re.DOTALL
)
"""Argparse's message about a value: the option, its type, the value, and the choices."""
_KINDS = {"int": "a whole number", "float": "a number, such as 1e-5", "string_to_bool": "true or false"}


class CommandParser(argparse.ArgumentParser):
    """A parser without abbreviations, with one-sentence errors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2; a wrong value is named as in `PPOConfig`'s errors."""
        if match := _WRONG_VALUE.fullmatch(message):
            name, kind, value, choices = match.groups()
            must_be = (choices and choices.replace("choose from", "one of")) or _KINDS.get(kind, f"of type {kind}")
            message = f"{name}={value} must be {must_be}"
        fail(self.prog, message)


@contextmanager
def user_errors(program: str) -> Iterator[None]:
    """Turn the first user error of the block into one sentence on stderr and exit code 2.

    For the steps before training. `TRANSFORMERS_VERBOSITY=debug` shows the traceback; errors with notes, those of the
    user's functions, always have it.

    Args:
        program: Start of the message, such as `rlhf-ppo train`.
    """
    try:
        yield
    except USER_ERRORS as error:
        if wants_tracebacks() or (getattr(error, "__notes__", None) and not isinstance(error, ConnectionError)):
            raise
        if isinstance(error, OSError) and error.filename and error.strerror:
            fail(program, f"{error.filename}: {error.strerror}; name another")
        fail(program, str(error), on_each_rank=isinstance(error, RuntimeError))


def wants_tracebacks() -> bool:
    """Return whether `TRANSFORMERS_VERBOSITY=debug` asks for tracebacks."""
    return os.environ.get("TRANSFORMERS_VERBOSITY") == "debug"


def fail(program: str, message: str, on_each_rank: bool = False) -> NoReturn:
    """Print one sentence on stderr and exit with code 2.

    Args:
        program: Start of the message.
        message: The sentence.
        on_each_rank: Whether only one process may have the error, such as too little memory; else all of them have
            it, and one on each machine prints it.
    """
    is_other = os.environ.get("LOCAL_RANK", "0") != "0"
    if on_each_rank or not is_other:
        where = f", rank {os.environ.get('RANK')}" if is_other else ""
        print_text(f"{program}{where}: error: {redact_urls(' '.join(message.split()))}", sys.stderr, "red")
    raise SystemExit(2)
