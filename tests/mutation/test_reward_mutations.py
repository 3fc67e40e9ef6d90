"""Break comparisons and stop strings in one place at a time: their tests must notice every time."""

import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.mutation.test_algorithm_mutations import ROOT, failing_tests, fresh_processes

__all__ = ["fresh_processes"]

PREFERENCE, STOPPING = "rewards/preference.py", "generation/stopping.py"
TESTS = {PREFERENCE: "rewards/test_preference.py", STOPPING: "generation/test_stopping.py"}
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
    (STOPPING, "found[row] = self.stop_strings.are_in([responses[row]])[0]", "pass"),
    (STOPPING, "max(len(text.encode()) for text in self.strings) + _CONTEXT", "1 + _CONTEXT"),
    (STOPPING, "skip_special_tokens=False", "skip_special_tokens=True"),
    (STOPPING, "< lengths[:, None]", "<= lengths[:, None]"),
    (STOPPING, "width if end is None else end", "0 if end is None else end"),
]


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    """A copy of the package and its tests, the one under test to be chosen."""
    no_cache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "rlhf_ppo", tmp_path / "rlhf_ppo", ignore=no_cache)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=no_cache)
    return tmp_path


def choose(sandbox: Path, file: str) -> None:
    """Let pytest run the tests of one file of the package, in the sandbox alone."""
    (sandbox / "pytest.ini").write_text(
        "[pytest]\npythonpath = .\naddopts = -x -p no:terminal -p no:cacheprovider\npython_files = "
        f"{Path(TESTS[file]).name}\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("file", list(TESTS))
def test_the_untouched_copy_passes(sandbox: Path, fresh_processes: ProcessPoolExecutor, file: str):
    choose(sandbox, file)
    assert failing_tests(sandbox, fresh_processes) == []


@pytest.mark.slow
@pytest.mark.parametrize(("file", "original", "mutant"), MUTATIONS)
def test_the_mutant_is_killed(
    sandbox: Path, fresh_processes: ProcessPoolExecutor, file: str, original: str, mutant: str
):
    choose(sandbox, file)
    path = sandbox / "rlhf_ppo" / file
    source = path.read_text()
    assert source.count(original) == 1, f"{original!r} is not there exactly once: bring the mutation up to date"
    path.write_text(source.replace(original, mutant))
    assert failing_tests(sandbox, fresh_processes), "the mutant survived"
