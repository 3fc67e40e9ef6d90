"""Rows with images: every pass equals plain transformers over the row alone, with the processor's tensors of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import compare_versions
from datasets import Dataset
from torch import nn
from transformers import AutoProcessor, AutoTokenizer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from rlhf_ppo.data.images import ImageChats, model_inputs
from tests.runs import QUICK, logged, train_and_record
from tests.vision import KINDS, alone, image_rows, make_model, make_processor, picture

LENGTH = 5


def with_response(given: dict[str, Any], response: torch.Tensor, token_type: int) -> dict[str, Any]:
    """Append a response; its token types are all alike."""
    ids = {"input_ids": response, "attention_mask": torch.ones_like(response)}
    return given | {
        name: torch.cat([value, ids.get(name, torch.full_like(response, token_type))], dim=1)
        for name, value in given.items()
        if name in ids or name.endswith("token_type_ids")
    }


@pytest.mark.parametrize("name", KINDS)
def test_an_update_reads_each_row_with_its_images_as_if_it_were_alone(name: str, make_trainer: Any) -> None:
    """The token types of a response are those of text; PaliGemma has prompts that are read in both directions."""
    processor = make_processor(name)
    policy, reference = make_model(name, processor), make_model(name, processor, seed=1)
    plain, rows = copy.deepcopy(policy), image_rows((2, 1, 3, 1) if name == "paligemma" else (0, 1, 3, 0))
    trainer = make_trainer(
        model=policy, ref_model=reference, value_model=None, processing_class=processor, train_dataset=rows, top_k=1,
        per_device_train_batch_size=2, num_ppo_epochs=1, total_episodes=4, response_length=LENGTH, temperature=1.0,
        reward_funcs=lambda completions, images, **_: [len(shown) for shown in images],
    )  # fmt: skip
    head = nn.init.normal_(trainer.value_model.score.weight).detach().clone()[0]
    (rollout,) = train_and_record(trainer)
    order, image = [], processor.tokenizer.convert_tokens_to_ids("<image>")
    for row, real in enumerate(rollout.responses.attention_mask):
        ids, mask = rollout.responses.query_responses[row][real], rollout.response_mask[row]
        prompt, response = ids[: -int(mask.sum())], ids[None, -int(mask.sum()) :]
        inputs = [alone(processor, each) for each in rows]
        order += [number for number, given in enumerate(inputs) if given["input_ids"].tolist() == [prompt.tolist()]]
        given, both = inputs[order[-1]], with_response(inputs[order[-1]], response, int(name == "paligemma"))
        how = {"do_sample": False, "suppress_tokens": [image], "return_dict_in_generate": True, "output_logits": True}
        with torch.no_grad():
            expected = plain.generate(**given, max_new_tokens=LENGTH, **how)
            logits = [torch.cat(expected.logits), reference(**both).logits[0, len(prompt) - 1 : -1]]
            values = plain.model(**both).last_hidden_state[0, len(prompt) - 1 : -1] @ head
        assert torch.equal(expected.sequences[0], ids)
        own, of_reference = (each.log_softmax(-1).gather(1, response.T)[:, 0] for each in logits)
        in_batch = (rollout.logprobs, rollout.ref_logprobs, rollout.values)
        for actual, right in zip(in_batch, (own, of_reference, values), strict=True):
            torch.testing.assert_close(actual[row][mask], right, atol=1e-4, rtol=1e-4)
    assert sorted(order) == [0, 1, 2, 3] and logged(trainer, "val/first_logratio")[0] < 1e-4
    assert rollout.scores.tolist() == [len(rows[number]["images"]) for number in order]


class Seen:
    """Keeps what a backbone reads while it learns, one row a pass: by the row's ids, its tensors."""

    def __init__(self, model: Any) -> None:
        self.rows: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
        model.model.register_forward_pre_hook(self.keep, with_kwargs=True)

    def keep(self, module: Any, _: Any, given: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            real = given["attention_mask"][0].bool()
            tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
            ids = tensors.pop("input_ids")[0][real]
            types = {name: value[0][real] for name, value in tensors.items() if name.endswith("token_type_ids")}
            self.rows[tuple(ids.tolist())] = tensors | types | {"attention_mask": real[real]}


@pytest.mark.skipif(compare_versions("trl", "<", "1.16"), reason="older TRL takes rows of a batch apart otherwise")
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_the_policy_reads_what_it_reads_under_grpo(name: str, make_trainer: Any, tmp_path: Path) -> None:
    """One data set and one processor under both trainers: ids, masks, token types and tensors of images."""
    processor, rows = make_processor(name), Dataset.from_list(image_rows((0, 1, 3, 2)))
    policies = [make_model(name, processor) for _ in range(2)]
    ours, theirs = map(Seen, policies)
    common: dict[str, Any] = {"per_device_train_batch_size": 1, "top_k": 1, "temperature": 1.0, "learning_rate": 0.0}
    make_trainer(
        model=policies[0], value_model=None, processing_class=processor, train_dataset=rows, num_ppo_epochs=1,
        gradient_accumulation_steps=4, total_episodes=4, response_length=LENGTH, reward_funcs=no_reward, **common,
    ).train()  # fmt: skip
    args = GRPOConfig(
        str(tmp_path), num_generations=2, steps_per_generation=2, gradient_accumulation_steps=8, max_steps=1,
        max_completion_length=LENGTH, bf16=False, use_cpu=True, report_to="none", disable_tqdm=True, **common,
    )  # fmt: skip
    GRPOTrainer(policies[1], no_reward, args, rows, processing_class=processor).train()
    assert len(ours.rows) == 4 and ours.rows.keys() == theirs.rows.keys()
    for ids, tensors in theirs.rows.items():
        own = ours.rows[ids]
        for field, expected in tensors.items():
            assert torch.equal(own.pop(field).to(expected.dtype), expected), field
        # Without images in a batch TRL passes no token types.
        assert all("token_type" in field and not types.any() for field, types in own.items())


def no_reward(completions: Any, **_: Any) -> list[float | None]:
    return [0.0] * len(completions)


@pytest.mark.parametrize("name", ["paligemma", "gemma3"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,)])
def test_a_text_among_images_reads_what_it_reads_alone(name: str, order: tuple[int, ...]) -> None:
    """Whichever row is first, and without images: PaliGemma reads no answer in both directions."""
    processor = make_processor(name)
    policy, chats = make_model(name, processor), ImageChats(processor)
    image, _ = chats.encoded(image_rows((1,))[0]["prompt"], [picture(1)], {})
    rows, answer = [chats.of_ids([5, 6, 7, 8]), image], torch.tensor([[9, 10, 11]])
    text = torch.tensor([[*rows[0].ids]])
    fields = {"input_ids": torch.tensor([[*image.ids]]), "attention_mask": torch.ones(1, len(image.ids)).long()}
    types = {key: value[None] if key.endswith("token_type_ids") else value for key, value in image.fields.items()}
    with torch.no_grad():
        types_of_text = {"token_type_ids": torch.zeros_like(text)} if name == "paligemma" else {}
        asked = {"input_ids": text, "attention_mask": torch.ones_like(text)}
        alone_text = policy(**with_response(asked | types_of_text, answer, 1)).logits[0]
        prefill = policy(**asked, use_cache=True).logits[0]
        torch.testing.assert_close(alone_text[: len(prefill)], prefill, atol=1e-4, rtol=1e-4)  # as `generate` reads it
        alone_image = policy(**with_response(fields | types, answer, int(name == "paligemma"))).logits[0]
        ids = [torch.tensor([*rows[row].ids, *answer[0]]) for row in order]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
        given = model_inputs([rows[row] for row in order], mask)
        logits = policy(input_ids=padded, attention_mask=mask, **given).logits
    for place, row in enumerate(order):
        expected = (alone_text, alone_image)[row]
        torch.testing.assert_close(logits[place, : len(expected)], expected, atol=1e-4, rtol=1e-4)


def test_a_policy_keeps_the_chat_template_of_its_prompts(make_trainer: Any, tmp_path: Path) -> None:
    """The tokenizer's, which rendered them, not that of the processor beside the model."""
    processor = make_processor("llava")
    make_model("llava", processor).save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = "{% for m in messages %}w20 {{ m['content'] }} {% endfor %}w21"
    chat = [{"role": "user", "content": "w4 w5"}]
    trainer = make_trainer(
        **QUICK, model=str(tmp_path / "model"), processing_class=tokenizer, value_model="policy",
        train_dataset=[{"prompt": chat}] * 8, reward_funcs="length",
    )  # fmt: skip
    trainer.save_model(str(tmp_path / "saved"))
    for kind in (AutoTokenizer, AutoProcessor):
        assert kind.from_pretrained(tmp_path / "saved").chat_template == tokenizer.chat_template
