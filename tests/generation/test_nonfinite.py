"""Logits that cannot be sampled from end in a sentence that names the model and the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.generation.nonfinite import ChecksLogits, NonFiniteLogitsError
from tests.conftest import needs_continuous, prompt_rows
from tests.runs import QUICK

MakeTrainer = Callable[..., PPOTrainer]
BROKEN = {
    "NaN": torch.tensor([0.0, torch.nan, 1.0]),
    "infinite": torch.tensor([0.0, torch.inf, 1.0]),
    "minus infinity throughout": torch.full((3,), -torch.inf),
}


class BreaksWeights(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            torch.nn.init.constant_(model.policy.lm_head.weight, torch.nan)


@pytest.mark.parametrize("logits", BROKEN.values(), ids=BROKEN)
def test_one_broken_row_of_a_batch_is_an_error(logits: torch.Tensor) -> None:
    good = torch.tensor([0.0, -torch.inf, 1.0])
    with pytest.raises(NonFiniteLogitsError, match="NaN or infinite"):
        ChecksLogits()(None, torch.stack([good, logits]))


def test_good_logits_are_left_alone() -> None:
    checks, good = ChecksLogits(), torch.tensor([[0.0, -torch.inf, 1.0], [5.0, 1e38, -1e38]])
    assert torch.equal(checks(None, good.clone()), good)
    checks.check()


@pytest.mark.parametrize("engine", ["transformers", pytest.param("continuous", marks=needs_continuous)])
def test_a_run_says_in_which_update_the_policy_broke(engine: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**QUICK, generation_engine=engine, callbacks=[BreaksWeights(2)])
    with pytest.raises(NonFiniteLogitsError, match=r"update 3: the policy \(LlamaForCausalLM\) .* NaN") as error:
        trainer.train()
    assert "learning_rate" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("engine", ["transformers", pytest.param("continuous", marks=needs_continuous)])
@pytest.mark.parametrize("call", ["evaluate", "generate_completions"])
def test_evaluation_says_after_which_update(engine: str, call: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**QUICK, generation_engine=engine, eval_dataset=prompt_rows(2))
    trainer.train()
    torch.nn.init.constant_(trainer.policy_model.lm_head.weight, torch.nan)  # pyright: ignore
    with pytest.raises(NonFiniteLogitsError, match=r"evaluation after update 3: the policy \(LlamaForCausalLM\)"):
        getattr(trainer, call)()


def test_off_a_cpu_the_row_is_sampled_from_and_the_error_comes_after() -> None:
    """What a device is given: an error there would wait for every token, and NaN would end the process."""
    checks = ChecksLogits()
    logits = torch.stack([torch.tensor([0.0, -1.0, 1.0]), BROKEN["NaN"]]).to("meta")
    assert checks(None, logits).shape == (2, 3)
    assert checks._failed is not None
