"""The table of docs/pipeline.md: each cell is tried with steps that take no time, and ends as an undisturbed pipeline.

A cell's first word is what the next start does with the step. Real steps are killed in `test_killed.py`.
"""

from __future__ import annotations

import errno
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_ppo.cli.pipeline import run_pipeline
from rlhf_ppo.cli.steps import read_pipeline
from tests.pipeline.stand_ins import DATA, NAMES, TEXT, TRAINING, Killed, Steps, outputs, prepare

PAGE = Path(__file__).parents[2] / "docs/pipeline.md"
SEEDS = "seeds: [0, 1]\n"


def run(text: str = TEXT, strike: Callable[[str, str], None] = lambda *_: None) -> tuple[Steps, list[str]]:
    """Run a pipeline until it ends; return what ran and what was printed."""
    Path("run.yaml").write_text(text)
    steps, said = Steps(strike), list[str]()
    try:
        run_pipeline(read_pipeline("run.yaml"), steps, said.append)
    except Killed:
        pass
    return steps, said


def at(step: str, moment: str, error: BaseException) -> Callable[[str, str], None]:
    def strike(name: str, now: str) -> None:
        if (name, now) == (step, moment):
            raise error

    return strike


def interrupted(step: str, moment: str, error: BaseException | None = None) -> str:
    run(TEXT, at(step, moment, error or Killed()))
    return TEXT


FULL = OSError(errno.ENOSPC, "No space left on device")


def place(step: str) -> Path:
    return {"judge": Path("out/ppo/judged"), "report": Path("out/report.html")}.get(step, Path("out", step))


def deleted(step: str, text: str = TEXT) -> str:
    run(TEXT)
    remove(place(step))
    return text


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def model_deleted(step: str, text: str = TEXT) -> str:
    run(TEXT)
    (place(step) / "model.safetensors").unlink()
    return text


def changed(step: str) -> str:
    """Another option of a step."""
    return TEXT.replace(f"\n{step}: {{", f"\n{step}: {{x: 1, ").replace(", }", "}")


def data_changed(step: str) -> str:
    Path(f"{DATA[step]}.jsonl").write_text("other")
    return TEXT


def earlier_writes_another(step: str) -> str:
    """Another model of the nearest step that this one reads."""
    run(TEXT)
    earlier = {"reward": "sft", "judge_reward": "sft", "ppo": "reward", "judge": "judge_reward", "report": "judge"}[
        step
    ]
    remove(place(earlier))
    return changed(earlier)


def earlier_writes_the_same(step: str) -> str:
    run(TEXT)
    remove(Path("out/sft"))
    return TEXT


def killed_and_earlier_deleted(step: str) -> str:
    interrupted(step, "saved" if step in TRAINING else "ends")
    remove(Path("out/sft"))
    return TEXT


def seeds_added(step: str) -> str:
    run(TEXT)
    return SEEDS + TEXT


def seeds_removed(step: str) -> str:
    run(SEEDS + TEXT)
    return "seeds: [1]\n" + TEXT


def seed_replaced(step: str) -> str:
    run(TEXT)
    return "seeds: [1]\n" + TEXT


