"""Rewards by name: every equation by hand, the answers of real problems, and TRL's own rewards."""

import importlib.util
import pickle
import signal
from typing import Any

import numpy as np
import pytest

from rlhf_ppo.rewards import limited
from rlhf_ppo.rewards.builtin import (
    BUILTIN_REWARDS,
    TRL_REWARDS,
    builtin_reward,
    final_answer,
    final_number,
    prompt_text,
    same_number,
    same_text,
)
from rlhf_ppo.rewards.functions import function_name

HAS_MATH_VERIFY = importlib.util.find_spec("math_verify") is not None
WORDS_60 = " ".join(["word"] * 60)


def joined(prompt: str, generated: str, full_text: str) -> float:
    """For `custom`: a number that tells its three texts apart."""
    return len(prompt) + 10 * len(generated) + 100 * (full_text == prompt + generated)


SETTINGS: dict[str, dict[str, Any]] = {"keyword": {"keywords": ["yes", "no"]}, "custom": {"function": joined}}
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "get_cosine_scaled_reward": {"max_len": 10},
    "get_soft_overlong_punishment": {"max_completion_len": 6, "soft_punish_cache": 4},
}


def score(name: str, *texts: str, columns: dict[str, list[Any]] | None = None, **settings: Any) -> list[float | None]:
    prompts = ["prompt"] * len(texts)
    return builtin_reward(name, **settings)(prompts=prompts, completions=list(texts), **columns or {})


def test_length_penalty_is_a_hundredth_per_word_beyond_fifty() -> None:
    assert score("length_penalty", "a b", " ".join(["w"] * 50), WORDS_60, "") == pytest.approx([0, 0, -0.1, 0])
    assert score("length_penalty", "a b  c\nd", max_words=1, penalty=0.5) == [-1.5]


def test_default_adds_half_for_a_sentence_that_ends() -> None:
    assert score("default", "Hi", "Hi.", "Hi! Hi?", "?", WORDS_60 + ".") == pytest.approx([0, 0.5, 0.5, 0.5, 0.4])
    assert score("default", "one two.", max_words=1, penalty=1.0, bonus=3.0) == [2.0]


def test_length_is_a_hundredth_per_word() -> None:
    assert score("length", WORDS_60, "") == pytest.approx([0.6, 0.0])
    assert score("length", "a b c", unit=2) == [1.5]


def test_formatting_finds_an_announced_answer_or_a_pattern() -> None:
    assert score("formatting", "Answer: 5", "#### 5", r"\boxed{5}", "answer 5", "boxed{5}") == [1, 1, 1, 0, 0]
    assert score("formatting", "<a>x</a>", "<a>x", pattern=r"<a>.*</a>") == [1, 0]


def test_keyword_counts_each_keyword_once() -> None:
    assert score("keyword", "yes yes", "yes, no", "Yes", "", keywords=["yes", "no"]) == [1, 2, 0, 0]


def test_custom_gets_prompt_response_and_both() -> None:
    assert score("custom", "ab", "", function=joined) == [6 + 20 + 100, 6 + 100]
    conversation = [[{"role": "user", "content": "Hi"}]]  # "User: Hi\n\n" has 10 characters
    response = [[{"role": "assistant", "content": "abc"}]]
    assert builtin_reward("custom", function=joined)(prompts=conversation, completions=response) == [10 + 30 + 100]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": [{"type": "text", "text": "w3 "}, {"type": "text", "text": "w4"}]}, "w3 w4"),
        (
            {"content": [{"type": "image_url", "image_url": "data:AAAA"}, {"type": "text", "text": "w3"}]},
            "[image_url]w3",
        ),
        ({"content": np.array([{"type": "text", "text": "w3"}])}, "w3"),
        ({"content": None}, ""),
        ({"tool_calls": []}, ""),
    ],
    ids=["blocks", "image", "parquet", "none", "missing"],
)
def test_a_judge_or_custom_reward_reads_the_text_of_each_message(message: dict[str, Any], text: str) -> None:
    assert prompt_text([{"role": "user", **message}, {"role": "assistant", "content": "w9"}]) == (
        f"User: {text}\n\nAssistant: w9\n\n"
    )


