"""Tests on a GPU are skipped for what they say that they need, and for nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.gpu.conftest import REASONS, found, missing

FOLDER = Path(__file__).parent
NOT_ON_A_CPU = {
    "test_rows_stay_packed_in_bf16_and_the_ratio_starts_at_1[flash_attention_2]": ["cuda", "flash"],
    **{
        f"test_packed_rows_take_pytorch_s_kernels_for_rows_of_any_lengths[{window}]": ["cuda", "varlen"]
        for window in (None, 3, 40)
    },
    "test_fp16_scales_its_losses": ["cuda"],
    "test_a_compiled_run_learns_what_a_plain_one_does": ["cuda", "compiler"],
    "test_the_estimate_is_near_the_measured_peak": ["cuda"],
    "test_the_host_waits_at_most_twice_for_a_micro_batch": ["cuda"],
    "test_an_adapter_learns_over_a_quantized_base[4]": ["cuda", "bitsandbytes"],
    "test_an_adapter_learns_over_a_quantized_base[8]": ["cuda", "bitsandbytes"],
    "test_vllm_generates_and_leaves_the_base_under_lora_bit_for_bit[awake]": ["cuda", "vllm"],
    "test_vllm_generates_and_leaves_the_base_under_lora_bit_for_bit[sleep mode]": ["cuda", "vllm"],
    **{
        f"test_the_first_update_under_each_launcher[{config}]": ["cuda"]
        for config in ("multi_gpu", "deepspeed_zero2", "deepspeed_zero3")
    },
    **{
        f"test_two_gpus_take_one_step_together[{config}]": ["cuda", "two GPUs"]
        for config in ("multi_gpu", "deepspeed_zero2", "deepspeed_zero3", "fsdp2")
    },
    "test_the_ranks_of_a_tensor_parallel_group_sample_the_same_ids": ["cuda", "two GPUs", "vllm"],
}
"""All tests that a CPU cannot run, with what they need."""


@pytest.fixture
def items(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """The tests of this folder; they are all there where the whole folder is collected."""
    collected: list[pytest.Item] = request.session.of_gpu  # pyright: ignore[reportAttributeAccessIssue]
    names = {path.name for path in FOLDER.glob("test_*.py")}
    if {item.path.name for item in collected} != names:
        pytest.skip("only some of the tests on a GPU were collected")
    return collected


def test_what_a_cpu_leaves_out(items: list[pytest.Item]) -> None:
    lacking = {item.name: lacks for item in items if (lacks := missing(item, set()))}
    assert lacking == {name: [need for need in REASONS if need in needs] for name, needs in NOT_ON_A_CPU.items()}


def test_what_one_gpu_with_everything_installed_leaves_out(items: list[pytest.Item]) -> None:
    lacking = {item.name for item in items if missing(item, REASONS.keys() - {"two GPUs"})}
    assert lacking == {name for name, needs in NOT_ON_A_CPU.items() if "two GPUs" in needs}


def test_what_a_gpu_alone_leaves_out(items: list[pytest.Item]) -> None:
    """On one without flash attention `continuous` is refused, which is not a failure."""
    lacking = {item.name: lacks for item in items if (lacks := missing(item, {"cuda"}))}
    continuous = {name for name, lacks in lacking.items() if lacks == ["flash"]} - NOT_ON_A_CPU.keys()
    assert {name.partition("[")[0] for name in continuous} == {
        "test_continuous_batching_says_the_log_probabilities_of_training"
    }
    needy = {name for name, needs in NOT_ON_A_CPU.items() if needs != ["cuda"]}
    assert lacking.keys() == needy | continuous


def test_every_skip_is_for_what_is_missing_here(items: list[pytest.Item]) -> None:
    here = found()
    for item in items:
        reasons = [mark.kwargs["reason"] for mark in item.iter_markers("skip")]
        assert reasons == [REASONS[name] for name in missing(item, here)][:1]


def test_no_test_skips_by_itself() -> None:
    calls = {"skip", "importorskip", "skipif", "xfail"}
    for path in FOLDER.glob("*.py"):
        if path.name not in ("test_skips.py", "conftest.py"):
            names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
            assert not names & calls, path
