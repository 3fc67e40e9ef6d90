"""Tools and environments that a command names."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_ppo.rewards.resolve import resolve_environments, resolve_tools

SOURCE = "class Maze:\n    def reset(self, **row): ...\n\ndef add(x: int) -> int:\n    return x\n\nnumber = 3\n"


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "maze.py"
    path.write_text(SOURCE)
    return str(path)


def test_one_environment_is_a_factory_and_several_are_a_dict(file: str) -> None:
    assert resolve_environments(None) is None and resolve_tools(None) is None
    assert resolve_environments([f"{file}:Maze"]).__name__ == "Maze"
    assert resolve_environments(f"{file}:Maze").__name__ == "Maze"  # in YAML, without brackets
    assert [tool.__name__ for tool in resolve_tools(f"{file}:add") or []] == ["add"]
    assert [*resolve_environments([f"a={file}:Maze", f"b={file}:Maze"])] == ["a", "b"]
    assert [tool.__name__ for tool in resolve_tools([f"{file}:add"]) or []] == ["add"]
