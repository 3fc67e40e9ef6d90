"""Which run a checkpoint belongs to: a name of its own that stands in `output_dir` and in each checkpoint."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, get_type_hints

from transformers.trainer import TRAINER_STATE_NAME

from rlhf_ppo.checkpoints.jsonfile import read_object, write_json
from rlhf_ppo.checkpoints.manifest import MANIFEST_NAME
from rlhf_ppo.config.validation import check_type

RUN_NAME = "ppo_run.json"
_DELETED = "deleted-"
_CHECKPOINT = r"checkpoint-\d+(-\d+)?"


@dataclass(frozen=True)
class Run:
    """A run, which may have been stopped and resumed any number of times.

    Attributes:
        id: Its name; empty for checkpoints that were written before runs had one.
        started: When it started, in UTC.
        earlier: What it goes on from: names of runs, and the last update of each that it has in common with them.
    """

    id: str = ""
    started: str = ""
    earlier: dict[str, int] = field(default_factory=dict)

    @classmethod
    def new(cls, earlier: dict[str, int] | None = None) -> Self:
        """Make a run with a name that no other has."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(uuid.uuid4().hex, now, earlier or {})

    def branched(self, step: int) -> Self:
        """Make the run that goes on from this one's update `step`, beside what this one did after it."""
        return self.new({name: min(last, step) for name, last in self.earlier.items()} | {self.id: step})

    def owns(self, other: Run, step: int) -> bool:
        """Tell whether a checkpoint of `other` with nothing after update `step` is one of this run's."""
        return other.id == self.id or step <= self.earlier.get(other.id, -1)

    def save(self, directory: str | Path) -> None:
        """Write `ppo_run.json`."""
        write_json(Path(directory, RUN_NAME), dataclasses.asdict(self))

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read `ppo_run.json`; a directory without one gives the run without a name.

        Raises:
            ValueError: It cannot be read.
        """
        path = Path(directory, RUN_NAME)
        if not path.exists():
            return cls()
        values = read_object(path)
        types = get_type_hints(cls)
        try:
            for name in values.keys() | types.keys():
                check_type(name, values[name], types[name], "")
        except (KeyError, TypeError) as error:
            raise ValueError(f"its {RUN_NAME} holds something else than a run: {str(error)[:80]}") from None
        return cls(**values)


def numbered(output_dir: str | Path) -> list[Path]:
    """Return the directories `checkpoint-<updates>` and `checkpoint-<updates>-<mini-batches>`, the newest first."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(_CHECKPOINT, path.name)]
    return sorted((path for path in found if path.is_dir()), key=place_of, reverse=True)


def place_of(checkpoint: Path) -> tuple[int, ...]:
    """Return the numbers in a checkpoint's name: updates that are done, mini-batches of one that is half learned."""
    return tuple(map(int, checkpoint.name.split("-")[1:]))


def is_half_learned(checkpoint: Path) -> bool:
    """Tell whether a checkpoint was written in the middle of learning."""
    return len(place_of(checkpoint)) > 1


def last_update(place: tuple[int, ...]) -> int:
    """Return the last update of which something is in a checkpoint."""
    return place[0] + len(place) - 1


def was_finished(checkpoint: Path) -> bool:
    """Tell whether a checkpoint was once written to its end, whatever has happened to it since."""
    is_of_old_format = not Path(checkpoint, RUN_NAME).exists()
    return Path(checkpoint, MANIFEST_NAME).exists() or (
        is_of_old_format and Path(checkpoint, TRAINER_STATE_NAME).exists()
    )


def run_in(output_dir: str | Path) -> Run | None:
    """Return the run whose directory this is, or None where there are no checkpoints.

    Without a legible `ppo_run.json` it is the run of the newest checkpoint.
    """
    for directory in (Path(output_dir), *filter(was_finished, numbered(output_dir))):
        try:
            run = Run.load(directory)
        except ValueError:
            continue
        if run.id or directory != Path(output_dir):
            return run
    return None


def belongs(checkpoint: Path, run: Run) -> bool:
    """Tell whether a checkpoint is one of the run's, as far as its own `ppo_run.json` can be read."""
    try:
        return run.owns(Run.load(checkpoint), last_update(place_of(checkpoint)))
    except ValueError:
        return False


def is_of_another(checkpoint: Path, run: Run) -> bool:
    """Tell whether a finished checkpoint says that it is not one of the run's."""
    try:
        return was_finished(checkpoint) and not run.owns(Run.load(checkpoint), last_update(place_of(checkpoint)))
    except ValueError:
        return False


def start_run(output_dir: str, overwrite: bool) -> Run:
    """Make a new run, if the directory is free for one.

    Args:
        output_dir: The run's directory.
        overwrite: Whether checkpoints that are there are deleted.

    Raises:
        ValueError: There are checkpoints, and nothing was said about them.
    """
    if overwrite:
        for checkpoint in numbered(output_dir):
            delete(checkpoint)
    check_unused(output_dir)
    return Run.new()


def finished_in(output_dir: str | Path) -> str:
    """Name the finished checkpoints in a directory: "checkpoint-1 to checkpoint-9", empty if there are none."""
    found = [path.name for path in numbered(output_dir) if was_finished(path)]
    return f"{found[-1]} to {found[0]}" if len(found) > 1 else "".join(found)


