"""Runs one update of a trainer, keeps what flowed through it, and computes the same with `tests/oracles.py`.

Prompts are taken from what the collator is given and responses from what the engine returns, so that none of the
trainer's own padding, masks or truncation is trusted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from numpy.testing import assert_allclose
from transformers import TrainerCallback

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.data.prompts import PromptCollator, Prompts
from rlhf_ppo.data.rollout import Experience, Rollout
from rlhf_ppo.generation import transformers_engine as engine
from tests import oracles
from tests.conftest import make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.oracles import Episode, Estimates, Llama, Settings, Step

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
NUM_EPISODES = 12
EOS = 1

LOGGED_ONLY = {
    *("eps", "lr", "learning_rate", "episode", "step", "epoch", "grad_norm", "policy/grad_norm", "val/grad_norm"),
    *("time/generate", "time/score", "time/evaluate", "time/learn", "time/tokens_per_second"),
}


class RecordingTrainer(PPOTrainer):
    """Keeps what flows between the public steps of an update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.micro_batches: list[list[Experience]] = []
        self.ratios: list[torch.Tensor] = []
        self.episodes: list[Episode] = []  # of a subclass that responds without the engine
        super().__init__(*args, **kwargs)

    def collect_rollout(self, prompts: Prompts, *given: Any) -> Rollout:
        self.rollout = super().collect_rollout(prompts, *given)
        return self.rollout

    def estimate_advantages(self, rollout: Rollout) -> Experience:
        self.experience = super().estimate_advantages(rollout)
        return self.experience

    def optimizer_step(self, minibatch: Experience, statistics: Any) -> Any:
        self.micro_batches.append([])
        return super().optimizer_step(minibatch, statistics)

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, **kwargs)
        self.micro_batches[-1].append(inputs)
        self.ratios.append(outputs[1].ratio.detach()[inputs.response_mask])
        return loss, outputs


class Snapshots(TrainerCallback):
    """Both models' weights before each optimizer step and after the last, and the gradients of each step."""

    def __init__(self, policy: torch.nn.Module, value_model: torch.nn.Module) -> None:
        self.models = {"policy": policy, "value_model": value_model}
        self.weights: list[dict[str, dict[str, Any]]] = []
        self.gradients: list[dict[str, dict[str, Any]]] = []

    def _weights(self) -> dict[str, dict[str, Any]]:
        return {name: oracles.weights_of(model) for name, model in self.models.items()}

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.weights.append(self._weights())
        self.gradients.append(
            {
                name: {key: p.grad.double().numpy().copy() for key, p in model.named_parameters()}
                for name, model in self.models.items()
            }
        )

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.weights.append(self._weights())


@dataclasses.dataclass(frozen=True)
class Update:
    """One update of the trainer, and the same computed by the oracle."""

    trainer: RecordingTrainer
    episodes: list[Episode]
    snapshots: Snapshots
    steps: list[Step]
    scores_by_source: dict[str, list[float]]
    settings: Settings
    known: Estimates
    llama: Llama

    @property
    def logged(self) -> dict[str, float]:
        return self.trainer.state.log_history[0]

    def per_token(self, values: torch.Tensor) -> list[Any]:
        """The policy's tokens of a `(B, T)` tensor's rows, and a check that it is 0 elsewhere."""
        rows = [row.double().numpy() for row in values]
        for row, episode in zip(rows, self.episodes, strict=True):
            assert not np.delete(row, episode.own).any()
        return [row[episode.own] for row, episode in zip(rows, self.episodes, strict=True)]


def stopping_policy(seed: int = 0, **overrides: Any) -> Any:
    """A tiny policy that likes EOS here and there, so that responses end at different lengths."""
    policy = tiny_policy(seed, **overrides)
    policy.lm_head.weight.data[EOS] *= 3
    return policy


