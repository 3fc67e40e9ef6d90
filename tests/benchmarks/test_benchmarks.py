"""The benchmark's counts against sums written out, and its tiny workload through our trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


PROMPTS, RESPONSES = torch.tensor([2, 3]), torch.tensor([1, 2])
SIZES = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "vocab_size": 10}
LLAMA, NEOX = SIZES | {"model_type": "llama"}, SIZES | {"model_type": "gpt_neox"}
ATTENTION = sum(2 * 2 * (2 * 4 * (position + 1)) for length in (3, 5) for position in range(length))
"""Of two layers: at each position the scores, and the sum of values, of 4 numbers of itself and those before."""
HEAD = 2 * 4 * 10 * 3


def test_useful_flops_are_those_of_each_multiplication() -> None:
    from bound import forward_flops, update_flops

    layers = 2 * 2 * (3 + 5) * (4 * (4 * 4) + 3 * (4 * 6))
    assert forward_flops(LLAMA, PROMPTS, RESPONSES) == (layers, ATTENTION, HEAD, 0)
    body = layers + ATTENTION
    learning = 3 * 2 * (2 * body + HEAD)
    assert update_flops(LLAMA, PROMPTS, RESPONSES, num_ppo_epochs=2) == (5 * body + 3 * HEAD + learning, learning)


def test_flops_of_adapters_over_a_frozen_gpt_neox() -> None:
    """Two MLP matrices; the policy's frozen weights have no gradient, the value model's all have."""
    from bound import decoded_bytes, forward_flops, update_flops

    layers = 2 * 2 * (3 + 5) * (3 * 4 * 4 + 4 * 4 + 2 * (4 * 6))
    adapters = 2 * 2 * (3 + 5) * 3 * ((4 + 12) + (4 + 4) + (4 + 6) + (6 + 4))  # rank 3, down and up
    assert forward_flops(NEOX, PROMPTS, RESPONSES, lora_rank=3) == (layers, ATTENTION, HEAD, adapters)
    body = layers + ATTENTION
    trained = 3 * body
    frozen = 2 * layers + 3 * ATTENTION + 3 * adapters + 2 * HEAD
    learning = 2 * (frozen + trained)
    whole = 5 * body + 3 * HEAD + learning
    assert update_flops(NEOX, PROMPTS, RESPONSES, num_ppo_epochs=2, lora_rank=3) == (whole, learning)
    whole_model = 2 * (trained + 3 * HEAD + trained)
    assert update_flops(NEOX, PROMPTS, RESPONSES, num_ppo_epochs=2)[1] == whole_model
    assert decoded_bytes(NEOX, 7, torch.bfloat16) == 7 * 2 * (2 * (4 * 16 + 2 * 24) + 4 * 10)
    assert decoded_bytes(LLAMA, 7) == 7 * 4 * (2 * (4 * 16 + 3 * 24) + 4 * 10)


def test_a_rate_on_a_cpu_leaves_out_the_time_of_other_work() -> None:
    from bound import best_seconds

    assert best_seconds(lambda: time.sleep(0.1), repeats=1) < 0.05


@pytest.mark.parametrize(
    ("stored", "trained"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]
)
def test_a_pass_of_the_head_moves_at_most_half_as_much_again_as_it_must(stored: torch.dtype, trained: bool) -> None:
    """In tiles of tokens and vocabulary, as on a GPU; what they compute is compared with whole logits in float64."""
    from head_bytes import TEMPERATURE, Shape, count, ideal

    shape = Shape(1024, 1024, 49152, stored, trained)
    *here, (logprobs, targets, states, weight) = count(shape, 2**24)
    assert [count <= 1.5 * least for count, least in zip(here, ideal(shape, 2**24), strict=True)] == [True, True]
    exact = [each.detach().bfloat16().double().requires_grad_() for each in (states, weight)]
    expected = (exact[0] @ exact[1].T / TEMPERATURE).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    expected.backward(torch.linspace(-1, 1, len(targets)).double())
    assert float((logprobs - expected.detach()).abs().max()) < 1e-4
    for ours, theirs in zip((states, weight) if trained else (states,), exact, strict=False):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == ours.dtype
        difference = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert 0 < float(difference) < 2**-8  # bf16's rounding of gradients by logits, and of the result


@pytest.mark.slow
def test_the_tiny_workload_runs_and_is_measured() -> None:
    command = [sys.executable, str(FOLDER / "measure.py"), "ours", "tiny", "--updates=3"]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    measured = json.loads(result.stdout.splitlines()[-1])
    assert len(measured["updates"]) == len(measured["lengths"]) == 2
    assert all(set(update) == {"generate", "score", "learn", "wall", "cpu"} for update in measured["updates"])
    assert all(min(update.values()) > 0 for update in measured["updates"])
    for prompts, responses in measured["lengths"]:
        assert len(prompts) == len(responses) == 4
        assert 2 <= min(prompts) and max(prompts) <= 6 and 1 <= min(responses) and max(responses) <= 8


@pytest.mark.slow
def test_grpo_plays_as_many_responses_and_learns_from_each_twice() -> None:
    from measure import measure
    from workloads import LORA_GROUPS

    measured = measure("grpo", LORA_GROUPS, 2)

    assert len(measured["updates"]) == 3  # two generations of two optimizer steps, the first of which allocates
    assert [step["generate"] > 0 for step in measured["updates"]] == [False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-8b-lora"])
def test_what_is_measured_on_a_gpu_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default path, small on a CPU, and the other value model of the large workload."""
    from compare import row
    from measure import measure
    from workloads import WORKLOADS

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    measured = measure("ours", WORKLOADS[name], 2)
    assert len(measured["updates"]) == len(measured["lengths"]) == 1
    cells = row(name, 1, {"ours": [measured], "trl": []}, (1e12, 1e12))
    assert cells[0] == name and cells[-1].endswith("%")


