"""Stop strings: generation ends and the response is cut at the same token, and prompts are not searched."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from rlhf_ppo.generation.sampling import StopStrings, ended, greedy_config, join_responses, special_tokens
from rlhf_ppo.generation.transformers_engine import CompactionCriterion, TransformersEngine
from tests.conftest import make_tokenizer, needs_continuous, tiny_policy
from tests.generation.test_transformers_engine import prompts, scripted_policy
from tests.runs import QUICK, MakeArgs, train_and_record

CORPUS = [
    "The end. END of the naïve café — 日本語 🙂🙂!",
    "Answer: 12\n\nQuestion: what is it?",
    " the end is the end",
] * 3


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """BPE over bytes, as GPT-2's and Llama 3's: a token may hold half a character."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", padding_side="right")


@functools.cache
def metaspace() -> PreTrainedTokenizerFast:
    """As Llama 2's: words begin with a space that the first token loses when it is decoded; bytes as a last resort."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\N{LOWER ONE EIGHTH BLOCK}" + word for word in ("", "the", "end", "END", "is")]
    tokens += ["th", "e", "n", "d", "END", ".", "!", "EN", "D"]
    bpe = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], unk_token="<unk>"))
    space = decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
    bpe.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


TOKENIZERS = {"bytes": byte_level, "metaspace": metaspace, "words": make_tokenizer}


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def first_end(tokenizer: Any, ids: list[int], strings: tuple[str, ...]) -> int | None:
    """The oracle: decode the response after each token from the start, and stop at the first hit."""
    return next(
        (n for n in range(1, len(ids) + 1) if any(text in text_of(tokenizer, ids[:n]) for text in strings)), None
    )


# ---- The property, over tokenizers, responses and stop strings ----


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, list[list[int]], tuple[str, ...]]:
    """A tokenizer, responses of any of its tokens, and stop strings: pieces of those responses' texts, or others."""
    tokenizer = TOKENIZERS[draw(st.sampled_from(sorted(TOKENIZERS)))]()
    width = draw(st.integers(1, 24))
    some = st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=6, unique=True)
    alphabet = draw(some | st.just(list(range(len(tokenizer)))))
    row = st.lists(st.sampled_from(alphabet), min_size=width, max_size=width)
    rows = draw(st.lists(row, min_size=1, max_size=3))
    text = text_of(tokenizer, draw(st.sampled_from(rows))).replace("\ufffd", "")
    start = draw(st.integers(0, max(0, len(text) - 1)))
    piece = text[start : start + draw(st.integers(1, 8))]
    others = draw(st.lists(st.sampled_from(["END", " the end", "\n", "é", "🙂", "w1 w2", "</s>", "D."]), max_size=2))
    strings = tuple([piece] * bool(piece) + others) or ("x",)
    return tokenizer, rows, strings


@settings(deadline=None, max_examples=300)
@given(cases())
def test_generation_and_truncation_end_each_row_at_the_same_token(case: Any) -> None:
    tokenizer, rows, strings = case
    stop_strings = StopStrings(tokenizer, strings)
    expected = [first_end(tokenizer, ids, strings) for ids in rows]

    criterion = CompactionCriterion(torch.zeros(len(rows)).bool(), (), stop_strings, prompt_length=2, most_left=-1)
    finished: list[int | None] = [None] * len(rows)
    behind_prompts = torch.tensor([[0, 1, *ids] for ids in rows])
    for length in range(1, len(rows[0]) + 1):
        now = criterion(behind_prompts[:, : 2 + length])
        finished = [length if hit and was is None else was for was, hit in zip(finished, now.tolist(), strict=True)]
    assert finished == expected
    assert [stop_strings.end(ids) for ids in rows] == expected

    joined = join_responses(prompts(*([[0, 1]] * len(rows))), torch.tensor(rows), None, 0, stop_strings)
    lengths = [len(ids) if end is None else end for ids, end in zip(rows, expected, strict=True)]
    assert joined.response_mask.sum(dim=1).tolist() == lengths
    assert ended(joined, None, stop_strings).tolist() == [end is not None for end in expected]


# ---- By hand ----


