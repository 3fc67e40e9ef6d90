"""Settings of the backend; what they do is tested in `tests/distributed`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.fsdp import MixedPrecisionPolicy

from rlhf_ppo.run.placing import early_accelerator, set_up_backend
from tests.conftest import tiny_policy


@pytest.mark.parametrize(("of_file", "used"), [({}, 0.25), ({"gradient_clipping": 0.5}, 0.5)], ids=["none", "other"])
def test_deepspeed_clips_at_max_grad_norm_unless_its_file_says_otherwise(of_file: dict[str, Any], used: float):
    """DeepSpeed alone clips: without a value in its file it would at 1."""
    plugin = SimpleNamespace(zero_stage=2, deepspeed_config=dict(of_file))
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin), parallelism_config=None)

    set_up_backend(accelerator, tiny_policy(), max_grad_norm=0.25)

    assert plugin.deepspeed_config["gradient_clipping"] == used


@pytest.mark.parametrize("size", ["tp_size", "cp_size", "sp_size"])
def test_processes_of_the_launcher_that_share_a_row_are_refused(size: str):
    """They would train on different rows as if these were one."""
    accelerator: Any = SimpleNamespace(parallelism_config=ParallelismConfig(**{size: 2}), state=None)

    with pytest.raises(ValueError, match=f"{size}=2.* must be 1: rows are split over all processes"):
        set_up_backend(accelerator, tiny_policy(), max_grad_norm=1.0)


@pytest.mark.parametrize("version", [1, 2])
def test_version_1_of_fsdp_is_refused_before_models_are_loaded(version: int, monkeypatch: pytest.MonkeyPatch):
    """It is what accelerate takes without `fsdp_version`."""
    bf16 = torch.bfloat16  # as accelerate makes it
    plugin = SimpleNamespace(fsdp_version=version, mixed_precision_policy=MixedPrecisionPolicy(bf16, bf16, bf16))
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    trainer: Any = SimpleNamespace(accelerator=accelerator, create_accelerator_and_postprocess=lambda: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    args: Any = SimpleNamespace(fsdp=True)

    if version == 2:
        assert early_accelerator(trainer, args) is accelerator
        assert plugin.mixed_precision_policy == MixedPrecisionPolicy(bf16, torch.float32, None)  # sums, then outputs
        return
    with pytest.raises(ValueError, match="fsdp_version=1 is not supported: set fsdp_version: 2 in the launcher's"):
        early_accelerator(trainer, args)
