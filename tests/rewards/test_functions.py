"""Reward functions: GRPO's calling convention, and what a function may return."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerState

from rlhf_ppo.data.prompts import PromptEncoder
from rlhf_ppo.rewards import RewardFunction, ScoringBatch
from rlhf_ppo.rewards.builtin import builtin_reward
from rlhf_ppo.rewards.functions import LoggedByFunctions, naming
from rlhf_ppo.rewards.scorer import WrongRewardError, check_scores
from tests.conftest import make_tokenizer, scoring_batch

PAD, EOS = 0, 1
STATE = TrainerState(global_step=5)
NAN = float("nan")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """<pad>=0 <eos>=1 w0=2 w1=3 ...; pad is told by masks alone."""
    words = ["<pad>", "<eos>", *[f"w{index}" for index in range(20)]]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def make_batch(tokenizer: PreTrainedTokenizerFast, **columns: list[Any]) -> ScoringBatch:
    """Three rows; the prompts have 2, 1, 2 tokens, the responses 3 (stopped), 1 (stopped) and 3 (cut)."""
    return scoring_batch(
        torch.tensor([[2, 3, 4, 5, EOS], [9, 6, EOS, 9, 9], [EOS, 7, 8, 8, 8]]),
        torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool(),
        torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1]]).bool(),
        columns,
        torch.tensor([True, True, False]),
        tokenizer=tokenizer,
    )


def source(function: Any, **options: Any) -> RewardFunction:
    return RewardFunction(function, lambda: STATE, **options)


def recorder(seen: dict[str, Any]) -> Any:
    def reward(prompts: Any, completions: Any, completion_ids: Any, **rest: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **rest)
        return [0.0] * len(prompts)

    return reward


def test_pretokenized_prompts_are_decoded_and_ids_are_the_real_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    seen: dict[str, Any] = {}
    source(recorder(seen))(make_batch(tokenizer, answer=["x", "y", "z"]))
    assert seen["prompts"] == ["w0 w1", "w4", "w5"]  # an EOS inside the prompt is real, and a special token
    assert seen["completions"] == [" w2 w3", "", " w6 w6 w6"]  # what follows the prompt's text
    assert seen["completion_ids"] == [[4, 5, EOS], [EOS], [8, 8, 8]]
    assert seen["answer"] == ["x", "y", "z"] and seen["trainer_state"] is STATE


def test_texts_keep_special_tokens_that_the_policy_wrote(tokenizer: PreTrainedTokenizerFast) -> None:
    """Not EOS, PAD or the stop token, here <end>; a format reward reads them, behind what the template has written."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<end>"]})
    open_id, close_id, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<end>"])
    chats = [[{"role": "user", "content": "w1"}], [{"role": "user", "content": "w2"}]]
    header = "{{ m.role }} {{ m.content if m.content is defined }} "
    opened = "{% if add_generation_prompt %}assistant <think> {% endif %}"
    ids = torch.tensor([[3, open_id, 4, close_id, 5, end], [3, EOS, 4, close_id, 5, end]])
    batch = scoring_batch(ids, ids > 0, (ids > 0)[:, 1:], {}, torch.tensor([True, True]), (end,), tokenizer)
    seen: dict[str, Any] = {}
    source(recorder(seen))(batch)
    assert seen["completions"] == [" <think> w2 </think> w3", " w2 </think> w3"]

    tokenizer.chat_template = "{% for m in messages %}" + header + "{% endfor %}" + opened
    tokenizer.add_tokens(["user", "assistant"])
    prompts = [PromptEncoder(tokenizer, "", None)({"prompt": chat}, 0)["input_ids"] for chat in chats]
    ids = torch.cat([torch.tensor(prompts), ids[:, 2:]], dim=1)
    batch = scoring_batch(
        ids, ids > 0, (ids > 0)[:, -4:], {"prompt": chats}, torch.tensor([True, True]), (end,), tokenizer
    )
    pattern = builtin_reward("formatting", pattern="^<think>.*</think>")
    for reward in (pattern, builtin_reward("think_format_reward")):
        assert source(reward)(batch).tolist() == [1, 1]