@pytest.mark.parametrize("answer", ["no 42", [{"type": "text", "text": "no 42"}]], ids=["text", "blocks"])
def test_of_an_episode_the_policys_own_words_count(answer: Any) -> None:
    """What a tool or an environment answers earns nothing; turns stay apart, and those of calls alone have no text."""
    call = {"role": "assistant", "content": "", "tool_calls": []}
    episode = [call, {"role": "tool", "name": "find", "content": answer}, {"role": "assistant", "content": "yes 4"}]
    asked = [*episode, {"role": "user", "content": "no 42"}, {"role": "assistant", "content": "2"}]

    def scored(name: str, **settings: Any) -> list[float | None]:
        return builtin_reward(name, **settings)(prompts=["p"] * 2, completions=[episode, asked], answer=["42"] * 2)

    assert scored("keyword", keywords=["yes", "no"]) == [1, 1]
    assert scored("length", unit=1) == [2, 3]
    assert scored("correctness") == [0, 0]


ANSWERS = {
    "auto": [("#### 72", "72", 1), ("It is 72 clips.", "#### 72", 1), ("71", "72", 0), ("Paris.", "paris", 1)],
    "exact": [("72.0", "72", 0), ("The answer is Paris", "Paris", 1), ("Paris, France", "Paris", 0)],
    "numeric": [("72.0", "72 clips", 1), ("3/4", "0.75", 1), ("$1,200", "1200", 1), ("none", "none", 0)],
}


@pytest.mark.parametrize("mode", ANSWERS)
def test_correctness_compares_the_answers_that_texts_end_in(mode: str) -> None:
    texts, wanted, expected = (list(column) for column in zip(*ANSWERS[mode], strict=True))
    assert score("correctness", *texts, columns={"answer": wanted}, mode=mode) == expected


def test_correctness_reads_the_column_answer_then_solution_or_the_one_given() -> None:
    columns = {"solution": ["2"], "other": [3]}
    assert score("correctness", "1", columns={"answer": ["1"], **columns}) == [1]
    assert score("correctness", "1", "2", columns={"solution": ["2", "2"]}) == [0, 1]
    assert score("correctness", "3", columns={"answer": ["1"], **columns}, column="other") == [1]
    assert score("correctness", "3", "4", columns={"answer": [None, 4]}) == [None, 1]
    assert score("correctness", "3", "4", "5", columns={"answer": [["2", "3"], ["3"], [None]]}) == [1, 0, None]


@pytest.mark.skipif(not HAS_MATH_VERIFY, reason="math-verify is not installed")
def test_math_mode_compares_expressions() -> None:
    texts = [r"so \boxed{\frac{2}{4}}", r"\boxed{x^2 + 2x + 1}", r"$\frac{1}{3}$", "I do not know"]
    wanted = [r"\frac{1}{2}", "(x+1)^2", "0.5", "7"]
    assert score("correctness", *texts, columns={"answer": wanted}, mode="math") == [1, 1, 0, 0]


