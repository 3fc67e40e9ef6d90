"""Every engine's answer is checked in one place: no token that was not sampled enters a rollout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from rlhf_ppo import PPOTrainer
from rlhf_ppo.algorithm.losses import PolicyLoss
from rlhf_ppo.data.rollout import Experience
from rlhf_ppo.generation.protocol import Sampled, stack_rows
from rlhf_ppo.generation.sampling import StopStrings, sample_with
from tests.conftest import make_tokenizer, tiny_policy
from tests.generation.test_transformers_engine import prompts
from tests.runs import QUICK, MakeTrainer

STOP = 1


class Answers:
    """An engine that gives a fixed answer, or one for each call."""

    reads_sharded = False

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def sample(self, policy: nn.Module, prompts: Any, config: GenerationConfig) -> Any:
        return self.answer(prompts, config) if callable(self.answer) else self.answer

    def policy_changed(self) -> None:
        pass


def config(most: int = 4, stop: Any = STOP, **given: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=most, eos_token_id=stop, pad_token_id=STOP, **given)


def ask(answer: Any, strings: tuple[str, ...] = (), **given: Any) -> Sampled:
    stop_strings = StopStrings(make_tokenizer(), strings) if strings else None
    return sample_with(Answers(answer), tiny_policy(), prompts([5, 9, 3], [4]), config(**given), stop_strings)


def stacked(*rows: list[int]) -> Sampled:
    """What a colocated or served engine gives: rows of any lengths, filled with the stop token."""
    return stack_rows(rows, [[-0.5] * len(row) for row in rows], STOP, torch.device("cpu"))


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (stacked([7, 8, 9, 6], [7, STOP]), {}),
        (stacked([7, 3], [8, 5]), {"stop": [STOP, 5, 3]}),
        (stacked([7, 8, 9, 6], [7, 8, 9, 6]), {"stop": None}),
        (stacked([7, 8], [9, 8]), {"strings": ("w5",)}),  # the id 8 is the word w5
        (Sampled(torch.tensor([[7, 8, 9, 6], [7, STOP, 0, 0]])), {}),
    ],
)
def test_rows_that_end_with_a_stop_or_at_the_limit_are_taken(answer: Any, given: dict[str, Any]) -> None:
    assert ask(answer, **given).ids is answer[0]


@pytest.mark.parametrize(
    ("answer", "given", "row", "length", "prompt"),
    [
        (stacked([7, 8, 9, 6], [7, 8]), {}, 1, 2, 1),  # the filling is the stop token
        (stacked([], [7, STOP]), {}, 0, 0, 3),
        (stacked([7, 8], [7, 9]), {"strings": ("w5",)}, 1, 2, 1),
        (Sampled(torch.tensor([[7, 8, 9], [7, STOP, 0]])), {}, 0, 3, 3),
    ],
)
def test_a_row_that_was_cut_is_an_error(
    answer: Any, given: dict[str, Any], row: int, length: int, prompt: int
) -> None:
    expected = (
        rf"engine=Answers cut the response to row {row} of the batch: {length} tokens after a prompt of {prompt}"
    )
    with pytest.raises(RuntimeError, match=expected + r", where 4 were asked for, and no stop token at its end; end"):
        ask(answer, **given)


def test_a_missing_log_probability_is_the_engine_s_fault(make_trainer: MakeTrainer) -> None:
    def forgets(prompts: Any, config: GenerationConfig) -> Sampled:
        rows = [[7, 8, 9, 6] for _ in prompts.input_ids]
        return stack_rows(rows, [[-0.5] * 3 for _ in rows], STOP, torch.device("cpu"))

    expected = (
        "engine=Answers gave no finite log-probability for token 3 of row 0 .* one for each token, or logprobs=N"
    )
    with pytest.raises(RuntimeError, match=expected) as error:
        make_trainer(**QUICK, engine=Answers(forgets)).train()
    assert "learning_rate" not in str(error.value)


def test_a_custom_loss_sees_what_the_engine_said_and_which_rows_ended(make_trainer: MakeTrainer) -> None:
    seen: list[Experience] = []

    def answer(prompts: Any, config: GenerationConfig) -> Sampled:
        rows = [[7, 8, 9, 6] if row % 2 else [7, STOP] for row in range(len(prompts.input_ids))]
        values = [[-0.1, -0.2, -0.3, -0.4] if row % 2 else [-0.5, -0.6] for row in range(len(rows))]
        return stack_rows(rows, values, STOP, torch.device("cpu"))

    class OfOnesOwn(PPOTrainer):
        def policy_loss(self, logprobs: Tensor, experience: Experience) -> PolicyLoss:
            seen.append(experience)
            return super().policy_loss(logprobs, experience)

    run = {**QUICK, "per_device_train_batch_size": 4, "total_episodes": 4, "num_mini_batches": 2}
    make_trainer(OfOnesOwn, **run, engine=Answers(answer)).train()
    rows = []
    for part in seen:
        responses = part.responses
        assert responses.sampling_logprobs is not None
        for row, real in enumerate(responses.response_mask):
            said = [round(value, 6) for value in responses.sampling_logprobs[row][real].tolist()]
            rows.append((responses.response_ids[row][real].tolist(), said, bool(part.ended[row])))
    cut, ended = ([7, 8, 9, 6], [-0.1, -0.2, -0.3, -0.4], False), ([7, STOP], [-0.5, -0.6], True)
    assert sorted(rows) == [ended, ended, cut, cut]
