"""The page about memory is what its script makes of the estimate."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_page_is_the_estimates() -> None:
    """The rows of the smallest model are written anew; the others have the same arithmetic."""
    path = ROOT / "docs" / "hooks" / "memory_guide.py"
    spec = importlib.util.spec_from_file_location("memory_guide", path)
    assert spec is not None and spec.loader is not None
    guide = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(guide)
    written, others = guide.PAGE.read_text(), [name for name in guide.SIZES if name != "0.5B"]
    lines = [
        line for line in written.splitlines(keepends=True) if not line.startswith(tuple(f"| {n} |" for n in others))
    ]
    assert guide.page(["0.5B"]) == "".join(lines), "run: python docs/hooks/memory_guide.py"
    assert [written.count(f"\n| {name} |") for name in guide.SIZES] == [3 + 2] * len(guide.SIZES)
    assert all(f"{name}.yaml" in written for name in guide.ENGINES)
    assert all((ROOT / "accelerate_configs" / f"{name}.yaml").exists() for name in guide.ENGINES)
