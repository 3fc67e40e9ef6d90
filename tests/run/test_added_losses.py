"""Texts that are learned from beside PPO; their gradients are among the numbers of tests/test_first_update.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_ppo.run.ptx import Text, prepare_texts
from tests.conftest import make_tokenizer, tiny_policy
from tests.runs import QUICK, MakeTrainer

TEXTS: list[dict[str, Any]] = [
    *({"text": " ".join(f"w{number + step}" for step in range(1 + number))} for number in range(5)),
    {"prompt": "w9 w8", "completion": " w7 w6"},
    {"prompt": "w3", "completion": " w1 <eos>"},
    {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]},
]
LEARNED = [(row, 1) for row in ([3, 1], [4, 5, 1], [5, 6, 7, 1], [6, 7, 8, 9, 1], [7, 8, 9, 10, 11, 1])]
LEARNED += [([12, 11, 10, 9, 1], 2), ([6, 4, 1], 1), ([5, 6, 7, 8], 2)]
"""Token ids of these rows, and how many are only read: the first, or the prompt."""


def test_every_pass_draws_each_text_once_in_an_order_of_its_own(make_trainer: MakeTrainer) -> None:
    modelling = make_trainer(**QUICK, ptx_coef=1.0, ptx_dataset=TEXTS).ptx
    passes = [[modelling.text_at(8 * number + place) for place in range(8)] for number in range(3)]
    assert all(sorted(drawn) == sorted(modelling.texts) for drawn in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert [modelling.text_at(place) for place in range(8)] == passes[0]
    other = make_trainer(**QUICK, ptx_coef=1.0, ptx_dataset=TEXTS, seed=4).ptx
    assert [other.text_at(place) for place in range(8)] != passes[0]


def test_the_ranks_take_rows_of_one_order(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(**QUICK | {"per_device_train_batch_size": 4}, ptx_coef=1.0, ptx_dataset=TEXTS)
    found: list[list[int]] = []
    for rank in (0, 1):
        monkeypatch.setattr(type(trainer.accelerator), "process_index", rank)
        rows = trainer.ptx.next_rows()
        masks = zip(rows.query_responses, rows.attention_mask, rows.response_mask.sum(dim=1).tolist(), strict=True)
        found += [(ids[mask].tolist(), int(mask.sum()) - num_learned) for ids, mask, num_learned in masks]
    assert sorted(found) == sorted(LEARNED)


def test_long_texts_are_cut_and_those_without_a_token_to_learn_left_out(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 6, 7, 8, 9, 10]}, {"input_ids": [5]}]
    texts = prepare_texts(rows, make_tokenizer(), longest=4)
    assert texts == [Text([5], [6, 7], [True] * 2), Text([5], [6, 7, 8], [True] * 3)]
    (said,) = caplog.messages
    assert said == (
        "ptx_dataset: of 3 rows, 1 are cut to 4 tokens, and 1 are left out because they have no token to learn"
    )
    with pytest.raises(ValueError, match="no row of ptx_dataset has a token to learn"):
        prepare_texts(rows[2:], make_tokenizer(), longest=4)


def test_tokens_that_a_data_set_masks_are_read_and_not_learned(make_trainer: MakeTrainer) -> None:
    """The masks and labels of `SFTTrainer`; the loss is transformers' own, with the label -100 on masked tokens."""
    texts: list[dict[str, Any]] = [
        {"input_ids": [5, 6, 7, 8, 9, 10, 11], "completion_mask": [0, 1, 1, 0, 0, 1, 0]},
        {"input_ids": [12, 13, 14, 15], "assistant_masks": [1, 0, 1, 0]},
        {"input_ids": [16, 17, 18, 19], "completion_mask": [0, 0, 1, 1], "assistant_masks": [1, 1, 0, 1]},
        {"input_ids": [20, 21, 22, 23], "labels": [-100, 21, -100, 23]},
    ]
    labels = [[5, 6, 7, -100, -100, 10, -100], [12, -100, 14, -100], [-100, -100, -100, 19], [-100, 21, -100, 23]]
    ids, of_ids = torch.zeros(4, 7).long(), torch.full((4, 7), -100)
    for row, (text, of_text) in enumerate(zip(texts, labels, strict=True)):
        ids[row, : len(of_text)], of_ids[row, : len(of_text)] = torch.tensor(text["input_ids"]), torch.tensor(of_text)
    expected = float(tiny_policy()(input_ids=ids, labels=of_ids).loss.detach())

    sizes = {"per_device_train_batch_size": 4, "total_episodes": 4, "logging_steps": 1}
    trainer = make_trainer(**QUICK | sizes, ptx_coef=1.0, ptx_dataset=texts, model=tiny_policy())
    trainer.train()
    (loss,) = (log["loss/ptx_avg"] for log in trainer.state.log_history if "loss/ptx_avg" in log)
    assert loss == pytest.approx(expected, abs=1e-5)
