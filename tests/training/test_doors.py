"""What research brings: a KL controller, an engine, a reward source, losses, advantages, parts with a state."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
)

from rlhf_ppo import PPOTrainer
from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss
from rlhf_ppo.checkpoints import last_complete_checkpoint
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Experience, Rollout
from rlhf_ppo.generation.protocol import Sampled
from rlhf_ppo.rewards.scorer import RewardSource, ScoringBatch
from tests.conftest import tiny_policy
from tests.runs import QUICK, history, logged, parameters

MakeTrainer = Callable[..., Any]


def peak_of_tensors(function: Callable[[], Any]) -> int:
    """The most bytes that a call has allocated at a time and not freed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events: Any = profiler.profiler.kineto_results.events()
    allocated = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(num_bytes for _, num_bytes in allocated))


class Doubling:
    """Doubles its coefficient after each update."""

    def __init__(self, coef: float = 0.5) -> None:
        self.coef = coef
        self.seen: list[tuple[float, int]] = []

    def update(self, mean_kl: float, num_episodes: int) -> None:
        self.seen.append((mean_kl, num_episodes))
        self.coef *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coef = state["coef"]


def test_a_kl_controller_sets_the_coefficient_of_the_next_update(make_trainer: MakeTrainer) -> None:
    controller = Doubling()
    trainer = make_trainer(**QUICK, ref_model=tiny_policy(seed=5), kl_controller=controller)
    trainer.train()

    kl, paid = logged(trainer, "objective/kl"), logged(trainer, "objective/non_score_reward")
    assert logged(trainer, "objective/kl_coef") == [0.5, 1.0, 2.0] and controller.coef == 4.0
    assert paid == pytest.approx([-coef * each for coef, each in zip((0.5, 1.0, 2.0), kl, strict=True)], rel=1e-5)
    assert controller.seen == [(each, trainer.args.batch_size) for each in kl]


class Leaving(Doubling):
    """Comes to a coefficient that no run can use."""

    def __init__(self, coef: float, at_update: int) -> None:
        super().__init__()
        self.bad, self.at_update = coef, at_update

    def update(self, mean_kl: float, num_episodes: int) -> None:
        super().update(mean_kl, num_episodes)
        self.coef = self.bad if len(self.seen) == self.at_update else self.coef


