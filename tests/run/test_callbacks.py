"""Every event of Trainer's callbacks fires where its name says, and what callbacks ask for is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from tests.conftest import prompt_rows, tiny_policy
from tests.runs import QUICK, At, MakeTrainer

# Two epochs of two updates; an update has 2 epochs of 2 mini-batches of 2 micro-batches.
RUN: dict[str, Any] = {
    **QUICK,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "num_ppo_epochs": 2,
    "num_mini_batches": 2,
    "total_episodes": 16,
    "train_dataset": Dataset.from_list(prompt_rows(8)),
}
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Recorder(TrainerCallback):
    """Notes every event with the number of updates and episodes so far."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []
        self.kwargs: dict[str, dict[str, Any]] = {}
        for name in EVENTS:
            setattr(self, name, self._recording(name))

    def _recording(self, name: str) -> Callable[..., None]:
        def record(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.events.append((name, state.global_step, getattr(state, "episode", 0)))
            self.kwargs[name] = kwargs

        return record

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.events]


def test_every_event_fires_in_its_order_and_number(make_trained: MakeTrainer) -> None:
    recorder = Recorder()
    trainer = make_trained(
        **RUN,
        eval_dataset=Dataset.from_list(prompt_rows(3)),
        per_device_eval_batch_size=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        callbacks=[recorder],
    )

    mini_batch = ["on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"]
    update = ["on_step_begin", *mini_batch * 4, "on_step_end", "on_log"]
    evaluation = ["on_prediction_step"] * 2 + ["on_log", "on_evaluate"]
    epoch = ["on_epoch_begin", *update, *update, *evaluation, "on_save", "on_epoch_end"]
    assert recorder.names == [
        "on_init_end", "on_train_begin", *epoch, *epoch, "on_log", "on_train_end",
    ]  # fmt: skip
    assert set(EVENTS) - set(recorder.names) == {"on_predict", "on_push_begin"}
    assert all(given["model"] is trainer.policy_model for name, given in recorder.kwargs.items() if name != EVENTS[0])


def test_a_callback_can_generate_with_the_model_and_save_it(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Tied weights, too, as W&B does with WANDB_LOG_MODEL=end."""

    class Uses(TrainerCallback):
        def on_train_end(
            self, args: Any, state: Any, control: Any, model: Any, processing_class: Any, **_: Any
        ) -> None:
            trainer: Any = Trainer(args=args, model=model, processing_class=processing_class, eval_dataset=["fake"])
            trainer.save_model(str(tmp_path))
            self.generated = model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False)

    uses, policy = Uses(), tiny_policy(tie_word_embeddings=True)
    make_trainer(**QUICK, model=policy, callbacks=[uses]).train()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False), uses.generated)


def asking(event: str, step: int, flag: str) -> At:
    """Set one flag of `control` at one event of one update."""
    return At(event, step, lambda now: setattr(now.control, flag, True))


@pytest.mark.parametrize("event", ["on_step_end", "on_step_begin", "on_substep_end", "on_optimizer_step"])
def test_should_training_stop_ends_the_run_after_the_update(event: str, make_trainer: MakeTrainer) -> None:
    step = 3 if event == "on_step_end" else 2  # in the middle of the second epoch
    recorder = Recorder()
    output = make_trainer(**RUN, callbacks=[asking(event, step, "should_training_stop"), recorder]).train()
    assert output.global_step == 3
    assert recorder.names[-1] == "on_train_end"


@pytest.mark.parametrize(
    ("flag", "answer"), [("should_log", "on_log"), ("should_evaluate", "on_evaluate"), ("should_save", "on_save")]
)
def test_should_log_evaluate_and_save_are_obeyed_once(flag: str, answer: str, make_trainer: MakeTrainer) -> None:
    recorder = Recorder()
    make_trainer(
        **RUN,
        logging_strategy="no",
        eval_dataset=Dataset.from_list(prompt_rows(2)),
        callbacks=[asking("on_step_end", 3, flag), recorder],
    ).train()
    answers = [event[1] for event in recorder.events if event[0] == answer]
    summary = [4] if answer == "on_log" else []  # Trainer logs how long the run took
    assert answers == [3, *summary]
