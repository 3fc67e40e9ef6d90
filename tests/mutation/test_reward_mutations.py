"""Break comparisons and stop strings in one place at a time: their tests must notice every time."""

import shutil
from pathlib import Path

import pytest

from tests.mutation.nursery import ROOT, Nursery, assert_killed, assert_passed, mutate

PREFERENCE, STOPPING = "rewards/preference.py", "generation/stopping.py"
TESTS = {PREFERENCE: "tests/rewards/test_preference.py", STOPPING: "tests/generation/test_stopping.py"}
MUTATIONS = [
    (PREFERENCE, "second - first", "first - second"),
    (PREFERENCE, "second - first", "1 - 2 * first"),
    (PREFERENCE, "pairs + [pair[::-1] for pair in pairs]", "pairs + [pair for pair in pairs]"),
    (PREFERENCE, "None if first is None or second is None else", "None if first is None else"),
    (PREFERENCE, "[0.0 if a == b else None for", "[None for"),
    (PREFERENCE, "number == -1", "number == -2"),
    (PREFERENCE, "shuffle_order=False", "shuffle_order=True"),
    (
        PREFERENCE,
        "scores[prompt + first] - scores[prompt + second]",
        "scores[prompt + second] - scores[prompt + first]",
    ),
    (PREFERENCE, "(1 + sum(scored) / len(scored)) / 2", "sum(scored) / len(scored)"),
    (PREFERENCE, "(1 - max(-1.0, min(1.0, value))) / 2", "(1 + max(-1.0, min(1.0, value))) / 2"),
    (STOPPING, "input_ids[:, self.prompt_length :].tolist()", "input_ids.tolist()"),
    (STOPPING, "self._is_in(ids[-self.num_tail_tokens :]) and self._is_in(ids)", "self._is_in(ids[-6:])"),
    (STOPPING, "self._is_in(ids[-self.num_tail_tokens :]) and self._is_in(ids)", "self._is_in(ids[1:])"),
    (STOPPING, "max(len(text.encode()) for text in self.strings) + _CONTEXT", "1 + _CONTEXT"),
    (STOPPING, "range(1, len(ids) + 1)", "range(1, len(ids))"),
    (STOPPING, "any(string in str(text)", "all(string in str(text)"),
    (STOPPING, "skip_special_tokens=False", "skip_special_tokens=True"),
    (STOPPING, "< lengths[:, None]", "<= lengths[:, None]"),
    (STOPPING, "width if end is None else end", "0 if end is None else end"),
]


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    """A copy of what the tests import."""
    for room in ("rlhf_ppo", "tests/generation", "tests/rewards"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__", "cli", "demo"))
    for helper in (ROOT / "tests").glob("[!t]*.py"):  # conftest.py, oracles.py and the like, but no test_*.py
        shutil.copy(helper, tmp_path / "tests")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("file", list(TESTS))
def test_the_untouched_copy_passes(sandbox: Path, nursery: Nursery, file: str):
    assert_passed(nursery.run(sandbox, [TESTS[file]]))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "original", "mutant"), MUTATIONS)
def test_the_mutant_is_killed(sandbox: Path, nursery: Nursery, file: str, original: str, mutant: str):
    mutate(sandbox / "rlhf_ppo" / file, original, mutant)
    assert_killed(nursery.run(sandbox, [TESTS[file]]))
