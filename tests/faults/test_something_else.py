"""Resuming with something else than the checkpoint's run had: it is said what is in force, or refused by name."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from rlhf_ppo.checkpoints import last_complete_checkpoint
from rlhf_ppo.checkpoints.files import write_manifest
from tests.conftest import count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.faults.conftest import make_saving


def count_w5(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [ids.count(8) / len(ids) for ids in completion_ids]


def with_other_code() -> Any:
    def count_w4(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [0.5 for _ in completion_ids]

    return count_w4


def lora() -> Any:
    return pytest.importorskip("peft").LoraConfig(r=4, target_modules=["q_proj"])


def partly_frozen() -> Any:
    policy = tiny_policy()
    policy.model.embed_tokens.requires_grad_(False)
    return policy


def other_tokenizer() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "w3"
    return tokenizer


def sgd() -> Any:
    model = tiny_policy()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def given(**made: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    return made


# What is passed on resuming: arguments, or makers of what the trainer is given; and what must be said.
SAID: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate": ({"learning_rate": 1e-4}, "learning_rate=0.0001 .*0.001"),
    "weight decay": ({"weight_decay": 0.5}, r"weight_decay=\[0.5.* \(was 0.0\)"),
    "Adam's beta": ({"adam_beta1": 0.5}, r"betas=\[0.5, .*0.9"),
    "scheduler": ({"lr_scheduler_type": "constant"}, "lr_scheduler_type=.*CONSTANT .*LINEAR"),
    "warm-up": ({"warmup_steps": 1}, "warmup_steps=1 .*0"),
    "seed": ({"seed": 4}, "seed=4 takes effect instead of 3: it now orders the prompts"),
    "seed of the data": ({"data_seed": 5}, "data_seed=5 takes effect instead of None: the order"),
    "temperature": ({"temperature": 1.0}, "temperature=1.0 takes effect instead of 0.7"),
    "KL coefficient": ({"kl_coef": 0.2}, "kl_coef=0.2 takes effect instead of 0.05"),
    "discount": ({"gamma": 0.9}, "gamma=0.9 takes effect instead of 1.0"),
    "clipping": ({"cliprange": 0.1}, "cliprange=0.1 takes effect instead of 0.2"),
    "epochs": ({"num_ppo_epochs": 2}, "num_ppo_epochs=2 takes effect instead of 1"),
    "response length": ({"response_length": 5}, "response_length=5 takes effect instead of 4"),
    "penalty": ({"missing_eos_penalty": 1.0}, "missing_eos_penalty=1.0 takes effect instead of None"),
    "how often to save": ({"save_steps": 3}, "save_steps=3 takes effect instead of 1"),
    "fewer updates": ({"total_episodes": 2}, "is of update 2 and the run has 1: nothing is left to train"),
    "tokenizer": (given(processing_class=other_tokenizer), "processing_class: the tokenizer has another"),
    "reward function": (given(reward_funcs=lambda: count_w5), "reward_funcs: the reward functions are others"),
    "code of the reward": (given(reward_funcs=with_other_code), "reward_funcs: .* their code"),
    "one more reward": (given(reward_funcs=lambda: [count_w4, count_w5]), r"reward_funcs: .*\(count_w5\)"),
    "more prompts": (given(train_dataset=lambda: prompt_rows(20)), r"train_dataset: .*\(rows 8 before, 20 now\)"),
    "other prompts": (given(train_dataset=lambda: prompt_rows(8, seed=1)), r"train_dataset: .*\(content\)"),
    "reference": (given(ref_model=lambda: tiny_policy(seed=9)), "ref_model: the reference has other weights"),
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer": (given(optimizers=sgd), "its optimizer is AdamW, and SGD cannot use its state"),
    "batch": ({"per_device_train_batch_size": 4}, "batch_size=2 episodes per update"),
    "accumulation": ({"gradient_accumulation_steps": 2}, "batch_size=2 episodes per update"),
    "wider model": (given(model=lambda: tiny_policy(hidden_size=64)), "is of another model.*has shape"),
    "flatter model": (given(model=lambda: tiny_policy(num_hidden_layers=1)), "is of another model.*does not exist"),
    "wider value model": (given(value_model=lambda: tiny_scorer(hidden_size=64)), "value_model.*has shape"),
    "value model": (given(value_model=lambda: tiny_scorer(num_hidden_layers=3)), "is of another model.*it lacks"),
    "an adapter": (given(peft_config=lora), "no adapter"),
    "rate of the value model": (
        {"critic_learning_rate": 1e-2},
        "optimizer has 2 groups of parameters, and this run's has 4: critic_learning_rate makes more; set it or leave",
    ),
    "frozen weights": (given(model=partly_frozen), "trained 42 parameters, but 41 are trained now"),
}  # fmt: skip


def resuming(run: Path, change: dict[str, Any]) -> Any:
    made = {name: value() for name, value in change.items() if callable(value)}
    if "optimizers" in made:
        made["model"], optimizer = made["optimizers"]
        value_model = made["value_model"] = tiny_scorer(seed=2)
        optimizer.add_param_group({"params": list(value_model.parameters())})
        made["optimizers"] = (optimizer, None)
    if "train_dataset" in made:
        made["train_dataset"] = Dataset.from_list(made["train_dataset"])
    values = {name: value for name, value in change.items() if name not in made}
    return make_saving(run, **{"total_episodes": 4, **values}, given=made)


@pytest.mark.parametrize("case", SAID)
def test_a_change_is_said_with_what_is_in_force(case: str, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    change, message = SAID[case]
    with caplog.at_level(logging.WARNING):
        resuming(run, change).train(resume_from_checkpoint=True)
    assert re.search(message, caplog.text), caplog.text


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_on_is_refused(case: str, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    change, message = REFUSED[case]
    trainer = resuming(run, change)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert trainer.state.global_step in (0, 1)
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-2")
    assert "is not taken for this run's" not in caplog.text  # a refused start gives nothing up


def test_nothing_is_said_where_nothing_changed(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_saving(run).train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert "is resumed with changes" not in caplog.text


# ---- More to train ----


def test_more_prompts_are_trained_on(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of 8 prompts in updates of 2 the run has seen 4; with 20 it goes on to the updates that are asked for."""
    trainer = make_saving(run, total_episodes=26, given={"train_dataset": Dataset.from_list(prompt_rows(20))})
    with caplog.at_level(logging.WARNING):
        assert trainer.train(resume_from_checkpoint=True).global_step == 13
    assert "a new pass begins" in caplog.text
    assert trainer.state.max_steps == 13 and trainer.state.episode == 26


