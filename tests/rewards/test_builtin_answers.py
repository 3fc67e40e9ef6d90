"""The answer that a text ends in: hand-made texts, and the solutions of real problems."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ppo.rewards.builtin import final_answer, final_number, is_number, same_number, same_text

ANNOUNCED = {
    "so it is 5.\n#### 72": "72",
    "#### 5\n#### 6": "6",
    "#### 72\nand then 5": "72",
    "The answer is 12 apples.": "12 apples.",
    "the final ANSWER IS: Paris": "Paris",
    "Answer: yes\nBecause I say so.": "yes",
    "Answer:\n42": "42",
    "**Answer:** **Paris**": "Paris",
    r"thus \boxed{\frac{3}{4}} is it": r"\frac{3}{4}",
    r"first \boxed{1}, then \boxed{2}": "2",
    r"\boxed{5}, no, the answer is 6": "6",
    r"The answer is \boxed{7}.": "7",
    r"cut off \boxed{12": "12",
    "  no announcement 3 \n": "no announcement 3",
    "the answers are many": "the answers are many",
    "#### ": "",
    "": "",
}

NUMBERS = {
    "#### 1,234": 1234.0,
    "12,000,000 people": 12e6,
    "The answer is $1,200.50.": 1200.5,
    "so 3 + 4 = 7 apples": 7.0,
    "Answer: 12 + 3 = 15 apples": 15.0,
    "Answer: 3 apples and 4 pears": 3.0,
    "3 apples and 4 pears": 4.0,
    "Answer: 3/4 cup": 0.75,
    r"\boxed{\frac{3}{4}}": 0.75,
    r"\boxed{\dfrac{-1}{2}}": -0.5,
    r"\boxed{1{,}000}": 1000.0,
    r"\boxed{\$15}": 15.0,
    "#### 50%": 50.0,
    "5kg": 5.0,
    "€ 5": 5.0,
    "-5": -5.0,
    "-$5": -5.0,
    "\N{MINUS SIGN}8 degrees": -8.0,
    "10-3": 3.0,
    "x = 5 - 3": 3.0,
    "costs 1.5e3 dollars": 1500.0,
    ".5": 0.5,
    "3.14.": 3.14,
    "<<48/2=24>>24": 24.0,
    "**The answer is 42**": 42.0,
    "no number": None,
    "version v2": None,
    "1/0": None,
    "1e400": None,
    "": None,
    "17 in all, but the answer is unknown": None,
}


@pytest.mark.parametrize("text", ANNOUNCED)
def test_the_last_announced_answer_is_taken(text: str) -> None:
    assert final_answer(text) == ANNOUNCED[text]


@pytest.mark.parametrize("text", NUMBERS)
def test_the_number_that_a_text_ends_in(text: str) -> None:
    assert final_number(text) == NUMBERS[text]


@pytest.mark.parametrize("text", ["72", "#### 1,234", "Answer: $5.", "50%", "-3/4", r"\boxed{\frac{3}{4}}"])
def test_a_number_alone_is_a_number(text: str) -> None:
    assert is_number(text)


@pytest.mark.parametrize("text", ["", "Paris", "5 apples", "3 + 4", "1,23", "12 30", "2026-11-21"])
def test_a_number_with_other_words_is_none(text: str) -> None:
    assert not is_number(text)


def test_texts_agree_but_for_case_spacing_and_a_full_stop() -> None:
    assert same_text("I think the answer is  New \t York.", "new york")
    assert same_text("**Answer: Paris**", "Paris")
    assert not same_text("The answer is New York", "York")
    assert not same_text("72.0", "72")


def test_fractions_agree_to_one_part_in_a_million_and_whole_numbers_exactly() -> None:
    assert same_number("#### 0.3333333", "1/3") and not same_number("#### 0.3333", "1/3")
    assert same_number("72.0", "72") and not same_number("#### 1,000,001", "1000000")
    assert same_number("0", "1e-10") and not same_number("0", "1e-6")
    assert not same_number("five", "five"), "two texts without a number do not agree"


@given(st.integers(-(10**12), 10**12), st.integers(0, 99))
def test_any_written_number_is_read_back(whole: int, cents: int) -> None:
    for text in (f"{whole}", f"{whole:,}", f"{whole:,}.{cents:02}", f"The answer is {whole:,}.{cents:02}."):
        assert final_number(f"1 and 2 make 3. {text}") == float(text.split()[-1].rstrip(".").replace(",", ""))


@given(st.text(), st.text())
def test_any_two_texts_can_be_compared(one: str, other: str) -> None:
    assert same_text(one, other) == same_text(other, one)
    assert same_number(one, other) == same_number(other, one)
    assert same_text(one, one)


def test_real_solutions_end_in_their_answer(shared_data: Path) -> None:
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]

    for solution in solutions:
        reference = solution.rsplit("#### ", 1)[1]
        assert final_answer(solution) == reference and is_number(solution)
        assert final_number(solution) == float(reference.replace(",", ""))
    assert len(solutions) == 7473
