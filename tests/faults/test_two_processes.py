"""Faults of one process of two: both stop, skip or fall back together, and what was saved before stays."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_ppo.checkpoints import why_incomplete
from rlhf_ppo.checkpoints.files import read_object
from rlhf_ppo.checkpoints.run import RUN_NAME, Run, locked
from tests.distributed import processes
from tests.distributed.comparing import assert_same_end
from tests.faults.scenarios import WRONG

pytestmark = pytest.mark.distributed

CONFIGS = ["multi_gpu", "deepspeed_zero2"]
SHARED = {"ppo_arguments.json", "ppo_run.json", "ppo_state.json", "trainer_state.json", "scheduler.pt"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `policy` and `value_model`."""
    from tests.conftest import tiny_policy, tiny_scorer

    folder = tmp_path_factory.mktemp("models")
    tiny_policy(tie_word_embeddings=True).save_pretrained(folder / "policy")
    tiny_scorer(seed=2).save_pretrained(folder / "value_model")
    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def ran(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each rank gave in two launches, by name, and the folder in which the runs are."""
    config, folder = request.param, tmp_path_factory.mktemp(request.param)

    def call(scenario: str, name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
        run = {"output_dir": str(folder / name), "models": str(models), "logging_steps": 3, **arguments}
        return f"tests.faults.scenarios.{scenario}", run

    calls = {"whole": call("outcome", "whole"), "locked": call("outcome", "locked")}
    for wrong in WRONG:
        calls[f"stop {wrong}"] = call("outcome", f"stop {wrong}", wrong=wrong)
        calls[f"skip {wrong}"] = call("outcome", f"skip {wrong}", wrong=wrong, on_divergence="skip")
    copies = {
        "damaged": {"damaged": "separate_rng_state_1.pth"},
        "bomb": {"bomb": "rng_state_1.pth", "max_steps": 4},
        "learning rate": {"learning_rate": 1e-4, "seed": 9, "max_steps": 4},
        "batch": {"per_device_train_batch_size": 4, "max_steps": 4},
        "optimizer": {"optim": "sgd", "max_steps": 4},
    }
    for name, copy in copies.items():
        calls[name] = call("resume_a_copy", name, whole=str(folder / "whole"), **copy)
    killed = call("killed_while_saving", "killed", rank=CONFIGS.index(config))
    (folder / "locked").mkdir()
    with locked(str(folder / "locked")):
        results = processes.run_all(config, [*calls.values(), killed], timeout=300, last_is_killed=True)
    left = {path.name: why_incomplete(str(path)) for path in (folder / "killed").glob("checkpoint-*")}
    resumed = processes.run_all(config, [call("outcome", "killed", resume=True)])
    by_name = dict(zip([*calls, "resumed"], results + resumed, strict=True))
    return {"folder": folder, "config": config, "left": left, **by_name}


def checkpoints(run: Path) -> dict[str, str | None]:
    return {path.name: why_incomplete(str(path)) for path in run.glob("checkpoint-*")}


def test_the_launch_is_the_one_that_is_meant(ran: dict[str, Any]) -> None:
    seen = [(rank["num_processes"], rank["distributed_type"], rank["zero_stage"]) for rank in ran["whole"]]
    assert seen == [(2, *processes.LAUNCHERS[ran["config"]])] * 2


def test_a_directory_in_use_is_refused_on_every_rank(ran: dict[str, Any]) -> None:
    for error in ran["locked"]:
        assert re.search(rf"output_dir=.* is in use: process {os.getpid()} on ", error), error
    assert [path.name for path in (ran["folder"] / "locked").iterdir()] == []


def test_the_manifest_lists_the_files_of_every_rank(ran: dict[str, Any]) -> None:
    run = ran["folder"] / "whole"
    files = read_object(run / "checkpoint-3" / "manifest.json")["files"]
    of_ranks = {f"{kind}_{rank}.pth" for kind in ("rng_state", "separate_rng_state") for rank in (0, 1)}
    if ran["config"] == "deepspeed_zero2":
        of_ranks |= {name for name in files if re.search(r"zero_pp_rank_[01]_mp_rank_00_optim_states.pt", name)}
        assert len(of_ranks) == 6
    assert of_ranks | SHARED <= files.keys()
    assert files.keys() | {"manifest.json"} == {
        str(path.relative_to(run / "checkpoint-3")) for path in (run / "checkpoint-3").rglob("*") if path.is_file()
    }
    assert len({Run.load(path).id for path in (run, *run.glob("checkpoint-*"))}) == 1
    assert checkpoints(run) == dict.fromkeys(("checkpoint-1", "checkpoint-2", "checkpoint-3"))


NAMED = {
    "score": "'nan_on_rank_1' returned nan for row 0",
    "log-probability": "the policy's log-probabilities of response 0 are not finite",
    "loss": "the loss became not finite in optimizer step 1",
    "weight": "after update 2: weights that are not finite in value_model",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_both_stop_for_what_is_not_finite_on_one(wrong: str, ran: dict[str, Any]) -> None:
    run = ran["folder"] / f"stop {wrong}"
    for error in ran[f"stop {wrong}"]:
        assert "DivergenceError: " in error and re.search("update 2: ", error) and NAMED[wrong] in error, error
        assert f"the last good checkpoint is {run / 'checkpoint-1'}" in error
    assert checkpoints(run) == {"checkpoint-1": None}


@pytest.mark.parametrize("wrong", WRONG)
def test_both_raise_the_same_of_what_is_not_finite_on_one(wrong: str, ran: dict[str, Any]) -> None:
    first, second = ran[f"stop {wrong}"]
    assert first == second and first.startswith("DivergenceError: ")


@pytest.mark.parametrize("wrong", WRONG)
def test_both_skip_what_is_not_finite_on_one(wrong: str, ran: dict[str, Any]) -> None:
    given = ran[f"skip {wrong}"]
    if wrong == "weight":  # which nothing can leave out
        assert all("DivergenceError: " in error and "weights that are not finite" in error for error in given), given
        assert checkpoints(ran["folder"] / f"skip {wrong}") == {"checkpoint-1": None}
        return
    rows, cut = (0, 1) if wrong == "loss" else (1, 0)
    for rank in given:
        last = [entry for entry in rank["log"] if "loss" in entry][-1]
        assert (last["guard/skipped_rows"], last["guard/skipped_updates"]) == (rows, cut)
        assert all(math.isfinite(value) for entry in rank["log"] for value in entry.values())
        assert rank["parameters"] and all(np.isfinite(value).all() for value in rank["parameters"].values())
    for name, value in given[0]["parameters"].items():
        np.testing.assert_array_equal(value, given[1]["parameters"][name], err_msg=name)
    other = ran["whole"][0]["parameters"]
    assert any((value != other[name]).any() for name, value in given[0]["parameters"].items())


def test_both_fall_back_when_a_file_of_one_is_damaged(ran: dict[str, Any]) -> None:
    damaged = ran["damaged"]
    assert_same_end([rank["outcome"] for rank in damaged], ran["whole"])
    path = ran["folder"] / "damaged" / "checkpoint-3"
    assert [len(re.findall(f"Skipping {path}: its separate_rng_state_1.pth was changed", "".join(rank["said"])))
            for rank in damaged] == [1, 0]  # fmt: skip
    assert why_incomplete(str(path)) is None  # written anew


def test_what_changed_is_said_once(ran: dict[str, Any]) -> None:
    first, second = ran["learning rate"]
    text = " ".join(first["said"])
    assert "learning_rate=0.0001" in text and "seed=9 takes effect instead of 3" in text
    assert second["said"] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("batch", "batch_size=8 episodes per update, but with 2 processes it is 16 now"),
        ("optimizer", "its optimizer is .*, and SGD cannot use its state"),
        ("bomb", "cannot be loaded: its random states"),
    ],
)
def test_what_cannot_go_on_is_refused_on_both(name: str, message: str, ran: dict[str, Any]) -> None:
    for rank in ran[name]:
        assert isinstance(rank["outcome"], str) and re.search(message, rank["outcome"]), rank["outcome"]
    assert not (ran["folder"] / name / "mark").exists()


def test_a_kill_in_the_middle_of_a_save_costs_nothing(ran: dict[str, Any]) -> None:
    assert ran["left"] == {"checkpoint-1": None, "checkpoint-2": "it has no manifest.json"}
    assert_same_end(ran["resumed"], ran["whole"])


def test_what_is_refused_leaves_the_runs_note_as_it_was(ran: dict[str, Any]) -> None:
    assert not (ran["folder"] / "locked" / RUN_NAME).exists()


@pytest.mark.parametrize(
    ("config", "arguments", "most"),
    [
        (
            "multi_gpu",
            {},
            20,
        ),  # of 40: each samples on its own, and looks twice a second for what the other has received
        ("deepspeed_zero3", {}, 20),
        ("deepspeed_zero3", {"ds3_gather_for_generation": False}, 6),  # all sample in step
        ("fsdp2", {}, 20),
    ],
)
def test_a_signal_to_one_ends_generation_on_both(
    config: str, arguments: dict[str, Any], most: int, models: Path, tmp_path: Path
) -> None:
    run = {"output_dir": str(tmp_path / "run"), "models": str(models), **arguments}
    (ended,) = processes.run_all(config, [("tests.faults.scenarios.stopped_in_generation", run)])
    for rank in ended:
        assert (rank["code"], rank["step"]) == (143, 1) and rank["tokens"] <= most and rank["seconds"] < 10, ended
    assert checkpoints(tmp_path / "run") == {"checkpoint-1": None}
