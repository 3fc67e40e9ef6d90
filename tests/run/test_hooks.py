"""Trainer's hooks under PPO: the order of the prompts, the logged loss, and the counts."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from tests.conftest import prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK, MakeTrainer, SeenPrompts, train_and_record

# ---- The order of the prompts ----


TOKENS = list(range(3, 15))


def passes(make_trainer: MakeTrainer, resume: bool | str = False, **overrides: Any) -> list[list[int]]:
    """Train for three passes over twelve prompts of one token each; return their order in each pass."""
    run = {**QUICK, "total_episodes": 3 * len(TOKENS), "response_length": 1, "logging_steps": 99, **overrides}
    dataset = Dataset.from_dict({"input_ids": [[token] for token in TOKENS]})
    small = {"model": tiny_policy(num_hidden_layers=1), "value_model": tiny_scorer(num_hidden_layers=1)}
    trainer = make_trainer(SeenPrompts, train_dataset=dataset, **small, **{**run, "per_device_train_batch_size": 4})
    trainer.train(resume_from_checkpoint=resume)
    seen = [ids[0] for prompts in trainer.seen for ids in prompts]
    return [seen[start : start + len(TOKENS)] for start in range(0, len(seen), len(TOKENS))]


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_each_pass_has_an_order_of_its_own_that_the_seed_alone_decides(
    strategy: str, make_trainer: MakeTrainer
) -> None:
    orders = passes(make_trainer, train_sampling_strategy=strategy)
    assert [sorted(order) for order in orders] == [TOKENS] * 3
    assert TOKENS not in orders and len({tuple(order) for order in orders}) == 3
    others = passes(make_trainer, train_sampling_strategy=strategy, data_seed=11)
    assert not {tuple(order) for order in orders} & {tuple(order) for order in others}
    run = {"data_seed": 11, "seed": 5, "temperature": 0.5}  # other random numbers
    assert passes(make_trainer, train_sampling_strategy=strategy, **run) == others


def test_prompts_of_similar_length_share_an_update(make_trainer: MakeTrainer) -> None:
    def spread(strategy: str) -> float:
        dataset = Dataset.from_dict({"input_ids": [[3 + row % 6] * (1 + row % 6) for row in range(96)]})
        run = {**QUICK, "total_episodes": len(dataset), "response_length": 1, "per_device_train_batch_size": 4}
        trainer = make_trainer(SeenPrompts, train_dataset=dataset, **run, train_sampling_strategy=strategy)
        trainer.train()
        lengths = [[len(ids) for ids in prompts] for prompts in trainer.seen]
        return sum(max(each) - min(each) for each in lengths) / len(lengths)

    assert spread("group_by_length") < 1.5 < 2.5 < spread("random")


def test_episodes_epochs_and_tokens_are_counted(make_trainer: MakeTrainer) -> None:
    rows = prompt_rows(8)
    run = {**QUICK, "total_episodes": 12, "max_steps": 6}
    tokens, held = {}, {"no": 0, "all": 0, "non_padding": 0}
    for counted in held:
        trainer = make_trainer(**run, train_dataset=Dataset.from_list(rows), include_num_input_tokens_seen=counted)
        rollouts = train_and_record(trainer)
        entries = [entry for entry in trainer.state.log_history if "episode" in entry]
        assert [entry["episode"] for entry in entries] == [2, 4, 6, 8, 10, 12]
        assert [entry["epoch"] for entry in entries] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
        assert trainer.state.num_train_epochs == 2  # one and a half, begun twice
        tokens[counted] = trainer.state.num_input_tokens_seen
        logged = [entry.get("num_input_tokens_seen", 0) for entry in trainer.state.log_history]
        assert logged[-1] == tokens[counted]
    held["all"] = sum(rollout.responses.attention_mask.numel() for rollout in rollouts)
    held["non_padding"] = sum(int(rollout.responses.attention_mask.sum()) for rollout in rollouts)
    assert tokens == held and 0 < held["non_padding"] < held["all"]
