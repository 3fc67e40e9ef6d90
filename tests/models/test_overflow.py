"""`debug="underflow_overflow"` lets a healthy run be and ends one whose numbers become infinite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.debug_utils import DebugOption

from rlhf_ppo import PPOTrainer
from tests.conftest import tiny_policy
from tests.runs import QUICK, parameters


def test_a_healthy_run_is_left_alone_and_ends_without_hooks(make_trainer: Callable[..., PPOTrainer]) -> None:
    ends = []
    for debug in ("", "underflow_overflow"):
        trainer = make_trainer(**QUICK, debug=debug)
        trainer.train()
        ends.append(parameters(trainer))
        assert not any(module._forward_hooks for module in trainer.model.modules())
    assert trainer.args.debug == [DebugOption.UNDERFLOW_OVERFLOW]
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-5)  # hooks see modules called that are fused without them


@pytest.mark.parametrize("part", ["policy", "value_model"])
def test_an_infinite_number_is_found_and_its_module_named(
    part: str, make_trainer: Callable[..., PPOTrainer], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer: Any = make_trainer(**QUICK, debug="underflow_overflow", model=tiny_policy())
    torch.nn.init.constant_(getattr(trainer.model, part).model.layers[1].mlp.up_proj.weight, torch.inf)
    with pytest.raises(ValueError, match="inf/nan detected"):
        trainer.train()
    printed = capsys.readouterr().out
    assert "weight has infs" in printed and f"{part}.model.layers.1.mlp.up_proj Linear" in printed