def share_of_w4(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [ids.count(7) / len(ids) for ids in completion_ids]


def number_of_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [0.1 * len(ids) for ids in completion_ids]


def run_update(make_trainer: Callable[..., Any], **overrides: Any) -> Update:
    """Train for one update and return it with the oracle's account of the same episodes.

    Args:
        make_trainer: The fixture of that name.
        overrides: Arguments of PPOTrainer or PPOConfig; besides, `config` of all models, `generation_config` of the
            policy, the learning rate `sgd`, and a `trainer_class`.
    """
    trainer_class = overrides.pop("trainer_class", RecordingTrainer)
    config = overrides.pop("config", {})
    policy, value_model = stopping_policy(**config), tiny_scorer(seed=2, **config)
    policy.generation_config = overrides.pop("generation_config", policy.generation_config)
    reference = overrides.pop("ref_model", tiny_policy(seed=5, **config))
    learning_rate = overrides.pop("sgd", 0.03)
    initial = {"policy": policy, "value": value_model, "ref": policy if reference is None else reference}
    initial = {name: oracles.weights_of(model) for name, model in initial.items()}
    collated: list[Any] = []
    tokenizer = overrides.pop("processing_class", make_tokenizer())
    collator = overrides.pop("data_collator", PromptCollator(tokenizer.pad_token_id))
    snapshots = Snapshots(policy, value_model)
    values: dict[str, Any] = {
        "processing_class": tokenizer,
        "data_collator": lambda rows: collated.append(rows) or collator(rows),
        "model": policy,
        "value_model": value_model,
        "ref_model": reference,
        "reward_funcs": share_of_w4,
        "train_dataset": Dataset.from_list(prompt_rows(NUM_EPISODES)),
        "optimizers": (torch.optim.SGD([*policy.parameters(), *value_model.parameters()], learning_rate), None),
        "callbacks": [snapshots],
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 6,
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "total_episodes": NUM_EPISODES,
        "seed": 1,
        "local_rollout_forward_batch_size": 5,
        "max_grad_norm": 0.0,
        "cliprange_value": 0.1,
    }
    trainer = make_trainer(trainer_class, **{**values, **overrides})
    collated.clear()  # the constructor tries the collator
    with _recorded_generation() as generated:
        trainer.train()
    return _account(trainer, snapshots, initial, collated[0], generated)


@contextmanager
def _recorded_generation() -> Iterator[list[list[int]]]:
    """Collect every sampled row, without its prompt, as it comes from the engine, before it is truncated."""
    rows: list[list[int]] = []
    original = engine.sample_responses

    def sample_responses(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = original(*args, **kwargs)
        rows.extend(output.tolist())
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "sample_responses", sample_responses)
        yield rows


def _account(
    trainer: RecordingTrainer,
    snapshots: Snapshots,
    initial: Mapping[str, Any],
    prompts: list[dict[str, list[int]]],
    generated: list[list[int]],
) -> Update:
    args, llama = trainer.args, Llama.of(trainer.policy_model.config)
    stop = EOS if args.stop_token == "eos" else args.stop_token_id
    episodes = trainer.episodes or [
        _episode(row["input_ids"], sampled, stop) for row, sampled in zip(prompts, generated, strict=True)
    ]
    settings = _settings(args)
    given = _given(trainer, llama, episodes)
    weights: Any = args.reward_weights or [1.0] * len(given)
    weights = weights if isinstance(weights, dict) else dict(zip(given, weights, strict=True))
    scores, token_scores = np.zeros(len(episodes)), [np.zeros(len(episode.own)) for episode in episodes]
    for name, rewards in given.items():
        if isinstance(rewards[0], np.ndarray):
            token_scores = [sum_ + weights[name] * row for sum_, row in zip(token_scores, rewards, strict=True)]
        else:
            scores += weights[name] * np.array(rewards)
    before = initial["policy"], initial["ref"], initial["value"]
    known = oracles.estimate(llama, episodes, *before, list(scores), settings, token_scores)
    by_source = {name: [float(np.sum(reward)) for reward in rewards] for name, rewards in given.items()}
    steps = [
        Step(before["policy"], before["value_model"], [_row_numbers(part, episodes) for part in parts])
        for before, parts in zip(snapshots.weights[:-1], trainer.micro_batches, strict=True)
    ]
    return Update(trainer, episodes, snapshots, steps, by_source, settings, known, llama)


def _episode(prompt: list[int], sampled: list[int], stop: int | None) -> Episode:
    ended = stop in sampled
    response = sampled[: sampled.index(stop) + 1] if ended else sampled
    # Without a stop token, what the penalty asks for is the tokenizer's EOS.
    return Episode(prompt, response, ended or (stop is None and EOS in sampled))


def _settings(args: PPOConfig) -> Settings:
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)}
    return Settings(**{**values, "missing_eos_penalty": args.missing_eos_penalty or 0.0})