def check_unused(output_dir: str | Path) -> None:
    """Check that a directory holds no finished checkpoint, which a new run would mix with its own.

    Raises:
        ValueError: It does; the message says what can be done.
    """
    if found := finished_in(output_dir):
        raise ValueError(
            f"output_dir={str(output_dir)!r} holds the checkpoints of another run ({found}): go on with that run by "
            "resume_from_checkpoint=True, delete its checkpoints by overwrite_output_dir=True, or choose another "
            "output_dir"
        )


def wanted_checkpoint(resume_from_checkpoint: str | bool | None) -> str | bool:
    """Read what was said about resuming: a directory, True for the newest checkpoint, False for a new run.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(resume_from_checkpoint, str | os.PathLike | bool | None):
        raise TypeError(
            f"resume_from_checkpoint={resume_from_checkpoint!r:.60} must be a checkpoint's directory, True or False"
        )
    if isinstance(resume_from_checkpoint, os.PathLike):
        return os.fspath(resume_from_checkpoint)
    if isinstance(resume_from_checkpoint, str) and resume_from_checkpoint.lower() in ("true", "false"):
        return resume_from_checkpoint.lower() == "true"
    return False if resume_from_checkpoint is None else resume_from_checkpoint


def check_start(output_dir: str, resume_from_checkpoint: str | bool | None, overwrite: bool) -> None:
    """Check what can be known before anything is loaded of how a run is to start.

    Args:
        output_dir: The run's directory.
        resume_from_checkpoint: As `PPOTrainer.train` takes it.
        overwrite: Whether checkpoints in the directory are deleted.

    Raises:
        ValueError: The directory is used and nothing is said about it, there is nothing to resume from, or both
            resuming and overwriting are asked for.
    """
    wanted = wanted_checkpoint(resume_from_checkpoint)
    if wanted is False:
        if not overwrite:
            check_unused(output_dir)
    elif overwrite:
        raise ValueError(
            f"overwrite_output_dir=True deletes the checkpoints, but resume_from_checkpoint={wanted!r} goes on from "
            "one; leave one of the two out"
        )
    elif wanted is True and not finished_in(output_dir):
        raise ValueError(
            f"resume_from_checkpoint=True, but output_dir={output_dir!r} holds no whole checkpoint; leave it out to "
            "start a new run"
        )
    elif isinstance(wanted, str) and not os.path.isdir(wanted):
        raise ValueError(f"resume_from_checkpoint={wanted!r} is no whole checkpoint: there is no such directory")


def continue_run(output_dir: str, checkpoint: str, place: tuple[int, ...]) -> tuple[Run, list[str]]:
    """Find the run that goes on from a checkpoint.

    It is the checkpoint's own run, unless that has been further already, or has no name: then it is a new one that
    goes on from it, and the later checkpoints are none of its own.

    Args:
        output_dir: The run's directory.
        checkpoint: The directory of a whole checkpoint.
        place: The number of updates after which it was written, and of mini-batches of one that is half learned.

    Returns:
        The run, and the names of the later checkpoints that it does not take for its own.

    Raises:
        ValueError: `output_dir` holds the checkpoints of another run.
    """
    origin, current = Run.load(checkpoint), run_in(output_dir)
    run = current if current is not None and current.owns(origin, last_update(place)) else origin
    if run is not current and not os.path.samefile(os.path.dirname(os.path.abspath(checkpoint)), output_dir):
        check_unused(output_dir)
    later = [path for path in numbered(output_dir) if place_of(path) > place and was_finished(path)]
    abandoned = [path.name for path in later if belongs(path, run)]
    return (run.branched(place[0]) if abandoned or not run.id else run), abandoned


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint; its name is gone at once, so that a kill leaves no half of it under that name."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    aside = checkpoint.with_name(f"{_DELETED}{checkpoint.name}")
    if aside.exists():
        shutil.rmtree(aside, ignore_errors=True)
    os.rename(checkpoint, aside)
    shutil.rmtree(aside, ignore_errors=True)


def rotate(output_dir: str, run: Run, limit: int | None, best: str | None, newest: str | None) -> None:
    """Delete the oldest checkpoints of a run, and of no other.

    What was half learned is not counted, and deleted when the run is further, whatever the limit.

    Args:
        output_dir: The run's directory.
        run: The run.
        limit: How many to keep; None keeps all.
        best: The best checkpoint so far, which stays.
        newest: The newest one, which stays; None lets the best stay alone.
    """
    own = [path for path in numbered(output_dir) if was_finished(path) and belongs(path, run)]
    for checkpoint in filter(is_half_learned, own):
        if newest is not None and place_of(checkpoint) < place_of(Path(newest)):
            delete(checkpoint)
    if limit is None or limit <= 0 or (newest is not None and is_half_learned(Path(newest))):
        return
    for leftover in Path(output_dir).glob(f"{_DELETED}checkpoint-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    kept = {os.path.realpath(path) for path in (best, newest) if path is not None}
    own = [path for path in own if not is_half_learned(path)]
    others = [path for path in own if os.path.realpath(path) not in kept]
    for checkpoint in others[max(0, limit - (len(own) - len(others))) :]:
        delete(checkpoint)
