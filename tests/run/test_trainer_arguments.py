"""Each inherited argument does what its name says in a PPO run; every test fails where the argument is ignored."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from tests.conftest import prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK, MakeTrainer, SeenPrompts, assert_identical, end_of_run, history, logged, parameters

EVALUATED: dict[str, Any] = {
    **QUICK,
    "total_episodes": 8,
    "eval_dataset": Dataset.from_list(prompt_rows(2)),
    "eval_strategy": "steps",
    "eval_steps": 1,
}
"""Four updates, each followed by an evaluation."""


def scores_by_update(*scores: float) -> Callable[..., list[float]]:
    """A reward that says what an evaluation after update 0, 1, 2, ... gives."""

    def planned(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        return [scores[trainer_state.global_step]] * len(completions)

    return planned


def steps_with(trainer: PPOTrainer, key: str) -> list[int]:
    return [entry["step"] for entry in trainer.state.log_history if key in entry]


def checkpoints(trainer: PPOTrainer) -> list[int]:
    folders = Path(cast(str, trainer.args.output_dir)).glob("checkpoint-*")
    return sorted(int(folder.name.split("-")[1]) for folder in folders)


# ---- The best model, and when to stop ----


@pytest.mark.parametrize("load_best", [True, False])
def test_load_best_model_at_end_restores_policy_and_value_of_the_highest_score(
    load_best: bool, make_trainer: MakeTrainer
) -> None:
    states: dict[int, dict[str, Tensor]] = {}

    class KeepStates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            states[state.global_step] = parameters(trainer)

    trainer = make_trainer(
        **EVALUATED,
        reward_funcs=scores_by_update(0.0, 0.2, 0.9, 0.5, 0.4),
        load_best_model_at_end=load_best,
        metric_for_best_model="score",
        save_strategy="steps",
        save_steps=1,
        callbacks=[KeepStates()],
    )
    trainer.train()
    assert_identical(parameters(trainer), states[2 if load_best else 4])
    assert all(not torch.equal(states[2][name], states[4][name]) for name in states[2])  # policy and value moved on
    assert trainer.state.best_metric == pytest.approx(0.9)
    assert trainer.state.best_model_checkpoint == os.path.join(trainer.args.output_dir, "checkpoint-2")
    trainer.create_model_card()
    trainer.generate_completions()
    folder, told = Path(cast(str, trainer.args.output_dir)), 0.9 if load_best else 0.4
    assert f"| eval_score | {told} |" in (folder / "README.md").read_text()  # of the policy that the card is about
    assert [path.stem for path in (folder / "_samples").iterdir()] == [f"update-0000{2 if load_best else 4}"]


# ---- When to log, evaluate and save ----


logs: dict[str, list[dict[str, Any]]] = {}


@pytest.mark.parametrize(
    ("arguments", "logged"),
    [
        ({"logging_steps": 3}, [1, 3, 4]),
        ({"logging_steps": 0.5}, [1, 2, 4]),
        ({"logging_strategy": "epoch"}, [1, 2, 4]),
        ({"logging_strategy": "no"}, []),
    ],
)
def test_logs_come_when_asked_for_and_average_the_updates_between(
    arguments: dict[str, Any], logged: list[int], make_trained: MakeTrainer
) -> None:
    run = {**QUICK, "total_episodes": 8, "train_dataset": Dataset.from_list(prompt_rows(4))}
    trainer = make_trained(**run, **arguments)
    assert steps_with(trainer, "loss") == logged == steps_with(trainer, "objective/kl")

    if "each update" not in logs:  # the cases share one run
        each = make_trained(**run)
        logs["each update"] = history(each)
    for start, end in zip([0, *logged], logged, strict=False):
        window, entry = logs["each update"][start:end], next(e for e in history(trainer) if e["step"] == end)
        for key in ("loss", "objective/entropy", "val/ratio", "loss/value_avg"):
            expected = sum(update[key] for update in window) / len(window)
            assert entry[key] == pytest.approx(expected, abs=1e-7), key
        assert entry["response/length_max"] == max(update["response/length_max"] for update in window)
        for key in ("episode", "lr", "learning_rate", "grad_norm"):
            assert entry[key] == window[-1][key], key


@pytest.mark.parametrize(
    ("arguments", "evaluated"),
    [
        ({"eval_strategy": "no"}, []),
        ({"eval_steps": 2}, [2, 4]),
        ({"eval_delay": 3}, [3, 4]),
        ({"eval_strategy": "epoch"}, [2, 4]),
        ({"eval_steps": 2, "eval_on_start": True}, [0, 2, 4]),
    ],
)
def test_evaluations_come_when_asked_for(
    arguments: dict[str, Any], evaluated: list[int], make_trained: MakeTrainer
) -> None:
    trainer = make_trained(**{**EVALUATED, "train_dataset": Dataset.from_list(prompt_rows(4)), **arguments})
    assert steps_with(trainer, "eval_score") == evaluated


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"save_strategy": "no"}, []),
        ({"save_steps": 2}, [2, 4, 5]),  # and at the end
        ({"save_steps": 1, "save_total_limit": 2}, [4, 5]),
        ({"save_strategy": "epoch"}, [2, 4, 5]),
    ],
)
def test_checkpoints_come_when_asked_for(
    arguments: dict[str, Any], written: list[int], make_trained: MakeTrainer
) -> None:
    dataset = Dataset.from_list(prompt_rows(4))
    run = {**QUICK, "total_episodes": 10, "train_dataset": dataset, "save_strategy": "steps"}
    trainer = make_trained(**{**run, **arguments})
    assert checkpoints(trainer) == written


def test_save_only_model_leaves_out_what_resuming_needs(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**QUICK, save_strategy="steps", save_steps=3, save_only_model=True)
    trainer.train()
    checkpoint = Path(trainer.args.output_dir, "checkpoint-3")
    names = {path.name for path in checkpoint.iterdir()}
    assert not names & {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert {"model.safetensors", "value_model"} <= names
    with pytest.raises(ValueError, match="save_only_model=True"):
        make_trainer(**QUICK).train(resume_from_checkpoint=str(checkpoint))


# ---- Precision and memory ----


def test_gradient_checkpointing_recomputes_layers_and_changes_no_number(make_trainer: MakeTrainer) -> None:
    def run(enabled: bool) -> tuple[dict[str, Any], list[int], set[bool]]:
        trainer = make_trainer(**QUICK, gradient_checkpointing=enabled)
        calls, flags = [0, 0], set()
        for index, model in enumerate((trainer.model.policy, trainer.model.value_model)):

            def count(module: Any, inputs: Any, index: int = index, layer: Any = model.model.layers[0]) -> None:
                if torch.is_grad_enabled():
                    calls[index] += 1
                    flags.add(layer.gradient_checkpointing)

            model.model.layers[0].mlp.register_forward_pre_hook(count)
        trainer.train()
        return end_of_run(trainer), calls, flags

    plain, plain_calls, plain_flags = run(False)
    recomputed, calls, flags = run(True)
    assert (plain_calls, plain_flags) == ([3, 3], {False})
    assert (calls, flags) == ([6, 6], {True})
    assert_identical(recomputed, plain)


def test_bf16_multiplies_in_bf16_everywhere_and_keeps_float32_weights(
    make_trainer: MakeTrainer, make_trained: MakeTrainer
) -> None:
    trainer = make_trainer(**QUICK, bf16=True)
    dtypes: dict[str, set[torch.dtype]] = {"rollout": set(), "learning": set()}
    for model in (trainer.model.policy, trainer.model.value_model, trainer.reference.model.model):

        def record(module: Any, inputs: Any, output: Tensor) -> None:
            dtypes["learning" if torch.is_grad_enabled() else "rollout"].add(output.dtype)

        model.model.layers[0].self_attn.q_proj.register_forward_hook(record)
    trainer.train()
    assert dtypes == {"rollout": {torch.bfloat16}, "learning": {torch.bfloat16}}
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    moments = [state["exp_avg"].dtype for state in trainer.optimizer.state.values()]
    assert set(moments) == {torch.float32}
    # Old and new log-probabilities come from one path: before the first step they differ by less than bf16 resolves.
    assert max(logged(trainer, "policy/approxkl_avg")) < 1e-6
    assert history(trainer) != history(make_trained(**QUICK))


# ---- Seeds ----


def test_seed_decides_everything(make_trained: MakeTrainer) -> None:
    first, again, other = (make_trained(SeenPrompts, **{**QUICK, "seed": seed}) for seed in (3, 3, 4))
    assert_identical(end_of_run(again), end_of_run(first))
    assert history(other) != history(first)
    assert other.seen != first.seen


# ---- Data ----


@pytest.mark.parametrize("remove", [True, False])
def test_remove_unused_columns_drops_what_no_reward_function_reads(remove: bool, make_trained: MakeTrainer) -> None:
    rows = [{**row, "answer": "w1", "length": 3} for row in prompt_rows(8)]
    dataset = Dataset.from_list(rows)
    trainer = make_trained(
        SeenPrompts, **QUICK, train_dataset=dataset, reward_model=tiny_scorer(), remove_unused_columns=remove
    )
    assert trainer.columns[0].keys() == (set() if remove else {"answer", "length"})
    with_function = make_trained(SeenPrompts, **QUICK, train_dataset=dataset, remove_unused_columns=remove)
    assert with_function.columns[0].keys() == {"answer", "length"}


def test_fsdp_that_accelerate_ignores_is_said(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`accelerate launch` sets this variable; on CPUs accelerate silently ignores FSDP."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    make_trainer()
    assert "The launcher asked for FSDP, which accelerate lacks on CPUs" in caplog.text


@pytest.mark.parametrize("role", ["policy", "value model"])
def test_a_model_that_trains_in_16_bits_is_named(
    role: str, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    models = {"model": tiny_policy(), "value_model": tiny_scorer()}
    models["model" if role == "policy" else "value_model"].to(torch.bfloat16)
    with caplog.at_level("WARNING", logger="rlhf_ppo"):
        make_trainer(**QUICK, **models)
    (told,) = [record.getMessage() for record in caplog.records if "16 bits" in record.getMessage()]
    assert f"trainable tensors of the {role} are stored in 16 bits" in told
    assert f"load the {role} with dtype=torch.float32" in told
