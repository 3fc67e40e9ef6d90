"""`PPOTrainer.step`: updates on responses that another loop has sampled."""

from __future__ import annotations

import math
import shutil
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from rlhf_ppo import PPOTrainer
from rlhf_ppo.generation import sampling
from rlhf_ppo.run import construction
from rlhf_ppo.run.checkpoints import InUseError, locked
from tests.conftest import make_tokenizer, tiny_policy, tiny_scorer
from tests.runs import QUICK, MakeArgs, MakeTrainer, assert_identical, history, parameters, record_rollouts

RUN = QUICK | {"num_ppo_epochs": 2, "learning_rate": 0.01, "kl_coef": 0.3, "missing_eos_penalty": 0.5}
Rows = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]
Steps = Callable[..., PPOTrainer]


@pytest.fixture
def make_stepper(make_args: MakeArgs) -> Iterator[Steps]:
    """Factory of trainers without prompts and rewards; those that are still open are closed."""
    made: list[weakref.ref[PPOTrainer]] = []

    def make(trainer_class: type[PPOTrainer] = PPOTrainer, **overrides: Any) -> PPOTrainer:
        given = {name: overrides.pop(name) for name in ("callbacks", "train_dataset") if name in overrides}
        args = make_args(**{**RUN, **overrides})
        models = {"ref_model": tiny_policy(seed=5), "value_model": tiny_scorer(seed=2)}
        trainer = trainer_class(args, make_tokenizer(), tiny_policy(), **models, **given)
        made.append(weakref.ref(trainer))
        return trainer

    yield make
    for kept in made:
        if (trainer := kept()) is not None:
            trainer.close()


def rows(number: int) -> Rows:
    """Two prompts of one and two tokens, and two responses of three and one."""
    queries = [torch.tensor([5 + number]), torch.tensor([6, 7])]
    responses = [torch.tensor([8, 9 + number, 1]), torch.tensor([7])]
    return queries, responses, torch.tensor([1.0 + number, -0.5])


def test_nothing_is_said_of_stop_tokens_where_the_loop_samples(
    make_stepper: Steps, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sampling.logger, "warning_once", said.append)
    make_stepper(stop_token=None)
    assert said == []
    make_trainer(stop_token=None)
    assert "No stop token is set" in said[0]


def test_the_settings_that_generate_takes_from_the_policy_are_named(
    make_stepper: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sampling.logger, "warning_once", said.append)
    trainer = make_stepper(temperature=1.0)
    own: Any = trainer.policy_model
    trainer.step(*rows(0))
    assert said == []
    stored = {"do_sample": True, "temperature": 0.3, "top_p": 0.8, "repetition_penalty": 1.3}
    own.generation_config = GenerationConfig(**stored)
    trainer.step(*rows(1))
    assert "generation_config has temperature=0.3, top_p=0.8, repetition_penalty=1.3, which" in said.pop()
    own.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0)
    trainer.step(*rows(2))
    assert said == []


def test_two_trainers_one_after_the_other_in_one_directory(make_stepper: Steps) -> None:
    """As cells of a notebook make them: the first is closed, and the second goes on bit for bit."""
    whole = make_stepper(score_scaling=True)
    for number in range(3):
        whole.step(*rows(number))
    shutil.rmtree(str(whole.args.output_dir))
    settings = {"score_scaling": True, "save_strategy": "steps", "save_steps": 10}
    first = make_stepper(**settings, logging_steps=2)
    before = signal.getsignal(signal.SIGTERM)
    first.step(*rows(0))
    second = make_stepper(**settings, resume_from_checkpoint="True")
    with pytest.raises(InUseError, match=r"close\(\)"):
        second.step(*rows(1))
    torch.rand(3)  # the caller's own
    drawn = torch.get_rng_state()
    first.close()
    first.close()

    assert signal.getsignal(signal.SIGTERM) is before
    assert torch.equal(torch.get_rng_state(), drawn)
    with locked(first.args.output_dir):
        pass
    assert [entry["step"] for entry in first.state.log_history if "loss" in entry] == [1]
    with pytest.raises(RuntimeError, match=r"over after 1 of 3 updates; .* resume_from_checkpoint=True"):
        first.step(*rows(1))
    first.save_model()
    for number in (1, 2):
        second.step(*rows(number))
    assert_identical(parameters(second), parameters(whole))
    assert history(second) == history(whole)


# ---- What is given beside the scores ----


QUERIES, RESPONSES, SCORES = rows(0)
LOGPROBS = [torch.tensor([-1.0, -2.0, 0.0]), torch.tensor([-3.0])]

