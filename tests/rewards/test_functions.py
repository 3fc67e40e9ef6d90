"""Reward functions: GRPO's calling convention, and what a function may return."""

import asyncio
import functools
import math
import pickle
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerState

from rlhf_ppo.processes.distributed import _portable
from rlhf_ppo.rewards import RewardFunction, ScoringBatch
from rlhf_ppo.rewards.functions import LoggedByFunctions, function_name
from rlhf_ppo.rewards.scorer import Scorer, WrongRewardError, check_scores
from tests.conftest import make_tokenizer

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


def make_batch(**columns: list[Any]) -> ScoringBatch:
    """Three rows; the prompts have 2, 1, 2 tokens, the responses 3 (stopped), 1 (stopped) and 3 (cut)."""
    return ScoringBatch(
        query_responses=torch.tensor([[2, 3, 4, 5, EOS], [9, 6, EOS, 9, 9], [EOS, 7, 8, 8, 8]]),
        attention_mask=torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool(),
        response_mask=torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1]]).bool(),
        columns=columns,
        ended=torch.tensor([True, True, False]),
    )


def source(function: Any, tokenizer: PreTrainedTokenizerFast, **options: Any) -> RewardFunction:
    return RewardFunction(function, tokenizer, lambda: STATE, **options)


def recorder(seen: dict[str, Any]) -> Any:
    def reward(prompts: Any, completions: Any, completion_ids: Any, **rest: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **rest)
        return [0.0] * len(prompts)

    return reward


def test_pretokenized_prompts_are_decoded_and_ids_are_the_real_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    seen: dict[str, Any] = {}
    source(recorder(seen), tokenizer)(make_batch(answer=["x", "y", "z"]))
    assert seen["prompts"] == ["w0 w1", "w4", "w5"]  # an EOS inside the prompt is real, and a special token
    assert seen["completions"] == ["w2 w3", "", "w6 w6 w6"]
    assert seen["completion_ids"] == [[4, 5, EOS], [EOS], [8, 8, 8]]
    assert seen["answer"] == ["x", "y", "z"] and seen["trainer_state"] is STATE


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

    function, batch, loop = reward_async if is_async else reward, make_batch(**columns), asyncio.new_event_loop()
    completions: list[Any] = ["w2 w3", "", "w6 w6 w6"]
    if form == "conversation":
        completions = [[{"role": "assistant", "content": text}] for text in completions]
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
    ours = source(function, tokenizer, log_metric=log_metric, log_extra=log_extra)(batch)
    assert torch.equal(ours.nan_to_num(99), theirs[:, 0].nan_to_num(99))
    for name in ("log_metric", "log_extra"):  # ours are checked
        assert all(callable(call.pop(name)) for call in calls)
    assert calls[1] == calls[0]
    loop.close()


def _finished(coroutine: Any, loop: asyncio.AbstractEventLoop) -> SimpleNamespace:
    return SimpleNamespace(result=lambda: loop.run_until_complete(coroutine))


