"""In bf16: what enters the losses is float32, and a policy that has not learned is its reference."""

import numpy as np
import pytest

from tests.distributed import processes
from tests.distributed.processes import LAUNCHERS

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("config", LAUNCHERS)
def test_the_first_update_in_bf16(config, adapters, models, tmp_path):
    ranks = processes.run(
        config,
        "first_update_in_bf16",
        options=["--mixed_precision", "bf16"],
        output_dir=str(tmp_path),
        models=str(models),
        adapters=adapters,
    )

    assert [(rank["num_processes"], rank["zero_stage"]) for rank in ranks] == [(2, LAUNCHERS[config][1])] * 2
    for rank in ranks:
        assert rank["mixed_precision"] == "bf16"
        figures = rank["figures"]
        np.testing.assert_array_equal(figures["logprobs"], figures["ref_logprobs"])
        for name, values in figures.items():
            assert values.dtype == np.float32, name
        assert share_beyond_bf16(figures["logprobs"]) > 0.9
        first = rank["log"][0]
        assert first["objective/kl"] == 0
        assert first["val/ratio"] == pytest.approx(1, abs=1e-3)
        assert first["policy/approxkl_avg"] == pytest.approx(0, abs=1e-5)


def share_beyond_bf16(values):
    """The share of float32 numbers other than 0 that 8 bits of mantissa could not hold."""
    return np.mean((values[values != 0].view(np.uint32) & 0xFFFF) != 0)
