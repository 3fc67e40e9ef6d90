"""DDP, ZeRO-1, ZeRO-2, ZeRO-3 and FSDP2 on the pretend GPU, in a world of one process whose collectives copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import processes, scenarios
from tests.distributed.comparing import assert_same_end, updates

pytestmark = pytest.mark.timeout(1800)  # a busy machine takes ten times as long as an idle one
ENGINES = {  # distributed type and ZeRO stage of one process under a configuration
    "multi_gpu": ("MULTI_GPU", None),
    "deepspeed_zero1": ("DEEPSPEED", 1),
    "deepspeed_zero2": ("DEEPSPEED", 2),
    "deepspeed_zero3": ("DEEPSPEED", 3),
    "fsdp2": ("FSDP", None),
}
OFFLOADED = {
    "deepspeed_zero2": ["--offload_optimizer_device", "cpu"],
    "deepspeed_zero3": ["--offload_optimizer_device", "cpu", "--offload_param_device", "cpu"],
    "fsdp2": ["--fsdp_offload_params", "true"],
}
"""Options of `accelerate launch` that keep parameters or the optimizer's state in the host's memory."""


def launch(config: str, *calls: processes.Call, precision: str = "bf16", options: Any = ()) -> list[dict[str, Any]]:
    """Make the calls in one process under a configuration; check how it was launched; return what each returned."""
    options = ["--mixed_precision", precision, *options]
    on_device = [(name, {**arguments, "ddp_backend": None}) for name, arguments in calls]
    reports = [rank for (rank,) in processes.run_all(config, on_device, 1, 1500, options=options)]
    for report in reports:
        assert (report["distributed_type"], report["zero_stage"]) == ENGINES[config]
        assert report["mixed_precision"] == precision
    return reports


@pytest.mark.parametrize("config", sorted(ENGINES))
def test_a_resumed_run_ends_bit_for_bit_like_one_that_was_not_stopped(
    config: str, models: Path, tmp_path: Path
) -> None:
    """In bf16, all weights and adapters."""

    def call(name: str, adapters: bool, **arguments: Any) -> processes.Call:
        run = {"output_dir": str(tmp_path / name), "models": str(models), "adapters": adapters, **arguments}
        return "train_with_checkpoints", run | {"bf16": True}

    of_whole, of_adapters = str(tmp_path / "whole" / "checkpoint-1"), str(tmp_path / "LoRA" / "checkpoint-1")
    whole, resumed, adapters, resumed_adapters = launch(
        config, call("whole", False), call("resumed", False, resume=of_whole),
        call("LoRA", True), call("resumed LoRA", True, resume=of_adapters),
    )  # fmt: skip
    assert_same_end([resumed], [whole])
    assert_same_end([resumed_adapters], [adapters])
    for report in (whole, adapters):
        assert [entry["step"] for entry in updates(report["log"])] == [1, 2, 3]
        assert updates(report["log"])[0]["val/first_logratio"] < 2e-2


@pytest.mark.parametrize("config", sorted(ENGINES))
def test_the_first_updates_figures_are_those_of_the_cpu(config: str, models: Path, tmp_path: Path) -> None:
    """In float32, of responses that are the same on both: every figure that is logged, and every parameter."""
    run = {"models": str(models), "fixed_responses": True, "max_steps": 2, "learning_rate": 0.1, "optim": "sgd"}
    (ours,) = launch(config, ("train_with_checkpoints", run | {"output_dir": str(tmp_path / config)}), precision="no")
    expected = scenarios.train_with_checkpoints(
        output_dir=str(tmp_path / "cpu"), use_cpu=True, ddp_backend=None, **run
    )
    assert expected["distributed_type"] == "NO"
    assert ours["parameters"].keys() == {name.removeprefix("module.") for name in expected["parameters"]}
    for name, value in expected["parameters"].items():
        assert ours["parameters"][name] == pytest.approx(value, abs=1e-5), name
    assert len(updates(ours["log"])) == len(updates(expected["log"])) == 2
    hidden = set() if ours["zero_stage"] is None else {"policy/grad_norm", "val/grad_norm"}
    for row, same in zip(updates(ours["log"]), updates(expected["log"]), strict=True):
        assert row.keys() == same.keys() - hidden
        for name in row:
            assert row[name] == pytest.approx(same[name], rel=1e-4, abs=1e-6, nan_ok=True), name


def test_a_frozen_model_is_sharded_block_by_block(models: Path, tmp_path: Path) -> None:
    """The trained models are on the host yet; beside the shards the device holds one block, or what is outside."""
    run = {"output_dir": str(tmp_path), "models": str(models), "bf16": True}
    (report,) = launch("fsdp2", ("tests.pretend_gpu.offloaded.shard_reference", run))
    assert report["now"] == pytest.approx(report["whole"], rel=0.05)  # a world of one has all shards
    assert 0 < report["most"] - report["now"] < 1.1 * report["largest"] < 0.4 * report["whole"]


@pytest.mark.parametrize("config", sorted(OFFLOADED))
def test_what_is_offloaded_resumes_bit_for_bit(config: str, models: Path, tmp_path: Path) -> None:
    def call(name: str, **arguments: Any) -> processes.Call:
        run = {"output_dir": str(tmp_path / name), "models": str(models), "bf16": True}
        return "tests.pretend_gpu.offloaded.train_with_checkpoints", run | arguments

    checkpoint = str(tmp_path / "whole" / "checkpoint-1")
    whole, resumed = launch(config, call("whole"), call("resumed", resume=checkpoint), options=OFFLOADED[config])
    assert_same_end([resumed], [whole])
    assert whole["moments"] == resumed["moments"] == {"cpu"}
    assert whole["weights"] == resumed["weights"] == {"cuda" if config == "deepspeed_zero2" else "cpu"}
