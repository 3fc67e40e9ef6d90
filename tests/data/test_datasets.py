"""Data sets of prompts of every kind, their checks, and the batches made of them."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from rlhf_ppo.data.prompts import PromptCollator, PromptEncoder, prepare_prompts
from rlhf_ppo.data.rollout import Prompts
from tests.conftest import WORDS, make_tokenizer
from tests.runs import QUICK

EOS = 1
CONVERSATION = [{"role": "user", "content": "w1 w2"}]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """<pad>=0 <eos>=1 <bos>=2 w0=3 w1=4 ..., padding on the right."""
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    return make_tokenizer("right", words=[*WORDS, "user", "assistant"], chat_template=template)


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.epoch = rows, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


KINDS = {
    "Dataset": Dataset.from_list,
    "list": list,
    "IterableDataset": lambda rows: Dataset.from_list(rows).to_iterable_dataset(),
    "torch stream": Stream,
}


def prepare(dataset: Any, tokenizer: PreTrainedTokenizerFast, **options: Any) -> Any:
    return prepare_prompts(dataset, PromptEncoder(tokenizer, "train_dataset", None), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("prompt", ["w0 w1", "w2"], [[3, 4], [5]]),
        ("text", ["w0 w1", "w2"], [[3, 4], [5]]),
        ("prompt", [CONVERSATION, CONVERSATION * 2], [[32, 4, 5, 33], [32, 4, 5, 32, 4, 5, 33]]),
        ("input_ids", [[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_every_kind_of_data_set_with_every_kind_of_prompt(
    kind: str, column: str, values: list[Any], expected: list[list[int]], tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{column: value, "answer": f"word {index}", "n": index} for index, value in enumerate(values)]
    prepared = list(prepare(KINDS[kind](rows), tokenizer))
    assert [row["input_ids"] for row in prepared] == expected
    assert [row["answer"] for row in prepared] == ["word 0", "word 1"]
    assert [row["n"] for row in prepared] == [0, 1]
    assert [row[column] for row in prepared] == (expected if column == "input_ids" else values)
    if column == "text":
        assert [row["prompt"] for row in prepared] == values


@pytest.mark.parametrize("kind", KINDS)
def test_masked_positions_and_their_mask_are_gone(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"input_ids": [0, 3, 4], "attention_mask": [0, 1, 1]},
        {"input_ids": [5, 1, 1], "attention_mask": [1, 0, 0]},
    ]
    assert list(prepare(KINDS[kind](rows), tokenizer)) == [{"input_ids": [3, 4]}, {"input_ids": [5]}]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_beyond_the_maximum_are_dropped_with_all_their_columns(
    kind: str, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": " ".join(["w1"] * length), "n": length} for length in (2, 3, 4, 5, 1)]
    with caplog.at_level(logging.WARNING):
        kept = list(prepare(KINDS[kind](rows), tokenizer, max_prompt_length=3))
    assert [row["n"] for row in kept] == [2, 3, 1]
    assert "dropped 2" in caplog.text and "longer than" in caplog.text and "3 tokens" in caplog.text


def test_where_all_prompts_are_too_long_only_the_argument_is_to_change(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"max_prompt_length=1 tokens: raise it, or shorten the prompts$"):
        prepare(KINDS["list"]([{"prompt": "w1 w2"}]), tokenizer, max_prompt_length=1)


@pytest.mark.parametrize("kind", ["Dataset", "list"])
def test_a_text_with_the_bos_that_the_tokenizer_adds_is_found_in_any_row(
    kind: str, make_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer: Any = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 2)])
    rows = [{"prompt": "w1"}] * 4 + [{"prompt": "<bos> w1"}] + [{"prompt": "w2"}] * 3
    make_trainer(**QUICK, processing_class=tokenizer, train_dataset=KINDS[kind](rows))
    assert "the prompt of row 4 begins with BOS twice" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 6, 9])
@pytest.mark.parametrize(("bad", "says"), [("", "has an empty prompt"), ("w1 <eos>", "EOS")])
def test_any_row_is_checked_and_named_by_its_place_in_the_given_data(
    kind: str, position: int, bad: str, says: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = ["w1 w2"] * 3 + ["w1 w2 w3 w4"] * 3 + ["w1"] * 4  # rows 3 to 5 are dropped, and still counted
    texts[position] = bad
    with pytest.raises(ValueError, match=rf"row {position} of train_dataset .*{says}"):
        list(prepare(KINDS[kind]([{"prompt": text} for text in texts]), tokenizer, max_prompt_length=3))


def test_a_torch_stream_can_be_read_again_and_learns_the_epoch(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = Stream([{"prompt": "w1"}, {"prompt": "w2"}])
    prepared = prepare(stream, tokenizer)
    prepared.set_epoch(3)
    assert stream.epoch == 3
    assert list(prepared) == list(prepared)
    loader = DataLoader(prepared, batch_size=2, collate_fn=PromptCollator(0))
    assert next(iter(loader))["input_ids"].tolist() == [[4], [5]]


def test_collator_pads_on_the_left_and_keeps_columns_as_lists() -> None:
    batch = PromptCollator(0)([{"input_ids": [5, 6, 7], "answer": "x"}, {"input_ids": torch.tensor([8]), "n": 2}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.long
    assert batch["answer"] == ["x", None] and batch["n"] == [None, 2]


rows_of_ids = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(rows=rows_of_ids, pad=st.integers(0, 4), left=st.integers(0, 3), right=st.integers(0, 3))
def test_the_batch_does_not_depend_on_the_padding_of_rows_or_on_the_pad_token(
    rows: list[list[int]], pad: int, left: int, right: int
) -> None:
    batch = PromptCollator(pad)([{"input_ids": ids} for ids in rows])
    mask = batch["attention_mask"].bool()
    assert [ids[real].tolist() for ids, real in zip(batch["input_ids"], mask, strict=True)] == rows
    assert (mask.long().diff(dim=1) >= 0).all() and mask[:, -1].all()  # padding on the left only
    assert (batch["input_ids"][~mask] == pad).all()
    padded = [
        {"input_ids": [9] * left + ids + [9] * right, "attention_mask": [0] * left + [1] * len(ids) + [0] * right}
        for ids in rows
    ]
    again = PromptCollator(pad)(padded)
    assert torch.equal(again["input_ids"], batch["input_ids"])
    assert torch.equal(again["attention_mask"], batch["attention_mask"])
    prompts = Prompts.from_collated(batch, torch.device("cpu"))
    assert torch.equal(prompts.input_ids, batch["input_ids"]) and torch.equal(prompts.attention_mask, mask)
