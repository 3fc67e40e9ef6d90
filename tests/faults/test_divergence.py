"""Each thing that the guard watches is made not finite once: it is named first, and the last good checkpoint stays."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss
from rlhf_ppo.generation.sampling import NonFiniteLogitsError
from rlhf_ppo.rewards.scorer import MAX_SCORE
from rlhf_ppo.training.guards import MAX_SKIPPED_IN_A_ROW, DivergenceError
from tests.conftest import count_w4, prompt_rows, tiny_scorer
from tests.runs import QUICK, assert_identical, die_and_resume, end_of_run, parameters

MakeTrainer = Callable[..., PPOTrainer]
AT = 2
"""The update in which things go wrong; 3 are made."""
RUN: dict[str, Any] = {**QUICK, "num_ppo_epochs": 2}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}


def giving(value: float, at: int = AT) -> Callable[..., list[Any]]:
    """A reward function whose second row is `value` in one update."""

    def mean_length(
        prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, **columns: Any
    ) -> list[Any]:
        rewards = count_w4(prompts, completions, completion_ids)
        return [rewards[0], value] if trainer_state.global_step == at - 1 else rewards

    return mean_length


class RolloutWith(PPOTrainer):
    """Its rollout of one update has one number that is not finite."""

    field, value = "logprobs", math.nan

    def collect_rollout(self, *args: Any) -> Any:
        rollout = super().collect_rollout(*args)
        if self.state.global_step == AT - 1:
            changed = getattr(rollout, self.field).clone()
            changed.view(len(rollout), -1)[1, 0] = self.value
            rollout = dataclasses.replace(rollout, **{self.field: changed})
        return rollout


class ExperienceWith(PPOTrainer):
    """Its experience of one update has one number that is not finite."""

    field = "returns"

    def estimate_advantages(self, *args: Any) -> Any:
        experience = super().estimate_advantages(*args)
        if self.state.global_step == AT - 1:
            getattr(experience, self.field)[1, 0] = math.inf
        return experience


class LossWith(PPOTrainer):
    """Its loss, or a part of it, is not finite in the second optimizer step of one update."""

    what = "the loss"
    num_losses = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss, (output, policy, value) = super().compute_loss(*args, **kwargs)
        self.num_losses += 1
        if self.num_losses == 2 * AT:
            if self.what == "the loss":
                loss = loss + math.nan  # the gradient stays finite
            elif self.what == "the policy loss":
                policy = policy._replace(loss=policy.loss * math.nan)
            elif self.what == "the value loss":
                value = value._replace(loss=value.loss * math.inf)
            elif self.what == "the importance ratios":
                policy = policy._replace(ratio=policy.ratio * math.inf)
            else:
                output = output._replace(logprobs=output.logprobs * math.nan)
        return loss, (output, policy, value)


class Breaks(TrainerCallback):
    """Breaks something of the model at an event of one update."""

    def __init__(self, event: str, how: Callable[[Any], None], at: int = AT) -> None:
        self.how, self.at = how, at
        setattr(self, event, self._break)

    def _break(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if state.global_step == self.at - 1:
            self.how(model)


def nan_gradient(model: Any) -> None:
    parameter = next(model.parameters())
    handle = parameter.register_hook(lambda gradient: [handle.remove(), gradient * math.nan][1])


def nan_weight(model: Any) -> None:
    with torch.no_grad():
        model.value_model.score.weight[0, 0] = math.nan


def variant(base: type, **changes: Any) -> dict[str, Any]:
    return {"trainer_class": type(base.__name__, (base,), changes)}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "score nan": ({"reward_funcs": giving(math.nan)}, "'mean_length' returned nan for row 1"),
    "score inf": ({"reward_funcs": giving(-math.inf)}, "'mean_length' returned -inf for row 1"),
    "score 3e38": ({"reward_funcs": giving(3e38)}, r"'mean_length' returned 3e\+38 for row 1"),
    "weighted score": (
        {"reward_funcs": giving(1e12), "reward_weights": [1e30]},
        "weighted sum of the rewards of row 1 is beyond",
    ),
    "log-probability": (variant(RolloutWith), "the policy's log-probabilities of response 1 are not finite"),
    "reference": (variant(RolloutWith, field="ref_logprobs"), "the reference's log-probabilities of response 1"),
    "KL": (
        variant(RolloutWith, field="ref_logprobs", value=1000.0) | {"kl_estimator": "k3"},
        "the KL of response 1 are not finite",
    ),
    "value": (variant(RolloutWith, field="values", value=math.inf), "the values of response 1 are not finite"),
    "final value": (variant(RolloutWith, field="final_values"), "the values of response 1 are not finite"),
    "score of another source": (variant(RolloutWith, field="scores", value=math.inf), "the scores of response 1"),
    "returns": (variant(ExperienceWith), "the returns .* of response 1 are not finite"),
    "advantages": (variant(ExperienceWith, field="advantages"), "the advantages of response 1 are not finite"),
    **{
        what: (variant(LossWith, what=what), f"{what} became not finite in optimizer step 2")
        for what in (
            "the policy's log-probabilities",
            "the importance ratios",
            "the policy loss",
            "the value loss",
            "the loss",
        )
    },
    "gradient": (
        {"callbacks": [Breaks("on_step_begin", nan_gradient)]},
        "the norm of the gradient became not finite in optimizer step 1",
    ),
}
"""What goes wrong in update 2: the trainer's arguments, and what must be named."""


