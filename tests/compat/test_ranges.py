"""The versions that pyproject.toml allows: its floors are what `make test-oldest` runs with, and TRL is not loaded."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.runs import QUICK, MakeTrainer

ROOT = Path(__file__).parents[2]
ABOVE_THE_FLOOR = {"torch"}
"""Older builds of it would bring several GB of CUDA packages to a CPU machine."""

RUN_BY_THE_OLDEST = ("deepspeed", "math", "peft", "wandb")
"""Extras that `make test-oldest` installs; vLLM needs a GPU."""

USES_TRL_ALWAYS = {"cli", "compat"}


def floors() -> dict[str, str]:
    """The lowest version of each dependency that `pyproject.toml` has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in RUN_BY_THE_OLDEST for line in extras[name])]
    found = [re.match(r"([\w-]+)>=([\d.]+)", line) for line in wanted]
    return {match[1]: match[2] for match in found if match is not None}


def same(pinned: str, floor: str) -> bool:
    return re.fullmatch(rf"{re.escape(floor)}(\.0)*", pinned) is not None


def test_the_oldest_versions_are_the_floors() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    expected = floors()
    assert len(expected) >= 16
    assert expected.keys() - pinned.keys() == set()
    differing = {name for name, floor in expected.items() if not same(pinned[name], floor)}
    assert differing == ABOVE_THE_FLOOR


@pytest.mark.parametrize("room", sorted(path.name for path in (ROOT / "rlhf_ppo").iterdir() if path.is_dir()))
def test_no_room_of_the_library_imports_trl_when_it_is_imported(room: str) -> None:
    if room in USES_TRL_ALWAYS:
        pytest.skip("a command line of TRL's")
    for path in (ROOT / "rlhf_ppo" / room).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert "trl" not in {name.partition(".")[0] for name in names}, path


def test_a_plain_trainer_needs_nothing_of_trl(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules, "trl"]:
        if name.partition(".")[0] == "trl":
            monkeypatch.setitem(sys.modules, name, None)  # the next import of it fails
    with pytest.raises(ModuleNotFoundError):
        __import__("trl.trainer.utils")
    given: dict[str, Any] = {**QUICK, "total_episodes": 4, "num_sample_generations": 1}
    make_trainer(**given).train()
