"""Value models with several heads: their mean, their shares of the responses, masks, seeds, saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from transformers import AutoModelForSequenceClassification, TrainingArguments

from rlhf_ppo.cli.critic import CriticTrainer, collate, examples_of
from rlhf_ppo.decoding import values_of
from rlhf_ppo.models.heads import value_head_of
from rlhf_ppo.reporting.completion_files import find_completions, read_completions
from rlhf_ppo.reporting.report import write_report
from tests.conftest import tiny_scorer
from tests.runs import QUICK, die_and_resume, logged, record, record_rollouts
from tests.training.test_value_heads import BINS, MODELS, ROWS, RUNNING, adapted, expected_values

MakeTrainer = Callable[..., Any]

ENSEMBLE: dict[str, Any] = {"critic_ensemble": 3, "learning_rate": 0.01, "per_device_train_batch_size": 4}
LOSSES: dict[str, dict[str, Any]] = {"mse": {}, "hl_gauss": BINS | {"value_bins": 5}}
MASKS: dict[str, Any] = {"critic_agreement_mask": 0.3, "critic_disagreement_mask": 0.4, "entropy_coef": 0.1}
RUN = QUICK | ENSEMBLE | {"total_episodes": 12}


def by_row(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Scores that tell a head's own responses from the others': 0, 1, 2, 0."""
    return [float(row % 3) for row in range(len(completion_ids))]


@pytest.mark.parametrize("models", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_values_are_the_mean_of_heads_that_begin_alike_and_grow_apart(
    make_trainer: MakeTrainer, loss: str, models: str
) -> None:
    trainer = make_trainer(**RUN | LOSSES[loss] | MODELS[models]())
    rollouts = record_rollouts(trainer)
    trainer.train()
    first, *_, last = rollouts
    assert not first.value_spread.any() and torch.allclose(first.own_values, first.values, atol=1e-6)
    mask = last.response_mask
    assert last.value_spread[mask].min() > 0 and last.own_heads.tolist() == [0, 1, 2, 0]
    assert logged(trainer, "val/spread") == [
        pytest.approx(float(each.value_spread[each.response_mask].mean()), abs=1e-6) for each in rollouts
    ]


@pytest.mark.parametrize("loss", LOSSES)
def test_values_equal_numpy(make_trainer: MakeTrainer, loss: str) -> None:
    trainer = make_trainer(**RUN | LOSSES[loss])
    trainer.train()
    model = trainer.value_model
    centers = np.array(getattr(model.config, "value_centers", [np.nan]))
    heads = model.score.weight.detach().double().numpy().reshape(3, -1, model.config.hidden_size)
    of_heads = [expected_values(model, prompt + response, centers, head)[-1]
        for prompt, response in zip(*ROWS[:2], strict=True) for head in heads]  # fmt: skip
    expected = np.reshape(of_heads, (2, 3)).mean(axis=1)
    assert_allclose(values_of(model, *ROWS), expected, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_each_head_learns_from_its_own_responses(make_trainer: MakeTrainer, loss: str) -> None:
    trainer = make_trainer(
        **RUN | ({} if loss == "mse" else BINS | {"value_range": [-1.0, 3.0]})
        | {"per_device_train_batch_size": 6, "total_episodes": 240, "vf_coef": 1.0},
        reward_funcs=by_row, kl_coef=0.0, cliprange_value=None, lam=1.0,
    )  # fmt: skip
    rollouts = record_rollouts(trainer)
    trainer.train()
    last = rollouts[-1]
    means = [float(last.own_values[row][last.response_mask[row]].mean()) for row in range(6)]
    assert means == pytest.approx([0.0, 1.0, 2.0, 0.0, 1.0, 2.0], abs=0.25)
    assert float(last.values[last.response_mask].mean()) == pytest.approx(1.0, abs=0.2)
    assert logged(trainer, "val/spread")[-1] == pytest.approx(np.std([0, 1, 2]), abs=0.15)


def test_the_advantages_of_the_agreed_and_the_entropy_of_the_others_are_left_out(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**RUN | MASKS | {"value_head_init": "normal", "value_model": None})
    rollouts, learned = record_rollouts(trainer), record(trainer, "estimate_advantages")
    trainer.train()
    for rollout, experience in zip(rollouts, learned, strict=True):
        mask = rollout.loss_mask
        order = rollout.value_spread[mask].argsort()
        count = len(order)
        assert (experience.advantages[mask] == 0)[order].tolist() == [n < int(0.3 * count) for n in range(count)]
        weights = experience.entropy_weights[mask][order].tolist()
        assert weights == [float(n < count - int(0.4 * count)) for n in range(count)]
    of_heads = rollouts[0].own_values, rollouts[0].values
    assert not torch.equal(*of_heads), "drawn heads differ from the start"


@pytest.mark.parametrize(
    "given", [{"value_model": None}, {"value_model": lambda: tiny_scorer(seed=6)}], ids=["reward model", "given"]
)
def test_each_head_begins_as_the_models_own(make_trainer: MakeTrainer, given: dict[str, Any]) -> None:
    source = tiny_scorer(seed=6)
    reward = {} if given["value_model"] else {"reward_model": source}
    trainer = make_trainer(**RUN | given | reward)
    assert torch.equal(trainer.value_model.score.weight, source.score.weight.repeat(3, 1))
    assert torch.allclose(values_of(trainer.value_model, *ROWS), values_of(tiny_scorer(seed=6), *ROWS), atol=1e-6)
    assert source.config.num_labels == 1


@pytest.mark.usefixtures("plain_runs")
@pytest.mark.parametrize("models", ["given", "over the policy's base"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_resumed_run_ends_bit_for_bit_alike(
    make_trainer: MakeTrainer, loss: str, models: str, tmp_path: Path
) -> None:
    die_and_resume(make_trainer, tmp_path, lambda: RUN | LOSSES[loss] | MASKS | MODELS[models]())


@pytest.mark.parametrize("loss", ["mse", "hl_gauss"])
def test_a_saved_critic_has_the_trainers_values_and_trains_on(
    make_trainer: MakeTrainer, loss: str, tmp_path: Path
) -> None:
    options = RUN | ({} if loss == "mse" else RUNNING)
    trainer = make_trainer(**options | {"save_critic": True, "num_completions_to_keep": 4})
    trainer.train()
    trainer.save_model()
    folder = tmp_path / "run" / "critic"
    expected = values_of(trainer.value_model, *ROWS)
    critic = AutoModelForSequenceClassification.from_pretrained(folder)  # with transformers alone
    outputs = critic(torch.tensor([[3, 4, 5, 7, 8]])).logits[0].reshape(critic.config.value_heads, -1)
    centers = torch.tensor(getattr(critic.config, "value_centers", [1.0]))
    values = outputs[:, 0] if loss == "mse" else outputs.softmax(dim=1) @ centers
    assert len(values) == 3 and float(values.mean()) == pytest.approx(float(expected[0]), abs=1e-5)
    after = make_trainer(**options | {"value_model": str(folder), "output_dir": str(tmp_path / "after")})
    assert torch.allclose(values_of(after.value_model, *ROWS), expected, atol=1e-6)
    assert value_head_of(after.value_model) == value_head_of(trainer.value_model)
    after.train()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"critic_ensemble": 5}, "critic_ensemble=5, but an update has 4 responses"),
        ({"critic_ensemble": 2}, "value_model has 3 heads, but critic_ensemble=2; set critic_ensemble=3"),
        ({"critic_ensemble": 1}, "value_model has 3 heads, but critic_ensemble=1"),
        ({"value_model": lambda: adapted()}, "critic_ensemble=3 makes a new head, which value_model cannot get below"),
    ],
)
def test_heads_that_do_not_fit_are_refused(make_trainer: MakeTrainer, given: dict[str, Any], message: str) -> None:
    several = tiny_scorer(seed=2, num_labels=3)
    several.config.value_heads = 3
    with pytest.raises(ValueError, match=message):
        make_trainer(**RUN | {"value_model": several} | given)


