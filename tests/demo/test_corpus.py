"""The demonstration's corpus: the same for a seed, within the lengths that the demonstration allows, and learnable."""

import math

import pytest

from rlhf_ppo.cli.demo import HEROES, openings, pleasantness, preference_pairs, stories


def hero_of(prompt: str) -> str:
    return next(hero for hero, names in HEROES.items() if any(f" {name} " in prompt for name in names))


@pytest.mark.parametrize("draw", [stories, preference_pairs, openings])
def test_a_seed_fixes_the_data_and_another_seed_changes_it(draw):
    assert draw(20, seed=3).to_list() == draw(20, seed=3).to_list()
    assert draw(20, seed=3).to_list() != draw(20, seed=4).to_list()


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
