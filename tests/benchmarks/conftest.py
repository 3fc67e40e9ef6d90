"""What the tests of benchmarks share: their folders are on the path, as where a benchmark runs."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (FOLDER, FOLDER / "learning"):
        monkeypatch.syspath_prepend(str(folder))
