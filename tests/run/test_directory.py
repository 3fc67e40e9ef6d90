"""Which checkpoint a run starts from, the lock of its directory, and files that are written whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.data.files import read_object, replacing, write_json
from rlhf_ppo.run.checkpoints import InUseError, find_start, last_complete_checkpoint, locked
from tests.runs import QUICK, At


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two complete checkpoints and one that TRL's trainer did not finish."""
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        write_json(tmp_path / f"checkpoint-{step}" / "trainer_state.json", {"global_step": step})
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


def test_a_renamed_checkpoint_is_refused(run: Path) -> None:
    """Its number would outrank the update that it holds."""
    (run / "checkpoint-2").rename(run / "checkpoint-12")
    with pytest.raises(ValueError, match="checkpoint-12 holds the state after update 2: rename it to checkpoint-2"):
        find_start(run, True, overwrite=False)


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def code_of_another_process(directory: Path) -> int | None:
    """Lock the directory in another process; 3: it is in use."""

    def tries() -> None:
        try:
            locked(directory).__enter__()
        except InUseError:
            os._exit(3)
        os._exit(0)

    other = multiprocessing.get_context("fork").Process(target=tries)
    other.start()
    other.join()
    return other.exitcode


def test_a_directory_has_one_trainer(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(InUseError, match="in use"), locked(tmp_path):
            pass
        assert code_of_another_process(tmp_path) == 3
    assert code_of_another_process(tmp_path) == 0
    with locked(tmp_path):
        pass


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "values.json"
    write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_object(path) == {"a": 1} and list(tmp_path.iterdir()) == [path]
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"values.json cannot be read .* it holds no JSON object, but \[1\]"):
        read_object(path)


def test_files_that_training_does_not_need_cannot_end_it(make_trainer: Any, caplog: Any, tmp_path: Path) -> None:
    for name in ("ppo_settings.json", "README.md"):
        (tmp_path / name).mkdir()
    log = At("on_train_begin", 0, lambda _: (tmp_path / "trainer_state.json").mkdir())  # an earlier one is moved away
    for name in ("_samples", "_completions"):
        (tmp_path / name).touch()
    run = {**QUICK, "save_strategy": "steps", "save_steps": 2, "num_sample_generations": 3}
    trainer = make_trainer(output_dir=str(tmp_path), callbacks=[log], **run)
    assert trainer.train().global_step == 3
    warned = {message.partition(" could not be written")[0] for message in caplog.messages}
    what = {"The run's settings", "The model card", "The log", "A sample table", "The responses of an update"}
    assert what <= warned


@pytest.mark.parametrize("critic", ["a model", "a head"])
@pytest.mark.parametrize("argument", ["model", "value_model"])
def test_a_checkpoint_that_a_run_starts_from_is_not_deleted(make_trainer: Any, argument: str, critic: str) -> None:
    value_model: Any = {} if critic == "a model" else {"value_model": "policy"}
    first = make_trainer(**QUICK | {"save_strategy": "steps", "save_steps": 3}, **value_model)
    first.train()
    checkpoint = os.path.join(str(first.args.output_dir), "checkpoint-3")
    start = checkpoint if argument == "model" else os.path.join(checkpoint, "value_model")
    there = files(Path(checkpoint))
    trainer = make_trainer(**QUICK | value_model | {argument: start, "overwrite_output_dir": True})
    with pytest.raises(
        ValueError, match=rf"^overwrite_output_dir=True would delete '{start}', the .*; choose another"
    ):
        trainer.train()
    assert files(Path(checkpoint)) == there


def test_a_new_run_does_not_inherit_the_results_of_an_earlier_policy(
    make_trainer: Any, caplog: Any, tmp_path: Path
) -> None:
    """They are in `_earlier`; a resumed run keeps its own."""
    saving = {"save_strategy": "steps", "save_steps": 2, "num_sample_generations": 3}
    run = {**QUICK, **saving, "output_dir": str(tmp_path), "overwrite_output_dir": True}
    make_trainer(**run).train()
    assert not (tmp_path / "_earlier").exists()
    (tmp_path / "judged").mkdir()
    judged = {"judged/win_rate.json", "judged.parquet", "win_rate-2.json", "verdict.json", "critic_audit.json"}
    judged |= {"curves.png"}  # of the card
    for name in judged:
        (tmp_path / name).touch()
    of_run = {
        str(path.relative_to(tmp_path)) for name in ("_samples", "_completions") for path in files(tmp_path / name)
    }
    of_run |= {"trainer_state.json"}  # a report of the new run, until it has its own, would show the old curves
    assert len(of_run) == 7

    make_trainer(**run | {"total_episodes": 4}).train()
    assert {str(path.relative_to(tmp_path / "_earlier")) for path in files(tmp_path / "_earlier")} == of_run | judged
    assert not any((tmp_path / name).exists() for name in judged)
    assert not (tmp_path / "_completions/completions_00003.parquet").exists()
    assert [message for message in caplog.messages if str(tmp_path / "_earlier") in message]

    make_trainer(**run).train(resume_from_checkpoint=True)
    assert not (tmp_path / "_earlier-2").exists()
    make_trainer(**run).train()
    assert {path.name for path in (tmp_path / "_earlier-2").iterdir()} == {
        "_samples",
        "_completions",
        "trainer_state.json",
    }

    other = tmp_path / "other"
    (other / "_samples").mkdir(parents=True)
    resumed = make_trainer(**run | {"output_dir": str(other)})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (other / "_earlier" / "_samples").is_dir()