def test_a_row_of_ids_among_conversations_has_its_text_as_prompt(tokenizer: Any) -> None:
    chat, ids = [{"role": "user", "content": "w1"}], torch.tensor([[3, 4, 5], [6, 7, 8]])
    real, seen = torch.ones_like(ids).bool(), dict[str, Any]()
    ended = torch.tensor([False, False])
    source(recorder(seen))(scoring_batch(ids, real, real[:, 2:], {"prompt": [chat, None]}, ended, (EOS,), tokenizer))
    assert seen["prompts"] == [chat, tokenizer.decode([6, 7])]
    assert [type(completion) for completion in seen["completions"]] == [list, str]


def test_a_text_and_its_completion_are_the_text_that_was_sampled() -> None:
    """SentencePiece's first word has no space; a message, and what follows a begun one, are texts of their own."""
    core = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["</s>", "▁Mom", "▁said", "▁that", "▁was"])}))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()  # pyright: ignore
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", chat_template="")
    ids = torch.tensor([[1, 2, 3, 1, 4, 0]])
    chat = [{"role": "user", "content": "Mom said that"}]
    begun = [*chat, {"role": "assistant", "content": "Mom said that"}]
    for columns, expected in (({}, " Mom was"), ({"prompt": [chat]}, "Mom was"), ({"prompt": [begun]}, " Mom was")):
        seen: dict[str, Any] = {}
        real = torch.ones_like(ids).bool()
        batch = scoring_batch(ids, real, real[:, 3:], columns, torch.tensor([True]), (0,), tokenizer)
        source(recorder(seen))(batch)
        completion = seen["completions"][0]
        assert (completion if isinstance(completion, str) else completion[0]["content"]) == expected
    assert isinstance(seen["prompts"][0], list)


CONVERSATIONS = [[{"role": "user", "content": f"w{index}"}] for index in range(3)]
GRPO_INPUTS = {
    "text": {"prompt": ["w0 w1", "w4", "<eos> w5"], "answer": ["x", "y", "z"], "completion": ["a", "b", "c"]},
    "conversation": {"prompt": CONVERSATIONS, "n": [1, 2, 3], "completion_ids": [[1], [2], [3]]},
}


@pytest.mark.parametrize("form", GRPO_INPUTS)
@pytest.mark.parametrize("is_async", [False, True])
def test_arguments_and_scores_are_those_of_grpo(form: str, is_async: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    grpo = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    columns = GRPO_INPUTS[form]
    calls: list[dict[str, Any]] = []

    def reward(**arguments: Any) -> list[float | None]:
        calls.append(arguments)
        return [1.5, None, -2.0]

    async def reward_async(**arguments: Any) -> list[float | None]:
        return reward(**arguments)

    function, loop = reward_async if is_async else reward, asyncio.new_event_loop()
    batch = make_batch(tokenizer, **columns)
    completions: list[Any] = [" w2 w3", "", " w6 w6 w6"]  # GRPO's lack the space: it decodes them alone
    if form == "conversation":
        completions = [[{"role": "assistant", "content": text.strip()}] for text in completions]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        state=STATE,
        _log_completion_extra=lambda column, values: None,
        _log_metric=lambda *given: None,
        environments=None,
        reward_funcs=[function],
        reward_processing_classes=[None],
        reward_func_names=["reward"],
        async_loop=loop,
    )
    PartialState()  # GRPO warns of the row without a reward through accelerate's logger
    inputs = [{key: values[row] for key, values in columns.items()} for row in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "run_coroutine_threadsafe", _finished)
        theirs = grpo._calculate_rewards(trainer, inputs, columns["prompt"], completions, batch.response_ids())
    log_metric, log_extra = trainer._log_metric, trainer._log_completion_extra
    ours = source(function, log_metric=log_metric, log_extra=log_extra)(batch)
    assert torch.equal(ours.nan_to_num(99), theirs[:, 0].nan_to_num(99))
    for name in ("log_metric", "log_extra"):  # ours are checked
        assert all(callable(call.pop(name)) for call in calls)
    assert calls[1] == calls[0]
    loop.close()


def _finished(coroutine: Any, loop: asyncio.AbstractEventLoop) -> SimpleNamespace:
    return SimpleNamespace(result=lambda: loop.run_until_complete(coroutine))


# ---- What a function may return ----


