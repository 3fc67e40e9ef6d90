"""The responses of logged updates in `_completions/`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_ppo.reporting.completion_files import TOKEN_VALUES, find_completions, read_completions
from tests.conftest import count_w4, make_tokenizer
from tests.runs import QUICK, record, record_rollouts

KEEPS = {**QUICK, "logging_steps": 2, "missing_eos_penalty": 0.5}


def logs_a_note(completion_ids: list[list[int]], log_extra: Any, **columns: Any) -> list[float]:
    log_extra("note", [f"{len(ids)} tokens" for ids in completion_ids])
    return count_w4(None, None, completion_ids)


def test_every_logged_update_has_its_responses_token_by_token(make_trainer: Any) -> None:
    trainer = make_trainer(**KEEPS, reward_funcs=logs_a_note)
    rollouts, experiences = record_rollouts(trainer), record(trainer, "estimate_advantages")
    trainer.train()
    found = find_completions(trainer.args.output_dir)
    assert list(found) == [1, 2, 3]
    tokenizer = make_tokenizer()
    for step, path in found.items():
        rollout, experience = rollouts[step - 1], experiences[step - 1]
        rows = read_completions(path)
        assert [row["step"] for row in rows] == [step, step]
        for index, kept in enumerate(rows):
            responses, written = rollout.responses, rollout.response_mask[index]
            ids = responses.response_ids[index][written]
            assert kept["token_id"] == ids.tolist() and kept["completion"] == tokenizer.decode(ids)
            context = slice(responses.context_length)
            prompt = responses.query_responses[index, context][responses.attention_mask[index, context]]
            assert kept["prompt"] == tokenizer.decode(prompt, skip_special_tokens=True)
            assert kept["prompt_id"] == prompt.tolist()
            kl = (rollout.logprobs - rollout.ref_logprobs)[index][written]
            score = rollout.scores[index] - (0.0 if rollout.ended[index] else 0.5)
            paid = -trainer.args.kl_coef * kl
            paid[-1] += score
            of_tokens = (rollout.values[index][written], experience.advantages[index][written], kl, paid)
            for name, expected in zip(TOKEN_VALUES, of_tokens, strict=True):
                torch.testing.assert_close(torch.tensor(kept[name]), expected)
            assert (kept["length"], kept["ended"]) == (len(ids), bool(rollout.ended[index]))
            assert kept["score"] == pytest.approx(float(score)) and kept["kl"] == pytest.approx(float(kl.sum()))
            assert kept["rewards/logs_a_note"] == pytest.approx(float(rollout.scores[index]))
            assert kept["extra/note"] == f"{len(ids)} tokens"


def test_gaps_have_text_and_no_figures(make_trainer: Any) -> None:
    settings = {**KEEPS, "reward_funcs": None, "train_dataset": None, "max_steps": 1, "total_episodes": None}
    trainer = make_trainer(**settings)
    queries, responses = [torch.tensor([5]), torch.tensor([6, 7])], [torch.tensor([8, 9, 10, 1]), torch.tensor([8, 1])]
    masks = [torch.tensor([1, 0, 0, 1]).bool(), torch.ones(2).bool()]
    trainer.step(queries, responses, [1.0, float("nan")], masks)
    gap, unscored = read_completions(find_completions(trainer.args.output_dir)[1])
    assert gap["token_id"] == [8, 9, 10, 1] and gap["token_written"] == [True, False, False, True]
    assert gap["length"] == 2 and len(gap["token_text"]) == 4
    assert all([value is None for value in gap[name]] == [False, True, True, False] for name in TOKEN_VALUES)
    assert unscored["score"] != unscored["score"] and unscored["token_advantage"] == [0.0, 0.0]
