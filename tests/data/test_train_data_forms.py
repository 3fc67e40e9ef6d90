"""Training takes prompts in every documented form, and reward functions get each row's own columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset

from tests.conftest import make_tokenizer
from tests.data.test_datasets import Stream
from tests.runs import QUICK, MakeTrainer

TEXTS = ["w1 w2", "w3", "w4 w5 w6", "w7 w8", "w9 w10 w11 w12", "w13"]
IDS = [[4, 5], [6], [7, 8, 9], [10, 11], [12, 13, 14, 15], [16]]
SEQUENTIAL = {**QUICK, "train_sampling_strategy": "sequential"}


CONVERSATIONS = [[{"role": "user", "content": text}] for text in TEXTS]


def test_a_conversation_opens_the_assistant_s_turn(make_trainer: MakeTrainer) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %} w28{% endif %}"
    )
    seen: list[Any] = []

    def keeps(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    trainer = make_trainer(
        **SEQUENTIAL, processing_class=tokenizer, reward_funcs=keeps,
        train_dataset=Dataset.from_dict({"prompt": CONVERSATIONS}),
    )  # fmt: skip
    assert [row["input_ids"] for row in trainer.train_dataset] == [[*ids, 31] for ids in IDS]
    trainer.train()
    assert [prompt for prompt, _ in seen] == CONVERSATIONS
    assert all(answer[0].keys() == {"role", "content"} and answer[0]["role"] == "assistant" for _, answer in seen)


COLUMNS = {"answer": TEXTS, "number": list(range(6)), "nested": [{"a": [index]} for index in range(6)]}
COLUMN_FORMS: dict[str, Callable[[], Any]] = {
    "a data set": lambda: Dataset.from_dict({"prompt": TEXTS, **COLUMNS}),
    "ids": lambda: Dataset.from_dict({"input_ids": IDS, **COLUMNS}),
    "a stream": lambda: Dataset.from_dict({"prompt": TEXTS, **COLUMNS}).to_iterable_dataset(),
    "a torch stream": lambda: Stream(list(COLUMN_FORMS["a data set"]())),
}


@pytest.mark.parametrize(("form", "num_workers"), [*((form, 0) for form in COLUMN_FORMS), ("a data set", 1)])
def test_reward_functions_get_the_columns_of_the_very_row(
    form: str, num_workers: int, make_trained: MakeTrainer
) -> None:
    seen: list[int] = []

    def checks(
        prompts: list[str], answer: list[str], number: list[int], nested: list[Any], **columns: Any
    ) -> list[float]:
        for prompt, text, index, inner in zip(prompts, answer, number, nested, strict=True):
            assert prompt == text == TEXTS[index] and inner == {"a": [index]}
        seen.extend(number)
        return [float(value) for value in number]

    trainer = make_trained(
        **QUICK, reward_funcs=checks, train_dataset=COLUMN_FORMS[form](), dataloader_num_workers=num_workers
    )
    assert sorted(seen) == list(range(6))
    for update, entry in enumerate(entry for entry in trainer.state.log_history if "loss" in entry):
        assert entry["objective/scores"] == pytest.approx(sum(seen[2 * update : 2 * update + 2]) / 2)


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_a_pass_over_a_stream_has_all_rows_but_a_last_part_batch_however_many_processes_read_it(
    num_workers: int, make_trainer: MakeTrainer
) -> None:
    rows = Dataset.from_dict({"input_ids": [[token] for token in range(3, 28)]})
    trainer = make_trainer(
        **QUICK | {"per_device_train_batch_size": 4}, train_dataset=rows.to_iterable_dataset(num_shards=5),
        dataloader_num_workers=num_workers, dataloader_prefetch_factor=3 if num_workers else None,
    )  # fmt: skip
    batches: list[list[int]] = [batch["input_ids"][:, 0].tolist() for batch in trainer.get_train_dataloader()]
    assert [*map(len, batches)] == [4] * 6
    read = [token for batch in batches for token in batch]
    assert len({*read}) == 24 and {*read} < {*range(3, 28)}
