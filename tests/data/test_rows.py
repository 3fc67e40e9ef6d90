"""A row is the same prompt in SFT, reward model, PPO and judge, with each column that the trainers of TRL know.

The oracles are the tokens of `SFTTrainer` and `RewardTrainer`, each row in a data set of its own: no other row's keys.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

from rlhf_ppo.cli.answers import answers_in_column
from rlhf_ppo.data.images import ImageChats
from rlhf_ppo.data.prompts import PromptEncoder
from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.rewards.reward_model import reward_model_ids
from tests.agents.chat import chat_tokenizer
from tests.conftest import scoring_batch, tiny_policy, tiny_scorer
from tests.runs import QUICK, MakeTrainer
from tests.vision import make_processor

ASKED = {"role": "user", "content": "Which?"}
ANSWERS = {key: [{"role": "assistant", "content": text}] for key, text in (("chosen", "This."), ("rejected", "That."))}


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    function = {"name": name, "description": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def calling(**arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return [ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "name": "look", "content": "3"}]


CHAT = {"prompt": [ASKED]}
ROWS: dict[str, list[dict[str, Any]]] = {
    "no column": [CHAT, {"prompt": [{"role": "system", "content": "Be brief."}, ASKED]}],
    "tools": [CHAT | {"tools": [tool("look", "place")]}, CHAT | {"tools": [tool("run", "a", "b")]}, CHAT],
    "tools as JSON text": [CHAT | {"tools": json.dumps([tool("look", "place") | {"default": None}])}, CHAT],
    "chat_template_kwargs": [CHAT | {"chat_template_kwargs": {"enable_thinking": False}}, CHAT],
    "nested None": [{"prompt": calling(place="here")}, {"prompt": calling(number=3)}],
}


def as_trl_reads(row: dict[str, Any], tokenizer: Any, folder: Path) -> tuple[list[int], list[list[int]]]:
    """The prompt's tokens in `SFTTrainer`, and those of both answers in `RewardTrainer`."""
    how: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "max_length": None}
    sizes, rows = {"vocab_size": len(tokenizer)}, Dataset.from_list([row | ANSWERS])
    rewards: Any = trl.RewardTrainer(
        tiny_scorer(**sizes), trl.RewardConfig(str(folder), **how), train_dataset=rows, processing_class=tokenizer
    ).train_dataset
    texts = Dataset.from_list([row | {"completion": ANSWERS["chosen"]}])
    sft: Any = trl.SFTTrainer(
        tiny_policy(**sizes), trl.SFTConfig(str(folder), **how), train_dataset=texts, processing_class=tokenizer
    ).train_dataset
    pairs = zip(sft[0]["input_ids"], sft[0]["labels"], strict=True)
    return [token for token, label in pairs if label == -100], [rewards[0]["chosen_ids"], rewards[0]["rejected_ids"]]


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
@pytest.mark.parametrize("columns", ROWS)
def test_a_row_is_the_same_prompt_at_every_stage(
    columns: str, name: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    tokenizer, rows = chat_tokenizer(name), Dataset.from_list(ROWS[columns])
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    trainer = make_trainer(
        **QUICK | {"per_device_train_batch_size": len(rows), "train_sampling_strategy": "sequential"},
        model=tiny_policy(**sizes), reward_model=tiny_scorer(**sizes), processing_class=tokenizer, train_dataset=rows,
        value_model=None,
    )  # fmt: skip
    (collated,) = trainer.get_train_dataloader()
    prompts = Prompts.from_collated(collated, torch.device("cpu"))
    for number, row in enumerate(ROWS[columns]):
        asked, answered = as_trl_reads(row, tokenizer, tmp_path)
        ids = prompts.input_ids[number][prompts.attention_mask[number]].tolist()
        assert ids == PromptEncoder(tokenizer, "rows", None)(row, 0)["input_ids"]
        assert ids[: len(asked)] == asked and (len(asked) == len(ids) or columns == "chat_template_kwargs")
        for key, expected in zip(ANSWERS, answered, strict=True):
            sampled = tokenizer(ANSWERS[key][0]["content"])["input_ids"] + [tokenizer.eos_token_id]
            whole, mask = torch.tensor([ids + sampled]), torch.ones(1, len(sampled)).bool()
            of_row = {column: [values[number]] for column, values in prompts.columns.items()}
            batch = scoring_batch(
                whole, torch.ones_like(whole).bool(), mask, of_row, torch.tensor([True]), (), tokenizer
            )
            assert reward_model_ids(batch.answers[0], None) == expected
            (judged,) = answers_in_column([rows[number] | ANSWERS], key)
            assert judged is not None and reward_model_ids(judged, tokenizer) == expected


def test_reward_models_and_judges_read_the_option_too(make_trainer: MakeTrainer) -> None:
    tokenizer, how, seen = chat_tokenizer(), {"enable_thinking": False}, list[Any]()

    def reward(policy_answers: Any, **_: Any) -> list[float]:
        seen.extend(answer.settings for answer in policy_answers)
        return [0.0] * len(policy_answers)

    other = {"enable_thinking": True}
    make_trainer(
        **QUICK, chat_template_kwargs=how, train_sampling_strategy="sequential", processing_class=tokenizer,
        model=tiny_policy(vocab_size=len(tokenizer)), reward_model=None, value_model="policy", reward_funcs=[reward],
        train_dataset=[CHAT, CHAT | {"chat_template_kwargs": other}],
    ).train()  # fmt: skip
    (judged,) = answers_in_column([CHAT | ANSWERS], "chosen", (), how)
    assert [*seen[:2], judged and judged.settings] == [how, other, how]


def test_tools_that_no_stage_could_read_are_refused() -> None:
    encode = PromptEncoder(chat_tokenizer(), "rows", None)
    with pytest.raises(ValueError, match=r"row 3 of rows has tools or chat_template_kwargs that are not JSON \("):
        encode(CHAT | {"tools": "look"}, 3)
    with pytest.raises(ValueError, match=r"row 3 of rows has tools or chat_template_kwargs that are not JSON \("):
        encode(CHAT | {"chat_template_kwargs": "[1]"}, 3)
    given = {"enable_thinking": False}
    as_text, as_dict = (encode(CHAT | {"chat_template_kwargs": one}, 3) for one in (json.dumps(given), given))
    assert as_text == as_dict != encode(CHAT, 3)
    assert encode({"prompt": "Which?", "tools": "look"}, 3)  # of a text, the column is a reward function's


@pytest.mark.parametrize("kind", ["input_image", "file", "input_audio", "image_url", "video"])
def test_a_block_that_the_template_drops_is_refused(kind: str) -> None:
    processor = make_processor("llava")
    processor.tokenizer.chat_template = processor.chat_template
    content = [{"type": kind, kind: "there.png"}, {"type": "text", "text": "w3"}]
    for chats in (None, ImageChats(processor)):
        encode = PromptEncoder(processor.tokenizer, "rows", None, chats=chats)
        with pytest.raises(ValueError, match=f"row 3 of rows holds a content block of type '{kind}': write text"):
            encode({"prompt": [{"role": "user", "content": content}]}, 3)


def test_a_block_that_the_template_writes_is_read() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for b in m.content %}{{ b.text or b.thinking }}{% endfor %}{% endfor %}"
    )
    content = [{"type": "thinking", "thinking": "Well"}, {"type": "text", "text": "a"}]
    ids = PromptEncoder(tokenizer, "rows", None)({"prompt": [{"role": "system", "content": content}]}, 0)["input_ids"]
    assert tokenizer.decode(ids) == "Wella"