def test_a_critic_with_several_heads_is_fitted_to_kept_completions(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(**RUN | {"num_completions_to_keep": 4, "logging_steps": 1})
    rollouts = record_rollouts(trainer)
    trainer.train()
    out = trainer.args.output_dir
    kept = [row for file in find_completions(out).values() for row in read_completions(file)]
    spreads = [row.value_spread[n][row.response_mask[n]] for row in rollouts for n in range(4)]
    for row, spread in zip(kept, spreads, strict=True):
        assert_allclose(row["token_spread"], spread, rtol=1e-6)
    page = write_report([out], tmp_path / "report.html").read_text()
    assert '"spread": [' in page or '"spread":[' in page

    examples, model = examples_of([out]), trainer.value_model
    args = TrainingArguments(str(tmp_path / "unused"), report_to="none", use_cpu=True)
    batch = collate(examples[1:3])
    loss = CriticTrainer(model, args, examples).compute_loss(model, batch)
    loss.backward()
    assert [bool(rows.any()) for rows in model.score.weight.grad] == [False, True, True], "of examples 1 and 2"


def test_a_critic_without_spread_keeps_none(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**QUICK, num_completions_to_keep=4, logging_steps=1)
    rollouts = record_rollouts(trainer)
    trainer.train()
    (file, *_) = find_completions(trainer.args.output_dir).values()
    assert "token_spread" not in read_completions(file)[0] and rollouts[0].value_spread is None
    assert not logged(trainer, "val/spread")
