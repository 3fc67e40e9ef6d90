"""What is learned from: the benchmark's stories, and VADER as their reward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def stories(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's file of that name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "learning"))
    return importlib.import_module("stories")


@pytest.fixture
def vader(stories: Any, shared_data: Path) -> Callable[..., list[float]]:
    """The compound valence of each response."""
    score = stories.vader(stories.read_lexicon(shared_data))

    def vader(completions: list[str], **columns: Any) -> list[float]:
        return score((), completions)

    return vader