def _functions(trainer: RecordingTrainer) -> list[Any]:
    """The reward functions of a trainer, as they were given."""
    given = trainer._reward_funcs
    return [] if given is None else [given] if callable(given) else list(given)


def _given(trainer: RecordingTrainer, llama: Llama, episodes: list[Episode]) -> dict[str, list[Any]]:
    """What each source gives each response: a number, or an array of one for each token of the policy."""
    given: dict[str, list[Any]] = {}
    if trainer.reward_model is not None:
        weights = oracles.weights_of(trainer.reward_model)
        given["reward_model"] = [llama.score(weights, episode.ids) for episode in episodes]
    for function in _functions(trainer):
        rewards = function(completion_ids=[episode.response for episode in episodes])
        given[function.__name__] = [
            np.array(reward)[episode.own] if isinstance(reward, list) else reward
            for reward, episode in zip(rewards, episodes, strict=True)
        ]
    return given


def _row_numbers(part: Experience, episodes: list[Episode]) -> list[int]:
    """Which episodes a micro-batch holds, told by their ids."""
    known = [episode.ids for episode in episodes]
    assert len({tuple(ids) for ids in known}) == len(known)
    rows = zip(part.query_responses, part.attention_mask, strict=True)
    return [known.index(ids[mask].tolist()) for ids, mask in rows]


def check_update(update: Update) -> None:
    """Compare every number of the update with the oracle's."""
    trainer, known = update.trainer, update.known
    rollout, experience = trainer.rollout, trainer.experience
    lengths = {len(episode.own) for episode in update.episodes}
    assert len(lengths) > 1 or trainer.tokens.stop is None, "the rollout must be ragged to test anything"
    for name in ("logprobs", "ref_logprobs", "values"):
        compare_rows(name, update.per_token(getattr(rollout, name)), getattr(known, name))
    assert_allclose(rollout.final_values, known.final_values, **TOLERANCE, err_msg="final_values")
    for name in ("advantages", "returns"):
        compare_rows(name, update.per_token(getattr(experience, name)), getattr(known, name))
    for name, scores in update.scores_by_source.items():
        assert_allclose(rollout.scores_by_source[name], scores, **TOLERANCE, err_msg=name)
    first_step = len(update.steps[0].micro_batches)
    assert_allclose(torch.cat(trainer.ratios[:first_step]), 1, rtol=0, atol=1e-4, err_msg="ratio at the first step")
    assert rollout.ended.tolist() == [episode.ended for episode in update.episodes]
    check_metrics(update)


def compare_rows(name: str, ours: list[Any], oracle: list[Any]) -> None:
    for row, (mine, theirs) in enumerate(zip(ours, oracle, strict=True)):
        assert_allclose(mine, theirs, **TOLERANCE, err_msg=f"{name}, row {row}")


def check_metrics(update: Update) -> None:
    expected = oracles.metrics(
        update.llama, update.episodes, update.known, update.steps, update.scores_by_source, update.settings
    )
    for key, value in expected.items():
        assert_allclose(update.logged[key], value, **TOLERANCE, err_msg=key)
    unexplained = {key for key in update.logged.keys() - expected.keys() if not key.startswith("health/")}
    assert unexplained == LOGGED_ONLY
    assert all(math.isfinite(update.logged[key]) and update.logged[key] > 0 for key in LOGGED_ONLY)
    assert update.logged["episode"] == NUM_EPISODES and update.logged["lr"] == update.logged["learning_rate"]
    seconds = sum(update.logged[f"time/{phase}"] for phase in ("generate", "score", "evaluate", "learn"))
    num_tokens = sum(len(episode.own) for episode in update.episodes)
    assert_allclose(update.logged["time/tokens_per_second"], num_tokens / seconds, rtol=1e-6)