ROWS: dict[str, list[Callable[[str], str]]] = {
    "Killed or disk full before its first checkpoint": [
        lambda step: interrupted(step, "begins"), lambda step: interrupted(step, "begins", FULL)
    ],
    "Killed or disk full in its first checkpoint": [
        lambda step: interrupted(step, "saves"), lambda step: interrupted(step, "saves", FULL)
    ],
    "Killed, signalled or disk full later": [
        lambda step: interrupted(step, "saved" if step in TRAINING else "ends"),
        lambda step: interrupted(step, "ends"), lambda step: interrupted(step, "ends", FULL),
    ],
    "Its directory or file deleted": [deleted],
    "Its model deleted, its checkpoints not": [model_deleted],
    "Options changed after it finished": [lambda step: (run(), changed(step))[1]],
    "Options changed before it finished": [
        lambda step: (interrupted(step, "saved" if step in TRAINING else "ends"), changed(step))[1]
    ],
    "Data changed after it finished": [lambda step: (run(), data_changed(step))[1]],
    "Data changed before it finished": [
        lambda step: (interrupted(step, "saved" if step in TRAINING else "ends"), data_changed(step))[1]
    ],
    "Seeds added": [seeds_added],
    "Seeds removed": [seeds_removed],
    "Another seed instead": [seed_replaced],
    "An earlier step's directory deleted; it writes the same again": [earlier_writes_the_same],
    "An earlier step wrote another model": [earlier_writes_another],
    "Two at once: killed later, and an earlier step's directory deleted": [killed_and_earlier_deleted],
    "Two at once: its directory deleted and options changed": [lambda step: deleted(step, changed(step))],
    "Two at once: its model deleted and options changed": [lambda step: model_deleted(step, changed(step))],
}  # fmt: skip
KEPT_NAMES = {"Seeds added", "Seeds removed", "Another seed instead"}
"""Rows whose steps have other names than in a pipeline that was never changed."""


def cells() -> Iterator[tuple[str, str, str, int]]:
    """Yield row, step and the first words of each cell of the table, for each way of making that state."""
    lines = PAGE.read_text().split("| Event |")[1].splitlines()[2:]
    for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]:
        row, training, *others = [cell.strip() for cell in line.strip("|").split("|")]
        for step, cell in zip(NAMES, [training] * 3 + others, strict=True):
            has_none = cell == "none" or (step == "sft" and "earlier step" in row)
            for way in () if has_none else range(len(ROWS[row])):
                yield row, step, re.match(r"begins anew|\w+", cell)[0], way  # pyright: ignore


def test_the_table_has_the_rows_that_are_tried() -> None:
    assert list(dict.fromkeys(row for row, *_ in cells())) == list(ROWS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    prepare()
    return tmp_path


@pytest.mark.parametrize(("row", "step", "does", "way"), list(cells()))
def test_a_cell(row: str, step: str, does: str, way: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ROWS[row][way](step)
    before = dict(outputs())
    if does == "stops":
        with pytest.raises(ValueError, match=f"^{step} was finished with other options or data: ") as stopped:
            run(text)
        assert dict(outputs()) == before
        follow_advice(str(stopped.value))
    steps, said = run(text)

    assert said[-1].startswith("All steps are finished"), said
    assert_done(steps, step, does, said)
    again, _ = run(text)
    assert again.names == []
    assert not [line for line in said if re.search("remove|delete|rm ", line)]
    if row in KEPT_NAMES:
        assert {path: text for path, text in outputs() if path in before and "report" not in path} == {
            path: text for path, text in before.items() if "report" not in path
        }
        return
    found = dict(outputs())
    (folder / "undisturbed").mkdir()
    monkeypatch.chdir(folder / "undisturbed")
    prepare()
    for name in DATA.values():
        shutil.copy(folder / f"{name}.jsonl", ".")
    run(text)
    if not row.startswith(("Options changed before", "Data changed before")):  # of which the checkpoint is another
        assert found == dict(outputs())


def assert_done(steps: Steps, step: str, does: str, said: list[str]) -> None:
    """Assert that the next start did with a step what the cell says."""
    started = {name.removesuffix("-seed1"): resumed for name, resumed in steps.started}
    moved = any(line.startswith(f"{step}: its earlier files are in out/replaced/") for line in said)
    if does == "stays":
        assert step not in started and not moved
    elif does == "continues":
        assert started[step] and not moved
    else:
        assert not started[step] and moved == (does == "begins anew"), said


def follow_advice(message: str) -> None:
    """Do what an error advises, after a look at what it takes away: nothing that another step has written."""
    (command,) = re.findall(r"`(mv .*?)`", message)
    _, source, target = shlex.split(command)
    moved = [name for name in json.loads(Path("out/pipeline.json").read_text()) if place(name).is_relative_to(source)]
    assert moved in ([message.split()[0]], ["ppo", "judge"]), (
        "nothing of another step; a policy takes its verdict along"
    )
    assert not Path(target).exists()
    Path(source).rename(target)
