"""The judge reads exactly what the grammar writes, and nothing else."""

import math
import random

import pytest

from rlhf_ppo.cli.demo import DemoResult, compare, draw_continuation, draw_opening, pleasantness
from rlhf_ppo.reporting.win_rate import WinRate


def test_reads_every_story_of_the_grammar_with_its_true_pleasantness():
    rng = random.Random(0)
    for _ in range(500):
        opening = draw_opening(rng)
        continuation = draw_continuation(opening, rng)
        assert pleasantness(continuation.text, opening.hero) == continuation.pleasantness


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (" She found a golden bell.", 2),
        (" She found a golden bell. In the end she was miserable.", 0),
        (" She met a kind fox. They fought under the tree. She ate some sweet pie.", 2 - 2 + 1),
        (" She lost the key. In the end she was tired.", -2),
    ],
)
def test_pleasantness_is_the_sum_over_words(response, expected):
    assert pleasantness(response, "She") == expected


@pytest.mark.parametrize(
    ("response", "flaw"),
    [
        ("", "empty"),
        (" happy happy happy happy", "not a sentence"),
        (" She found a golden golden bell.", "a word too many"),
        (" She found a happy bell.", "a word of another slot"),
        (" He found a golden bell.", "another hero"),
        (" In the end He was happy.", "a capital letter"),
        (" In the end she was happy.", "an ending without a story"),
        (" In the end she was happy. She found a golden bell.", "an ending in the middle"),
        (" She found a golden bell. In the end she was happy. In the end she was happy.", "two endings"),
        (" She found a golden bell. She found a golden bell.", "the same sentence twice"),
        (" She found a golden bell. She found a lovely key.", "the same kind of sentence twice"),
        (
            " She found a golden bell. She met a kind fox. They danced under the moon. She won the hat.",
            "more events than any story has",
        ),
        (" She found a golden bell. She met a kind", "cut off"),
        (" She found a golden bell.. She met a kind fox.", "two full stops"),
        ("She found a golden bell.", "no space after the opening"),
        (" She found a golden bell. ", "trailing space"),
    ],
)
def test_what_is_no_story_is_worse_than_any_story(response, flaw):
    assert pleasantness(response, "She") == -math.inf, flaw


GOOD, DULL, BROKEN = " She won the hat.", " She moved the hat.", " won won won won"


def test_compare_counts_from_the_first_policys_side():
    first = [GOOD, DULL, GOOD, BROKEN, BROKEN, GOOD]
    second = [DULL, GOOD, GOOD, DULL, BROKEN, BROKEN]
    assert compare(first, second, ["She"] * 6) == WinRate(2, 2, 2, 0)
    assert compare(second, first, ["She"] * 6) == WinRate(2, 2, 2, 0)
    assert compare([BROKEN], [" She ruined the hat."], ["She"]) == WinRate(0, 1, 0, 0)
    with pytest.raises(ValueError):
        compare([GOOD], [GOOD, DULL], ["She", "She"])


@pytest.mark.parametrize(
    ("wins", "losses", "clear"),
    [(65, 35, False), (66, 34, True), (34, 66, False), (9, 0, False), (10, 0, True), (0, 0, False)],
)
def test_clear_means_three_standard_errors(wins, losses, clear):
    """wins - losses against 3 sqrt(wins + losses): 30 against 30, 32 against 30, 9 against 9, 10 against 9.49."""
    assert DemoResult(0.5, {}, {}, WinRate(wins, losses, 50, 0)).is_clear is clear
