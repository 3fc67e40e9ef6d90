"""Whose directory it is: a used one, two runs at once, and which checkpoints are a run's own."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.checkpoints import last_complete_checkpoint
from rlhf_ppo.checkpoints.run import LOCK_NAME, RUN_NAME, InUseError, Run, locked
from tests.faults.conftest import make_saving
from tests.runs import DieAt, RunDied

NO_TRAINING: dict[str, Any] = {"given": {"callbacks": [DieAt("on_train_begin", 0)]}}
"""Ends a run that starts anew as soon as it has started."""


def checkpoints(run: Path) -> set[str]:
    return {path.name for path in run.glob("checkpoint-*")}


# ---- A used directory ----


def test_a_new_run_does_not_start_among_the_checkpoints_of_another(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    trainer = make_saving(run, save_total_limit=1)
    with pytest.raises(ValueError) as error:
        trainer.train()
    text = str(error.value)
    assert "holds the checkpoints of another run (checkpoint-1 to checkpoint-2)" in text
    for way in ("resume_from_checkpoint=True", "overwrite_output_dir=True", "another output_dir"):
        assert way in text
    assert trainer.state.global_step == 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_overwriting_deletes_the_checkpoints_and_nothing_else(run: Path) -> None:
    (run / "notes.txt").write_text("mine")
    with pytest.raises(RunDied):
        make_saving(run, overwrite_output_dir=True, **NO_TRAINING).train()
    assert checkpoints(run) == set()
    assert (run / "notes.txt").read_text() == "mine"


def test_overwriting_and_resuming_contradict_each_other(run: Path) -> None:
    trainer = make_saving(run, overwrite_output_dir=True)
    with pytest.raises(ValueError, match=r"overwrite_output_dir=True deletes .*resume_from_checkpoint=True"):
        trainer.train(resume_from_checkpoint=True)
    assert checkpoints(run) == {"checkpoint-1", "checkpoint-2"}


def test_a_directory_without_a_finished_checkpoint_is_free(run: Path) -> None:
    """A model, logs, and what a kill in the first save has left are no obstacle."""
    shutil.rmtree(run / "checkpoint-1")
    (run / "checkpoint-2" / "manifest.json").unlink()
    (run / "model.safetensors").write_bytes(b"a model")
    with pytest.raises(RunDied):
        make_saving(run, **NO_TRAINING).train()
    assert Run.load(run).id != Run.load(run / "checkpoint-2").id


def test_evaluation_neither_locks_nor_minds_a_used_directory(run: Path) -> None:
    trainer = make_saving(run, given={"eval_dataset": [{"input_ids": [4, 5]}]})
    with locked(str(run)):
        assert "eval_score" in trainer.evaluate()


# ---- A run's own checkpoints ----


def test_resuming_takes_no_checkpoint_of_another_run(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-20")
    Run.new().save(run / "checkpoint-20")
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-2")
    assert f"Skipping {run / 'checkpoint-20'}: it is not of the run" in caplog.text


def test_rotation_leaves_the_checkpoints_of_others(run: Path) -> None:
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-20")
    Run.new().save(run / "checkpoint-20")
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-0")
    (run / "checkpoint-0" / RUN_NAME).unlink()
    make_saving(run, save_total_limit=1, total_episodes=8).train(resume_from_checkpoint=True)
    assert checkpoints(run) == {"checkpoint-4", "checkpoint-20", "checkpoint-0"}


def test_going_on_from_an_earlier_one_gives_the_later_ones_up(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Killed again, the run goes on from where it was, not from what its first continuation has left."""
    later = make_saving(run, total_episodes=8)
    later.train(resume_from_checkpoint=True)
    died = make_saving(run, total_episodes=8, given={"callbacks": [DieAt("on_step_begin", 2)]})
    with caplog.at_level(logging.WARNING), pytest.raises(RunDied):
        died.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert "(checkpoint-4, checkpoint-3, checkpoint-2) is not taken for this run's any more" in caplog.text
    assert checkpoints(run) == {f"checkpoint-{step}" for step in (1, 2, 3, 4)}
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-2")
    resumed = make_saving(run, total_episodes=8)
    assert resumed.train(resume_from_checkpoint=True).global_step == 4
    assert resumed._initial_global_step == 2
    assert {Run.load(run / f"checkpoint-{step}").id for step in (2, 3, 4)} == {Run.load(run).id}