ROWS = {name for name in WRONG if name in ("returns", "advantages") or re.search("row 1|response 1", WRONG[name][1])}
"""What costs a response, and not the update."""


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_finite_stops_the_run_before_it_is_saved(
    wrong: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    arguments, named = WRONG[wrong]
    trainer = make_trainer(**RUN, **SAVING, **arguments)
    with pytest.raises(DivergenceError, match=f"update {AT}: .*{named}") as error:
        trainer.train()
    last = str(tmp_path / "run" / f"checkpoint-{AT - 1}")
    assert f"the last good checkpoint is {last}: continue with resume_from_checkpoint={last!r}" in str(error.value)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [f"checkpoint-{AT - 1}"]
    assert all(value.isfinite().all() for value in parameters(trainer).values())


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_finite_is_skipped_and_counted(wrong: str, make_trainer: MakeTrainer, caplog: Any) -> None:
    trainer = make_trainer(**RUN, **WRONG[wrong][0], on_divergence="skip")
    trainer.train()
    assert all(value.isfinite().all() for value in parameters(trainer).values())
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    counts = [(entry["guard/skipped_rows"], entry["guard/skipped_updates"]) for entry in logged]
    assert counts == [(0, 0)] + [(1, 0) if wrong in ROWS else (0, 1)] * 2
    assert all(math.isfinite(value) for entry in logged for value in entry.values())
    assert re.search(f"update {AT}.*{WRONG[wrong][1]}", caplog.text)
    assert "on_divergence='skip' left out" in caplog.text


def nan_loss(logprobs: Any, experience: Any, args: Any) -> PolicyLoss:
    loss = logprobs * math.nan
    return PolicyLoss(loss, torch.ones_like(loss), loss > 0)


class SquareRoot(PPOTrainer):
    """Its value loss is finite, and its gradient is not."""

    def value_loss(self, values: Any, *args: Any) -> ValueLoss:
        return ValueLoss((values - values.detach()).abs().sqrt(), values > values)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {"trainer_class": functools.partial(PPOTrainer, policy_loss=nan_loss)},
            "the policy loss .*; likely causes: your policy_loss=nan_loss",
        ),
        ({"trainer_class": SquareRoot}, r"the norm of the gradient .*; likely causes: your SquareRoot.value_loss\(\)"),
    ],
    ids=["function", "method"],
)
def test_a_loss_of_the_users_is_named_as_the_cause(
    given: dict[str, Any], named: str, make_trainer: MakeTrainer, caplog: Any
) -> None:
    with pytest.raises(DivergenceError, match=rf"{named}\. Nothing of it was saved"):
        make_trainer(**RUN, **given).train()
    with pytest.raises(DivergenceError, match="skipped updates in a row"):
        make_trainer(**RUN | {"total_episodes": 20}, **given, on_divergence="skip").train()
    assert re.search(f"Skipped in update 1: {named}\n", caplog.text)