@pytest.mark.parametrize(
    "returned",
    [
        (1, 0.5, True),
        torch.tensor([1.0, 0.5, 1.0], dtype=torch.bfloat16, requires_grad=True),
        np.array([1.0, 0.5, 1.0], dtype=object),
        [np.float32(1), torch.tensor(0.5), np.bool_(True)],
        (value for value in [1.0, 0.5, 1.0]),
    ],
)
def test_any_sequence_of_numbers_is_accepted(returned: Any) -> None:
    scores = check_scores(returned, "f", [2, 2, 2])
    assert scores.dtype == torch.float32 and scores.tolist() == [1.0, 0.5, 1.0] and not scores.requires_grad
    assert check_scores([None, 2, None], "f", [2, 2, 2]).tolist() == pytest.approx([NAN, 2, NAN], nan_ok=True)


def test_a_list_in_each_row_rewards_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    for returned in ([[1.0, 2.0], None, [3]], [torch.tensor([1.0, 2.0]), None, np.array([3])]):
        rewards = check_scores(returned, "f", [2, 4, 1])
        assert rewards[0].tolist() == [1.0, 2.0, 0.0, 0.0] and rewards[2].tolist() == [3.0, 0.0, 0.0, 0.0]
        assert rewards[1].isnan().all() and rewards.dtype == torch.float32
    padded = source(lambda completion_ids, **_: completion_ids)(make_batch(tokenizer))
    assert padded.tolist() == [[4.0, 5.0, EOS], [EOS, 0.0, 0.0], [8.0, 8.0, 8.0]]
    of_tool = check_scores([[1.0, None, 2.0], [3.0, 4.0]], "f", [3, 2], [[True, False, True], [True, True]])
    assert of_tool.tolist() == [[1.0, 0.0, 2.0], [3.0, 4.0, 0.0]]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([1.0, 2.0], "^f returned 2 rewards for 3 completions"),
        ([1.0, NAN, 2.0], "^f returned nan for row 1: return a finite number"),
        ([float("-inf"), 1.0, 2.0], "returned -inf for row 0"),
        ([0.0, 1.0, 1e13], "returned 10000000000000.0"),
        (torch.zeros(3, 1), r"returned 1 rewards for the 2 tokens of row 0: .* after .squeeze\(-1\)"),
        ([[1.0, 2.0], [1.0, NAN], None], "returned nan for row 1, token 1"),
        ([[1.0, 2.0], [None, 1.0], None], "returned None for row 1, token 0"),
        ([[1.0, 2.0], 0.5, None], "returned 0.5 for the 2 tokens of row 1"),
        ([0.0, [1.0], 2.0], r"returned \[1.0\] for row 1"),
        (["0.5", 1.0, 2.0], "returned '0.5' for row 0"),
        ([{"score": 1.0}, 1.0, 2.0], "returned {'score': 1.0} for row 0"),
        (None, "returned None for 3 completions: return a list"),
        (0.5, "returned 0.5 for 3 completions"),
        ("abc", "returned 'abc' for 3 completions"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "for 3 completions"),
    ],
)
def test_wrong_scores_are_errors(returned: Any, says: str) -> None:
    with pytest.raises(WrongRewardError, match=says):
        check_scores(returned, "f", [2, 2, 2])


def test_an_error_of_a_function_shows_no_escapes_and_its_name() -> None:
    with pytest.raises(ValueError) as error, naming("f"):
        raise ValueError("wrote \x1b[2J")
    assert str(error.value) == r"wrote \x1b[2J" and error.value.__notes__ == ["raised by the reward function 'f'"]


# ---- What a function logs ----


def test_metrics_are_weighted_by_rows_and_columns_have_a_value_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without metrics no objects are exchanged: under NCCL they would travel through the device."""
    exchanged: list[Any] = []
    monkeypatch.setattr("rlhf_ppo.rewards.functions.gather_object", lambda own: exchanged.extend(own) or own)
    logged = LoggedByFunctions()
    assert logged.drain() == {} and exchanged == []
    extra = ["a", None, 3]

    def judged(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("m", torch.tensor([2.0]))
        log_extra("c", iter(extra))
        return [0.0] * len(completions)

    function = RewardFunction(judged, lambda: STATE, logged.log_metric, log_extra=logged.log_extra)
    function(make_batch(make_tokenizer()))
    logged.log_metric("m", 6.0, 1)
    assert logged.drain_columns() == {"c": extra} and logged.drain() == {"m": 3.0}
    extra.pop()
    with pytest.raises(ValueError, match=r"log_extra\('c', ...\) has 2 values for 3 completions"):
        function(make_batch(make_tokenizer()))
