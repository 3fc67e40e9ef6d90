"""Separate processes: two together, one that is killed and resumed, the judge's command."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.vllm.launching import finished, launched, start


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_processes(tensor_parallel: int, saved: Path, tmp_path: Path) -> None:
    """Each with a vLLM for its own prompts, or both with one: then both sample all, and the same."""
    one, other = launched(tmp_path, 2, "two", saved, tensor_parallel)
    assert len(one["sampled"]) == len(other["sampled"]) > 16
    assert (one["sampled"] == other["sampled"]) is (tensor_parallel == 2)
    assert one["next"] != other["next"] and 0 < one["largest"] < 1e-4


def test_episodes_of_two_processes_with_one_vllm(saved: Path, tmp_path: Path) -> None:
    """Rank 0's episodes have one turn and rank 1's four: both ask vLLM as often, and each gets its own answers."""
    one, other = launched(tmp_path, 2, "episodes", saved)
    assert one["calls"] == other["calls"] >= 2 * 3
    assert one["several"] == 0 and other["several"] > 8


def test_a_killed_run_resumes_bit_for_bit(saved: Path, tmp_path: Path) -> None:
    """Colocated, with one process: vLLM draws from the generator of the process, which checkpoints hold."""
    straight = finished(tmp_path, "straight", start(tmp_path, "straight", saved))
    finished(tmp_path, "dies", start(tmp_path, "dies", saved), code=-signal.SIGKILL)  # TRL's ports: one at a time
    assert (tmp_path / "resumed" / "checkpoint-2").is_dir()
    resumed = finished(tmp_path, "resumes", start(tmp_path, "resumes", saved))
    assert len(straight["log"]) == 4
    assert resumed["log"][-2:] == straight["log"][-2:] and resumed["weights"] == straight["weights"]


def test_the_judge_s_answers(saved: Path, tmp_path: Path) -> None:
    report = finished(tmp_path, "judge", start(tmp_path, "judge", saved, 5, "--max_new_tokens", 20))
    assert report["judged"] == 6


def test_the_judge_s_prompts_must_leave_room(saved: Path, tmp_path: Path) -> None:
    """The model has 128 positions."""
    arguments = (saved, 115, "--max_new_tokens", 20)
    finished(tmp_path, "judge", start(tmp_path, "judge", *arguments), code=2)
    said = (tmp_path / "judge-0.log").read_text()
    assert "max_new_tokens=20 leaves no room for any of" in said and "lower it" in said
