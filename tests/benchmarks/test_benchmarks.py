"""The benchmark's counts against sums written out, and its tiny workload through our trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_useful_flops_are_those_of_each_multiplication() -> None:
    from bound import forward_flops, update_flops

    model = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "vocab_size": 10}
    prompts, responses = torch.tensor([2, 3]), torch.tensor([1, 2])
    body = 0
    for length in (3, 5):
        for position in range(length):
            projections = 4 * (4 * 4) + 3 * (4 * 6)
            attention = 2 * 4 * (position + 1)  # scores, and the sum of values
            body += 2 * 2 * (projections + attention)
    head = 2 * 4 * 10 * 3
    assert forward_flops(model, prompts, responses) == (body, head)
    learning = 3 * 2 * (2 * body + head)
    assert update_flops(model, prompts, responses, num_ppo_epochs=2) == (5 * body + 3 * head + learning, learning)


@pytest.mark.slow
def test_the_tiny_workload_runs_and_is_measured() -> None:
    command = [sys.executable, str(FOLDER / "measure.py"), "ours", "tiny", "--updates=3"]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    measured = json.loads(result.stdout.splitlines()[-1])
    assert len(measured["updates"]) == len(measured["lengths"]) == 2
    assert all(set(update) == {"generate", "score", "learn", "wall"} for update in measured["updates"])
    assert all(min(update.values()) > 0 for update in measured["updates"])
    for prompts, responses in measured["lengths"]:
        assert len(prompts) == len(responses) == 4
        assert 2 <= min(prompts) and max(prompts) <= 6 and 1 <= min(responses) and max(responses) <= 8


def test_stops_come_as_often_as_the_workload_says() -> None:
    """A mean of 40 tokens: the stop token has a probability of 1/40 a step, whatever the rest of the head says."""
    from workloads import STOP, TEMPERATURE, WORKLOADS, make_models

    workload = WORKLOADS["ragged"]
    policy = make_models(workload)["model"]
    ids = torch.randint(2, 4096, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        probabilities = (policy(input_ids=ids).logits / TEMPERATURE).softmax(-1)[..., STOP]
    assert float(probabilities.mean()) == pytest.approx(1 / 40, rel=0.25)


def test_the_row_of_a_workload_gives_medians_and_ratios() -> None:
    from compare import COLUMNS, row

    def run(seconds: float, memory: float) -> dict[str, object]:
        phases = {"generate": seconds, "score": seconds, "learn": 2 * seconds, "wall": 5 * seconds}
        return {"updates": [phases] * 3, "memory": memory, "lengths": [[[2, 3], [4, 5]]]}

    cells = row("tiny", 1, {"ours": [run(1.0, 10.0)], "trl": [run(3.0, 40.0)]}, (1e9, 1e9))
    assert len(cells) == len(COLUMNS)
    assert cells[:6] == ["tiny", "1", "5.00 / 15.00", "**3.00x**", "4.00 / 12.00", "**3.00x**"]
    assert cells[6:12] == ["1.00 / 3.00", "1.00 / 3.00", "2.00 / 6.00", "10", "40", "0.25x"]


def test_the_row_of_an_option_leaves_the_first_updates_out() -> None:
    from options import COLUMNS, row

    def run(memory: float, *seconds: float) -> dict[str, object]:
        updates = [{"generate": each, "score": each, "learn": 2 * each, "wall": 9.0} for each in seconds]
        return {"first": updates[0], "updates": updates[1:], "memory": memory}

    cells = row("slow", run(30.0, 9.0, 1.0, 2.0, 3.0, 4.0, 2.0), run(20.0, 1.0, 1.0, 1.0, 1.5, 1.5, 1.5))
    assert len(cells) == len(COLUMNS)
    assert cells == ["slow", "48.00", "12.00", "2.00x", "3.00", "3.00", "6.00", "30", "1.50x"]


def test_options_reach_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    import measure
    import options

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(options, "measure", lambda *args, **models: calls.append((*args, models)))
    options.measure_alone("tiny", "LoRA, gradient_checkpointing", 2)
    ((trainer, workload, num_updates, arguments, models),) = calls
    assert (trainer, workload, num_updates) == ("ours", options.SHAPES["tiny"], options.NUM_FIRST + 2)
    assert arguments == {"gradient_checkpointing": True}
    assert models.keys() == {"peft_config", "value_peft_config"}
    with pytest.raises(ValueError, match="kl_estimator='k7'"):
        measure.measure("ours", workload, 1, {"kl_estimator": "k7"})
    with pytest.raises(ValueError, match="reward_funcs"):
        measure.measure("ours", workload, 1, reward_model=None)


@pytest.mark.slow
def test_operations_are_listed_by_phase() -> None:
    from operations import profiled, rows
    from workloads import WORKLOADS

    figures = profiled(WORKLOADS["tiny"])
    assert figures.keys() == {"generate", "score", "learn"}
    assert any("_FusedLogprobsBackward" in figure.key for figure in figures["learn"])
    assert not any("Backward" in figure.key for figure in figures["score"])
    first, second = rows("tiny", "learn", figures["learn"], 2)
    assert first[:2] == ["tiny", "learn"] and int(first[3].rstrip("%")) >= int(second[3].rstrip("%")) > 0
