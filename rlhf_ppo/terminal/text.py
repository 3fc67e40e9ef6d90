"""Escaping of untrusted text, such as of a model, a server or a dataset, before it is displayed.

`visible` is for terminals, logs, errors and names; `csv_cell`, `markdown` and `code_span` build on it. Data files keep
their texts unchanged.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import textwrap
import warnings
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

_BIDI = "\u202a-\u202e\u2066-\u2069"
CONTROL = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029{_BIDI}\ud800-\udfff]")
"""Characters that `visible` escapes."""

_CONTROL_IN_LINE = re.compile(f"[\t\n]|{CONTROL.pattern}")
_FORMULA = re.compile("'*[=+\\-@\t\n\uff1d\uff0b\uff0d\uff20]")
_MARKUP = re.compile(r"""(?<!\w)[_./-]|[_./-](?!\w)|(?<=www)\.|[!"#$&()*+:<=>@\[\\\]^`{|}~]""", re.IGNORECASE)
_CODE = re.compile("`[^`]*`")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)


def visible(text: str, *, one_line: bool = False) -> str:
    r"""Escape control characters as in Python source, such as `\x1b`.

    These are the control characters of C0 and C1 and DEL, with which escape sequences begin, line separators, changes
    of the writing direction, and lone surrogates, which cannot be encoded.

    Args:
        text: Any text.
        one_line: Whether to escape newlines and tabs too.
    """
    pattern = _CONTROL_IN_LINE if one_line else CONTROL
    return pattern.sub(lambda found: repr(found[0])[1:-1], text)


def csv_cell(value: Any) -> Any:
    """Return a value as a CSV cell that spreadsheets do not compute: escaped, with `'` before a formula.

    Formulas begin with =, +, -, @, a tab or a newline, also in full width, after any number of `'`. `from_csv_cell`
    removes the added `'`. Numbers, also as text, do not change.

    Args:
        value: A value; only text is escaped.
    """
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def from_csv_cell(cell: str) -> str:
    """Return the escaped text from which `csv_cell` made a cell."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def markdown(value: Any) -> str:
    """Escape a text for Markdown, its tables and HTML; newlines become `<br>`.

    Punctuation becomes HTML entities, except in numbers, and `_./-` between letters, as in names.

    Args:
        value: A text, or a value to convert to text.
    """
    text = visible(str(value))
    return text if _NUMBER.fullmatch(text) else _MARKUP.sub(_entity, text).replace("\n", "<br>")


def code_span(text: str) -> str:
    """Return a text as inline code of Markdown, in one line.

    Args:
        text: Any text; with backticks or `|`, which inline code cannot escape everywhere, it becomes `markdown`.
    """
    text = visible(text, one_line=True)
    return markdown(text) if not text.strip() or re.search("[`|<>&]", text) else f"`{text}`"


def cell(value: object, style: str = "") -> Text:
    """Return a value as text for a terminal table, without rich's markup such as `[red]`."""
    return Text(visible(str(value)), style)


def print_text(text: object, file: TextIO | None = None, style: str = "") -> None:
    """Print an escaped text; a terminal gets lines that break between words, and colours.

    Args:
        text: The text.
        file: The stream; None is stdout.
        style: A style of rich, such as "bold red"; other streams than a terminal get plain text.
    """
    stream = file or sys.stdout
    shown = _fitted(visible(str(text)), stream)
    if style:
        no_color = bool(os.environ.get("NO_COLOR"))
        Console(file=stream, no_color=no_color).print(Text(shown, style), soft_wrap=True)
    else:
        print(shown, file=stream, flush=True)


def _fitted(text: str, stream: Any) -> str:
    """Break lines between words for a terminal; return the text unchanged for other streams."""
    if not (hasattr(stream, "isatty") and stream.isatty()):
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(part for line in text.split("\n") for part in _wrapped(line, width))


def _wrapped(line: str, width: int) -> list[str]:
    """Break a line between words; paths and `commands` stay whole, and a continued line keeps its indent."""
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip(" -")))
    glued = _CODE.sub(lambda found: found[0].replace(" ", "\0") if len(found[0]) < width else found[0], line)
    parts = textwrap.wrap(
        glued, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return [part.replace("\0", " ") for part in parts]


def visible_logger(name: str) -> Any:
    """Return the logger of a module; it escapes its messages and, on a terminal, breaks lines between words."""
    from transformers.utils import logging as transformers_logging  # its import takes a second

    logger: Any = transformers_logging.get_logger(name)
    logger.addFilter(_escape)
    return logger


def escape_library_messages() -> None:
    """Escape log messages and warnings of other libraries too, for the rest of the program."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub", "datasets")]
    handlers = [*(handler for logger in loggers for handler in logger.handlers), logging.lastResort]
    for handler in filter(None, handlers):
        handler.addFilter(_escape)
    warnings.formatwarning = _escaped_warning


_format_warning: Any = warnings.formatwarning


def _escaped_warning(*given: Any, **named: Any) -> str:
    return visible(_format_warning(*given, **named))


def _escape(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if (shown := _fitted(visible(message), sys.stderr)) != message:
        record.msg, record.args = shown, None
    return True


def _entity(found: re.Match[str]) -> str:
    return f"&#{ord(found[0])};"
