"""Several responses to each prompt of an update."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from datasets import Dataset

from rlhf_ppo import PPOTrainer
from tests.conftest import needs_continuous, prompt_rows
from tests.runs import QUICK, MakeTrainer

NUMBERED = [{**row, "number": index} for index, row in enumerate(prompt_rows(6))]


class Seen:
    """A reward that keeps what it is called with, and compares with a response of the policy's own."""

    __name__ = "seen"
    opponent = "self"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, completion_ids: list[list[int]], number: list[int], **columns: Any) -> list[float]:
        self.calls.append({"number": number, "ids": completion_ids, "opponents": columns["opponent_self_ids"]})
        return [ids.count(7) / len(ids) for ids in completion_ids]


def trained(make_trained: MakeTrainer, data: Any = None, **arguments: Any) -> tuple[PPOTrainer, Seen]:
    seen = Seen()
    given = QUICK | {"response_length": 8, "total_episodes": None, "num_train_epochs": 1} | arguments
    data = Dataset.from_list(NUMBERED) if data is None else data
    trainer = make_trained(**given, train_dataset=data, reward_funcs=[seen])
    return trainer, seen


@pytest.mark.parametrize("engine", ["transformers", pytest.param("continuous", marks=needs_continuous)])
def test_a_pass_gives_each_prompt_several_different_responses_side_by_side(
    make_trained: MakeTrainer, engine: str
) -> None:
    """In the order in which one response each would have come."""
    kinds = {"per_device_train_batch_size": 8, "num_generations": 4, "generation_engine": engine}
    trainer, seen = trained(make_trained, **kinds)
    order = [number for call in trained(make_trained)[1].calls for number in call["number"]]

    assert [call["number"] for call in seen.calls] == [
        [one] * 4 + [other] * 4 for one, other in zip(*[iter(order)] * 2, strict=True)
    ]
    for call in seen.calls:
        for group in (range(4), range(4, 8)):
            for answers in (call["ids"], call["opponents"]):
                assert len({tuple(answers[row]) for row in group}) > 1
    assert (trainer.state.global_step, trainer.state.episode, trainer.state.epoch) == (3, 24, 1.0)
    assert trainer.args.total_episodes == 24 and trainer.args.batch_size == 8


def test_a_rest_of_prompts_makes_no_batch_and_a_stream_goes_on(make_trained: MakeTrainer) -> None:
    """Five prompts, two an update: the fifth of each pass is left out."""
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "num_generations": 3, "max_steps": 4}
    rows = Dataset.from_list(NUMBERED[:5])
    for data in (rows, rows.to_iterable_dataset()):
        seen = trained(make_trained, data, **sizes)[1]
        assert [len(set(call["number"])) for call in seen.calls] == [2] * 4
        numbers = Counter(number for call in seen.calls[:2] for number in call["number"])
        assert set(numbers.values()) == {3} and len(numbers) == 4
