"""Runs of a configuration, and all that flows through one: what the simulation starts from and is compared with."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.algorithm.losses import PolicyLoss
from rlhf_ppo.data.rollout import Experience, Prompts, Rollout
from rlhf_ppo.generation.protocol import Sampled
from tests.conftest import QUIET, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.episodes import RespondsInTurns
from tests.fuzz.options import BASE, OBJECTS, Configuration
from tests.oracles import Array, weights_of
from tests.runs import InOnePass

TINY: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.3,
}  # fmt: skip
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "log_console": "none"}
NUM_PROMPTS = 16
TEXTS = [{"text": "w1 w2 w3 " * length} for length in (1, 3, 2, 4, 1)]
EOS = 1


# ---- Rewards ----


def length(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [0.1 * len(ids) + 0.05 * (ids[0] % 7) for ids in completion_ids]


def share(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(each % 2 for each in ids) / len(ids) for ids in completion_ids]


def tokens(completion_ids: list[list[int]], **columns: Any) -> list[list[float]]:
    return [[0.1 * (each % 5) for each in ids] for ids in completion_ids]


def sometimes(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    return [None if sum(ids) % 3 == 0 else sum(ids) % 11 / 10 for ids in completion_ids]


def in_time(completion_ids: list[list[int]], trainer_state: Any, **columns: Any) -> list[float | None]:
    return [None if trainer_state.global_step == 1 else 0.1 * len(ids) for ids in completion_ids]


REWARDS: dict[str, list[Callable[..., Any]]] = {
    "length": [length],
    "several": [length, share],
    "tokens": [tokens, share],
    "some None": [sometimes],
    "some None of one": [sometimes, share],
    "None in the second update": [in_time],
    "model": [],
    "of all kinds": [length, share, tokens],
}
HAVE_MODEL = {"several", "model", "of all kinds"}


def squared(logprobs: Tensor, experience: Experience, args: Any) -> PolicyLoss:
    """A policy loss of one's own, with a figure of its own."""
    log_ratio = logprobs - experience.logprobs
    loss = -experience.advantages * log_ratio.exp() + log_ratio.square()
    return PolicyLoss(loss, log_ratio.exp(), log_ratio > 0.1, {"policy/distance": log_ratio.square()})


# ---- Models ----


def stopping_policy(seed: int = 0, **overrides: Any) -> Any:
    """A tiny policy that likes EOS here and there, so that responses end at different lengths."""
    policy = tiny_policy(seed, **TINY, **overrides)
    policy.lm_head.weight.data[EOS] *= 2
    return policy


def reward_model() -> Any:
    return tiny_scorer(seed=7, **TINY)


def lora(task: str) -> Any:
    from peft import LoraConfig

    modules = ["q_proj", "v_proj", "lm_head"] if task == "CAUSAL_LM" else ["q_proj", "v_proj"]
    return LoraConfig(task_type=task, r=2, lora_alpha=8, target_modules=modules)


def given_models(objects: Configuration) -> dict[str, Any]:
    """The models that a trainer takes, made anew."""
    given: dict[str, Any] = {
        "model": stopping_policy(),
        "ref_model": stopping_policy(seed=5) if objects["reference"] == "other" else None,
        "value_model": tiny_scorer(seed=2, **TINY) if objects["value_model"] == "own" else None,
        "reward_model": reward_model() if objects["reward"] in HAVE_MODEL else None,
    }
    if objects["adapter"] == "lora":
        given["peft_config"] = lora("CAUSAL_LM")
    return given


# ---- Engines ----


class Engine:
    """Answers as another engine does, says log-probabilities if it is to, and keeps or repeats the answers.

    Args:
        inner: The other engine.
        says: Whether it says log-probabilities, here made up.
        answers: What it answers instead; None asks the other engine.
    """

    def __init__(self, inner: Any, says: bool, answers: list[Any] | None = None) -> None:
        self.inner, self.says = inner, says
        self.reads_sharded = inner.reads_sharded
        self.to_come = None if answers is None else list(answers)
        self.answers: list[Any] = []
        self.is_kept = False

    def sample(self, policy: Any, prompts: Prompts, config: Any) -> Sampled:
        if not self.is_kept:  # of a sample table
            return self.inner.sample(policy, prompts, config)
        answer = self.inner.sample(policy, prompts, config) if self.to_come is None else self.to_come.pop(0)
        if self.says:
            places = torch.arange(answer.ids.shape[1])
            answer = Sampled(answer.ids, -3.0 + torch.sin(1.7 * answer.ids + places))
        self.answers.append(answer)
        return answer

    def policy_changed(self) -> None:
        self.inner.policy_changed()