def test_a_function_without_kwargs_gets_only_what_it_names(tokenizer: PreTrainedTokenizerFast) -> None:
    def by_answer(completions: list[str], answer: list[str], *, scale: float = 2.0) -> list[float]:
        return [scale * (text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    scores = source(by_answer, tokenizer)(make_batch(answer=["w2 w3", "no", "w6 w6 w6"], unused=[1, 2, 3]))
    assert scores.tolist() == [2.0, 0.0, 2.0]
    halved = source(functools.partial(by_answer, scale=0.5), tokenizer)(make_batch(answer=["w2 w3", "", ""]))
    assert halved.tolist() == [0.5, 0.5, 0.0]


def test_a_column_that_a_function_requires_and_nobody_has_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    def needs_answer(completions: list[str], answer: list[str]) -> list[float]:
        raise AssertionError("must not be called")

    with pytest.raises(ValueError, match=r"'needs_answer' requires the arguments \['answer'\].*'solution'"):
        source(needs_answer, tokenizer)(make_batch(solution=[1, 2, 3]))


def test_columns_cannot_take_the_place_of_the_arguments(tokenizer: PreTrainedTokenizerFast) -> None:
    seen: dict[str, Any] = {}
    source(recorder(seen), tokenizer)(make_batch(prompts=["no"] * 3, completions=["no"] * 3, trainer_state=["no"] * 3))
    assert seen["completions"] == ["w2 w3", "", "w6 w6 w6"] and seen["trainer_state"] is STATE
    assert seen["prompts"] == ["w0 w1", "w4", "w5"]


class Judge:
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]


class AsyncJudge:
    async def __call__(self, completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]


@pytest.mark.parametrize(("judge", "is_async"), [(Judge(), False), (AsyncJudge(), True)])
def test_callable_objects(judge: Any, is_async: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    for function in (judge, functools.partial(judge)):
        reward = source(function, tokenizer)
        assert reward.is_async is is_async and reward.name == type(judge).__name__
        assert reward(make_batch()).tolist() == [5.0, 0.0, 8.0]


def test_a_plain_function_may_return_a_coroutine(tokenizer: PreTrainedTokenizerFast) -> None:
    """As a decorator around an async function does."""
    judge = AsyncJudge()
    reward = source(lambda completions, **_: judge(completions), tokenizer)
    assert not reward.is_async and reward(make_batch()).tolist() == [5.0, 0.0, 8.0]


def test_names() -> None:
    def good(**_: Any) -> None: ...

    named = functools.partial(functools.partial(good, b=2), a=1)
    assert function_name(good) == function_name(named) == "good"
    named.__name__ = "outer"  # pyright: ignore[reportAttributeAccessIssue]
    assert function_name(named) == function_name(functools.partial(named)) == "outer"
    assert (function_name(lambda: 0), function_name(Judge())) == ("lambda", "Judge")


def test_a_given_name_wins_and_errors_use_it(tokenizer: PreTrainedTokenizerFast) -> None:
    reward = source(lambda **_: [1.0], tokenizer, name="brevity")
    assert reward.name == "brevity"
    with pytest.raises(ValueError, match="reward function 'brevity' returned 1 rewards for 3 completions"):
        reward(make_batch())


@pytest.mark.parametrize("is_async", [False, True])
def test_functions_run_without_gradients(is_async: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    def reward(completions: list[str]) -> list[float]:
        return [float(torch.is_grad_enabled())] * len(completions)

    async def reward_async(completions: list[str]) -> list[float]:
        return reward(completions)

    assert source(reward_async if is_async else reward, tokenizer)(make_batch()).tolist() == [0.0] * 3
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("is_async", [False, True])
def test_what_the_function_raises_comes_through_with_its_name(
    is_async: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    class NoNetwork(ConnectionError): ...

    def flaky(**_: Any) -> list[float]:
        raise NoNetwork("no route")

    async def flaky_async(**_: Any) -> list[float]:
        raise NoNetwork("no route")

    function = flaky_async if is_async else flaky
    with pytest.raises(NoNetwork, match="no route") as error:
        source(function, tokenizer)(make_batch())
    [note] = error.value.__notes__
    assert note == f"raised by the reward function {function.__name__!r}, given the rows 0 to 2 after update 5"


def test_the_row_that_fails_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    def fragile(prompts: list[str], completions: list[str]) -> list[float]:
        return [1 / len(text) for text in completions]

    with pytest.raises(ZeroDivisionError) as error:
        source(fragile, tokenizer)(make_batch())
    [note] = error.value.__notes__
    assert note.endswith("after update 5; row 1 alone fails too: prompts='w4', completions=''")


def test_an_async_client_keeps_its_loop_between_calls(tokenizer: PreTrainedTokenizerFast) -> None:
    loops: list[Any] = []

    async def reward(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    function = source(reward, tokenizer)

    async def inside_a_running_loop() -> None:  # a notebook
        function(make_batch())

    function(make_batch())
    asyncio.run(inside_a_running_loop())
    assert loops[0] is loops[1] and not loops[0].is_closed()


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5, True],
        (1.0, 0.5, 1),
        torch.tensor([1.0, 0.5, 1.0], requires_grad=True),
        torch.tensor([1.0, 0.5, 1.0], dtype=torch.bfloat16),
        np.array([1.0, 0.5, 1.0]),
        np.array([1.0, 0.5, 1.0], dtype=object),
        {"a": 1.0, "b": 0.5, "c": 1.0}.values(),
        [np.float32(1), torch.tensor(0.5), np.bool_(True)],
        (value for value in [1.0, 0.5, 1.0]),
    ],
)
def test_any_sequence_of_numbers_is_accepted(returned: Any) -> None:
    scores = check_scores(returned, "f", [2, 2, 2])
    assert scores.dtype == torch.float32 and scores.tolist() == [1.0, 0.5, 1.0] and not scores.requires_grad
    assert check_scores([None, 2, None], "f", [2, 2, 2]).tolist() == pytest.approx([NAN, 2, NAN], nan_ok=True)


def test_a_list_in_each_row_rewards_tokens() -> None:
    for returned in ([[1.0, 2.0], None, [3]], [torch.tensor([1.0, 2.0]), None, np.array([3])]):
        rewards = check_scores(returned, "f", [2, 4, 1])
        assert rewards[0].tolist() == [1.0, 2.0, 0.0, 0.0] and rewards[2].tolist() == [3.0, 0.0, 0.0, 0.0]
        assert rewards[1].isnan().all() and rewards.dtype == torch.float32
    assert check_scores(torch.ones(2, 3), "f", [3, 3]).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_rewards_per_token_have_the_width_of_the_responses(is_async: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    def ids(completion_ids: list[list[int]]) -> list[list[int]]:
        return completion_ids

    async def ids_async(completion_ids: list[list[int]]) -> list[list[int]]:
        return completion_ids

    rewards = source(ids_async if is_async else ids, tokenizer)(make_batch())
    assert rewards.tolist() == [[4.0, 5.0, EOS], [EOS, 0.0, 0.0], [8.0, 8.0, 8.0]]


@pytest.mark.parametrize(
    ("returned", "kind", "says"),
    [
        ([1.0, 2.0], ValueError, "returned 2 rewards for 3 completions"),
        (torch.zeros(4), ValueError, "returned 4 rewards for 3 completions"),
        ([], ValueError, "returned 0 rewards"),
        ([1.0, NAN, 2.0], ValueError, "returned nan for row 1"),
        (torch.tensor([0.0, 1.0, NAN]), ValueError, "returned nan for row 2"),
        ([float("-inf"), 1.0, 2.0], ValueError, "returned -inf for row 0"),
        ([0.0, 1.0, 1e39], ValueError, r"returned 1e\+39 for row 2"),
        (10**400 * np.array([1, 1, 1], dtype=object), ValueError, "for row 0"),
        ("abc", TypeError, r"returned 'abc' \(str\): return a list of 3 numbers"),
        (0.5, TypeError, r"returned 0.5 \(float\)"),
        (torch.tensor(0.5), TypeError, r"\(Tensor\)"),
        (None, TypeError, "returned None"),
        ({0: 1.0, 1: 2.0, 2: 3.0}, TypeError, r"\(dict\)"),
        ({1.0, 2.0, 3.0}, TypeError, r"\(set\)"),
        (bytearray(b"123"), TypeError, r"\(bytearray\)"),
        (SimpleNamespace(rewards=[1.0, 2.0, 3.0]), TypeError, r"\(SimpleNamespace\)"),
        ([Decimal("0.5"), 1.0, 2.0], TypeError, r"\(Decimal\) for row 0"),
        ([{"score": 1.0}, 1.0, 2.0], TypeError, r"\(dict\) for row 0"),
        ([[[1.0], [1.0]], None, None], TypeError, "for row 0, token 0"),
        (["0.5", 1.0, 2.0], TypeError, r"returned '0.5' \(str\) for row 0"),
        (torch.zeros(3, 1), ValueError, r"returned 1 rewards for the 2 tokens of row 0: .* after .squeeze\(-1\)"),
        ([[1.0, 2.0], None, [3.0]], ValueError, "returned 1 rewards for the 2 tokens of row 2"),
        ([[1.0, 2.0], [1.0, 2.0, 3.0], None], ValueError, "returned 3 rewards for the 2 tokens of row 1"),
        ([[1.0, 2.0], 0.5, None], TypeError, r"returned 0.5 \(float\) for row 1, and a list for another"),
        ([[1.0, 2.0], [1.0, NAN], None], ValueError, "returned nan for row 1, token 1"),
        ([[1.0, 2.0], [None, 1.0], None], TypeError, "returned None for row 1, token 0"),
        ([[1.0, 2.0], [1.0, "x"], None], TypeError, r"returned 'x' \(str\) for row 1, token 1"),
        ([0.0, [1.0], 2.0], TypeError, r"\(list\) for row 1"),
        ([0.0, torch.zeros(2), 2.0], TypeError, r"\(Tensor\) for row 1"),
        ([0.0, 1j, 2.0], TypeError, r"\(complex\) for row 1"),
    ],
)
def test_anything_else_names_the_function_the_row_and_the_fix(returned: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says) as error:
        check_scores(returned, "the reward function 'my_reward'", [2, 2, 2])
    assert "reward function 'my_reward'" in str(error.value) and "return " in str(error.value).rsplit(": ", 1)[1]


@pytest.mark.parametrize("empty", [None, math.nan, math.inf, "no number"])
def test_what_is_returned_for_tokens_of_a_tool_is_not_read(empty: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """The policy wrote the first and the third token; what is missing for one of these is an error as ever."""
    gaps = ScoringBatch(
        torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]]), torch.ones(2, 4, dtype=torch.bool),
        torch.tensor([[True, False, True], [True, True, True]]), {}, torch.ones(2, dtype=torch.bool),
    )  # fmt: skip
    tool = RewardFunction(lambda **_: [[1.0, empty, 2.0], [3.0, 4.0, 5.0]], tokenizer, lambda: STATE)
    assert tool(gaps).tolist() == [[1, 0, 2], [3, 4, 5]]
    assert Scorer([tool])(gaps).total.tolist() == [3, 12]
    assert Scorer([tool])(gaps).by_source["lambda"].tolist() == [3, 12]
    own = RewardFunction(lambda **_: [[1.0, 2.0, empty], None], tokenizer, lambda: STATE)
    with pytest.raises((TypeError, ValueError), match="for row 0, token 2"):
        own(gaps)


# ---- What a function logs is checked at the call ----


def scored(call: Any) -> LoggedByFunctions:
    """Score three completions with a function that makes a call of `log_metric` and `log_extra`."""
    logged = LoggedByFunctions()

    def judged(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        call(log_metric, log_extra)
        return [0.0] * len(completions)

    RewardFunction(judged, make_tokenizer(), lambda: STATE, logged.log_metric, log_extra=logged.log_extra)(
        make_batch()
    )
    return logged


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda metric, extra: metric("m", 10**400), r"log_metric\('m', 10+\): pass numbers below 1e308"),
        (lambda metric, extra: metric("m", 10**5000), r"log_metric\('m', an integer of thousands of digits\)"),
        (lambda metric, extra: metric("m", "high"), r"log_metric\('m', 'high'\): pass one number"),
        (lambda metric, extra: metric("m", None), r"log_metric\('m', None\): pass one number"),
        (lambda metric, extra: metric("\ud800", 1.0), r"log_metric\('\\ud800', '\\ud800'\): .*half of a surrogate"),
        (lambda metric, extra: metric(3, 1.0), r"log_metric\(3, None\): pass a text as the name"),
        (lambda metric, extra: extra("c", ["a", "b"]), r"log_extra\('c', \['a', 'b'\]\): it has 2 values: .* 3 compl"),
        (lambda metric, extra: extra("c", "abc"), r"log_extra\('c', 'abc'\): pass a list of 3 values"),
        (lambda metric, extra: extra("c", None), r"log_extra\('c', None\): pass a list of 3 values"),
        (lambda metric, extra: extra("c", ["a", "\ud800", 3]), r"log_extra\('c', '\\ud800'\): .*half of a surrogate"),
        (lambda metric, extra: extra("c", [1, 2, 10**400]), r"log_extra\('c', 10+\): pass numbers below 1e308"),
        (lambda metric, extra: extra("\ud800", [1, 2, 3]), r"log_extra\('\\ud800', .*half of a surrogate"),
    ],
)  # fmt: skip
def test_what_cannot_be_logged_is_refused_at_the_call(call: Any, said: str) -> None:
    with pytest.raises(WrongRewardError, match=f"^the reward function 'judged' called {said}"):
        scored(call)


