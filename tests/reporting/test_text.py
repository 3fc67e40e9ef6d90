"""Foreign text: nothing that shows it obeys it, and other text stays as it is."""

from __future__ import annotations

import csv
import html
import io
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from rlhf_ppo.terminal import (
    cell,
    code_span,
    csv_cell,
    from_csv_cell,
    markdown,
    print_text,
    visible,
    visible_logger,
)
from tests.reporting.test_progress import Terminal

CONTROLS = [*range(9), *range(11, 32), *range(127, 160)]
ANY_TEXT = st.text(st.characters(exclude_categories=()))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"), ("\x1b]0;title\x07", r"\x1b]0;title\x07"), ("\x9b31m", r"\x9b31m"), ("a\rb", r"a\rb"),
        ("\u202egnp.exe", r"\u202egnp.exe"), ("\u2066x\u2069", r"\u2066x\u2069"), ("\ud800", r"\ud800"),
        ("\0", r"\x00"),        ("\x7f", r"\x7f"), ("a\u2028b", r"a\u2028b"), ("a\n\tb", "a\n\tb"),
    ],
)  # fmt: skip
def test_what_a_terminal_obeys_is_written_as_python_writes_it(text, shown):
    assert visible(text) == shown


def test_text_of_any_language_stays():
    text = "¿Qué? 日本語\u3000 עברית\u200f \u0633\u061c نمی\u200cخو 👩\u200d🔬 \u00a0\u00ad"

    assert visible(text) == text


@given(ANY_TEXT)
def test_no_control_character_and_no_surrogate_is_left(text):
    shown = visible(text)

    assert not any(ord(character) in CONTROLS for character in shown)
    assert visible(shown) == shown and shown.encode() is not None
    assert not re.search("[\r\n\t]", visible(text, one_line=True))


@pytest.mark.parametrize("text", ["=1+1", "+1-1", "-x", "@SUM(A1)", "\t=1", "\n=1", "\uff1d1", "'=1", "''@x"])
def test_a_formula_is_a_text_in_a_spreadsheet(text):
    assert csv_cell(text) == f"'{text}"
    assert from_csv_cell(csv_cell(text)) == text


@pytest.mark.parametrize("value", ["-3", "+1.5e-3", "-.5", "it's", "'quoted'", "a=b", "", -0.5, 7, None])
def test_numbers_and_other_texts_stay_in_a_csv_cell(value):
    assert csv_cell(value) is value
    assert value is None or from_csv_cell(str(value)) == str(value)


@given(ANY_TEXT)
def test_a_csv_cell_gives_its_visible_text_back(text):
    file = io.StringIO(newline="")
    csv.writer(file).writerow([csv_cell(text), "x"])
    ((found, _),) = csv.reader(io.StringIO(file.getvalue(), newline=""))

    assert from_csv_cell(found) == visible(text)
    assert found[:1] not in tuple("=+-@\t\n\r") or re.fullmatch(r"[-+\d.eE]*", found) or found == ""


@given(ANY_TEXT)
def test_markdown_shows_the_visible_text_and_no_markup(text):
    written = markdown(text)

    assert html.unescape(written.replace("<br>", "\n")) == visible(text)
    assert not re.search(r"[`*|<>\[\]\\#$]", re.sub(r"&#\d+;", "", written.replace("<br>", "")))


@pytest.mark.parametrize("text", ["objective/kl", "0.05", "-0.25", "3e-06", "adamw_torch", "5.17.0", "trl-lib/tldr"])
def test_names_and_numbers_stay_readable_in_markdown(text):
    assert markdown(text) == text and code_span(text) == f"`{text}`"


def test_code_ends_where_the_text_ends():
    assert code_span("a`b") == "a&#96;b"
    assert code_span("a|b\n# c") == r"a&#124;b&#92;n&#35; c"
    assert code_span("a\nb") == r"`a\nb`"


def test_a_cell_has_the_width_of_what_is_shown():
    table, console = Table(), Console(file=io.StringIO(), width=60)
    table.add_column("text")
    for text in ("\x1b[2J", "[red]", "four"):
        table.add_row(cell(text))
    console.print(table)
    lines = console.file.getvalue().splitlines()

    assert r"\x1b[2J" in lines[3] and "[red]" in lines[4]
    assert len({len(line) for line in lines}) == 1


def test_a_log_message_is_visible(caplog):
    logger = visible_logger("rlhf_ppo.test_foreign")

    logger.warning("the judge said %s", "\x1b[2J")
    logger.warning("100%")
    assert caplog.messages == [r"the judge said \x1b[2J", "100%"]
    assert visible_logger("rlhf_ppo.test_foreign").filters == logger.filters and len(logger.filters) == 1
    assert isinstance(logger, logging.Logger)


@pytest.mark.parametrize("width", [60, 80, 140, 200])
def test_a_terminal_gets_lines_that_break_between_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = "  - " + "several words, a/long/path.json and `a command --with options` " * 9
    terminal, file = Terminal(), io.StringIO()

    print_text(text, terminal)
    print_text(text, file, "red")

    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= width and all(line.startswith("    ") for line in lines[1:])
    assert " ".join(terminal.getvalue().split()) == " ".join(text.split())
    assert all(line.count("`") % 2 == 0 for line in lines)  # a command is in one line
    assert file.getvalue() == f"{text}\n"


@pytest.mark.parametrize(("no_color", "begins"), [("", "\x1b[31m"), ("1", "error")])
def test_a_terminal_has_colours_unless_the_user_wants_none(
    no_color: str, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    terminal = Terminal()
    print_text("error: [bold]", terminal, "red")
    assert terminal.getvalue().startswith(begins) and "error: [bold]" in terminal.getvalue()
