"""A disk that is full, at every file of a save, and what a killed save leaves behind."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import TrainerCallback

from rlhf_ppo.checkpoints import last_complete_checkpoint
from rlhf_ppo.checkpoints.files import DiskFullError, explaining_full_disk, remove_leftovers
from rlhf_ppo.cli.training import running
from tests.faults.conftest import make_saving
from tests.runs import DieAt, RunDied

SAYS = "no space is left for {}, which is incomplete .* MB free; the error was: .*"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as if the disk had no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# The models' files have 100 kB, the optimizer's more, random states 10.
@pytest.mark.parametrize("size", [0, 5_000, 50_000, 150_000])
def test_a_checkpoint_without_room_names_itself_and_the_one_that_is_whole(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it goes on from there, in the same process."""
    run = tmp_path / "run"
    trainer = make_saving(run)
    save = trainer._checkpoints.write

    def fill(directory: str, *args: Any) -> None:
        if not directory.endswith("checkpoint-2"):
            return save(directory, *args)
        with largest_file(size):
            save(directory, *args)

    monkeypatch.setattr(trainer._checkpoints, "write", fill)
    said = (
        f"{SAYS.format(run / 'checkpoint-2')}{run}/checkpoint-1 is complete: make room, and continue with resume_from_"
    )
    with pytest.raises(DiskFullError, match=said):
        trainer.train()
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-1")
    resumed = make_saving(run)
    resumed.train(resume_from_checkpoint=True)
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-2")


def test_a_first_checkpoint_and_a_final_model_without_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_saving(tmp_path / "run", save_strategy="no")
    trainer.train()
    with largest_file(5_000), pytest.raises(DiskFullError, match=SAYS.format(tmp_path / "run") + "There is no checkp"):
        trainer.save_model()
    with pytest.raises(SystemExit, match="2"), running("it", trainer), largest_file(5_000):
        trainer.save_model(str(tmp_path / "elsewhere"))
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"it: error: no space is left for {tmp_path}/elsewhere, which is incomplete")


def test_no_room_for_what_is_printed_or_logged_is_said_too(tmp_path: Path) -> None:
    class Prints(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = tmp_path / "run"
    said = (
        f"no space is left for what is logged or printed .* MB free.*No space left.*{run}/checkpoint-1 is complete: "
    )
    with pytest.raises(DiskFullError, match=said):
        make_saving(run, given={"callbacks": [Prints()]}).train()


def torch_save(directory: Path) -> None:
    torch.save({"a": torch.zeros(9_999)}, directory / "a.pt")


def torch_save_to_device(directory: Path) -> None:
    torch.save({"a": torch.zeros(9_999)}, "/dev/full")


def text(directory: Path) -> None:
    (directory / "a.json").write_text(json.dumps([0] * 9_999))


def device(directory: Path) -> None:
    with open("/dev/full", "w") as file:
        file.write("a")


def tensors(directory: Path) -> None:
    save_file({"a": torch.zeros(9_999)}, directory / "a.safetensors")


def quota(directory: Path) -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def in_words(directory: Path) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("write", [torch_save, torch_save_to_device, text, device, tensors, quota, in_words])
def test_each_way_of_writing_is_understood(write: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match="no space"), explaining_full_disk(f"{tmp_path}/new/er", lambda: None):
        with largest_file(5_000):
            write(tmp_path)


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no"), RuntimeError("size mismatch"), KeyError("a")])
def test_other_errors_stay_what_they_are(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised, explaining_full_disk(str(tmp_path), lambda: None):
        raise error
    assert raised.value is error


def leave_behind(directory: Path) -> Path:
    """Kill a process that writes safetensors, in the middle; return what it leaves.

    Skips where the installed safetensors writes in place: nothing is left behind then.
    """
    directory.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        save_file({"a": torch.zeros(30_000_000)}, directory / "model.safetensors")
        os._exit(0)
    while not (found := list(directory.glob(".tmp*"))):
        if os.waitpid(child, os.WNOHANG)[0]:
            pytest.skip("this safetensors writes no temporary file")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return found[0]


def test_what_a_killed_save_leaves_is_deleted_by_the_next_save_and_the_next_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = make_saving(run, given={"callbacks": [DieAt("on_train_begin", 0)]}, save_strategy="no")
    for folder in (run, run / "value_model"):
        left = leave_behind(folder)
        trainer.save_model()
        assert not left.exists()
    left = leave_behind(run)
    with pytest.raises(RunDied):
        trainer.train()
    assert not left.exists()


def test_only_temporary_files_are_deleted(tmp_path: Path) -> None:
    names = [
        ".tmpAbC123",
        "a.csv.0123abcd.tmp",
        "state.json.tmp",
        "notes.tmp",
        ".tmp",
        ".tmpAbC1234",
        "tmpAbC123",
        "model.safetensors",
    ]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / ".tmpFolder").mkdir()
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*names[2:], ".tmpFolder"}