NO_UPDATE: list[tuple[dict[str, Any], str]] = [
    ({"queries": QUERIES[:1]}, "queries has 1 entries, but an update takes 2 responses on each process"),
    ({"queries": [QUERIES[0], torch.tensor([6, 32])]}, r"queries\[1\] holds .* token ids 0 to 31 of the policy"),
    (
        {"queries": [torch.full((62,), 6), QUERIES[1]]},
        r"queries\[0\] and responses\[0\] have 65 tokens together, but the model has 64",
    ),
    ({"responses": [RESPONSES[0][:0], RESPONSES[1]]}, "row 0: response_mask has no real token"),
    ({"scores": [1.0]}, "scores has 1 entries"),
    ({"scores": [1.0, None]}, r"scores\[1\] must be a number, NaN for a response without a score, .*: None"),
    ({"scores": torch.ones(2, 3)}, r"scores\[0\] must be a number, .* or scores a list of tensors"),
    ({"queries": [QUERIES[0], [6, 7]]}, r"queries\[1\] must be a tensor with one number for each token: \[6, 7\]"),
    ({"response_masks": [torch.ones(1), torch.ones(1)]}, r"response_masks\[0\] has 1 values for the 3 tokens"),
    ({"response_masks": [torch.ones(3), torch.ones(1, 1)]}, r"response_masks\[1\] must be a tensor with one number"),
    ({"scores": [torch.ones(2), torch.ones(1)]}, r"scores\[0\] has 2 values for the 3 tokens"),
    ({"scores": [torch.tensor([math.nan, 0.0, 1.0]), torch.ones(1)]}, r"scores\[0\] is NaN at some tokens"),
    ({"sampling_logprobs": [LOGPROBS[0]] * 2}, r"sampling_logprobs\[1\] has 3 values for the 1 tokens"),
    ({"sampling_logprobs": [torch.tensor([0.5, 0.2, 0.5]), LOGPROBS[1]]}, r"sampling_logprobs\[0\]: pass the natural"),
]


def test_the_first_step_leaves_the_random_numbers_of_the_loop(make_stepper: Steps) -> None:
    """Else the loop would sample its second update with the numbers of its first."""
    trainer = make_stepper()
    torch.manual_seed(3)
    drawn = torch.rand(3)
    trainer.step(*rows(0))
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(6), torch.cat([drawn, after]))


def test_the_loop_of_each_process_has_random_numbers_of_its_own(
    make_stepper: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[tuple[int, bool]] = []
    monkeypatch.setattr(construction, "set_seed", lambda seed, device_specific: seeds.append((seed, device_specific)))
    trainer = make_stepper(seed=5)
    assert seeds == [(5, True)]
    trainer.step(*rows(0))
    assert seeds == [(5, True)]


@pytest.mark.parametrize("name", ["logging_strategy", "save_strategy"])
def test_what_is_to_be_done_after_each_pass_is_refused(make_stepper: Steps, name: str) -> None:
    trainer = make_stepper(**{name: "epoch"})
    with pytest.raises(ValueError, match=f"{name}='epoch' never comes"):
        trainer.step(*rows(0))


def test_what_is_no_update_changes_nothing(make_stepper: Steps, tmp_path: Path) -> None:
    """Before the first update and between two: the run is the one that was never called so, bit for bit."""
    undisturbed, trainer = make_stepper(), make_stepper(output_dir=str(tmp_path / "disturbed"))
    for number in range(3):
        undisturbed.step(*rows(number))
        for changed, message in NO_UPDATE:
            with pytest.raises(ValueError, match=message):
                trainer.step(**{"queries": QUERIES, "responses": RESPONSES, "scores": SCORES, **changed})
        assert trainer.state.global_step == number
        trainer.step(*rows(number))
    assert_identical(parameters(trainer), parameters(undisturbed))


def test_rewards_of_tokens_and_ended_are_taken_as_they_are(make_stepper: Steps) -> None:
    trainer: Any = make_stepper(missing_eos_penalty=None, missing_eos_score=-3.0, kl_coef=0.0)
    queries, responses, _ = rows(0)
    rollouts = record_rollouts(trainer)
    paid = [torch.tensor([0.5, 9.0, -1.0]), torch.tensor([2.0])]
    masks = [torch.tensor([True, False, True]), torch.tensor([True])]
    logged = trainer.step(queries, responses, paid, masks, ended=[False, True])
    (rollout,) = rollouts
    assert logged.items() <= trainer.state.log_history[0].items() and logged["objective/scores"] == -0.75

    assert rollout.response_mask.tolist() == [[True, False, True], [True, False, False]]
    assert rollout.responses.attention_mask[:, 2:].tolist() == [[True, True, True], [True, False, False]]
    assert rollout.token_scores.tolist() == [[0.5, 0.0, -1.0], [2.0, 0.0, 0.0]]
    assert rollout.scores.tolist() == [0.0, 0.0] and rollout.ended.tolist() == [False, True]
    assert trainer.shape_rewards(rollout).tolist() == [[0.5, 0.0, -4.0], [2.0, 0.0, 0.0]]


def test_each_row_may_use_all_positions(make_stepper: Steps) -> None:
    """A long query stands beside a long response: together they would be too long for the model's 64 positions."""
    queries, responses = [torch.full((50,), 6), torch.tensor([7])], [torch.tensor([8]), torch.full((50,), 9)]
    assert make_stepper().step(queries, responses, SCORES)["objective/scores"] == float(SCORES.mean()) - 0.5  # no EOS