# ---- What flows ----


Key = tuple[tuple[int, ...], tuple[int, ...]]
"""An episode's prompt and response."""


@dataclass
class SeenStep:
    """A mini-batch, and the optimizer step on it; without one `before` is empty.

    Attributes:
        rows: Keys of the mini-batch's episodes.
        micro_batches: Keys of the episodes of each micro-batch.
        texts: Context and learned ids of the language modelling beside it.
    """

    rows: list[Key]
    micro_batches: list[list[Key]] = field(default_factory=list)
    texts: list[Key] = field(default_factory=list)
    before: dict[str, Array] = field(default_factory=dict)
    gradients: dict[str, Array] = field(default_factory=dict)
    after: dict[str, Array] = field(default_factory=dict)


@dataclass
class SeenUpdate:
    """An update: the episodes as they were sampled, and its steps."""

    prompts: list[list[int]]
    weights: dict[str, Array]
    rollout: Any = None
    experience: Any = None
    answers: Sampled | None = None
    episodes: list[Any] = field(default_factory=list)
    steps: list[SeenStep] = field(default_factory=list)


def keys_of(rows: Any) -> list[Key]:
    """Prompt and whole response of each row of `Responses`."""
    context = rows.context_length
    return [
        (tuple(ids[:context][mask[:context]].tolist()), tuple(ids[context:][mask[context:]].tolist()))
        for ids, mask in zip(rows.query_responses, rows.attention_mask, strict=True)
    ]


class Recorder(PPOTrainer):
    """Keeps what flows between the public steps of an update."""

    def collect_rollout(self, prompts: Prompts, *given: Any) -> Rollout:
        real = [ids[mask].tolist() for ids, mask in zip(prompts.input_ids, prompts.attention_mask, strict=True)]
        weights = weights_of(self.model)
        vars(self).setdefault("updates", []).append(SeenUpdate(real, weights))
        engine: Any = self.sampler.engine
        engine.is_kept = True
        rollout = super().collect_rollout(prompts, *given)
        engine.is_kept = False
        seen: SeenUpdate = self.updates[-1]
        seen.rollout, seen.answers = rollout, engine.answers[-1] if engine.answers else None
        seen.episodes = list(getattr(self, "episodes", ()))
        return rollout

    def estimate_advantages(self, rollout: Rollout) -> Experience:
        experience = super().estimate_advantages(rollout)
        self.updates[-1].experience = experience
        return experience

    def optimizer_step(self, minibatch: Experience, statistics: Any) -> Any:
        if "updates" in vars(self):
            self.updates[-1].steps.append(SeenStep(keys_of(minibatch.responses)))
        return super().optimizer_step(minibatch, statistics)

    def value_loss(self, values: Tensor, experience: Experience) -> Any:
        if "updates" in vars(self):
            self.updates[-1].steps[-1].micro_batches.append(keys_of(experience.responses))
        return super().value_loss(values, experience)


class Snapshots(TrainerCallback):
    """Keeps weights before and after each optimizer step, and its gradients; and copies the directory once.

    Args:
        update: Number of updates before the one in which the run's directory is copied: what a kill would leave.
        is_learning: Whether that is after the first optimizer step, if there is one, instead of at the beginning.
    """

    def __init__(self, update: int, is_learning: bool) -> None:
        self.trainer: Any = None
        self.update, self.waits = update, is_learning

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.update:
            self._copy(args)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        step, model = self.trainer.updates[-1].steps[-1], self.trainer.model
        step.before = weights_of(model)
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        step.gradients = {name: value.double().numpy().copy() for name, value in gradients.items()}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.updates[-1].steps[-1].after = weights_of(self.trainer.model)
        if self.waits and state.global_step == self.update:
            self.waits = False
            self._copy(args)

    def _copy(self, args: Any) -> None:
        shutil.rmtree(f"{args.output_dir}-killed", ignore_errors=True)
        shutil.copytree(args.output_dir, f"{args.output_dir}-killed")