def test_all_ranks_raise_the_same() -> None:
    with pytest.raises(WrongRewardError) as raised:
        scored(lambda metric, extra: extra("c", ["a"]))
    other = pickle.loads(pickle.dumps(_portable(raised.value, rank=1)))

    assert (type(other), str(other)) == (WrongRewardError, str(raised.value))


@pytest.mark.parametrize("value", [1, True, 0.5, float("nan"), np.float32(2), torch.tensor([3.0]), "4"])
def test_what_python_takes_for_a_number_is_logged(value: Any) -> None:
    ((logged, _),) = scored(lambda metric, extra: metric("m", value)).values["m"]

    assert logged == float(value) or logged != logged


def test_columns_hold_any_values_and_names_are_visible() -> None:
    values = [None, {"a": [1]}, torch.zeros(2)]
    logged = scored(lambda metric, extra: (extra("c\x1b[2J\n", iter(values)), metric("m\x1b", 1.0)))

    assert logged.columns == {r"c\x1b[2J\n": values} and logged.values == {r"m\x1b": [(1.0, 3.0)]}


def test_nothing_logged_exchanges_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NCCL they travel through the device, for which the host waits several times in each update."""
    exchanged: list[Any] = []
    monkeypatch.setattr("rlhf_ppo.rewards.functions.gather_object", lambda own: exchanged.extend(own) or own)
    assert LoggedByFunctions().drain() == {} and exchanged == []
    assert scored(lambda metric, extra: metric("m", 2.0)).drain() == {"m": 2.0} and exchanged == [{"m": [(2.0, 3.0)]}]
