"""Critic warm-up: the value model learns alone, and the policy stays as if these updates had not happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.run.optimization import Optimization
from tests.conftest import tiny_policy, tiny_scorer
from tests.models.test_peft import lora
from tests.runs import QUICK, InOnePass, MakeTrainer, history, parameters

WARM: dict[str, Any] = QUICK | {
    **{"gradient_accumulation_steps": 2, "num_ppo_epochs": 2, "total_episodes": 12},
    **{"critic_warmup_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.1},
}
"""Three updates of two optimizer steps, of two micro-batches each; the first two are of warm-up."""


class Snapshots(TrainerCallback):
    """Copies all parameters after each update, and counts the policy's that the optimizer has a state of."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.num_begun: list[int] = []
        self.trainer: Any = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.weights.append(parameters(self.trainer))
        self.num_begun.append(sum(each in self.trainer.optimizer.state for each in own_of_policy(self.trainer)))

    on_train_end = on_step_begin

    def moved(self, update: int) -> set[str]:
        before, after = self.weights[update : update + 2]
        return {name for name, value in after.items() if not torch.equal(value, before[name])}


def own_of_policy(trainer: Any) -> list[nn.Parameter]:
    return [each for each in trainer.policy_model.parameters() if each.requires_grad]


def over_one_trunk() -> dict[str, Any]:
    """Policy and value model that share all trained weights but their heads."""
    policy, scorer = tiny_policy(), tiny_scorer()
    scorer.model = policy.model
    return {"model": policy, "value_model": scorer}


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "two models": dict,
    "adapters over one base": lambda: {"share_base_model": True, "value_model": None, "peft_config": lora()},
    "one trunk": over_one_trunk,
}


@pytest.mark.parametrize("models", MODELS)
@pytest.mark.parametrize("trainer_class", [PPOTrainer, InOnePass])
def test_the_policy_stays_and_nothing_of_it_is_begun(
    make_trainer: MakeTrainer, models: str, trainer_class: type[PPOTrainer]
) -> None:
    seen = Snapshots()
    trainer = seen.trainer = make_trainer(trainer_class, **WARM | MODELS[models](), callbacks=[seen])
    trainer.train()
    of_policy = {id(each) for each in own_of_policy(trainer)}
    named = trainer.model.named_parameters(remove_duplicate=False)
    held = {name for name, value in named if id(value) in of_policy}
    for update in (0, 1):
        assert seen.moved(update) and not seen.moved(update) & held
    assert seen.num_begun == [0, 0, 0, len(of_policy)] and seen.moved(2) & held

    *warm, last = (log for log in history(trainer) if "val/ratio" in log)
    for log in warm:
        assert log["val/critic_warmup"] == 1 and log["policy/grad_norm"] == 0 and log["val/grad_norm"] > 0
        assert (log["val/ratio"], log["policy/approxkl_avg"], log["policy/clipfrac_avg"]) == (1, 0, 0)
        assert not {"policy/entropy_avg", "loss/policy_avg", "val/first_logratio"} & log.keys()
        assert log["loss"] == pytest.approx(0.1 * log["loss/value_avg"], rel=0.2)
    assert last["val/critic_warmup"] == 0 and last["policy/grad_norm"] > 0 and "policy/entropy_avg" in last


# ---- DeepSpeed ----


def test_deepspeed_holds_the_policys_groups_by_the_numbers_that_it_gives_them(make_trainer: MakeTrainer) -> None:
    """It drops groups without parameters, such as that of adapters for what has no weight decay."""
    trainer = make_trainer(**WARM, peft_config=lora(), value_peft_config=lora())
    optimization = Optimization((None, None))
    optimization._is_deepspeed = True
    groups = optimization.rated(trainer.create_optimizer(), trainer.model, trainer.args).param_groups
    kept = [group["params"] for group in groups if group["params"]]
    held = {id(each) for index in optimization.policy_groups for each in kept[index]}
    assert held == {id(each) for each in trainer.policy_model.parameters() if each.requires_grad}
    assert len(kept) < len(groups)