@pytest.mark.parametrize("coef", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("at_update", [1, 3])
def test_a_coefficient_that_rewards_divergence_ends_the_run(
    coef: float, at_update: int, make_trainer: MakeTrainer
) -> None:
    """After the update that made it, the last one too, before anything is saved."""
    settings = QUICK | {"save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(**settings, ref_model=tiny_policy(seed=5), kl_controller=Leaving(coef, at_update))
    with pytest.raises(ValueError, match=rf"kl_controller: Leaving\.coef={coef} must be finite and at least 0"):
        trainer.train()
    assert len(list(Path(trainer.args.output_dir).glob("checkpoint-*"))) == at_update - 1


@pytest.mark.parametrize("coef", [None, "much", "0.1", torch.ones(2), torch.ones((), requires_grad=True)], ids=str)
def test_a_coefficient_that_is_no_number_names_the_controller(coef: Any, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**QUICK, kl_controller=Leaving(coef, 1))
    with pytest.raises(TypeError, match=r"kl_controller: Leaving\.coef=.* must be a number"):
        trainer.train()


def test_a_coefficient_of_numpy_is_resumed(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    settings = QUICK | {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path)}
    make_trainer(**settings, kl_controller=Doubling(np.float64(0.5))).train()
    resumed = make_trainer(**settings | {"total_episodes": 8}, kl_controller=Doubling(np.float64(0.5)))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.kl_controller.coef == 8.0


def test_a_coefficient_of_a_checkpoint_that_rewards_divergence_is_refused(make_trainer: MakeTrainer) -> None:
    settings = QUICK | {"save_strategy": "steps", "save_steps": 2}
    make_trainer(**settings, kl_controller=Doubling()).train()
    controller = Doubling()
    controller.load_state_dict = lambda state: setattr(controller, "coef", -state["coef"])
    trainer = make_trainer(**settings | {"total_episodes": 12}, kl_controller=controller)
    with pytest.raises(ValueError, match=r"Doubling\.coef=-4\.0 must be finite and at least 0"):
        trainer.train(resume_from_checkpoint=True)


def test_a_coefficient_that_rewards_divergence_is_refused_at_once(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=r"kl_controller: Doubling\.coef=-0\.5 must be finite and at least 0"):
        make_trainer(**QUICK, kl_controller=Doubling(-0.5))


def test_a_run_that_starts_anew_starts_from_the_controllers_first_state(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**QUICK, kl_controller=Doubling(), overwrite_output_dir=True)
    trainer.train()
    trainer.train()

    assert logged(trainer, "objective/kl_coef") == [0.5, 1.0, 2.0]


class Adding:
    """A part with a state: a tensor that a callback of its own changes."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total = state["total"]


class Accumulating(PPOTrainer):
    """Weights rewards by the sum of all scores so far: what it learns depends on its part's state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.part = Adding()
        self.register_stateful("adding", self.part)

    def shape_rewards(self, rollout: Rollout) -> Tensor:
        self.part.total = self.part.total + torch.tensor([1.0, float(rollout.scores.sum())])
        return super().shape_rewards(rollout) * self.part.total.sum()


@pytest.mark.parametrize("stopped_after", [1, 2])
def test_a_run_with_states_resumes_bit_for_bit(stopped_after: int, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def run(name: str, **settings: Any) -> Any:
        return make_trainer(
            Accumulating, **{**QUICK, "save_strategy": "steps", "save_steps": 1, **settings}, kl_controller=Doubling(),
            score_scaling=True, ref_model=tiny_policy(seed=5), output_dir=str(tmp_path / name),
        )  # fmt: skip

    whole = run("whole")
    whole.train()
    run("cut").train()
    for later in range(stopped_after + 1, 4):
        (tmp_path / "cut" / f"checkpoint-{later}" / "model.safetensors").unlink()
    resumed = run("cut")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{stopped_after}"))

    assert all(torch.equal(value, parameters(whole)[name]) for name, value in parameters(resumed).items())
    assert history(resumed) == history(whole)
    assert torch.equal(resumed.part.total, whole.part.total) and resumed.part.total[0] == 3
    assert resumed.kl_controller.coef == 4.0
    assert resumed.score_moments.moments == whole.score_moments.moments


class Counts(dict[str, Any]):
    """A part whose state is empty at first."""

    state_dict = dict.copy

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clear()
        self.update(state)


def test_a_state_that_is_empty_at_first_is_restored(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def run(steps: int) -> tuple[PPOTrainer, Counts]:
        counts = Counts()
        settings = {**QUICK, "save_strategy": "steps", "save_steps": 1, "total_episodes": None, "max_steps": steps}
        trainer = make_trainer(**settings, output_dir=str(tmp_path))
        trainer.register_stateful("counts", counts)
        return trainer, counts

    trainer, counts = run(1)
    counts["before"] = 0  # a run starts from the state at the registration
    trainer.add_callback(type("Counting", (TrainerCallback,), {"on_step_end": lambda *_, **__: counts.update(a=1)}))
    trainer.train()
    assert counts == {"a": 1}
    trainer, counts = run(2)
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(str(tmp_path)))
    assert counts == {"a": 1}


def test_a_state_that_holds_code_is_not_read(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    settings = {**QUICK, "save_strategy": "steps", "save_steps": 1, "score_scaling": True}
    make_trainer(**settings, output_dir=str(tmp_path)).train()
    torch.save({"score_moments": Doubling()}, tmp_path / "checkpoint-3" / "stateful.pt")

    with pytest.raises(ValueError, match=r"its stateful\.pt cannot be read: .*Weights only load failed"):
        make_trainer(**settings, output_dir=str(tmp_path)).train(resume_from_checkpoint=True)


def test_states_of_parts_that_are_not_there_are_said(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**QUICK, "save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path)}
    make_trainer(Accumulating, **settings, kl_controller=Doubling()).train()
    checkpoint = last_complete_checkpoint(str(tmp_path))
    make_trainer(**settings).train(resume_from_checkpoint=checkpoint)

    assert "keeps a state of ['adding', 'kl_controller'], which nothing of this run has" in caplog.text


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (TypeError, object(), r"has no state_dict and no load_state_dict"),
        (ValueError, Adding(), r"a part called 'adding' is registered already"),
    ],
)
def test_what_cannot_be_registered(kind: type, value: Any, message: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(kind, match=message):
        make_trainer(Accumulating, **QUICK).register_stateful("adding", value)


@pytest.mark.parametrize("state", [None, {"coef": Adding()}], ids=["None", "an object"])
def test_a_state_that_no_run_could_resume_from_is_refused_at_once(state: Any, make_trainer: MakeTrainer) -> None:
    controller = Doubling()
    controller.state_dict = lambda: state
    with pytest.raises(TypeError, match=r"kl_controller: Doubling\.state_dict\(\) returned"):
        make_trainer(**QUICK, kl_controller=controller)


class Echo:
    """An engine that answers every prompt with its last token, `<eos>` behind it."""

    reads_sharded = False
    changes = 0

    def sample(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Sampled:
        eos = torch.full((len(prompts), 1), 1)
        return Sampled(torch.cat([prompts.input_ids[:, -1:], eos], dim=1), None)

    def policy_changed(self) -> None:
        self.changes += 1


def test_an_engine(make_trainer: MakeTrainer) -> None:
    engine = Echo()
    trainer = make_trainer(**QUICK, engine=engine)
    trainer.train()

    assert logged(trainer, "response/length_mean") == [2.0] * 3 and logged(trainer, "response/ended_frac") == [1.0] * 3
    assert engine.changes >= 3


class Lengths(RewardSource):
    """A tenth of a point for each token."""

    name = "lengths"

    def __call__(self, batch: ScoringBatch) -> Tensor:
        return batch.response_mask.sum(dim=1) / 10


class Evens:
    """Each even token is worth a point: a source by its shape, without the base class."""

    name = "evens"

    def __call__(self, batch: ScoringBatch) -> Tensor:
        width = batch.response_mask.shape[1]
        return (batch.query_responses[:, -width:] % 2 == 0).float() * batch.response_mask


def test_reward_sources_stand_beside_functions(make_trainer: MakeTrainer) -> None:
    def seven(completions: list[str], **_: Any) -> list[float]:
        return [7.0] * len(completions)

    class Keeping(PPOTrainer):
        def collect_rollout(self, model: nn.Module, prompts: Prompts) -> Rollout:
            self.rollout = super().collect_rollout(model, prompts)
            return self.rollout

    funcs = [Lengths(), seven, Evens()]
    trainer = make_trainer(Keeping, **QUICK, reward_funcs=funcs, reward_weights=[1, 10, 100])
    trainer.train()

    rollout, evens = trainer.rollout, (trainer.rollout.responses % 2 == 0) & trainer.rollout.response_mask
    assert trainer.scorer.names == ["lengths", "seven", "evens"] and evens.any()
    assert torch.equal(rollout.scores, rollout.response_mask.sum(dim=1) / 10 + 70)
    assert torch.equal(rollout.token_scores, 100 * evens.float())
    assert logged(trainer, "rewards/evens/mean")[-1] == pytest.approx(float(evens.sum(dim=1).float().mean()))


def test_a_callable_with_a_name_is_a_function_if_it_takes_what_functions_take(make_trainer: MakeTrainer) -> None:
    class Named:
        name = "named"
        __name__ = "named"

        def __call__(self, completions: list[str], **_: Any) -> list[float]:
            return [1.0] * len(completions)

    trainer = make_trainer(**QUICK, reward_funcs=[Named()])
    trainer.train()

    assert logged(trainer, "objective/scores") == [1.0] * 3


def test_a_source_of_the_wrong_shape_is_named(make_trainer: MakeTrainer) -> None:
    class Short(RewardSource):
        name = "short"

        def __call__(self, batch: ScoringBatch) -> Tensor:
            return torch.zeros(1)

    with pytest.raises(ValueError, match=r"'short' has shape \(1,\), expected \(2,\), or \(2, 4\)"):
        make_trainer(**QUICK, reward_funcs=Short()).train()


class Trusting(PPOTrainer):
    """PPO with a squared log-ratio in place of the clip, and its own figure."""

    def policy_loss(self, logprobs: Tensor, experience: Experience) -> PolicyLoss:
        own = super().policy_loss(logprobs, experience)
        distance = (logprobs - experience.logprobs).square()
        loss = -experience.advantages * own.ratio + 0.5 * distance
        return PolicyLoss(loss, own.ratio, own.clipped, {"policy/distance": distance})

    def value_loss(self, values: Tensor, experience: Experience) -> ValueLoss:
        error = values - experience.returns
        return ValueLoss(error.abs(), torch.zeros_like(error, dtype=torch.bool), {"val/error": error})


class TrustingAtOnce(Trusting):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def test_losses_of_a_subclass_learn_in_turn_and_log_their_figures(make_trainer: MakeTrainer) -> None:
    settings = {
        **QUICK,
        "num_ppo_epochs": 2,
        "gradient_accumulation_steps": 2,
        "total_episodes": 12,
        "learning_rate": 0.01,
    }
    plain, ours, at_once = (make_trainer(kind, **settings) for kind in (PPOTrainer, Trusting, TrustingAtOnce))
    for trainer in (plain, ours, at_once):
        trainer.train()

    assert ours._sequential_backward and not at_once._sequential_backward
    assert all(torch.equal(value, parameters(at_once)[name]) for name, value in parameters(ours).items())
    assert history(ours) == history(at_once) != history(plain)
    approximate = [2 * each for each in logged(ours, "policy/approxkl_avg")]  # which is half of the square
    assert logged(ours, "policy/distance") == pytest.approx(approximate, rel=1e-5)
    assert len(logged(ours, "val/error")) == 3 and min(approximate) > 0


@pytest.mark.slow
def test_an_own_policy_loss_takes_no_more_memory(make_trainer: MakeTrainer) -> None:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, vocab_size=2048,
        pad_token_id=0, num_labels=1,
    )  # fmt: skip

    def peak(kind: type[PPOTrainer]) -> int:
        trainer = make_trainer(
            kind, model=LlamaForCausalLM(config), value_model=LlamaForSequenceClassification(config),
            num_mini_batches=1, total_episodes=8, response_length=16,
            train_dataset=Dataset.from_list([{"input_ids": [5] * 24}] * 8),
        )  # fmt: skip
        gc.collect()
        return peak_of_tensors(trainer.train)

    plain, own, at_once = peak(PPOTrainer), peak(Trusting), peak(TrustingAtOnce)
    assert own / plain == pytest.approx(1.0, abs=0.02) and at_once > 1.05 * plain


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda own: None, TypeError, r"policy_loss returned NoneType without .*: return PolicyLoss\(loss, ratio"),
        (lambda own: own.loss.mean(), TypeError, "policy_loss returned Tensor without"),
        (
            lambda own: own._replace(loss=own.loss.mean()),
            ValueError,
            r"policy_loss returned a loss of shape \(\), exp",
        ),
        (
            lambda own: own._replace(loss=own.loss.detach()),
            ValueError,
            "policy_loss returned a loss without a gradient",
        ),
        (lambda own: own._replace(figures={"own": 1.0}), TypeError, "the figure 'own' of a loss is a float, expected"),
    ],
)
def test_a_policy_loss_of_another_form_names_it(
    change: Callable[..., Any], kind: type[Exception], message: str, make_trainer: MakeTrainer
) -> None:
    class Own(PPOTrainer):
        def policy_loss(self, logprobs: Tensor, experience: Experience) -> Any:
            return change(super().policy_loss(logprobs, experience))

    class Whole(Own):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    for made_class in (Own, Whole):
        with pytest.raises(kind, match=message):
            make_trainer(made_class, **QUICK).train()


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (lambda values, _: {"val/ratio": values}, r"a loss returns figures named \['val/ratio'\]"),
        (lambda values, _: {"own": values[:, :1]}, r"the figure 'own' has shape \(2, 1\), expected \(2, 4\)"),
        (lambda values, calls: {f"own_{calls}": values}, r"give the figures \['own_2'\] and gave \['own_1'\] before"),
    ],
)
def test_figures_that_cannot_be_logged(figures: Callable[..., Any], message: str, make_trainer: MakeTrainer) -> None:
    class Own(PPOTrainer):
        calls = 0

        def policy_loss(self, logprobs: Tensor, experience: Experience) -> PolicyLoss:
            self.calls += 1
            return super().policy_loss(logprobs, experience)._replace(figures=figures(logprobs, self.calls))

    with pytest.raises(ValueError, match=message):
        make_trainer(Own, **QUICK | {"num_ppo_epochs": 2, "response_length": 4}, stop_token=None).train()


def test_the_advantages_of_a_subclass(make_trainer: MakeTrainer) -> None:
    class FirstToken(PPOTrainer):
        """Only the first token of a response matters."""

        def compute_advantages(self, rollout: Rollout, rewards: Tensor) -> tuple[Tensor, Tensor]:
            advantages = torch.zeros_like(rewards)
            advantages[:, 0] = rewards.sum(dim=1)
            return advantages, rewards

    class Keeping(FirstToken):
        def learn(self, model: nn.Module, experience: Experience) -> Any:
            self.experience = experience
            return super().learn(model, experience)

    trainer = make_trainer(Keeping, **QUICK)
    trainer.train()

    experience = trainer.experience
    mean = experience.advantages[experience.loss_mask].mean()
    later = experience.advantages[:, 1:][experience.loss_mask[:, 1:]]
    assert float(mean) == pytest.approx(0.0, abs=1e-6) and len(set(later.tolist())) == 1  # whitened after
