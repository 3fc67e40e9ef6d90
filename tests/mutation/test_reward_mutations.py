"""Break comparisons and stop strings in one place at a time: their tests must notice every time."""

import shutil
from pathlib import Path

import pytest

from tests.mutation.nursery import (
    ROOT,
    Nursery,
    assert_killed,
    assert_passed,
    assert_there_once,
    copy_package,
    mutate,
)

PREFERENCE, JUDGES, STOPPING = "rewards/preference.py", "rewards/judges.py", "generation/stopping.py"
TESTS = {
    PREFERENCE: "tests/rewards/test_preference.py",
    JUDGES: "tests/rewards/test_judges.py",
    STOPPING: "tests/generation/test_stopping.py",
}
MUTATIONS = [
    (PREFERENCE, "second - first", "first - second"),
    (PREFERENCE, "second - first", "1 - 2 * first"),
    (PREFERENCE, "[(other, one) for one, other in chosen]", "[(one, other) for one, other in chosen]"),
    (PREFERENCE, "None if first is None or second is None else", "None if first is None else"),
    (PREFERENCE, "0.0 if other is not None and one.response == other.response else None", "None"),
    (PREFERENCE, "number == -1", "number == -2"),
    (PREFERENCE, "shuffle_order=False", "shuffle_order=True"),
    (PREFERENCE, "(1 + sum(scored) / len(scored)) / 2", "sum(scored) / len(scored)"),
    (JUDGES, "float(second > first)", "float(second < first)"),
    (JUDGES, "0.5 if first == second else float(second > first)", "float(second > first)"),
    (JUDGES, "min(first - second, 700.0)", "min(second - first, 700.0)"),
    (JUDGES, "None if first is None or second is None else self.verdict", "None if first is None else self.verdict"),
    (JUDGES, "(1 - max(-1.0, min(1.0, value))) / 2", "(1 + max(-1.0, min(1.0, value))) / 2"),
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
    copy_package(tmp_path)
    for room in ("generation", "rewards"):
        for file in (ROOT / "tests" / room).glob("test_*.py"):
            shutil.copy(file, tmp_path / "tests" / room)
    return tmp_path


@pytest.mark.parametrize(("file", "original"), sorted({mutation[:2] for mutation in MUTATIONS}))
def test_what_is_broken_is_there(file: str, original: str):
    assert_there_once(ROOT / "rlhf_ppo" / file, original)


@pytest.mark.slow
@pytest.mark.parametrize("file", list(TESTS))
def test_the_untouched_copy_passes(sandbox: Path, nursery: Nursery, file: str):
    assert_passed(nursery.run(sandbox, [TESTS[file]]))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "original", "mutant"), MUTATIONS)
def test_the_mutant_is_killed(sandbox: Path, nursery: Nursery, file: str, original: str, mutant: str):
    mutate(sandbox / "rlhf_ppo" / file, original, mutant)
    assert_killed(nursery.run(sandbox, [TESTS[file]]))