class SignalAt(TrainerCallback):
    """Sends SIGTERM after some optimizer steps of an update."""

    def __init__(self, step: int, num_steps: int) -> None:
        self.step, self.left = step, num_steps

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)


# ---- Runs ----


def split(configuration: Configuration) -> tuple[Configuration, Configuration]:
    """Return the options of `PPOConfig`, and the objects, of a whole configuration."""
    whole = {**BASE, **OBJECTS, **configuration}
    return {name: value for name, value in whole.items() if name not in OBJECTS}, {
        name: whole[name] for name in OBJECTS
    }


def make(
    configuration: Configuration,
    output_dir: Path,
    answers: list[Any] | None = None,
    callbacks: tuple[TrainerCallback, ...] = (),
    given: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Any:
    """Make the trainer of a configuration.

    Args:
        configuration: What was drawn.
        output_dir: Its directory.
        answers: What the engine answers; None: it samples.
        callbacks: Those of the trainer.
        given: Other objects that it is given.
        overrides: Further options.

    Raises:
        TypeError: The package refuses the configuration.
        ValueError: It does.
    """
    options, objects = split(configuration)
    bases = [RespondsInTurns] * (objects["responses"] == "turns") + [InOnePass] * (objects["loss"] == "at once")
    made_class: Any = type("Recording", (*bases, Recorder), {})
    args = PPOConfig(**{**QUIET, **SAVING, **options, "output_dir": str(output_dir), **overrides})
    values = {
        "processing_class": make_tokenizer(),
        "reward_funcs": REWARDS[objects["reward"]] or None,
        "train_dataset": Dataset.from_list(prompt_rows(NUM_PROMPTS)),
        "ptx_dataset": TEXTS if options.get("ptx_coef") else None,
        "callbacks": list(callbacks),
    }
    trainer = made_class(args, **{**values, **given_models(objects), **(given or {})})
    engine: Any = Engine(trainer.sampler.engine, objects["engine"] != "transformers", answers)
    trainer.sampler.engine = engine
    _keep_texts(trainer)
    return trainer


def train(configuration: Configuration, output_dir: Path, given: Mapping[str, Any] | None = None) -> Any:
    """Train and return the trainer, which has kept what flowed through it."""
    snapshots = Snapshots(-1, False)
    trainer = snapshots.trainer = make(configuration, output_dir, None, (snapshots,), given, save_strategy="no")
    trainer.train()
    return trainer


def make_stepped(configuration: Configuration, output_dir: Path) -> PPOTrainer:
    """Make the trainer of a configuration that is given responses and scores."""
    options, objects = split(configuration)
    for name in ("reward_weights", "num_generations"):  # of rewards and prompts that it has not
        options.pop(name, None)
    args = PPOConfig(**{**QUIET, "log_console": "none", **options, "output_dir": str(output_dir)})
    given = given_models(objects)
    if given.pop("reward_model") is not None and given["value_model"] is None and not args.share_base_model:
        given["value_model"] = reward_model()  # which it is otherwise made from
    made_class = InOnePass if objects["loss"] == "at once" else PPOTrainer
    return made_class(args, make_tokenizer(), **given, ptx_dataset=TEXTS if options.get("ptx_coef") else None)


def _keep_texts(trainer: Any) -> None:
    if trainer.ptx is None:
        return
    rows = trainer.ptx.next_rows

    def kept() -> Any:
        texts = rows()
        if "updates" in vars(trainer):  # not where a resumed run finishes an update
            trainer.updates[-1].steps[-1].texts = keys_of(texts)
        return texts

    trainer.ptx.next_rows = kept


@contextmanager
def padded() -> Iterator[None]:
    """Let models read padded rows instead of packed ones."""
    with (
        patch("rlhf_ppo.models.packing.packs_rows", lambda body: False),
        patch("rlhf_ppo.models.policy_and_value.packs_rows", lambda body: False),
    ):
        yield
