"""Value models whose head is a distribution over bins: values, learning, resuming, saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from peft import LoraConfig
from rlhf_ppo.decoding import values_of
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlhf_ppo import PPOConfig
from rlhf_ppo.models.heads import ValueHead, cover_returns, value_head_of
from rlhf_ppo.models.loading import load_value_model
from rlhf_ppo.models.unwrapping import transformers_model
from tests import oracles
from tests.conftest import tiny_scorer
from tests.oracles import Llama
from tests.runs import QUICK, die_and_resume, logged, parameters, record_rollouts

MakeTrainer = Callable[..., Any]

BINS: dict[str, Any] = {"value_loss": "hl_gauss", "value_bins": 11, "value_range": [-1.0, 2.0], "learning_rate": 0.01}
RUNNING: dict[str, Any] = BINS | {"value_range": None}
ROWS = ([[3, 4, 5], [6]], [[7, 8], [9, 10, 11]], [False, False])


def lora(**given: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **given)


def shared_base() -> dict[str, Any]:
    return {"share_base_model": True, "peft_config": LoraConfig(r=2, target_modules=["q_proj"]), "value_model": None}


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "given": dict,
    "made from the policy": lambda: {"value_model": None},
    "made from the reward model": lambda: {"value_model": None, "reward_model": tiny_scorer(seed=4)},
    "with an adapter": lambda: {"value_peft_config": lora()},
    "over the policy's base": shared_base,
}


def expected_values(model: Any, ids: list[int], centers: np.ndarray, head: np.ndarray | None = None) -> np.ndarray:
    """The expectation of each token's distribution over the bins, or its number, in NumPy."""
    weights = oracles.weights_of(model)
    outputs = Llama.of(model.config).states(weights, ids) @ (weights["score.weight"] if head is None else head).T
    return outputs[:, 0] if len(centers) == 1 else np.exp(oracles.log_softmax(outputs)) @ centers


@pytest.mark.parametrize("models", MODELS)
def test_a_head_with_bins_is_new_learns_and_gives_its_expectation_to_the_advantages(
    make_trainer: MakeTrainer, models: str
) -> None:
    given = MODELS[models]()
    trainer = make_trainer(**QUICK | BINS | given)
    config = transformers_model(trainer.value_model).config
    centers = -1 + 3 / 11 * (np.arange(11) + 0.5)
    assert config.num_labels == 11
    assert_allclose(config.value_centers, centers)
    if "reward_model" in given:
        assert given["reward_model"].config.num_labels == 1 and not hasattr(
            given["reward_model"].config, "value_centers"
        )
    rollouts, before = record_rollouts(trainer), parameters(trainer)
    trainer.train()
    assert_allclose(rollouts[0].values[rollouts[0].response_mask], 0.5, atol=1e-6)  # the middle of the range
    assert rollouts[2].values[rollouts[2].response_mask].std() > 1e-3
    assert any(not torch.equal(value, before[name]) for name, value in parameters(trainer).items() if "score" in name)
    assert logged(trainer, "val/out_of_range_frac") == [0.0] * 3
    assert logged(trainer, "loss/value_avg")[0] == pytest.approx(np.log(11), abs=1e-5)  # of equal bins


def test_values_equal_numpy(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**QUICK | BINS | {"value_loss": "hl_gauss"})
    trainer.train()
    model = trainer.value_model
    whole = [prompt + response for prompt, response in zip(*ROWS[:2], strict=True)]
    centers = np.array(model.config.value_centers)
    assert_allclose(values_of(model, *ROWS), [expected_values(model, ids, centers)[-1] for ids in whole], atol=1e-5)


def test_the_head_learns_the_mean_return(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        **QUICK | BINS | {"reward_funcs": lambda completion_ids, **_: [1.3] * len(completion_ids), "kl_coef": 0.0}
        | {"total_episodes": 160, "vf_coef": 1.0},
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "val/values_mean")[-1] == pytest.approx(1.3, abs=0.1)


def covered(first: float, last: float, returns: list[float]) -> tuple[float, float]:
    model = tiny_scorer()
    head = ValueHead.with_bins(4, first, last)
    head.write_to(model.config)
    cover_returns(model, torch.tensor([returns]), torch.tensor([[True] * (len(returns) - 1) + [False]]), lambda x: x)
    return value_head_of(model).range


@pytest.mark.parametrize(
    ("before", "returns", "after"),
    [
        ((0.0, 0.0), [1.0, 3.0, 99.0], (0.8, 3.2)),
        ((0.0, 0.0), [2.0, 99.0], (1.999, 2.001)),
        ((0.0, 4.0), [1.0, 4.0, 99.0], (0.0, 4.0)),
        ((0.0, 4.0), [1.0, 6.0, 99.0], (0.0, 6.6)),
        ((0.0, 4.0), [-1.0, 2.0, 99.0], (-1.5, 4.0)),
        ((0.0, 4.0), [99.0], (0.0, 4.0)),
    ],
    ids=["first returns", "equal returns", "inside", "above", "below", "no token"],
)
def test_a_running_range_grows_by_a_tenth_beyond_the_returns_of_learned_tokens(
    before: tuple[float, float], returns: list[float], after: tuple[float, float]
) -> None:
    assert covered(*before, returns) == pytest.approx(after)