def test_the_space_that_the_first_token_loses() -> None:
    """' END' inside a response, at whose start the same token reads 'END'; also far behind the start."""
    tokenizer = metaspace()
    end, other = tokenizer.convert_tokens_to_ids(["\N{LOWER ONE EIGHTH BLOCK}END", "."])
    stop = StopStrings(tokenizer, (" END",))
    assert stop.end([end, other]) is None
    for length in (1, 5, 40):
        assert stop.end([other] * length + [end]) == length + 1
        row = torch.tensor([[other] * length + [end]])
        assert CompactionCriterion(torch.tensor([False]), (), stop, 0, -1)(row).tolist() == [True]


def test_stop_token_and_stop_string_whichever_comes_first() -> None:
    stop = StopStrings(make_tokenizer(), ("w4",))  # id 7; EOS is 1
    sampled = torch.tensor([[5, 7, 1, 9], [5, 1, 7, 9], [5, 6, 8, 9]])
    joined = join_responses(prompts([5], [5], [5]), sampled, 1, 0, stop)
    assert joined.response_ids.tolist() == [[5, 7, 0, 0], [5, 1, 0, 0], [5, 6, 8, 9]]
    assert ended(joined, 1, stop).tolist() == [True, True, False]
    assert ended(joined, 1, None).tolist() == [False, True, False]


def test_without_a_stop_token_eos_ends_no_response_that_has_stop_strings(make_args: MakeArgs) -> None:
    responses = join_responses(prompts([5]), torch.tensor([[5, 1, 6]]), None, 0)
    for strings, expected in ((["w4"], [False]), (None, [True])):
        tokens = special_tokens(make_args(stop_token=None, stop_strings=strings), make_tokenizer())
        assert tokens.ended(responses).tolist() == expected


# ---- In generate ----


@pytest.mark.parametrize("prompt", [[11, 12], [12, 11], [5, 11]], ids=["whole", "backwards", "its beginning"])
def test_a_stop_string_in_the_prompt_ends_nothing(make_args: MakeArgs, prompt: list[int]) -> None:
    """Nor does one that begins in the prompt: after w8 the policy says w9."""
    stop = StopStrings(make_tokenizer(), ("w8 w9",))
    config = greedy_config(make_args(response_length=4), stop_token_id=None)
    given_prompts = prompts(prompt, [5, 6])
    sampled = TransformersEngine(64, stop).sample(scripted_policy({11: 12}), given_prompts, config).ids
    assert sampled[0].tolist() == [prompt[-1] + 1 + step for step in range(4)]
    assert join_responses(given_prompts, sampled, None, 0, stop).response_mask[0].sum() == 4


# ---- In the trainer ----


@pytest.mark.parametrize("engine", ["transformers", pytest.param("continuous", marks=needs_continuous)])
def test_each_eos_token_of_the_generation_config_ends_a_response(make_trainer: Any, engine: str) -> None:
    policy, listed = tiny_policy(), [1, 5, 6, 7, 8]
    policy.generation_config.eos_token_id = listed
    trainer = make_trainer(**QUICK | {"response_length": 12}, model=policy, generation_engine=engine, temperature=1.0)
    rollouts = train_and_record(trainer)
    rows = [
        ids[real].tolist()
        for each in rollouts
        for ids, real in zip(each.responses.response_ids, each.response_mask, strict=True)
    ]
    assert all(not {*listed} & {*row[:-1]} for row in rows)
    assert torch.cat([each.ended for each in rollouts]).tolist() == [row[-1] in listed for row in rows]
    assert any(row[-1] in listed[1:] for row in rows)
    assert trainer.sampler.settings().eos_token_id == listed  # what vLLM and episodes take
    alone = make_trainer(**QUICK, model=policy, stop_token=None, stop_token_id=9)
    assert alone.tokens.stops == (9,)  # the user's own, which is not among them


def test_a_saved_policy_does_not_stop_at_strings_of_an_earlier_run(make_trainer: Any, tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.generation_config.stop_strings = ["w3"]
    make_trainer(**QUICK, model=policy).save_model(str(tmp_path))
    assert GenerationConfig.from_pretrained(tmp_path).stop_strings is None
    assert policy.generation_config.stop_strings == ["w3"]


def test_training_adds_no_stop_token_to_the_policy_in_memory(make_trainer: Any) -> None:
    """Trainer adds the tokenizer's EOS to another one; a second run on the same policy would stop at both."""
    policy = tiny_policy()
    policy.generation_config.eos_token_id = 5
    for _ in range(2):
        trainer = make_trainer(**QUICK, model=policy)
        trainer.train()
        assert (policy.generation_config.eos_token_id, trainer.tokens.stops) == (5, (1,))
