"""Which checkpoint a run starts from, the lock of its directory, and files that are written whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_ppo.data.files import read_object, replacing, write_json
from rlhf_ppo.run.checkpoints import InUseError, find_start, in_use, last_complete_checkpoint, locked


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two complete checkpoints and one that TRL's trainer did not finish."""
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    (tmp_path / "checkpoint-11").mkdir()
    return tmp_path


def test_the_newest_complete_checkpoint_has_the_highest_number(run: Path) -> None:
    assert last_complete_checkpoint(run) == str(run / "checkpoint-10")
    assert last_complete_checkpoint(run / "nothing") is None


@pytest.mark.parametrize(("wanted", "step"), [(True, 10), ("True", 10), ("checkpoint-10", 10), (None, None)])
def test_a_run_starts_from_what_it_is_given(wanted: str | bool | None, step: int | None, run: Path) -> None:
    given = str(run / wanted) if isinstance(wanted, str) and wanted != "True" else wanted
    found = find_start(run, given, overwrite=given is None)
    assert found == (None if step is None else str(run / f"checkpoint-{step}"))


@pytest.mark.parametrize(
    ("directory", "wanted", "overwrite", "message"),
    [
        (".", False, False, "holds checkpoints that this run does not continue, such as .*checkpoint-10"),
        (".", "checkpoint-2", False, "holds checkpoints that this run does not continue"),
        (".", "checkpoint-2", True, "holds checkpoints that this run does not continue"),
        (".", "checkpoint-11", False, "checkpoint-11' is not a complete checkpoint"),
        ("new", True, False, "holds no complete checkpoint"),
    ],
)
def test_a_start_that_would_mix_two_runs_is_refused(
    directory: str, wanted: str | bool, overwrite: bool, message: str, run: Path
) -> None:
    given = str(run / wanted) if isinstance(wanted, str) else wanted
    with pytest.raises(ValueError, match=message):
        find_start(run / directory, given, overwrite)


TRIES = "import sys; from rlhf_ppo.run.checkpoints import locked; locked(sys.argv[1]).__enter__()"


def test_a_directory_has_one_trainer(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert in_use(tmp_path)
        with pytest.raises(InUseError, match="in use"), locked(tmp_path):
            pass
        other = subprocess.run([sys.executable, "-c", TRIES, str(tmp_path)], capture_output=True, text=True)
        assert other.returncode != 0 and "InUseError" in other.stderr
    assert not in_use(tmp_path)
    assert subprocess.run([sys.executable, "-c", TRIES, str(tmp_path)]).returncode == 0


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "values.json"
    write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_object(path, {"a": int}) == {"a": 1} and list(tmp_path.iterdir()) == [path]