def test_a_running_range_covers_all_returns_and_starts_from_the_values_0(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        **QUICK | RUNNING, reward_funcs=lambda completion_ids, **_: [50.0 + ids[0] for ids in completion_ids]
    )
    rollouts = record_rollouts(trainer)
    trainer.train()
    assert not rollouts[0].values.any() and logged(trainer, "val/out_of_range_frac") == [0.0] * 3
    low, high = value_head_of(trainer.value_model).range
    assert 40 < low < 60 and 60 < high < 100
    assert low < logged(trainer, "val/values_mean")[-1] < high


@pytest.mark.usefixtures("plain_runs")
@pytest.mark.parametrize("models", ["given", "over the policy's base"])
@pytest.mark.parametrize("options", [BINS, RUNNING], ids=["fixed", "running"])
def test_a_resumed_run_ends_bit_for_bit_alike(
    make_trainer: MakeTrainer, options: dict[str, Any], models: str, tmp_path: Path
) -> None:
    resumed, whole = die_and_resume(make_trainer, tmp_path, lambda: options | MODELS[models]())
    assert value_head_of(resumed.value_model) == value_head_of(whole.value_model)


def test_the_best_model_has_the_range_of_its_own_weights(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """The returns grow from update to update, and so does the range; the first checkpoint is the best."""
    calls = iter(range(100))
    trainer = make_trainer(
        **QUICK | RUNNING | {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1},
        reward_funcs=lambda completion_ids, **_: [float(next(calls)) for _ in completion_ids],
        eval_dataset=[{"input_ids": [3, 4]}], load_best_model_at_end=True, greater_is_better=False,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    saved = AutoModelForSequenceClassification.from_pretrained(f"{trainer.state.best_model_checkpoint}/value_model")
    assert value_head_of(trainer.value_model) == value_head_of(saved)
    assert torch.equal(values_of(trainer.value_model, *ROWS), values_of(saved, *ROWS))


def test_a_resumed_run_has_the_range_of_its_bins(make_trainer: MakeTrainer) -> None:
    saving = QUICK | {"save_strategy": "steps", "save_steps": 1}
    make_trainer(**saving | BINS).train()
    running = make_trainer(**saving | RUNNING)
    running.train(resume_from_checkpoint=True)
    assert value_head_of(running.value_model).range == pytest.approx((-1.0, 2.0))
    with pytest.raises(ValueError, match=r"value_range=\[-1.0, 3.0\], but the bins of value_model range from -1 to 2"):
        make_trainer(**saving | BINS | {"value_range": [-1.0, 3.0]}).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("models", ["given", "with an adapter"])
def test_a_saved_critic_has_the_trainers_values_and_trains_on(
    make_trainer: MakeTrainer, models: str, tmp_path: Path
) -> None:
    scorer = tiny_scorer(seed=2)
    scorer.save_pretrained(tmp_path / "base")
    scorer.config.name_or_path = scorer.name_or_path = str(tmp_path / "base")
    trainer = make_trainer(**QUICK | RUNNING | {"save_critic": True} | MODELS[models]() | {"value_model": scorer})
    trainer.train()
    trainer.save_model()
    folder = tmp_path / "run" / "critic"
    expected: Tensor = values_of(trainer.value_model, *ROWS)
    assert torch.allclose(values_of(load_value_model(folder, "critic"), *ROWS), expected, atol=1e-6)
    if models == "given":  # with transformers alone
        critic = AutoModelForSequenceClassification.from_pretrained(folder)
        logits = critic(torch.tensor([[3, 4, 5, 7, 8]])).logits[0]
        value = logits.softmax(dim=0) @ torch.tensor(critic.config.value_centers)
        assert float(value) == pytest.approx(float(expected[0]), abs=1e-5)
    after = make_trainer(**QUICK | RUNNING | {"value_model": str(folder), "output_dir": str(tmp_path / "after")})
    assert torch.allclose(values_of(after.value_model, *ROWS), expected, atol=1e-6)
    assert value_head_of(after.value_model) == value_head_of(trainer.value_model)
    after.train()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"value_bins": 12}, "value_model has a head with 11 bins, but value_bins=12"),
        ({"value_loss": "mse"}, "value_model has a head with 11 bins, but value_loss='mse'"),
        ({"value_range": [-1.0, 3.0]}, r"value_range=\[-1.0, 3.0\], but the bins of value_model range from -1 to 2"),
        ({"value_model": lambda: adapted()}, "which value_model cannot get below its adapter"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(make_trainer: MakeTrainer, given: dict[str, Any], message: str) -> None:
    binned = tiny_scorer(seed=2, num_labels=11)
    ValueHead.with_bins(11, -1.0, 2.0).write_to(binned.config)
    with pytest.raises(ValueError, match=message):
        make_trainer(**QUICK | BINS | {"value_model": binned} | given)


def adapted() -> Any:
    from peft import get_peft_model

    return get_peft_model(tiny_scorer(), lora(task_type="SEQ_CLS"))


@pytest.mark.parametrize("edges", [[1.0], [2.0, 1.0], [0.0, float("inf")], [0.0, 1.0, 2.0]])
def test_a_range_is_two_rising_finite_numbers(edges: list[float], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"value_range=.* must be two finite numbers"):
        PPOConfig(str(tmp_path), report_to="none", value_loss="hl_gauss", value_range=edges)
