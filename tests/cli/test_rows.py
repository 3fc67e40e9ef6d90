"""The columns that AITraining's parameters name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_ppo.cli import aitraining
from rlhf_ppo.cli.aitraining import load_rows, remove_short_warmup, wanted_columns
from rlhf_ppo.compat.params import LLMTrainingParams
from tests.conftest import write_rows


def params(trainer: str, **given: object) -> LLMTrainingParams:
    return LLMTrainingParams(trainer=trainer, **({"model_ref": "x"} if trainer == "ppo" else {}), **given)


@pytest.mark.parametrize(
    ("trainer", "given", "columns", "wanted"),
    [
        ("ppo", {}, "text other", {"prompt": "text"}),
        ("ppo", {}, "prompt", {"prompt": "prompt"}),
        ("ppo", {}, "prompt text", {"prompt": "text"}),
        ("ppo", {"text_column": "question"}, "question text", {"prompt": "question"}),
        ("ppo", {"prompt_text_column": "question"}, "question text", {"prompt": "question"}),
        ("sft", {}, "text", {"text": "text"}),
        ("sft", {}, "prompt completion", {}),
        ("sft", {}, "messages", {}),
        ("sft", {"text_column": "body"}, "body prompt", {"text": "body"}),
        ("reward", {}, "chosen rejected", {"chosen": "chosen", "rejected": "rejected"}),
        ("reward", {}, "prompt chosen rejected", {"chosen": "chosen", "rejected": "rejected", "prompt": "prompt"}),
        ("reward", {}, "text rejected", {"chosen": "text", "rejected": "rejected"}),
        (
            "reward",
            {"prompt_text_column": "ask", "text_column": "good", "rejected_text_column": "bad"},
            "ask good bad prompt",
            {"chosen": "good", "rejected": "bad", "prompt": "ask"},
        ),
    ],
)
def test_the_columns_that_are_read(trainer, given, columns, wanted):
    assert wanted_columns(columns.split(), params(trainer, **given)) == wanted


@pytest.fixture
def folder(empty_place):
    rows = [{"good": f"g{i}", "bad": f"b{i}", "chosen": "other", "id": i} for i in range(5)]
    write_rows("data/train.jsonl", rows)
    write_rows("data/validation.jsonl", rows[:3])


def test_rows_are_cut_renamed_and_split(folder):
    given = params(
        "reward", data_path="data", valid_split="validation", text_column="good", rejected_text_column="bad",
        max_samples=4,
    )  # fmt: skip

    train, valid = load_rows(given)

    assert train.to_dict() == {"chosen": ["g0", "g1", "g2", "g3"], "rejected": ["b0", "b1", "b2", "b3"]}
    assert valid["chosen"] == ["g0", "g1", "g2"]


def test_the_columns_that_rewards_may_read_stay_with_prompts(folder):
    train, valid = load_rows(params("ppo", data_path="data", text_column="good"))

    assert valid is None and train["prompt"][0] == "g0"
    assert set(train.column_names) == {"prompt", "bad", "chosen", "id"}


# ---- Few prompts ----


@pytest.fixture
def said(monkeypatch):
    """What is said once."""
    messages: list[str] = []
    monkeypatch.setattr(aitraining.logger, "warning_once", messages.append)
    return messages


@pytest.mark.parametrize(
    ("share", "num_rows", "kept"), [(0.1, 8, False), (0.1, 79, False), (0.1, 80, True), (3, 8, True), (0, 8, True)]
)
def test_a_warm_up_of_less_than_one_update_is_left_out(share, num_rows, kept, said):
    args = SimpleNamespace(num_train_epochs=1, warmup_steps=share)
    remove_short_warmup(args, num_rows, num_episodes=8)  # pyright: ignore[reportArgumentType]

    assert args.warmup_steps == (share if kept else 0) and len(said) == (not kept)
