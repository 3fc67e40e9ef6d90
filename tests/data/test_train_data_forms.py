"""Training takes prompts in every documented form, and reward functions get each row's own columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.generation.transformers_engine import greedy_config
from rlhf_ppo.training.datasets import logger
from tests.conftest import make_tokenizer, tiny_scorer
from tests.data.test_datasets import Rows, Stream
from tests.runs import QUICK, assert_identical, end_of_run

MakeTrainer = Callable[..., PPOTrainer]
TEXTS = ["w1 w2", "w3", "w4 w5 w6", "w7 w8", "w9 w10 w11 w12", "w13"]
IDS = [[4, 5], [6], [7, 8, 9], [10, 11], [12, 13, 14, 15], [16]]
SEQUENTIAL = {**QUICK, "train_sampling_strategy": "sequential"}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def conversations(**message: Any) -> list[list[dict[str, Any]]]:
    return [[{"role": "user", "content": text, **message}] for text in TEXTS]


FORMS: dict[str, Callable[[], Any]] = {
    "ids": lambda: Dataset.from_dict({"input_ids": IDS}),
    "texts": lambda: Dataset.from_dict({"prompt": TEXTS}),
    "conversations": lambda: Dataset.from_dict({"prompt": conversations()}),
    "a stream": lambda: Dataset.from_dict({"prompt": TEXTS}).to_iterable_dataset(),
    "a torch data set": lambda: Rows([{"prompt": text} for text in TEXTS]),
    "a torch stream": lambda: Stream([{"prompt": text} for text in TEXTS]),
    "a list": lambda: [{"input_ids": ids} for ids in IDS],
}

ends: dict[str, Any] = {}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_the_prompts_changes_nothing(form: str, make_trainer: MakeTrainer) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE

    def end(name: str) -> dict[str, Any]:
        trainer = make_trainer(**SEQUENTIAL, processing_class=tokenizer, train_dataset=FORMS[name]())
        trainer.train()
        return {key: value for key, value in end_of_run(trainer).items() if key != "epoch"}

    for name in ("ids", form):
        ends[name] = ends.get(name) or end(name)
        for entry in ends[name]["history"]:
            entry.pop("epoch", None)  # a stream has no epochs to count in
    actual = ends[form]
    assert actual["episode"] == 6
    assert_identical(actual, ends["ids"])


def test_a_conversation_opens_the_assistant_s_turn(make_trainer: MakeTrainer) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE + "{% if add_generation_prompt %} w28{% endif %}"
    seen: list[Any] = []

    def keeps(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    trainer = make_trainer(
        **SEQUENTIAL, processing_class=tokenizer, reward_funcs=keeps,
        train_dataset=Dataset.from_dict({"prompt": conversations()}),
    )  # fmt: skip
    assert [row["input_ids"] for row in trainer.train_dataset] == [[*ids, 31] for ids in IDS]
    trainer.train()
    assert [prompt for prompt, _ in seen] == conversations()
    assert all(answer[0].keys() == {"role", "content"} and answer[0]["role"] == "assistant" for _, answer in seen)


@pytest.mark.parametrize(
    ("prompts", "stop", "warns"),
    [
        (conversations(), {"stop_token": "eos"}, True),
        (conversations(), {"stop_token": None, "stop_token_id": 2}, False),
        (conversations(), {"stop_token": "eos", "stop_strings": ["w5"]}, False),
        (TEXTS, {"stop_token": "eos"}, False),
    ],
    ids=["eos", "the turn's end", "stop strings", "texts"],
)
def test_another_end_of_turn_than_the_stop_token_is_told(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, prompts: Any, stop: dict[str, Any], warns: bool
) -> None:
    """Gemma's template ends answers with <end_of_turn>, which is not its EOS: responses would go on behind it."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} <bos> {% endfor %}w3"
    logger.warning_once.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
    make_trainer(**QUICK, **stop, processing_class=tokenizer, train_dataset=Dataset.from_dict({"prompt": prompts}))
    told = "ends an answer with '<bos>' (2), but responses end only at '<eos>' (1)"
    assert (told in caplog.text and "set stop_token_id=2 instead" in caplog.text) == warns


