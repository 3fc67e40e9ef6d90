"""Baseline completions: which model answers, with which random numbers, and that the policy's run is unchanged."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rlhf_ppo import PPOTrainer
from rlhf_ppo.reporting.completion_files import find_completions, read_completions
from rlhf_ppo.rewards.judges import PreferenceReward
from tests.conftest import make_tokenizer, prompt_rows, tiny_policy
from tests.runs import QUICK, assert_identical, end_of_run

ROWS = [{"input_ids": row["input_ids"], "number": index} for index, row in enumerate(prompt_rows(32))]


class Watching(PreferenceReward):
    """A comparison by length that notes what it is given."""

    def __init__(self, opponent: str, scored: bool = True) -> None:
        super().__init__(self._longer, opponent, name=opponent)
        self.seen: list[dict[str, Any]] = []
        self.scored = scored

    def _longer(self, prompts: list[str], pairs: list[list[str]]) -> list[float]:
        return [float(len(second) > len(first)) for first, second in pairs]

    def __call__(self, prompts: Any, completions: Any, log_metric: Any = None, **columns: Any) -> list[float | None]:
        self.seen.append({"prompts": prompts, "ours": completions, "theirs": columns[self.column], **columns})
        rewards = super().__call__(prompts, completions, log_metric, **columns)
        return rewards if self.scored else [0.0] * len(rewards)


def texts_of(policy: Any, prompts: list[list[int]]) -> list[str]:
    """The oracle: greedy responses up to EOS, computed without a cache, one prompt at a time."""
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + 8 and ids[-1] != 1:
            ids.append(int(policy(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(make_tokenizer().decode(ids[len(prompt) :], skip_special_tokens=True))
    return answers


GREEDY = {"temperature": 1.0, "top_k": 1}


@torch.no_grad()
@pytest.mark.parametrize("opponent", ["reference", "self"])
def test_the_opponent_is_who_it_is_said_to_be(make_trainer: Any, opponent: str) -> None:
    """With one choice at each step, what the models say is known."""
    reward = Watching(opponent)
    models = {"self": tiny_policy(seed=0), "reference": tiny_policy(seed=7)}
    trainer = make_trainer(
        model=models["self"], ref_model=models["reference"], reward_funcs=reward, train_dataset=ROWS, **GREEDY
    )
    trainer.evaluate(ROWS[:4])
    (seen,) = reward.seen
    expected = texts_of(tiny_policy(seed=0 if opponent == "self" else 7), [ROWS[row]["input_ids"] for row in range(4)])
    assert seen["theirs"] == expected and seen["number"] == [0, 1, 2, 3]
    ours = [text.removeprefix(" ") for text in seen["ours"]]  # a completion continues its prompt
    assert (ours == seen["theirs"]) is (opponent == "self")


def test_prompts_responses_and_opponents_are_read_as_they_were_written(make_trainer: Any) -> None:
    """Some tokenizers drop spaces before punctuation unless told not to; a judge could tell who wrote what."""
    reward, words = Watching("reference"), [f".{number}" for number in range(29)]
    tokenizer = make_tokenizer(words=words, clean_up_tokenization_spaces=True)
    trainer = make_trainer(
        **QUICK, processing_class=tokenizer, reward_funcs=reward, train_dataset=ROWS, eval_dataset=ROWS[:4]
    )
    trainer.train()
    table = trainer.generate_completions()
    files = find_completions(trainer.args.output_dir).values()
    kept = [row for path in files for row in read_completions(path)]
    texts = {name: [text for batch in reward.seen for text in batch[name]] for name in ("prompts", "ours", "theirs")}
    texts |= {f"kept {name}": [row[name] for row in kept] for name in ("prompt", "completion")}
    texts |= {f"shown {name}": list(table[name]) for name in ("query", "model response")}
    for where, those in texts.items():
        assert any(" ." in text for text in those), where
        assert not any(re.search(r"\d\.", text) for text in those), where


def run(make_trained: Any, *rewards: Any, **arguments: Any) -> PPOTrainer:
    return make_trained(
        reward_funcs=list(rewards), **(QUICK | {"temperature": 1.0, "train_dataset": ROWS} | arguments)
    )


def constant(completions: Any, **_: Any) -> list[float]:
    return [0.0] * len(completions)


def test_the_policys_run_is_the_same_with_opponents(make_trained: Any) -> None:
    """Parameters, optimizer and random numbers, where the comparisons score nothing."""
    alone = run(make_trained, constant)
    watched = run(make_trained, constant, Watching("self", scored=False), Watching("reference", scored=False))
    for key in ("parameters", "optimizer", "rng"):
        assert_identical(end_of_run(watched)[key], end_of_run(alone)[key], key)