def test_a_checkpoint_that_is_written_again_holds_nothing_of_before(run: Path) -> None:
    """Here what a kill has left of one that two processes wrote."""
    (run / "checkpoint-2" / "manifest.json").unlink()
    (run / "checkpoint-2" / "optimizer_0").mkdir()
    (run / "checkpoint-2" / "optimizer_0" / "__1_0.distcp").write_bytes(b"a shard")
    make_saving(run).train(resume_from_checkpoint=True)
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-2")
    assert not (run / "checkpoint-2" / "optimizer_0").exists()


def test_a_run_goes_on_in_another_directory_if_that_is_free(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    resumed = make_saving(other, total_episodes=6)
    resumed.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert checkpoints(other) == {"checkpoint-3"}
    assert last_complete_checkpoint(str(other)) == str(other / "checkpoint-3")
    make_saving(tmp_path / "third").train()
    with pytest.raises(ValueError, match="holds the checkpoints of another run"):
        make_saving(tmp_path / "third").train(resume_from_checkpoint=str(run / "checkpoint-1"))


def test_a_kept_checkpoint_that_was_moved_back_is_the_runs(run: Path, tmp_path: Path) -> None:
    (run / "checkpoint-1").rename(tmp_path / "kept")
    shutil.rmtree(run / "checkpoint-2")
    resumed = make_saving(run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "kept"))
    assert resumed._initial_global_step == 1
    assert Run.load(run / "checkpoint-2").id == Run.load(tmp_path / "kept").id


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 3}', '{"id": "a", "started": "", "earlier": {"b": "c"}}'])
def test_without_a_legible_note_it_is_the_newest_checkpoints_run(text: str, run: Path) -> None:
    (run / RUN_NAME).write_text(text)
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-2")


# ---- Two runs at once ----


def test_a_second_run_in_the_same_directory_is_refused(run: Path, tmp_path: Path) -> None:
    with (
        locked(str(run)),
        pytest.raises(
            RuntimeError,
            match=r"output_dir=.* is in use: a trainer of this process trains in it; call that trainer's close",
        ),
    ):
        make_saving(run).train(resume_from_checkpoint=True)
    died = make_saving(tmp_path / "died", given={"callbacks": [DieAt("on_step_begin", 1)]})
    with pytest.raises(RunDied):
        died.train()
    with locked(died.args.output_dir):  # given back, also after an error
        pass
    assert not (run / LOCK_NAME).exists()


def test_without_locks_a_warning_says_so(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with caplog.at_level(logging.WARNING), locked(str(tmp_path)):
        assert "output_dir cannot be locked" in caplog.text


def hold(output_dir: str, pipe: Any) -> None:
    """Hold the lock, with a child that lives longer."""
    with locked(output_dir):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        pipe.send(child)
        time.sleep(60)


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=hold, args=(str(tmp_path), theirs))
    holder.start()
    child = ours.recv()
    try:
        with pytest.raises(RuntimeError, match=f"is in use: process {holder.pid} on "), locked(str(tmp_path)):
            pass
        holder.kill()
        holder.join()
        with locked(str(tmp_path)):
            pass
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)


# ---- Files that are planted where a run writes ----


@pytest.mark.parametrize("kind", ["link", "dangling", "hard link", "fifo", "directory", "others"])
def test_a_lock_that_is_no_file_of_ours_is_neither_written_nor_waited_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    victim.write_text("mine")
    lock = run / LOCK_NAME
    if kind == "others":
        lock.touch()

        def refuse(*args: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    else:
        plant: dict[str, Any] = {
            "link": lambda: lock.symlink_to(victim),
            "dangling": lambda: lock.symlink_to(tmp_path / "nowhere"),
            "hard link": lambda: lock.hardlink_to(victim),
            "fifo": lambda: os.mkfifo(lock),
            "directory": lock.mkdir,
        }
        plant[kind]()
    with pytest.raises(InUseError, match=f"{LOCK_NAME} (is|has|cannot) .*remove it"), locked(str(run)):
        pass
    assert victim.read_text() == "mine" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["completions", "_samples"])
def test_a_file_where_a_directory_is_needed_is_said_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"{name} is a file, and the run needs a directory there; rename it"):
        make_saving(tmp_path)
