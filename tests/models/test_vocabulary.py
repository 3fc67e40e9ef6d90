"""Models with embeddings of different lengths: what no model could read is never sampled, or an error at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset

from rlhf_ppo import PPOTrainer
from tests.conftest import make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK, record_rollouts

MakeTrainer = Callable[..., PPOTrainer]
SIZES = {"model": 40, "ref_model": 39, "value_model": 37, "reward_model": 35}
"""Rows of the embeddings; the tokenizer makes the ids 0 to 31."""


def family(**sizes: int) -> dict[str, Any]:
    """Models of one family, padded differently; the policy all but always says an id of the padding."""
    sizes = SIZES | sizes
    policy, reference = tiny_policy(vocab_size=sizes["model"]), tiny_policy(3, vocab_size=sizes["ref_model"])
    with torch.no_grad():
        policy.lm_head.weight[32:] *= 20
    scorers = {name: tiny_scorer(vocab_size=sizes[name]) for name in ("value_model", "reward_model")}
    return {"model": policy, "ref_model": reference, **scorers}


@pytest.mark.parametrize(
    ("smallest", "engine"),
    [
        ("ref_model", "transformers"),
        ("value_model", "transformers"),
        ("reward_model", "transformers"),
        pytest.param("reward_model", "continuous", marks=pytest.mark.thorough),
    ],
)
def test_ids_that_a_model_lacks_are_never_sampled(make_trainer: MakeTrainer, smallest: str, engine: str) -> None:
    trainer = make_trainer(
        **family(**{smallest: 34}), generation_engine=engine, **{**QUICK, "response_length": 20, "total_episodes": 4}
    )
    rollouts = record_rollouts(trainer)
    trainer.train()

    sampled = [int(rollout.responses[rollout.response_mask].max()) for rollout in rollouts]
    assert max(sampled) in (32, 33)  # as far as all models go, and not as far as the tokenizer
    first = next(log for log in trainer.state.log_history if "val/ratio" in log)
    assert first["val/ratio"] == pytest.approx(1, abs=1e-6)
    rollout = rollouts[0]
    ids = rollout.query_responses[0][rollout.attention_mask[0]]
    with torch.no_grad():  # the log-probabilities are those of the whole distribution
        whole = family()["model"].eval()(ids[None]).logits[0, -2] / trainer.args.temperature
    expected = float(whole.log_softmax(-1)[ids[-1]])
    assert float(rollout.logprobs[0][rollout.response_mask[0]][-1]) == pytest.approx(expected, abs=1e-4)


def test_nor_in_sample_tables(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**family(), **QUICK, eval_dataset=Dataset.from_list(prompt_rows(2)))
    assert trainer.generate_completions() is not None


def test_where_all_models_read_all_ids_nothing_is_left_out(make_trainer: MakeTrainer) -> None:
    assert make_trainer(**family(ref_model=40, value_model=41, reward_model=40))._vocabulary.never_sampled is None


def test_a_prompt_with_an_id_that_a_model_lacks_names_row_and_model(make_trainer: MakeTrainer) -> None:
    rows = [{"input_ids": [3, 34]}, {"input_ids": [5, 35, 6]}]
    for given in ({"train_dataset": Dataset.from_list(rows * 4)}, {"eval_dataset": rows}):
        with pytest.raises(
            ValueError, match=r"row 1 of .*_dataset holds the token id 35, outside reward_model's 35 ids"
        ):
            make_trainer(**family(), **given)


@pytest.mark.parametrize("name", ["ref_model", "value_model", "reward_model"])
def test_a_model_that_lacks_an_id_of_the_tokenizer_is_an_error(make_trainer: MakeTrainer, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has 31 token ids, but processing_class makes ids up to 31"):
        make_trainer(**family(**{name: 31}))


def test_a_model_with_another_tokenizer_limits_nothing(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**family(reward_model=32), reward_processing_classes=make_tokenizer())
    assert trainer._vocabulary.limited_by == "value_model"


def test_a_stop_token_that_is_never_sampled_is_an_error(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=r"the stop token 36 lies outside reward_model's 35 ids.*set stop_token_id"):
        make_trainer(**family(), stop_token=None, stop_token_id=36)
