"""One prompt: the columns that a row becomes, and rows that are refused."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from rlhf_ppo.data.prompts import PromptEncoder, as_the_template_reads, real_tokens
from tests.conftest import make_tokenizer

PAD, EOS, BOS = 0, 1, 2
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def word_tokenizer(template: str | None = None, post: str | None = None, **more: Any) -> PreTrainedTokenizerFast:
    """<pad>=0 <eos>=1 <bos>=2 a=3 b=4 c=5 user=6 assistant=7 tools=8."""
    words = ["a", "b", "c", "user", "assistant", "tools"]
    tokenizer = make_tokenizer(words=words, chat_template=template, **more)
    if post is not None:
        parts = processors.TemplateProcessing(post, None, [("<eos>", EOS), ("<bos>", BOS)])
        tokenizer.backend_tokenizer.post_processor = parts
    return tokenizer


def encode(row: dict[str, Any], tokenizer: Any = None, vocab_size: int | None = None) -> Any:
    return PromptEncoder(tokenizer or word_tokenizer(), "train_dataset", vocab_size)(row, 7)


def refused(row: dict[str, Any], tokenizer: Any = None, vocab_size: int | None = None) -> str:
    with pytest.raises(ValueError) as error:
        encode(row, tokenizer, vocab_size)
    assert "row 7 of train_dataset" in str(error.value)
    return str(error.value)


def test_text_in_either_column() -> None:
    assert encode({"prompt": "a b c"}) == {"input_ids": [3, 4, 5]}
    assert encode({"text": "a b c"}) == {"input_ids": [3, 4, 5], "prompt": "a b c"}
    assert encode({"text": "a long document", "prompt": "b"}) == {"input_ids": [4]}


def test_eos_that_the_tokenizer_adds_is_removed_and_bos_is_kept() -> None:
    tokenizer = word_tokenizer(post="<bos> $A <eos>")
    assert tokenizer("a b")["input_ids"] == [BOS, 3, 4, EOS]
    assert encode({"prompt": "a b"}, tokenizer)["input_ids"] == [BOS, 3, 4]


def test_eos_in_the_text_itself_is_refused_even_if_the_tokenizer_adds_another() -> None:
    assert "ends in the EOS token (1)" in refused({"prompt": "a b <eos>"})
    assert "ends in the EOS token (1)" in refused({"prompt": "a b <eos>"}, word_tokenizer(post="<bos> $A <eos>"))
    assert encode({"prompt": "a <eos> b"})["input_ids"] == [3, EOS, 4]


def test_conversation_goes_through_the_chat_template() -> None:
    tokenizer = word_tokenizer(TEMPLATE)
    messages = [{"role": "user", "content": "a b"}]
    assert encode({"prompt": messages}, tokenizer)["input_ids"] == [6, 3, 4, 7]  # user a b assistant


def test_a_begun_assistant_message_is_continued() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert encode({"prompt": messages}, word_tokenizer(TEMPLATE))["input_ids"] == [6, 3, 7, 4]


def test_keys_that_arrow_filled_with_none_are_not_defined_for_the_template() -> None:
    template = "{% for m in messages %}{% if 'tools' in m %}tools{% else %}{{ m.content }}{% endif %}{% endfor %}"
    messages = [{"role": "user", "content": "a", "tools": None}]
    assert encode({"prompt": messages}, word_tokenizer(template))["input_ids"] == [3]


def test_nested_keys_that_arrow_filled_with_none_are_not_written_by_the_template() -> None:
    """A call's arguments have the keys of all rows' calls; TRL removes them the same way."""
    from trl.trainer.utils import remove_none_values

    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"expr": "x"}, {"n": 1})]
    rows = [[{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}] for call in calls]
    for messages in Dataset.from_dict({"prompt": rows})["prompt"]:
        shown = as_the_template_reads(messages, word_tokenizer())
        assert shown == remove_none_values(messages) and "None" not in str(shown)


def test_a_rows_own_template_arguments_win_as_in_trls_trainers() -> None:
    tokenizer = word_tokenizer("{% for m in messages %}{{ m.content }} {{ word }} {{ other }}{% endfor %}")
    encoder = PromptEncoder(tokenizer, "train_dataset", None, template_kwargs={"word": "b", "other": "c"})
    row = {"prompt": [{"role": "user", "content": "a"}]}
    assert encoder(row, 0)["input_ids"] == [3, 4, 5]
    assert encoder(row | {"chat_template_kwargs": {"word": "a", "other": None}}, 0)["input_ids"] == [3, 3, 5]
    assert encoder(row | {"chat_template_kwargs": None}, 0)["input_ids"] == [3, 4, 5]


@pytest.mark.parametrize(
    "written",
    [
        "m.content if m.content is string else ''",
        "m.content if m.content is string else m.content | map(attribute='text') | join",
        "m.content + ''",
        "m.content | trim",
    ],
    ids=["leaves lists out", "writes lists", "fails", "prints lists"],
)
def test_blocks_of_text_reach_the_model_whatever_the_template_does_with_lists(written: str) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ WRITTEN }} {% endfor %}".replace("WRITTEN", written)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
    ]
    assert encode({"prompt": messages}, word_tokenizer(template))["input_ids"] == [6, 3, 4, 7, 4]
    tool = [{"role": "user", "content": [{"type": "tool_use", "id": "1"}]}]
    if "map" not in written:
        assert "content block of type 'tool_use'" in refused({"prompt": tool}, word_tokenizer(template))


def test_conversations_are_refused_without_a_template_or_by_it() -> None:
    messages = [{"role": "user", "content": "a"}]
    assert "set tokenizer.chat_template" in refused({"prompt": messages})
    assert "no system" in refused({"prompt": messages}, word_tokenizer("{{ raise_exception('no system') }}"))
    ends_turn = word_tokenizer("{% for m in messages %}{{ m.content }} <eos>{% endfor %}")
    assert "opening of the assistant's turn" in refused({"prompt": messages}, ends_turn)


def test_attention_mask_selects_the_real_tokens_whatever_their_ids() -> None:
    ids = [PAD, PAD, EOS, 3, PAD, 4, EOS, EOS]
    mask = [0, 0, 1, 1, 1, 1, 0, 0]
    assert encode({"input_ids": ids, "attention_mask": mask})["input_ids"] == [EOS, 3, PAD, 4]
    assert real_tokens({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}) == [EOS, 3, PAD, 4]
    assert real_tokens({"input_ids": [3, 4], "attention_mask": None}) == [3, 4]
    assert encode({"input_ids": [PAD, 3, PAD], "attention_mask": [1, 1, 1]})["input_ids"] == [PAD, 3, PAD]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", ["<pad>", "<eos>", "<bos>", "c"], ids=["PAD", "EOS", "BOS", "UNK"])
def test_padding_without_a_mask_is_no_text_whatever_token_it_is(pad: str, side: str, adds_bos: bool) -> None:
    """What the tokenizer's own padding adds comes off again, and no more; inside a prompt the token stays."""
    post = "<bos> $A" if adds_bos else None
    tokenizer = word_tokenizer(post=post, pad_token=pad, unk_token="c", padding_side=side)
    texts = ["a b", f"a {pad} b a", "a"]
    padded = tokenizer(texts, padding="max_length", max_length=8)["input_ids"]
    assert {len(ids) for ids in padded} == {8}
    for text, ids in zip(texts, padded, strict=True):
        whole = tokenizer(text)["input_ids"]
        assert encode({"input_ids": ids}, tokenizer) == encode({"input_ids": whole}, tokenizer) == {"input_ids": whole}
        kept = encode({"input_ids": ids, "attention_mask": [1] * 8}, tokenizer)
        assert kept == {"input_ids": ids}  # a record wins


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ""},
        {"prompt": None},
        {"input_ids": []},
        {"input_ids": [3, 4], "attention_mask": [0, 0]},
        {"input_ids": [PAD, PAD]},
    ],
)
def test_empty_prompts_are_refused(row: dict[str, Any]) -> None:
    assert "has an empty prompt" in refused(row)
    assert "has an empty prompt" in refused(row, word_tokenizer(post="<bos> $A"))  # BOS alone is not a prompt either


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": 5}, "a text or a list of messages"),
        ({"input_ids": [3, 4], "attention_mask": [1]}, "1 values for 2 input_ids"),
        ({"input_ids": [3, -1, 4]}, "token id -1"),
        ({"input_ids": [3, 9, 4]}, "token id 9, outside the policy's 9 ids"),
    ],
)
def test_refused_rows_name_the_row_and_the_problem(row: dict[str, Any], says: str) -> None:
    assert says in refused(row, vocab_size=9)
