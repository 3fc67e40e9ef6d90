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
