"""The log is written once: checkpoints hold its end, the file beside them all; nothing is lost or doubled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState

from rlhf_ppo.checkpoints import run as run_module
from rlhf_ppo.checkpoints.run import HISTORY_NAME, History, full_history
from rlhf_ppo.reporting.run_log import read_log
from tests.faults.conftest import make_saving
from tests.runs import DieAt, RunDied

NUM_UPDATES = 6
RUN = {"total_episodes": 2 * NUM_UPDATES, "save_steps": 2}


@pytest.fixture(autouse=True)
def two_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "NUM_KEPT", 2)


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(directory, HISTORY_NAME).read_text().splitlines()]


def steps(entries: Any) -> list[int]:
    return [entry["step"] for entry in entries if "loss" in entry]


@pytest.fixture(scope="module")
def logged_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose trainer wrote its state at the end; not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "NUM_KEPT", 2)
        trainer = make_saving(tmp_path_factory.mktemp("history") / "run", **RUN)
        trainer.train()
    (Path(str(trainer.args.output_dir)) / "whole.json").write_text(json.dumps(trainer.state.log_history))
    return Path(str(trainer.args.output_dir))


def test_checkpoints_hold_the_end_of_the_log_and_the_file_all(logged_run: Path) -> None:
    whole = json.loads((logged_run / "whole.json").read_text())
    for step in (2, 4, 6):
        checkpoint = logged_run / f"checkpoint-{step}"
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        assert steps(state.log_history) == [step - 1, step]
        assert steps(read_log(checkpoint)) == list(range(1, step + 1))
    assert lines(logged_run) == whole[:NUM_UPDATES]  # each once; the run's last line came later
    assert steps(read_log(logged_run)) == steps(whole) == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_after_the_last_log_of_training_is_there(tmp_path: Path) -> None:
    """Without a save, and before the run's end; one beside training is not a part of the run's directory."""
    prompts = [{"input_ids": [5, 6]}] * 2
    trainer = make_saving(
        tmp_path, total_episodes=2, save_strategy="no", eval_strategy="steps", eval_steps=1,
        given={"eval_dataset": prompts, "callbacks": [DieAt("on_train_end", 1)]},
    )  # fmt: skip
    with pytest.raises(RunDied):
        trainer.train()
    assert [("loss" in line, "eval_score" in line) for line in lines(tmp_path)] == [(True, False), (False, True)]
    trainer.evaluate()
    assert len(trainer.state.log_history) > len(lines(tmp_path)) == 2


def test_a_run_that_died_goes_on_with_all_that_it_had_logged(tmp_path: Path) -> None:
    with pytest.raises(RunDied):
        make_saving(tmp_path, **RUN, given={"callbacks": [DieAt("on_save", 4)]}).train()
    with open(tmp_path / HISTORY_NAME, "a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"st')  # a save that a kill has stopped in the middle of a line
    resumed = make_saving(tmp_path, **RUN)
    resumed.train(resume_from_checkpoint=True)
    assert steps(resumed.state.log_history) == steps(lines(tmp_path)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("damage", ["missing", "cut off", "of another run"])
def test_without_the_file_the_end_of_the_log_is_left(
    damage: str, logged_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(logged_run, tmp_path / "run")
    file = tmp_path / "run" / HISTORY_NAME
    file.write_text({"missing": "", "cut off": file.read_text()[:40], "of another run": '{"step": 7}\n' * 6}[damage])
    if damage == "missing":
        file.unlink()
    assert steps(read_log(tmp_path / "run" / "checkpoint-4")) == [3, 4]
    assert "does not hold the 4 entries" in caplog.text
    if damage == "cut off":
        resumed = make_saving(tmp_path / "run", **RUN)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
        assert steps(resumed.state.log_history) == steps(lines(tmp_path / "run")) == [3, 4, 5, 6]


def test_a_new_run_begins_a_new_log(tmp_path: Path) -> None:
    History(tmp_path, [{"step": 1}]).write([{"step": 1}, {"step": 2}])
    assert steps([entry | {"loss": 0} for entry in lines(tmp_path)]) == [1, 2]
    History(tmp_path, [])
    assert not (tmp_path / HISTORY_NAME).exists()


def test_nan_is_the_same_as_nan(tmp_path: Path) -> None:
    entries = [{"step": step, "loss": float("nan")} for step in range(5)]
    History(tmp_path, entries)
    assert len(full_history(tmp_path / "checkpoint-5", json.loads(json.dumps(entries[-2:])), 5)) == 5