def test_a_text_that_holds_bos_is_told_where_the_tokenizer_adds_it(make_trainer: MakeTrainer, caplog: Any) -> None:
    """A chat template that rendered the prompts wrote it, and the tokenizer adds another."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    for text, is_told in (("w4 w5", False), ("<bos> w4 w5", True)):
        caplog.clear()
        make_trainer(train_dataset=[{"prompt": text}] * 8, processing_class=tokenizer)
        assert ("train_dataset: the first prompt begins with BOS twice" in caplog.text) is is_told


def test_a_rows_template_arguments_are_read_where_no_reward_reads_columns(make_trainer: MakeTrainer) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ word }} {{ messages[0].content }}"
    rows = [{"prompt": prompt, "chat_template_kwargs": {"word": "w0"}} for prompt in conversations()]
    trainer = make_trainer(
        **QUICK, processing_class=tokenizer, reward_model=tiny_scorer(), reward_funcs=None,
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    assert [row["input_ids"] for row in trainer.train_dataset] == [[3, *ids] for ids in IDS]


COLUMNS = {"answer": TEXTS, "number": list(range(6)), "nested": [{"a": [index]} for index in range(6)]}
COLUMN_FORMS: dict[str, Callable[[], Any]] = {
    "a data set": lambda: Dataset.from_dict({"prompt": TEXTS, **COLUMNS}),
    "ids": lambda: Dataset.from_dict({"input_ids": IDS, **COLUMNS}),
    "a stream": lambda: Dataset.from_dict({"prompt": TEXTS, **COLUMNS}).to_iterable_dataset(),
    "a generator": lambda: datasets.IterableDataset.from_generator(lambda: iter(_rows())),
    "a torch data set": lambda: Rows(_rows()),
    "a torch stream": lambda: Stream(_rows()),
}


def _rows() -> list[dict[str, Any]]:
    return list(Dataset.from_dict({"prompt": TEXTS, **COLUMNS}))  # pyright: ignore


@pytest.mark.parametrize(("form", "num_workers"), [*((form, 0) for form in COLUMN_FORMS), ("a data set", 1)])
def test_reward_functions_get_the_columns_of_the_very_row(
    form: str, num_workers: int, make_trainer: MakeTrainer
) -> None:
    seen: list[int] = []

    def checks(
        prompts: list[str], answer: list[str], number: list[int], nested: list[Any], **columns: Any
    ) -> list[float]:
        for prompt, text, index, inner in zip(prompts, answer, number, nested, strict=True):
            assert prompt == text == TEXTS[index] and inner == {"a": [index]}
        seen.extend(number)
        return [float(value) for value in number]

    trainer = make_trainer(
        **QUICK, reward_funcs=checks, train_dataset=COLUMN_FORMS[form](), dataloader_num_workers=num_workers
    )
    trainer.train()
    assert sorted(seen) == list(range(6))
    for update, entry in enumerate(entry for entry in trainer.state.log_history if "loss" in entry):
        assert entry["objective/scores"] == pytest.approx(sum(seen[2 * update : 2 * update + 2]) / 2)


def test_a_reward_model_reads_prompt_and_answer_of_the_same_row(make_trainer: MakeTrainer) -> None:
    """Scores do not depend on how many rows are scored at once, or beside which others."""
    together, one_by_one = (
        make_trainer(
            **QUICK, reward_model=tiny_scorer(), train_dataset=FORMS["texts"](), local_rollout_forward_batch_size=rows
        )
        for rows in (64, 1)
    )
    scores = []
    for trainer in (together, one_by_one):
        batch = trainer.data_collator([{"input_ids": ids} for ids in IDS])  # pyright: ignore
        prompts = Prompts.from_collated(batch, trainer.args.device)
        torch.manual_seed(0)
        responses = together.generate_responses(together.model.policy, prompts, _greedy(together))
        scores.append(trainer.score_responses(responses, prompts).total)
    assert torch.allclose(*scores, atol=1e-5)
    assert len(set(scores[0].tolist())) == 6


def _greedy(trainer: PPOTrainer) -> Any:
    return greedy_config(trainer.args, trainer.tokens.stop)


def test_prompts_that_are_too_long_are_dropped_before_the_run_is_counted(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        trainer = make_trainer(
            **{**QUICK, "total_episodes": None},
            num_train_epochs=1,
            train_dataset=FORMS["texts"](),
            max_prompt_length=2,
        )
    assert "train_dataset: dropped 2 of 6 prompts, longer than 2 tokens" in caplog.text
    assert len(trainer.train_dataset) == 4
    assert trainer.train().global_step == 2
    assert trainer.state.episode == 4


def test_a_stream_may_end_in_a_part_of_a_batch(make_trainer: MakeTrainer) -> None:
    """Five prompts in batches of two: the fifth is left out, in every pass."""
    stream = Dataset.from_dict({"prompt": TEXTS[:5]}).to_iterable_dataset()
    seen: list[str] = []

    def keeps(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen.extend(prompts)
        return [0.0] * len(prompts)

    make_trainer(**{**QUICK, "total_episodes": 8}, train_dataset=stream, reward_funcs=keeps).train()
    assert seen == TEXTS[:4] * 2


def test_an_own_collator_is_used(make_trainer: MakeTrainer) -> None:
    calls: list[int] = []

    def right_padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
        calls.append(len(rows))
        longest = max(len(row["input_ids"]) for row in rows) + 1
        pairs = [(row["input_ids"], [0] * (longest - len(row["input_ids"]))) for row in rows]
        return {
            "input_ids": torch.tensor([ids + padding for ids, padding in pairs]),
            "attention_mask": torch.tensor([[1] * len(ids) + padding for ids, padding in pairs]),
        }

    own = make_trainer(**QUICK, train_dataset=FORMS["ids"](), data_collator=right_padded)
    own.train()
    plain = make_trainer(**QUICK, train_dataset=FORMS["ids"]())
    plain.train()
    assert set(calls) == {2}
    assert_identical(end_of_run(own), end_of_run(plain))