@pytest.mark.parametrize("on_divergence", ["stop", "skip"])
def test_weights_that_are_not_finite_are_never_saved(
    on_divergence: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    breaks = Breaks("on_step_end", nan_weight, at=AT + 1)  # the update is counted when the event comes
    trainer = make_trainer(**RUN, **SAVING, callbacks=[breaks], on_divergence=on_divergence)
    with pytest.raises(DivergenceError, match=r"after update 2: weights that are not finite in value_model\.score"):
        trainer.train()
    kept = [path.name for path in (tmp_path / "run").glob("checkpoint-*")]
    assert kept == ["checkpoint-1"]
    for path in (tmp_path / "run").rglob("*.safetensors"):
        assert all(value.isfinite().all() for value in load_file(path).values())
    with pytest.raises(DivergenceError, match="The model was not saved"):
        trainer.save_model(str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_a_run_does_not_end_well_with_weights_that_are_not_finite(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**RUN, callbacks=[Breaks("on_step_end", nan_weight, at=4)])
    with pytest.raises(DivergenceError, match=r"after update 3: weights that are not finite.*no checkpoint was saved"):
        trainer.train()


@pytest.mark.parametrize(("num_ppo_epochs", "named"), [(2, "log-probabilities became not finite"), (1, "no probabil")])
def test_a_learning_rate_that_is_too_large_is_named(
    num_ppo_epochs: int, named: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Seen in the next optimizer step, or where the next responses are sampled."""
    trainer = make_trainer(**RUN | {"num_ppo_epochs": num_ppo_epochs}, learning_rate=1e38)
    with pytest.raises((DivergenceError, NonFiniteLogitsError)) as error:
        trainer.train()
    for part in (named, "weights that are not finite in policy.model.embed_tokens.weight", "learning_rate=1e+38"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "default"),
    [("vf_coef", 0.1), ("entropy_coef", 0.0), ("kl_coef", 0.05), ("ptx_coef", 0.0), ("positive_nll_coef", 0.0)],
)
def test_a_large_coefficient_is_named_as_the_cause(name: str, default: float, make_trainer: MakeTrainer) -> None:
    more: dict[str, Any] = {"ptx_dataset": [{"text": "w1 w2 w3"}] * 4} if name == "ptx_coef" else {}
    run = RUN | {name: 1e38, "num_ppo_epochs": 4, "positive_nll_threshold": -1.0}
    trainer = make_trainer(**run, **more, learning_rate=1e-3)
    with pytest.raises(DivergenceError) as raised:
        trainer.train()
    assert f"likely causes: {name}=1e+38 (the default is {default})" in str(raised.value)
    assert "learning_rate=" not in str(raised.value)


def test_a_reward_model_of_nan_is_named(make_trainer: MakeTrainer) -> None:
    broken = tiny_scorer()
    trainer = make_trainer(**QUICK, reward_model=broken, value_model=tiny_scorer(2))
    with torch.no_grad():
        broken.score.weight[0, 0] = math.nan
    with pytest.raises(DivergenceError, match="update 1: the reward model's score of row 0 is nan"):
        trainer.train()


def test_one_nan_of_ten_updates_is_left_out_and_said(make_trainer: MakeTrainer, tmp_path: Path, caplog: Any) -> None:
    run = {**QUICK, **SAVING, "total_episodes": 20, "on_divergence": "skip"}
    trainer = make_trainer(**run, reward_funcs=giving(math.nan, at=7))
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    counts = [entry["guard/skipped_rows"] for entry in trainer.state.log_history if "loss" in entry]
    assert counts == [0] * 6 + [1] * 4
    assert (
        "Left out 1 responses of update 7; the first because the reward function 'mean_length' returned nan for row 1"
        in caplog.text
    )
    assert "on_divergence='skip' left out 1 responses, and steps of 0 updates" in caplog.text
    for path in (tmp_path / "model" / "model.safetensors", tmp_path / "run" / "checkpoint-10" / "model.safetensors"):
        assert all(value.isfinite().all() for value in load_file(path).values())


def test_too_many_skipped_updates_in_a_row_stop(make_trainer: MakeTrainer) -> None:
    def broken(prompts: Any, completions: Any, trainer_state: Any, **columns: Any) -> list[float]:
        return [1.0 if trainer_state.global_step == 1 else math.nan] * len(prompts)

    run = {**QUICK, "total_episodes": 20, "reward_funcs": broken, "on_divergence": "skip"}
    trainer = make_trainer(**run)
    with pytest.raises(
        DivergenceError, match=f"no response was left to learn from, the last of {MAX_SKIPPED_IN_A_ROW}"
    ):
        trainer.train()
    assert trainer.state.global_step == 2 + MAX_SKIPPED_IN_A_ROW - 1  # the second update was whole


def test_a_resumed_run_goes_on_counting(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    run = {**RUN, "on_divergence": "skip", "reward_funcs": giving(math.nan, 1)}
    resumed, _ = die_and_resume(make_trainer, tmp_path, lambda: run)
    assert resumed.state.log_history[-2]["guard/skipped_rows"] == 1


def test_an_evaluation_counts_to_no_update(make_trainer: MakeTrainer, caplog: Any) -> None:
    def never(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [math.nan, *[1.0] * (len(prompts) - 1)]

    dataset = Dataset.from_list(prompt_rows(4))
    trainer = make_trainer(**QUICK, reward_funcs=never, eval_dataset=dataset, on_divergence="skip")
    assert trainer.evaluate()["eval_score"] == 1.0
    assert trainer._run.guard.finish_update()["guard/skipped_rows"] == 0
    assert "Left out 1 responses of evaluation after update 0; the first because the reward" in caplog.text
    with pytest.raises(DivergenceError, match=r"^evaluation after update 0: the reward function 'never' returned nan"):
        make_trainer(**QUICK, reward_funcs=never, eval_dataset=dataset).evaluate()


def test_the_largest_score_leaves_every_gradient_finite(make_trainer: MakeTrainer) -> None:
    """For every token, and of either sign: the squares of returns and advantages are the largest that there are."""

    def largest(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[Any]:
        return [[MAX_SCORE * (-1) ** row] * len(ids) for row, ids in enumerate(completion_ids)]

    trainer = make_trainer(**RUN, reward_funcs=largest, max_grad_norm=0.0)
    trainer.train()
    assert all(value.isfinite().all() for value in parameters(trainer).values())
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert all(1e9 < norm < math.inf for norm in norms)


def test_the_guard_changes_nothing_of_a_run_in_which_all_is_finite(make_trainer: MakeTrainer) -> None:
    ends = []
    for on_divergence in ("stop", "skip"):
        trainer = make_trainer(**RUN, on_divergence=on_divergence)
        trainer.train()
        end = end_of_run(trainer)
        for entry in end["history"]:
            for name in ("guard/skipped_rows", "guard/skipped_updates"):
                entry.pop(name, None)
        ends.append(end)
    assert_identical(*ends)
