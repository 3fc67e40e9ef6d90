"""The optimizer holds all that is trained, at the rates it was given, and a longer run follows its own schedule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from rlhf_ppo import PPOTrainer
from tests.conftest import tiny_policy
from tests.models.test_peft import lora
from tests.runs import QUICK, MakeTrainer, parameters


def moved(trainer: PPOTrainer, before: dict[str, torch.Tensor]) -> set[str]:
    """The models of which anything changed."""
    after = parameters(trainer)
    return {name.partition(".")[0] for name, value in before.items() if not torch.equal(value, after[name])}


def rates(trainer: PPOTrainer) -> list[float]:
    """The rate that each logged update used."""
    return [entry["lr"] for entry in trainer.state.log_history if "lr" in entry]


def two_rates(policy: float, value_model: float) -> Callable[..., Any]:
    def make(named: list[tuple[str, Any]]) -> SGD:
        groups = {"policy": policy, "value_model": value_model}
        return SGD(
            [
                {"params": [value for name, value in named if name.startswith(f"{part}.")], "lr": rate}
                for part, rate in groups.items()
            ]
        )

    return make


# ---- Every trainable parameter has an optimizer ----


def test_an_optimizer_without_the_value_model_is_refused(make_trainer: MakeTrainer) -> None:
    policy = tiny_policy()
    count = len(list(policy.parameters()))
    with pytest.raises(
        ValueError, match=rf"\(SGD\) lacks {count} of the {2 * count} .* value_model\.model\.embed_tokens.*make_opt"
    ):
        make_trainer(model=policy, optimizers=(SGD(policy.parameters(), 0.1), None))


# ---- The value model's learning rate ----


@pytest.mark.parametrize("value_model", ["a model", "policy"])
@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
def test_all_of_the_value_model_has_its_rate(value_model: str, adapters: bool, make_trainer: MakeTrainer) -> None:
    """Adapters have no norms or biases, so the value model's are alone in the group without weight decay."""
    options: dict[str, Any] = {"peft_config": lora()} if adapters else {}
    if value_model == "policy":
        options["value_model"] = "policy"
    trainer = make_trainer(**QUICK, **options, learning_rate=0.3, critic_learning_rate=0.05)
    trainer.train()
    rate_of = {id(p): group["initial_lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
    expected = {name: 0.05 if "value_model." in name else 0.3 for name, _ in named}
    assert {name: rate_of[id(p)] for name, p in named} == expected
    assert {*expected.values()} == {0.05, 0.3}
    assert trainer.create_optimizer() is trainer.optimizer, "a second call must not undo the schedule"
    assert all(group["lr"] < group["initial_lr"] for group in trainer.optimizer.param_groups)


# ---- Functions that make optimizer and scheduler ----


@pytest.mark.parametrize(("of_policy", "of_value_model"), [(0.0, 0.1), (0.1, 0.0)])
def test_policy_and_value_model_get_each_its_rate(
    of_policy: float, of_value_model: float, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(**QUICK, optimizers=(two_rates(of_policy, of_value_model), None))
    before = parameters(trainer)
    trainer.train()
    assert moved(trainer, before) == ({"policy"} if of_policy else {"value_model"})
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [of_policy, of_value_model]
    assert rates(trainer) == pytest.approx([of_policy, of_policy * 2 / 3, of_policy / 3])  # args' schedule: linear


@pytest.mark.parametrize("optimizer", [None, two_rates(0.1, 0.2)])
def test_a_function_makes_the_scheduler(optimizer: Any, make_trained: MakeTrainer) -> None:
    def make(optimizer: Any, num_updates: int) -> LambdaLR:
        assert num_updates == 3
        return LambdaLR(optimizer, lambda update: 0.5**update)

    trainer = make_trained(**QUICK, optimizers=(optimizer, make))
    first = 0.1 if optimizer else trainer.args.learning_rate
    assert rates(trainer) == pytest.approx([first, first / 2, first / 4])


# ---- A run that goes on with other arguments ----

SAVED = {**QUICK, "save_strategy": "steps", "save_steps": 1, "weight_decay": 0.1}


def went_on(make_trainer: MakeTrainer, at: int = 3, first: Any = None, **changes: Any) -> PPOTrainer:
    """Train three updates, then go on from a checkpoint of these with other arguments."""
    earlier = make_trainer(**SAVED, **(first or {}))
    earlier.train()
    run = str(earlier.args.output_dir)
    trainer = make_trainer(**{**SAVED, **(first or {}), **changes}, output_dir=f"{run}-on")
    trainer.train(resume_from_checkpoint=f"{run}/checkpoint-{at}")
    return trainer


@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch_fused"])
def test_another_kind_of_optimizer_is_refused(optim: str, make_trainer: MakeTrainer) -> None:
    message = "optim='adafactor', but .*checkpoint-3 has the state of optim='adamw_torch': set optim='adamw_torch', or"
    with nullcontext() if optim == "adamw_torch_fused" else pytest.raises(ValueError, match=message):
        went_on(make_trainer, first={"optim": "adamw_torch"}, total_episodes=8, optim=optim)


def test_a_longer_run_has_the_schedule_of_its_length_and_its_rate(make_trainer: MakeTrainer, caplog: Any) -> None:
    trainer = went_on(make_trainer, total_episodes=12, learning_rate=4e-4)
    assert rates(trainer)[3:] == pytest.approx([4e-4 * left / 6 for left in (3, 2, 1)])
    said = [record.message for record in caplog.records if "learning_rate=" in record.message]
    assert len(said) == 1
    changes = "learning_rate=0.0004 (was 0.001), num_total_batches=6 (was 3). The learning rate is now 0.0002"
    assert f"from update 4 on these take effect: {changes}" in said[0]
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {4e-4}


@pytest.mark.parametrize(("first", "later"), [(None, 0.3), (0.3, None)])
def test_the_value_model_gets_another_rate(
    first: float | None, later: float | None, make_trainer: MakeTrainer
) -> None:
    trainer = went_on(make_trainer, at=1, first={"critic_learning_rate": first}, critic_learning_rate=later)
    critic = {id(weight) for weight in trainer.model.value_model.parameters()}
    groups = [(id(group["params"][0]) in critic, group["initial_lr"]) for group in trainer.optimizer.param_groups]
    assert {*groups} == {(False, 1e-3), (True, later or 1e-3)}
    assert rates(trainer) == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])


def test_a_plateau_schedule_keeps_what_it_learned(make_trainer: MakeTrainer) -> None:
    plateau = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 100.0},  # nothing is ever better
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_dataset": [{"input_ids": [5, 6]}] * 2,
    }
    kwargs = {"patience": 0, "factor": 0.1, "threshold": 100.0}
    trainer = went_on(
        make_trainer, at=2, first=plateau, learning_rate=2e-3, lr_scheduler_kwargs=kwargs, total_episodes=8
    )
    before, after = rates(trainer)[:2], rates(trainer)[2:]
    assert before == pytest.approx([1e-3, 1e-3])  # the first evaluation is the best so far
    assert after == pytest.approx([1e-3, 1e-4])
