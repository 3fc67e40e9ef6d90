"""Every table of the documentation is one: a header, a line of dashes, and rows of as many cells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")})
DASHES = re.compile(r":?-+:?")


def tables(text: str) -> Iterator[list[tuple[int, str]]]:
    """Yield the lines of each table, numbered, outside of blocks of code."""
    found: list[tuple[int, str]] = []
    fence = ""
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        line = line.strip()
        if mark := re.match(r"(`{3,}|~{3,})", line):
            fence = "" if fence and mark[0].startswith(fence) else fence or mark[0]
        if not fence and line.startswith("|"):
            found.append((number, line))
        elif found:
            yield found
            found = []


def cells(line: str) -> list[str]:
    """Split a row as GitHub does: at every `|` without a backslash before it, in code and formulas too."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.removeprefix("|").removesuffix("|"))]


def mistakes(text: str) -> list[str]:
    found = []
    for (number, header), *rows in tables(text):
        if not rows or not all(map(DASHES.fullmatch, cells(rows[0][1]))):
            found.append(f"line {number} has no header, or no line of dashes after it: {header}")
        for at, line in [(number, header), *rows]:
            if not line.endswith("|"):
                found.append(f"line {at} does not end in |: {line}")
            if len(cells(line)) != len(cells(header)):
                found.append(f"line {at} has {len(cells(line))} cells, its header {len(cells(header))}: {line}")
            if any(re.search(r"(?<!\\)\|", code) for code in re.findall(r"`[^`]*`", line)):
                found.append(f"line {at} has a | in code, which ends a cell: {line}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    assert mistakes(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("| a | b |\n|---|---|\n| 1 | 2 |\n\n| 3 | 4 |", "line 5 has no header"),
        ("| a | b |\n|---|---|\n| 1 |", "line 3 has 1 cells, its header 2"),
        ("| a | b |\n|---|---|\n| `x|y` |", "line 3 has a | in code"),
        ("| a | b |\n|---|---|\n| $|x|$ | 2 |", "line 3 has 4 cells"),
        ("| a | b |\n|---|---|\n| 1 | 2", "line 3 does not end in |"),
        ("| a | b |\n|---|\n| 1 | 2 |", "line 2 has 1 cells"),
    ],
)
def test_what_breaks_a_table_is_found(rows: str, words: str) -> None:
    assert any(words in found for found in mistakes(rows))


def test_code_is_no_table() -> None:
    assert mistakes("```\n| a |\n```\n\n| a | `x\\|y` |\n|---|:-:|\n| 1 | 2 |\n") == []
