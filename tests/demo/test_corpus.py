"""The demonstration's corpus: the same for a seed, within the lengths that the demonstration allows, and learnable."""

import math
import random
from collections import Counter

import pytest

from rlhf_ppo.demo.corpus import (
    ENDING,
    EVENTS,
    HEROES,
    WORDS,
    Opening,
    draw_continuation,
    draw_opening,
    draw_repetitive_continuation,
    openings,
    pleasantness,
    preference_pairs,
    slots_of,
    stories,
)


def hero_of(prompt: str) -> str:
    return next(hero for hero, names in HEROES.items() if any(f" {name} " in prompt for name in names))


def kinds_of(text: str) -> list[str]:
    """Name each sentence's template by its second word, or by the slot that the word fills."""
    words = [sentence.split()[1] for sentence in text.split(".")[:-1]]
    return [next((slot for slot in ("fate", "deed") if word in WORDS[slot]), word) for word in words]


@pytest.mark.parametrize("draw", [stories, preference_pairs, openings])
def test_a_seed_fixes_the_data_and_another_seed_changes_it(draw):
    assert draw(20, seed=3).to_list() == draw(20, seed=3).to_list()
    assert draw(20, seed=3).to_list() != draw(20, seed=4).to_list()


def test_columns_are_those_that_each_trainer_reads():
    assert stories(1, seed=0).column_names == ["prompt", "completion"]
    assert preference_pairs(1, seed=0).column_names == ["prompt", "chosen", "rejected"]
    assert openings(1, seed=0).column_names == ["prompt", "hero"]


def test_openings_say_who_the_hero_is():
    for row in openings(50, seed=0).to_list():
        assert row["hero"] == hero_of(row["prompt"])


def test_every_slot_has_words_of_both_moods_or_of_none():
    assert {slot for template in (*EVENTS, ENDING) for slot in slots_of(template)} == {"hero", *WORDS}
    for slot, words in WORDS.items():
        valences = set(words.values())
        assert valences == {0} or (max(valences) == 2 and min(valences) == -2), slot
        assert sum(words.values()) == 0, f"{slot} leans to one side"


def test_a_story_has_one_to_three_different_events_and_perhaps_an_ending():
    rng = random.Random(0)
    opening = Opening("", "She", 0)
    counts = Counter()
    for _ in range(600):
        text = draw_continuation(opening, rng).text
        kinds = kinds_of(text)
        ended = kinds[-1] == "the"
        events = kinds[: len(kinds) - ended]
        counts[len(events), ended] += 1
        assert len(set(events)) == len(events)
    assert set(counts) == {(number, ended) for number in (1, 2, 3) for ended in (False, True)}
    assert sum(number for (_, ended), number in counts.items() if ended) / 600 == pytest.approx(2 / 3, abs=0.08)


@pytest.mark.parametrize(("mood", "sign"), [(1, 1), (-1, -1)])
def test_the_weather_sets_the_mood(mood, sign):
    rng = random.Random(0)
    drawn = [draw_continuation(Opening("", "He", mood), rng).pleasantness for _ in range(400)]
    assert sign * sum(drawn) / len(drawn) > 0.5


@pytest.fixture(scope="module")
def gaps():
    """By how much the chosen story of each pair is the pleasanter one."""
    return [
        pleasantness(row["chosen"], hero_of(row["prompt"])) - pleasantness(row["rejected"], hero_of(row["prompt"]))
        for row in preference_pairs(2000, seed=0).to_list()
    ]


def test_readers_prefer_the_pleasanter_story_but_not_always(gaps):
    """Among pairs that differ by d, Bradley-Terry chooses the pleasanter story with probability sigmoid(d)."""
    for gap, share in ((1, 0.731), (2, 0.881), (3, 0.953)):
        right, wrong = gaps.count(gap), gaps.count(-gap)
        standard_error = math.sqrt(share * (1 - share) / (right + wrong))
        assert right / (right + wrong) == pytest.approx(share, abs=4 * standard_error)


def test_one_pair_of_three_has_a_story_that_repeats_itself_and_readers_reject_it(gaps):
    assert gaps.count(math.inf) / len(gaps) == pytest.approx(1 / 3, abs=0.05)
    assert -math.inf not in gaps


def test_a_repetitive_story_has_a_sentence_too_many_and_is_none_for_the_judge():
    rng = random.Random(0)
    for _ in range(200):
        opening = draw_opening(rng)
        story = draw_repetitive_continuation(opening, rng)
        kinds = kinds_of(story.text)
        assert len(kinds) == len(set(kinds)) + 1
        assert pleasantness(story.text, opening.hero) == story.pleasantness == -math.inf
