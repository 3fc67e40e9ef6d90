"""Nothing that the package prints advises to delete work: a file that is in the way is moved, or another is named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "rlhf_ppo"
DELETES = re.compile(r"\b(removes?|deletes?|erase|wipe|unlink|rm)\b", re.IGNORECASE)

ALLOWED = {
    "checkpoints/run.py": (
        "if no process trains there, remove it",  # the lock that the message names
        "overwrite_output_dir=True",  # what that option does, and to which checkpoints
    ),
    "training/optimization.py": "remove both and set optim",  # two arguments
    "rewards/endpoint.py": "remove it from the ",  # a column of the data
    "config/ppo_config.py": "Delete the checkpoints in output_dir when training starts",  # overwrite_output_dir
}
"""Texts that name the word, none of which is about what a run or a step has written but the option's own."""


def fragments(name: str) -> tuple[str, ...]:
    allowed = ALLOWED.get(name, ())
    return (allowed,) if isinstance(allowed, str) else allowed


def texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file that are no docstrings."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_message_advises_to_delete(path: Path) -> None:
    found = [text for text in texts(path) if DELETES.search(text)]
    allowed = fragments(str(path.relative_to(ROOT)))

    assert not [text for text in found if not any(fragment in text for fragment in allowed)]
