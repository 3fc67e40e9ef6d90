"""Pairs that a reward model is measured on."""

from __future__ import annotations

import pytest
from datasets import Dataset

from rlhf_ppo.data.sources import hold_out_pairs
from rlhf_ppo.reporting.judgements import RewardAccuracy, wilson_interval


def test_pairs_of_a_prompt_stay_together_and_are_the_same_each_time() -> None:
    pairs = Dataset.from_list([{"prompt": f"{row // 2}", "chosen": f"{row}", "rejected": ""} for row in range(60)])
    kept, held_out = hold_out_pairs(pairs)

    assert len(held_out) == 6 and len(kept) == 54
    assert not {*held_out["prompt"]} & {*kept["prompt"]}
    assert held_out["chosen"] == hold_out_pairs(pairs)[1]["chosen"] != [str(row) for row in range(54, 60)]
    assert hold_out_pairs(pairs.select(range(9)))[1] is None
    alone = pairs.remove_columns("prompt")
    assert len(hold_out_pairs(alone)[1]) == 6


def test_a_stream_keeps_all_its_pairs() -> None:
    """Nothing can be measured on a stream, whose length is unknown."""
    kept, held_out = hold_out_pairs(Dataset.from_list([{"chosen": "w1", "rejected": "w2"}] * 30).to_iterable_dataset())
    assert len([*kept]) == 30 and held_out is None


@pytest.mark.parametrize(
    ("accuracy", "num_pairs", "state"),
    [
        *(
            (share, count, "tested on too few pairs")
            for share, count in ((1.0, 3), (0.681, 19), (0.5, 4), (0.0, 3), (0.3, 29))
        ),
        *((0.54, 200, "at chance"), (0.56, 1000, "weak"), (0.6, 100, None), (0.9, 19, None)),
    ],
)
def test_few_pairs_prove_no_reward_model(accuracy: float, num_pairs: int, state: str | None) -> None:
    found = RewardAccuracy.of(accuracy, num_pairs)
    assert found.state == state and found.interval == wilson_interval(accuracy, num_pairs)
