"""What a user did wrong is one sentence and exit code 2; what a program does wrong keeps its traceback."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from rlhf_ppo.config.redaction import shown_addresses
from rlhf_ppo.terminal.foreign import print_text


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the list of all options; abbreviations are no options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and say what is left over without the words themselves: a misplaced token may be among them."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {left_over(unknown, sys.argv[1:] if args is None else args)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Write the sentence and exit with code 2."""
        fail(self.prog, message)


def left_over(unknown: Sequence[str], words: Sequence[str]) -> str:
    """Name the options that are unknown, or, where there are words only, the option that they follow.

    Args:
        unknown: The words that no option takes.
        words: All words of the command line.
    """
    options = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    if options:
        return ", ".join(options)
    before = [word.partition("=")[0] for word in words[: list(words).index(unknown[0])] if word.startswith("--")]
    count = "a word" if len(unknown) == 1 else f"{len(unknown)} words"
    return f"{count} too many after {before[-1]}" if before else f"{count} without an option"


@contextmanager
def user_errors(program: str) -> Iterator[None]:
    """Turn errors that are the user's to mend into one sentence on stderr and exit code 2.

    It goes around what precedes training: reading options, data and models, and making the trainer. There every
    `OSError`, `ValueError`, `TypeError` and `ImportError` is taken for the user's, but for one that a user's own
    module raises while it is loaded. Errors of other types are bugs and keep their traceback, which
    `TRANSFORMERS_VERBOSITY=debug` shows of all.

    Args:
        program: What the sentence begins with, such as `rlhf-ppo train`.

    Raises:
        SystemExit: With code 2, after a user's error.
    """
    try:
        yield
    except (OSError, ValueError, TypeError, ImportError) as error:
        if _is_of_users_module(error) or wants_tracebacks():
            raise
        fail(program, str(_described(error)))


def wants_tracebacks() -> bool:
    """Tell whether errors shall show where they were noticed."""
    return os.environ.get("TRANSFORMERS_VERBOSITY") == "debug"


def program_name(command: str, argv: Sequence[str] | None) -> str:
    """Return what a command is called in its messages: `rlhf-ppo <command>`, or the script that calls it."""
    return f"rlhf-ppo {command}" if argv is not None else os.path.basename(sys.argv[0])


def fail(program: str, message: str) -> NoReturn:
    """Write one sentence on stderr, once on each machine, and exit with code 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        message = shown_addresses(" ".join(message.split()))
        print_text(f"{program}: error: {message}", sys.stderr)
    raise SystemExit(2)


def _is_of_users_module(error: BaseException) -> bool:
    """Tell whether `resolve_reward` has noted the module that it was loading."""
    return bool(getattr(error, "__notes__", None))


def _described(error: BaseException) -> object:
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return error
