"""The demonstration's corpus: the same for a seed."""

import pytest

from rlhf_ppo.cli.demo import openings, preference_pairs, stories


@pytest.mark.parametrize("draw", [stories, preference_pairs, openings])
def test_a_seed_fixes_the_data_and_another_seed_changes_it(draw):
    assert draw(20, seed=3).to_list() == draw(20, seed=3).to_list()
    assert draw(20, seed=3).to_list() != draw(20, seed=4).to_list()
