"""In bf16: what enters the losses is float32, a new policy is its reference, and DeepSpeed's ranks add up."""

import numpy as np
import pytest

from tests.distributed import processes
from tests.distributed.processes import LAUNCHERS

pytestmark = pytest.mark.distributed

BF16 = ["--mixed_precision", "bf16"]


@pytest.mark.parametrize("config", sorted(LAUNCHERS.keys() - {"deepspeed_zero1"}))
def test_the_first_update(config, models, tmp_path):
    """ZeRO-1 has ZeRO-2's optimizer, and in float32 a test in `test_launchers.py`."""
    run = {"output_dir": str(tmp_path), "models": str(models)}
    calls = [("first_update_in_bf16", {**run, "adapters": adapters}) for adapters in (False, True)]
    whole, adapters = processes.run_all(config, calls, options=BF16)
    for rank in (*whole, *adapters):
        assert (rank["num_processes"], rank["zero_stage"]) == (2, LAUNCHERS[config][1])
        assert_in_float32_and_not_yet_learned(rank)
    if config.startswith("deepspeed"):
        assert_added_up_in_float32(whole)
        assert_added_up_in_float32(adapters)


def test_an_evaluation_before_training_computes_as_those_after(models, tmp_path):
    """DeepSpeed has no autocast; its weights are in bf16 once it has prepared them."""
    call = ("evaluations_in_bf16", {"output_dir": str(tmp_path), "models": str(models)})
    ((rank, _),) = processes.run_all("deepspeed_zero2", [call], options=BF16)
    assert rank["stored"] == {"torch.float32"}
    for name in ("eval_kl", "eval_entropy"):
        assert rank["before"][name] == rank["after"][name]


def assert_in_float32_and_not_yet_learned(rank):
    assert rank["mixed_precision"] == "bf16"
    figures, first = rank["figures"], rank["log"][0]
    np.testing.assert_array_equal(figures["logprobs"], figures["ref_logprobs"])
    for name, values in figures.items():
        assert values.dtype == np.float32, name
    for name in ("logprobs", "values", "final_values"):
        assert share_beyond_bf16(figures[name]) > 0.9, name
    assert first["objective/kl"] == 0
    assert first["val/first_logratio"] < 1e-2
    assert first["val/ratio"] == pytest.approx(1, abs=1e-3)
    assert first["policy/approxkl_avg"] == pytest.approx(0, abs=1e-5)


def assert_added_up_in_float32(ranks):
    """The step is the mean of the ranks' gradients, up to what is lost in the float32 weights by which it is told."""
    assert ranks[0]["own_gradients"]
    for name, total in ranks[0]["own_gradients"].items():
        expected = sum((rank["own_gradients"][name] for rank in ranks[1:]), total) / len(ranks)
        for rank in ranks:
            difference = np.linalg.norm(rank["gradients"][name] - expected)
            assert difference <= 2e-4 * np.linalg.norm(expected), name


def share_beyond_bf16(values):
    """The share of float32 numbers other than 0 that 8 bits of mantissa could not hold."""
    return np.mean((values[values != 0].view(np.uint32) & 0xFFFF) != 0)