@pytest.mark.skipif(not HAS_MATH_VERIFY, reason="math-verify is not installed")
def test_math_mode_ends_on_a_tower_of_powers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take longer than the universe has, in C code that ignores signals and threads."""
    monkeypatch.setattr(limited, "SECONDS", 2.0)
    texts = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{1}"]
    assert score("correctness", *texts, columns={"answer": ["1", "1"]}, mode="math") == [0, 1]


def test_a_pattern_that_backtracks_for_ever_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "SECONDS", 2.0)
    assert score("formatting", "a" * 40 + "b", "aaa", pattern="(a+)+$") == [0, 1]
    with pytest.raises(RuntimeError, match="matches ended with exit code 1"):
        score("formatting", "a", pattern="(")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGKILL"])
def test_the_process_of_long_comparisons_outlives_a_schedulers_signals(name: str) -> None:
    """A run ends after its update, for which it needs scores; a process that was killed is started again."""
    matches = limited.LimitedProcess()
    assert matches("matches", "a", "a")
    process = matches._process
    process.send_signal(getattr(signal, name))
    if name == "SIGKILL":
        process.wait()
    assert matches("matches", "a", "a") and (matches._process is process) == (name != "SIGKILL")


OF_ONE_TEXT = {
    "default": 0.5, "length_penalty": 0, "length": 0.03, "formatting": 1, "keyword": 1, "correctness": 1,
    "custom": 1 + 110 + 100,
}  # fmt: skip
"""Scores of `yes. #### 3`, by hand."""


@pytest.mark.parametrize("name", BUILTIN_REWARDS)
def test_builtins_have_a_score_by_hand_and_are_picklable_and_named(name: str) -> None:
    assert name in OF_ONE_TEXT, f"{name} needs a score in OF_ONE_TEXT, and a test of its equation here"
    reward = builtin_reward(name, **SETTINGS.get(name, {}))
    again = pickle.loads(pickle.dumps(reward))

    arguments = {"prompts": ["p"], "completions": ["yes. #### 3"], "answer": ["3"]}
    assert again(**arguments) == reward(**arguments) == pytest.approx([OF_ONE_TEXT[name]])
    assert function_name(again) == function_name(reward) == name


@pytest.mark.parametrize("name", TRL_REWARDS)
def test_trl_rewards_score_texts_as_trl_scores_messages(name: str) -> None:
    rewards = pytest.importorskip("trl.rewards")
    if not hasattr(rewards, name):
        pytest.skip("this version of TRL does not have it")
    if "accuracy" in name or "cosine" in name:
        pytest.importorskip("math_verify")
    settings = TRL_SETTINGS.get(name, {})
    theirs = getattr(rewards, name)(**settings) if name.startswith("get_") else getattr(rewards, name)
    texts = [r"<think>hm</think> \boxed{3}", "a b c a b c a b c", r"\boxed{4}"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {"completion_ids": [[1] * 3, [1] * 5, [1] * 9], "solution": [r"\boxed{3}"] * 3}

    ours = pickle.loads(pickle.dumps(builtin_reward(name, **settings)))
    expected = theirs(completions=messages, **columns)
    assert ours(completions=texts, **columns) == ours(completions=messages, **columns) == expected
    assert len(set(expected)) > 1, "an example that the reward tells apart"
    assert function_name(ours) == theirs.__name__


# ---- The answer that a text ends in ----


ANNOUNCED = {
    "so it is 5.\n#### 72": "72",
    "#### 72\nand then 5": "72",
    "The answer is 12 apples.": "12 apples.",
    "the final ANSWER IS: Paris": "Paris",
    "Answer: yes\nBecause I say so.": "yes",
    "**Answer:** **Paris**": "Paris",
    r"thus \boxed{\frac{3}{4}} is it": r"\frac{3}{4}",
    r"first \boxed{1}, then \boxed{2}": "2",
    r"\boxed{5}, no, the answer is 6": "6",
    r"The answer is \boxed{7}.": "7",
    r"cut off \boxed{12": "12",
    "  no announcement 3 \n": "no announcement 3",
    "": "",
}

NUMBERS = {
    "#### 1,234": 1234.0,
    "The answer is $1,200.50.": 1200.5,
    "so 3 + 4 = 7 apples": 7.0,
    "Answer: 12 + 3 = 15 apples": 15.0,
    "Answer: 3 apples and 4 pears": 3.0,
    "Answer: 3/4 cup": 0.75,
    r"\boxed{\frac{3}{4}}": 0.75,
    r"\boxed{1{,}000}": 1000.0,
    r"\boxed{\$15}": 15.0,
    "5kg": 5.0,
    "-$5": -5.0,
    "\N{MINUS SIGN}8 degrees": -8.0,
    "x = 5 - 3": 3.0,
    "3.14.": 3.14,
    "no number": None,
    "1e400": None,
    "17 in all, but the answer is unknown": None,
}


@pytest.mark.parametrize("text", ANNOUNCED)
def test_the_last_announced_answer_is_taken(text: str) -> None:
    assert final_answer(text) == ANNOUNCED[text]


@pytest.mark.parametrize("text", NUMBERS)
def test_the_number_that_a_text_ends_in(text: str) -> None:
    assert final_number(text) == NUMBERS[text]


def test_texts_agree_but_for_case_spacing_and_a_full_stop() -> None:
    assert same_text("I think the answer is  New \t York.", "new york")
    assert same_text("**Answer: Paris**", "Paris")
    assert same_text("**Answer:** Paris.", "Paris")
    assert same_text("The answer is **Paris**.", "Paris")
    assert not same_text("The answer is New York", "York")
    assert not same_text("72.0", "72")


def test_fractions_agree_to_one_part_in_a_million_and_whole_numbers_exactly() -> None:
    assert same_number("#### 0.3333333", "1/3") and not same_number("#### 0.3333", "1/3")
    assert same_number("72.0", "72") and not same_number("#### 1,000,001", "1000000")
    assert same_number("0", "1e-10") and not same_number("0", "1e-6")
    assert not same_number("five", "five"), "two texts without a number do not agree"