def test_the_bound_of_shared_rows_counts_computed_tokens_and_the_models_there_are() -> None:
    from bound import forward_flops
    from compare import bounds
    from shared import CHATS
    from shared import bounds as shared_bounds
    from workloads import WORKLOADS

    workload, lengths = WORKLOADS[CHATS], [[[40, 42], [32, 30]]]
    rates = (1e9, 1e12)

    def seconds(share: float, arm: str) -> torch.Tensor:
        row = {"lengths": lengths, "shared": [share], "rates": rates, "arm": arm}
        return torch.tensor(shared_bounds(workload, row), dtype=torch.float64)

    alone = seconds(0.0, "chats, two models")
    assert alone.tolist() == pytest.approx(bounds(workload, [{"lengths": lengths}], rates))
    half, full = seconds(0.5, "chats, two models"), seconds(1.0, "chats, two models")
    assert half.tolist() == pytest.approx(((alone + full) / 2).tolist())  # no more than heads, sampling and reading
    flops = forward_flops(workload.model, *(torch.tensor(side) for side in lengths[0]))
    body = (flops.layers + flops.attention) / rates[0]
    one_body = alone - seconds(0.0, "chats, one body")  # a forward pass, and two passes of three
    assert one_body.tolist() == pytest.approx([7 * body, 6 * body])
    function = seconds(0.0, "chats, one body") - seconds(0.0, "chats, one body, a function")
    assert function.tolist() == pytest.approx([body, 0])


def process_results(seconds: float, memory: float) -> dict[str, Any]:
    phases = {"generate": seconds, "score": seconds, "learn": 2 * seconds, "wall": 5 * seconds, "cpu": 4 * seconds}
    return {"updates": [phases] * 3, "memory": memory, "lengths": [[[2, 3], [4, 5]]]}


def test_shares_of_the_bound_count_the_threads_of_a_cpu_alone() -> None:
    from bound import update_flops
    from compare import row, utilization
    from workloads import WORKLOADS

    lengths = torch.tensor([2, 3]), torch.tensor([4, 5])
    whole, learning = update_flops(WORKLOADS["tiny"].model, *lengths, num_ppo_epochs=1)
    results = {"ours": [process_results(1.0, 10.0)], "trl": []}
    rates = learning / 0.5, 1e18  # the bound is 0.5 s of the 2 s of learning
    shares = [f"{times * whole / learning * 0.5 / 4:.0%}" for times in (3, 1)]
    assert row("tiny", 3, results, rates)[-2:] == [shares[0], "75%"]
    assert row("tiny", 3, results, rates, "cuda")[-2:] == [shares[1], "25%"]
    rate = f"{learning / 2 / 1e12:.1f} TFLOP/s"
    assert utilization("tiny", results["ours"], "NVIDIA H200") == f"- *tiny*: {rate}, 0% of 989."
    assert utilization("tiny", results["ours"], "another") == f"- *tiny*: {rate}, of an unknown nominal rate."
    assert utilization("tiny", [], "another") == "- *tiny*: not measured."


def test_the_page_and_the_picture_show_the_table(tmp_path: Path) -> None:
    from picture import draw, measured, trained_megabytes

    text = (FOLDER / "RESULTS.md").read_text("utf-8")
    rows = measured(text)
    section = text.partition("<!-- compare.py cpu -->")[2].partition("<!-- end -->")[0]
    cells = [line.split(" | ") for line in section.splitlines() if "x** |" in line]
    speeds, shares = ([float(row[place].strip("*x")) for row in cells] for place in (5, 11))
    assert len(cells) % len(rows) == 0 < len(rows)
    page = (FOLDER.parent / "docs" / "results.md").read_text("utf-8")
    assert all(f"| {speed:.2f}x | {share:.2f}x |" in page for speed, share in zip(speeds[:2], shares[:2], strict=True))
    assert trained_megabytes("tiny") == pytest.approx(trained_parameters() * 4 / 1e6)
    draw(text, tmp_path / "speed.svg")
    drawn = (FOLDER.parent / "docs" / "assets" / "speed.svg").read_text("utf-8")
    assert all(f"<!-- {name}, ours -->" in drawn for name, *_ in rows), "run benchmarks/picture.py"


def trained_parameters() -> int:
    """Count the weights of the policy and the value model of *tiny*: one layer of width 32, inner width 96."""
    body = 64 * 32 + 4 * 32 * 32 + 3 * 32 * 96 + 2 * 32 + 32
    return body + 32 * 64 + 64 + body + 32  # the policy's head has a bias
