"""Show text that a model, a server or a data set wrote, so that nothing that shows it obeys it.

`visible` is for terminals, logs, errors and names; `csv_cell`, `markdown` and `code_span` start from it. Data keep
their texts as they are: only what shows them calls these functions.
"""

from __future__ import annotations

import logging
import re
from typing import Any, TextIO

from rich.text import Text

_BIDI = "\u202a-\u202e\u2066-\u2069"
_OBEYED = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029{_BIDI}\ud800-\udfff]")
_OBEYED_IN_A_LINE = re.compile(f"[\t\n]|{_OBEYED.pattern}")
_FORMULA = re.compile("'*[=+\\-@\t\n\uff1d\uff0b\uff0d\uff20]")
_MARKUP = re.compile(r"""(?<!\w)[_./-]|[_./-](?!\w)|(?<=www)\.|[!"#$&()*+:<=>@\[\\\]^`{|}~]""", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)


def visible(text: str, *, one_line: bool = False) -> str:
    r"""Write what a terminal would obey as Python writes it, such as `\x1b`; all other text stays as it is.

    These are the control characters of C0 and C1 and DEL, with which escape sequences begin, the line separators, what
    turns the direction of writing, and lone surrogates, which no file and no terminal takes.

    Args:
        text: Any text.
        one_line: Whether newlines and tabs are written in that way too; else they stay.
    """
    pattern = _OBEYED_IN_A_LINE if one_line else _OBEYED
    return pattern.sub(lambda found: repr(found[0])[1:-1], text)


def csv_cell(value: Any) -> Any:
    """Return a value as a cell that no spreadsheet computes: `visible`, with `'` before the beginning of a formula.

    Formulas begin with =, +, -, @, a tab or a newline, also in full width. A text that begins so behind any number
    of `'` gets one more, so that `from_csv_cell` can take it away. Numbers, also as texts, stay.

    Args:
        value: A cell; what is no text stays.
    """
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def from_csv_cell(cell: str) -> str:
    """Return the visible text of which `csv_cell` made a cell."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def markdown(value: Any) -> str:
    """Return a text that is no markup in Markdown, in a table of it or in HTML; newlines become `<br>`.

    Punctuation becomes HTML entities, except inside of a number, and `_./-` between letters, as in a name.

    Args:
        value: A text, or anything that is shown as its text.
    """
    text = visible(str(value))
    return text if _NUMBER.fullmatch(text) else _MARKUP.sub(_entity, text).replace("\n", "<br>")


def code_span(text: str) -> str:
    """Return a text as Markdown's code, in one line.

    Args:
        text: Any text; one with backticks or `|`, of which code takes no escape everywhere, becomes `markdown`.
    """
    text = visible(text, one_line=True)
    return markdown(text) if not text.strip() or re.search("[`|<>&]", text) else f"`{text}`"


def cell(value: object) -> Text:
    """Return a value as a cell of a table in the terminal, where `[red]` is no markup either."""
    return Text(visible(str(value)))


def print_text(text: object, file: TextIO | None = None) -> None:
    """Print a text, visible, on stdout or another stream."""
    print(visible(str(text)), file=file, flush=True)


def visible_logger(name: str) -> Any:
    """Return the logger of a module, whose messages are visible.

    Args:
        name: The module's name.
    """
    from transformers.utils import logging as transformers_logging  # which takes a second

    logger: Any = transformers_logging.get_logger(name)
    logger.addFilter(_show)
    return logger


def _show(record: logging.LogRecord) -> bool:
    said = record.getMessage()
    if (shown := visible(said)) != said:
        record.msg, record.args = shown, None
    return True


def _entity(found: re.Match[str]) -> str:
    return f"&#{ord(found[0])};"