def test_passes_that_are_over_before_the_updates_are_go_on(tmp_path: Path) -> None:
    """Two passes over 4 prompts, then two over 16: the passes are used up, the updates are not."""
    few, many = Dataset.from_list(prompt_rows(4)), Dataset.from_list(prompt_rows(16))
    passes = {"total_episodes": None, "num_train_epochs": 2}
    make_saving(tmp_path, **passes, given={"train_dataset": few}).train()
    resumed = make_saving(tmp_path, **passes, given={"train_dataset": many})
    assert resumed.train(resume_from_checkpoint=True).global_step == 16


def test_a_position_that_was_edited_still_ends_at_the_updates_asked_for(run: Path) -> None:
    path = run / "checkpoint-1" / "ppo_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "batches_in_epoch": 1, "epoch": 1}))
    write_manifest(str(run / "checkpoint-1"))
    resumed = make_saving(run, total_episodes=16)
    assert resumed.train(resume_from_checkpoint=str(run / "checkpoint-1")).global_step == 8


def test_an_optimizer_of_another_engine_is_refused(run: Path) -> None:
    (run / "checkpoint-2" / "optimizer.pt").rename(run / "checkpoint-2" / "optimizer.bin")
    write_manifest(str(run / "checkpoint-2"))
    with pytest.raises(ValueError, match=r"written under another engine: it has no optimizer.pt"):
        make_saving(run).train(resume_from_checkpoint=str(run / "checkpoint-2"))
