"""`kl_coef=0`: no reference is made, held or run, unless the KL is to be logged or something else needs one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_ppo import PPOTrainer
from rlhf_ppo.algorithm.advantages import AdaptiveKLController
from rlhf_ppo.models.policy_and_value import Reference
from rlhf_ppo.reporting.completion_files import find_completions, read_completions
from tests.conftest import tiny_policy
from tests.runs import QUICK, At, MakeTrainer, history, parameters, train_and_record

RUN: dict[str, Any] = QUICK | {"kl_coef": 0.0}


def keys(trainer: PPOTrainer) -> set[str]:
    return {key for entry in history(trainer) for key in entry}


def test_nothing_is_made_held_or_run_and_the_policy_learns_the_same(
    make_trainer: MakeTrainer, make_trained: MakeTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared = make_trained(**RUN, ref_model=tiny_policy(), output_dir=str(tmp_path / "compared"))
    assert compared.reference is not None and "objective/kl" in keys(compared)

    monkeypatch.setattr("rlhf_ppo.run.assembly.make_reference", None)
    monkeypatch.setattr(Reference, "forward", None)
    trainer = make_trainer(**RUN, output_dir=str(tmp_path / "alone"))
    rollouts = train_and_record(trainer)

    assert trainer.reference is None and len(rollouts) == 3 and rollouts[0].ref_logprobs is None
    one, other = parameters(trainer), parameters(compared)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert keys(compared) - keys(trainer) == {"objective/kl"}
    for ours, theirs in zip(history(trainer), history(compared), strict=True):
        assert ours == {key: theirs[key] for key in ours}
    kept = read_completions(find_completions(tmp_path / "alone")[1])
    assert [row["kl"] for row in kept] == [None, None] and set(kept[0]["token_kl"]) == {None}
    assert None not in kept[0]["token_value"]


def test_a_given_reference_is_used(make_trained: MakeTrainer) -> None:
    trainer = make_trained(**RUN, ref_model=tiny_policy(seed=5))
    logged = [entry for entry in history(trainer) if "objective/kl" in entry]
    assert len(logged) == 3 and abs(logged[-1]["objective/kl"]) > 0
    assert {entry["objective/non_score_reward"] for entry in logged} == {0.0}


def test_a_controller_of_the_coefficient_has_a_reference(make_trainer: MakeTrainer) -> None:
    controller = AdaptiveKLController(0.1, 3.0, 100)
    assert make_trainer(**RUN, kl_controller=controller).reference is not None


def test_a_coefficient_that_a_callback_raises_later_is_refused(make_trainer: MakeTrainer) -> None:
    """Without a reference there is no KL to penalize."""

    def penalize(passed: Any) -> None:
        passed.args.kl_coef = 0.1

    trainer = make_trainer(**RUN, callbacks=[At("on_step_begin", 1, penalize)])
    with pytest.raises(ValueError, match=r"kl_coef=0\.1 has no effect without a reference: start the run with"):
        trainer.train()
    assert trainer.state.global_step == 1
