"""User errors as one sentence and exit code 2; errors of the program keep their traceback."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rlhf_ppo.terminal import print_text, redact_urls

USER_ERRORS = (OSError, ValueError, TypeError, ImportError)
"""Errors before training that count as user errors."""


class OneSpelling(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows each option in one spelling: `--learning_rate`, not also `--learning-rate`."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        spellings = {name.lstrip("-").replace("-", "_"): name for name in reversed(action.option_strings)}
        shown = copy.copy(action)
        shown.option_strings = [*reversed(spellings.values())]
        return super()._format_action_invocation(shown)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shows_none = action.default is False or action.default in (None, [], Path())  # 0, which equals False, is shown
        return action.help if shows_none else super()._get_help_string(action)


class CommandParser(argparse.ArgumentParser):
    """A parser with one-sentence errors, without abbreviations, whose help shows each option once.

    Attributes:
        raises_errors: Whether an error is a `ValueError`, for a list of problems, instead of the program's end.
    """

    raises_errors = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults = {"allow_abbrev": False, "formatter_class": OneSpelling}
        super().__init__(*args, **{**defaults, **kwargs})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; an error about unknown words does not quote them, because one may be a misplaced token."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {left_over(unknown, sys.argv[1:] if args is None else args)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2, or raise it; see `raises_errors`."""
        if self.raises_errors:
            raise ValueError(message)
        fail(self.prog, message)


def left_over(unknown: Sequence[str], words: Sequence[str]) -> str:
    """Describe unknown words: the options among them, else the option before them.

    Args:
        unknown: Words that no option takes.
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
    """Turn user errors into one sentence on stderr and exit code 2.

    For the steps before training: reading options, data and models, and making the trainer. Each `OSError`,
    `ValueError`, `TypeError` and `ImportError` there counts as a user error, unless the user's own module raises it
    while it is imported. Other errors are bugs and keep their traceback. `TRANSFORMERS_VERBOSITY=debug` shows every
    traceback.

    Args:
        program: Start of the message, such as `rlhf-ppo train`.

    Raises:
        SystemExit: With code 2, after a user error.
    """
    problems = Problems()
    with problems.collecting():
        yield
    problems.fail(program)


class Problems:
    """User errors of several checks, to be printed as one list.

    ```python
    problems = Problems()
    with problems.collecting():
        check_first()
    with problems.collecting():
        check_second()
    problems.fail("rlhf-ppo train")
    ```
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._section = ""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Begin each message in the block with a name; `fail` ends the block instead of the program.

        Args:
            name: The section of a pipeline's file.
        """
        self._section = f"{name}: "
        try:
            yield
        except _SectionFailed:
            pass
        finally:
            self._section = ""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the user error that ends the block; see `user_errors`."""
        try:
            yield
        except USER_ERRORS as error:
            if _is_of_users_module(error) or wants_tracebacks():
                raise
            self.add(str(_described(error)))

    def add(self, message: str) -> None:
        """Add a message, unless the list has it already."""
        message = self._section + message
        if message not in self.messages:
            self.messages.append(message)

    def fail(self, program: str) -> None:
        """Print the list and exit with code 2, if there is any problem.

        Args:
            program: Start of the message, such as `rlhf-ppo train`.

        Raises:
            SystemExit: With code 2.
        """
        if self._section:
            raise _SectionFailed
        if self.messages:
            fail(program, *self.messages)


class _SectionFailed(Exception):
    """The checks of a section cannot continue."""


def wants_tracebacks() -> bool:
    """Return whether `TRANSFORMERS_VERBOSITY=debug` asks for tracebacks."""
    return os.environ.get("TRANSFORMERS_VERBOSITY") == "debug"


def program_name(command: str, argv: Sequence[str] | None) -> str:
    """Return the start of a command's messages: `rlhf-ppo <command>`, or the name of the script that calls it."""
    return f"rlhf-ppo {command}" if argv is not None else os.path.basename(sys.argv[0])


def fail(program: str, *messages: str) -> NoReturn:
    """Print one sentence, or a list of them, on stderr, once per machine, and exit with code 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        lines = [redact_urls(" ".join(message.split())) for message in messages]
        first, rest = (lines[0], []) if len(lines) == 1 else (f"{len(lines)} problems:", lines)
        print_text(f"{program}: error: {first}", sys.stderr, "red")
        for line in rest:
            print_text(f"  - {line}", sys.stderr)
    raise SystemExit(2)


def _is_of_users_module(error: BaseException) -> bool:
    """Return whether `resolve_reward` has added a note about the module that it was importing."""
    return bool(getattr(error, "__notes__", None))


def _described(error: BaseException) -> object:
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return error
