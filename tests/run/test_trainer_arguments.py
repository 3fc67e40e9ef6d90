"""Each inherited argument does what its name says in a PPO run; every test fails where the argument is ignored."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import EarlyStoppingCallback, TrainerCallback

from rlhf_ppo import PPOTrainer
from tests.conftest import prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK, SeenPrompts, assert_identical, end_of_run, history, logged, parameters

MakeTrainer = Callable[..., PPOTrainer]
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


def flat(batches: list[list[list[int]]]) -> list[list[int]]:
    return [ids for batch in batches for ids in batch]


def seen_in(make_trainer: MakeTrainer, **overrides: Any) -> list[list[list[int]]]:
    trainer = cast(SeenPrompts, make_trainer(SeenPrompts, **{**QUICK, **overrides}))
    trainer.train()
    return trainer.seen


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


def test_restore_callback_states_gives_early_stopping_its_patience_back(make_trainer: MakeTrainer) -> None:
    def run(**overrides: Any) -> PPOTrainer:
        return make_trainer(
            **EVALUATED,
            reward_funcs=scores_by_update(0.0, 0.9, 0.5, 0.4, 0.3),
            metric_for_best_model="score",
            save_strategy="steps",
            save_steps=1,
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
            **overrides,
        )

    first = run()
    assert first.train().global_step == 3
    checkpoint = os.path.join(first.args.output_dir, "checkpoint-2")
    assert run(restore_callback_states_from_checkpoint=True).train(checkpoint).global_step == 3
    assert run().train(checkpoint).global_step == 4


# ---- When to log, evaluate and save ----


logs: dict[str, list[dict[str, Any]]] = {}


@pytest.mark.parametrize(
    ("arguments", "logged"),
    [
        ({"logging_steps": 3}, [1, 3, 4]),
        ({"logging_steps": 0.5}, [1, 2, 4]),
        ({"logging_steps": 3, "logging_first_step": True}, [1, 3, 4]),
        ({"logging_strategy": "epoch"}, [1, 2, 4]),
        ({"logging_strategy": "no"}, []),
    ],
)
def test_logs_come_when_asked_for_and_average_the_updates_between(
    arguments: dict[str, Any], logged: list[int], make_trainer: MakeTrainer
) -> None:
    run = {**QUICK, "total_episodes": 8, "train_dataset": Dataset.from_list(prompt_rows(4))}
    trainer = make_trainer(**run, **arguments)
    trainer.train()
    assert steps_with(trainer, "loss") == logged == steps_with(trainer, "objective/kl")

    if "each update" not in logs:  # the cases share one run
        each = make_trainer(**run)
        each.train()
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
        ({"eval_steps": 0.5}, [2, 4]),
        ({"eval_steps": 3}, [3, 4]),
        ({"eval_delay": 3}, [3, 4]),
        ({"eval_strategy": "epoch"}, [2, 4]),
        ({"eval_strategy": "epoch", "eval_delay": 2}, [4]),
        ({"eval_steps": 2, "eval_on_start": True}, [0, 2, 4]),
    ],
)
def test_evaluations_come_when_asked_for(
    arguments: dict[str, Any], evaluated: list[int], make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(**{**EVALUATED, "train_dataset": Dataset.from_list(prompt_rows(4)), **arguments})
    trainer.train()
    assert steps_with(trainer, "eval_score") == evaluated


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"save_strategy": "no"}, []),
        ({"save_steps": 2}, [2, 4, 5]),  # and at the end
        ({"save_steps": 0.4}, [2, 4, 5]),
        ({"save_steps": 1, "save_total_limit": 2}, [4, 5]),
        ({"save_strategy": "epoch"}, [2, 4, 5]),
    ],
)
def test_checkpoints_come_when_asked_for(
    arguments: dict[str, Any], written: list[int], make_trainer: MakeTrainer
) -> None:
    dataset = Dataset.from_list(prompt_rows(4))
    run = {**QUICK, "total_episodes": 10, "train_dataset": dataset, "save_strategy": "steps"}
    trainer = make_trainer(**{**run, **arguments})
    trainer.train()
    assert checkpoints(trainer) == written


def test_save_total_limit_keeps_the_best_and_the_newest(make_trainer: MakeTrainer) -> None:
    written: list[list[int]] = []

    class Look(TrainerCallback):
        def on_save(self, *args: Any, **kwargs: Any) -> None:
            written.append(checkpoints(trainer))

    trainer = make_trainer(
        **EVALUATED,
        reward_funcs=scores_by_update(0.0, 0.9, 0.5, 0.4, 0.3),
        load_best_model_at_end=True,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        callbacks=[Look()],
    )
    trainer.train()
    assert written == [[1], [1, 2], [1, 3], [1, 4]]
    assert checkpoints(trainer) == [1]


def test_save_only_model_leaves_out_what_resuming_needs(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**QUICK, save_strategy="steps", save_steps=3, save_only_model=True)
    trainer.train()
    checkpoint = Path(trainer.args.output_dir, "checkpoint-3")
    names = {path.name for path in checkpoint.iterdir()}
    assert not names & {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert {"model.safetensors", "value_model"} <= names
    with pytest.raises(ValueError, match="save_only_model=True"):
        make_trainer(**QUICK).train(resume_from_checkpoint=str(checkpoint))


# ---- Optimizer and scheduler ----


@pytest.mark.parametrize(
    ("arguments", "shares"),
    [
        ({"warmup_steps": 2}, [0.0, 0.5, 1.0, 0.5]),
        ({"warmup_ratio": 0.5}, [0.0, 0.5, 1.0, 0.5]),
        ({"lr_scheduler_type": "constant"}, [1.0] * 4),
        ({"lr_scheduler_type": "cosine"}, [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.5}},
            [0.75 + math.cos(math.pi * step / 4) / 4 for step in range(4)],
        ),
    ],
)
def test_learning_rate_follows_the_schedule_by_update(
    arguments: dict[str, Any], shares: list[float], make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(**{**QUICK, "total_episodes": 8, "num_ppo_epochs": 2}, learning_rate=0.001, **arguments)
    trainer.train()
    assert logged(trainer, "lr") == pytest.approx([0.001 * share for share in shares])
    assert logged(trainer, "learning_rate") == logged(trainer, "lr")


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


def test_bf16_multiplies_in_bf16_everywhere_and_keeps_float32_weights(make_trainer: MakeTrainer) -> None:
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
    assert history(trainer) != history(_trained(make_trainer, bf16=False))


def _trained(make_trainer: MakeTrainer, **overrides: Any) -> PPOTrainer:
    trainer = make_trainer(**{**QUICK, **overrides})
    trainer.train()
    return trainer


@pytest.mark.slow
def test_torch_compile_compiles_and_changes_little(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._dynamo.config.recompile_limit", 1)  # further shapes run as they are, which is faster

    def run(**overrides: Any) -> PPOTrainer:
        return _trained(make_trainer, total_episodes=4, model=tiny_policy(num_hidden_layers=1), **overrides)

    plain, compiled = run(), run(torch_compile=True, torch_compile_backend="eager")
    assert type(compiled.model_wrapped).__name__ == "OptimizedModule"
    assert logged(compiled, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-4)
    compiled.save_model()
    assert Path(cast(str, compiled.args.output_dir), "model.safetensors").is_file()


# ---- Seeds ----


def test_seed_decides_everything(make_trainer: MakeTrainer) -> None:
    first, again, other = (_trained(make_trainer, seed=seed) for seed in (3, 3, 4))
    assert_identical(end_of_run(again), end_of_run(first))
    assert history(other) != history(first)
    assert seen_in(make_trainer, seed=4) != seen_in(make_trainer, seed=3)


# ---- Data ----


def test_grouping_by_length_puts_similar_lengths_together(make_trainer: MakeTrainer) -> None:
    rows = [{"input_ids": [3] * length} for length in (1, 5, 2, 6, 3, 4)]
    seen = seen_in(make_trainer, train_sampling_strategy="group_by_length", train_dataset=Dataset.from_list(rows))
    lengths = [sorted(len(ids) for ids in batch) for batch in seen]
    assert 6 in lengths[0]  # the longest comes first, so that a lack of memory shows at once
    assert sorted(lengths) != sorted([sorted(pair) for pair in ((1, 5), (2, 6), (3, 4))])
    other = seen_in(make_trainer, train_dataset=Dataset.from_list(rows))
    assert lengths != [sorted(len(ids) for ids in batch) for batch in other]


@pytest.mark.parametrize("remove", [True, False])
def test_remove_unused_columns_drops_what_no_reward_function_reads(remove: bool, make_trainer: MakeTrainer) -> None:
    rows = [{**row, "answer": "w1", "length": 3} for row in prompt_rows(8)]
    dataset = Dataset.from_list(rows)
    trainer = make_trainer(
        SeenPrompts, **QUICK, train_dataset=dataset, reward_model=tiny_scorer(), remove_unused_columns=remove
    )
    trainer.train()
    assert cast(SeenPrompts, trainer).columns[0] == (set() if remove else {"answer", "length"})
    with_function = make_trainer(SeenPrompts, **QUICK, train_dataset=dataset, remove_unused_columns=remove)
    with_function.train()
    assert cast(SeenPrompts, with_function).columns[0] == {"answer", "length"}


def test_ignore_data_skip_starts_the_epoch_anew(make_trainer: MakeTrainer) -> None:
    run = {**QUICK, "train_dataset": Dataset.from_list(prompt_rows(8)), "save_strategy": "steps", "save_steps": 1}
    first = cast(SeenPrompts, make_trainer(SeenPrompts, **run))
    first.train()
    for ignore, expected in ((False, first.seen[1:]), (True, first.seen[:2])):
        run["output_dir"] = f"{first.args.output_dir}-{ignore}"
        resumed = cast(SeenPrompts, make_trainer(SeenPrompts, **run, ignore_data_skip=ignore))
        resumed.train(resume_from_checkpoint=os.path.join(first.args.output_dir, "checkpoint-1"))
        assert resumed.seen == expected
    later = cast(
        SeenPrompts,
        make_trainer(SeenPrompts, **run | {"total_episodes": 8, "output_dir": f"{first.args.output_dir}-True"}),
    )
    later.train(resume_from_checkpoint=True)
    assert later.seen == first.seen[2:]


@pytest.mark.parametrize("value", ["path", True, "true"])
def test_resume_from_checkpoint_as_an_argument(value: Any, make_trainer: MakeTrainer) -> None:
    run = {**QUICK, "save_strategy": "steps", "save_steps": 2}
    first = make_trainer(**run)
    first.train()
    newest = os.path.join(first.args.output_dir, "checkpoint-3")
    os.rename(newest, newest + "-aside")
    path = os.path.join(first.args.output_dir, "checkpoint-2")
    resumed = make_trainer(**run, resume_from_checkpoint=path if value == "path" else value)
    resumed.train()
    assert resumed._initial_global_step == 2
    assert_identical(end_of_run(resumed), end_of_run(first))
    again = make_trainer(**run, resume_from_checkpoint=path, overwrite_output_dir=True)
    again.train(resume_from_checkpoint=False)
    assert again._initial_global_step == 0


# ---- Logging ----
