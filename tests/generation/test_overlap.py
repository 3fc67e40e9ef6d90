"""generation_overlap=1: which weights sample which rollout, resume, signals, death of the worker."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import set_seed
from peft import LoraConfig
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.generation.continuous import ContinuousEngine
from rlhf_ppo.generation.sampling import NonFiniteLogitsError
from rlhf_ppo.generation.transformers_engine import TransformersEngine, sampling_config
from rlhf_ppo.processes.distributed import derive_seed, preserve_rng
from rlhf_ppo.processes.signals import RunStopped
from rlhf_ppo.rewards.judges import PreferenceReward
from tests.conftest import count_w4, needs_continuous, tiny_policy
from tests.faults import conftest as faults
from tests.faults.conftest import make_saving
from tests.generation import workers
from tests.oracles import Llama, log_softmax, weights_of
from tests.runs import assert_identical, end_of_run, logged, record_rollouts

pytestmark = pytest.mark.usefixtures("quick_workers")
quick_workers = workers.quick_workers

RUN: dict[str, Any] = {
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_ppo_epochs": 2, "num_mini_batches": 2,
    "total_episodes": 12, "learning_rate": 1e-2, "temperature": 0.8, "generation_overlap": 1,
}  # fmt: skip
"""Six updates of two prompts each; a pass has four."""


class KeepsWeights(TrainerCallback):
    """Keeps the policy before each update."""

    def __init__(self) -> None:
        self.policies: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.policies.append(copy.deepcopy(model.policy))


def make(output_dir: Path, *callbacks: Any, given: Any = None, **overrides: Any) -> PPOTrainer:
    return make_saving(output_dir, given={"callbacks": [*callbacks], **(given or {})}, **{**RUN, **overrides})


def prompts_of(rollout: Rollout) -> Prompts:
    context = rollout.context_length
    return Prompts(rollout.query_responses[:, :context], rollout.attention_mask[:, :context], {})


def logprobs_in_numpy(policy: Any, rollout: Rollout) -> Any:
    """Log-probabilities of all response tokens under a policy, row after row."""
    llama, weights, found = Llama.of(policy.config), weights_of(policy), []
    for ids, real, written in zip(*rollout.batch, strict=True):
        row, length = ids[real].tolist(), int(written.sum())
        distribution = log_softmax(llama.states(weights, row) @ weights["lm_head.weight"].T / RUN["temperature"])
        found += [distribution[place - 1, row[place]] for place in range(len(row) - length, len(row))]
    return np.array(found)


@pytest.mark.parametrize("engine", ["transformers", pytest.param("continuous", marks=needs_continuous)])
def test_a_rollout_is_sampled_with_the_weights_before_the_last_update(engine: str, tmp_path: Path) -> None:
    """Sampled again here with these weights; prompts come as without overlap, also those of the next pass."""
    trainer = make(tmp_path / "ahead", kept := KeepsWeights(), generation_engine=engine)
    rollouts = record_rollouts(trainer)
    trainer.train()
    plain = make(tmp_path / "plain", generation_overlap=0)
    of_plain = record_rollouts(plain)
    plain.train()

    own = TransformersEngine(lambda: 2) if engine == "transformers" else ContinuousEngine(lambda: 2)
    config = sampling_config(trainer.args, trainer.tokens.stop, trainer._run.vocabulary.never_sampled)
    assert len(rollouts) == 6

    def is_of(update: int, policy: Any) -> bool:
        rollout = rollouts[update]
        with preserve_rng(), torch.no_grad():
            set_seed(derive_seed("rollout", trainer.args.seed, update, 0))
            ids = own.sample(policy, prompts_of(rollout), config).ids
        mask = rollout.response_mask
        lengths = mask.sum(dim=1).tolist()
        given = zip(ids.tolist(), rollout.responses.tolist(), lengths, strict=True)
        same = all(one[:length] == other[:length] for one, other, length in given)
        return same and np.allclose(logprobs_in_numpy(policy, rollout), rollout.sampling_logprobs[mask], atol=1e-4)

    for update in range(6):
        used = [before for before, policy in enumerate(kept.policies) if is_of(update, policy)]
        assert used == [max(update - 1, 0)], update
        one, other = rollouts[update], of_plain[update]
        assert torch.equal(
            one.query_responses[:, : one.context_length], other.query_responses[:, : other.context_length]
        )
    assert logged(trainer, "generation/lag") == [0, 1, 1, 1, 1, 1]


class SignalAt(TrainerCallback):
    """Sends this process SIGTERM at an event of an update."""

    def __init__(self, event: str, step: int) -> None:
        setattr(self, f"on_{event}", self._signal)
        self.step = step

    def _signal(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            os.kill(os.getpid(), signal.SIGTERM)


class SignalInReward:
    """Scores like `count_w4`; sends SIGTERM while the responses of an update are scored."""

    __name__ = "count_w4"

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, trainer_state: Any, **columns: Any) -> Any:
        if trainer_state.global_step == self.step:
            self.step = -1
            os.kill(os.getpid(), signal.SIGTERM)
        return count_w4(**columns)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of the run that was left alone."""
    with pytest.MonkeyPatch.context() as patch:
        workers.replace_processes(patch, workers.ForkedWorker)
        trainer = make(tmp_path_factory.mktemp("whole") / "run")
        trainer.train()
    return end_of_run(trainer)


MOMENTS = {
    "before the first rollout": (SignalAt("step_begin", 0), "checkpoint-0"),
    "waiting": (SignalAt("step_begin", 3), "checkpoint-3"),
    "waiting, first of a pass": (SignalAt("step_begin", 4), "checkpoint-4"),
    "scoring": (SignalInReward(2), "checkpoint-2"),
    "learning": (SignalAt("optimizer_step", 2), "checkpoint-2-1"),
    "learning, last of a pass": (SignalAt("optimizer_step", 3), "checkpoint-3-1"),
    "saving": (SignalAt("save", 2), "checkpoint-2"),
    "saved": (SignalAt("step_end", 3), "checkpoint-3"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_resumed_run_ends_like_one_that_was_never_stopped(moment: str, whole: Any, tmp_path: Path) -> None:
    stops, checkpoint = MOMENTS[moment]
    stops = copy.copy(stops)
    is_reward = isinstance(stops, SignalInReward)
    start = time.monotonic()
    trainer = make(
        tmp_path / "run", *([] if is_reward else [stops]), given={"reward_funcs": stops} if is_reward else None
    )
    with pytest.raises(RunStopped) as stopped:
        trainer.train()
    assert os.path.basename(stopped.value.checkpoint) == checkpoint
    assert time.monotonic() - start < 30
    resumed = make(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)

    assert_identical(end_of_run(resumed), whole)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (signal.SIGKILL, r"worker process \d+, which samples the next rollout, has ended \(signal SIGKILL\)"),
        (signal.SIGSTOP, r"worker process has not sampled the next rollout within ddp_timeout=3 seconds"),
    ],
)
def test_a_worker_that_dies_or_hangs_ends_the_run_by_name(
    sent: signal.Signals, message: str, quick_workers: Any, tmp_path: Path
) -> None:
    class Strikes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(quick_workers[-1].pid, sent)
                trainer._rollouts.ahead.patience = 3.0  # pyright: ignore[reportOptionalMemberAccess]

    trainer = make(tmp_path / "run", Strikes())
    with pytest.raises(RuntimeError, match=message):
        trainer.train()
    assert len(quick_workers) == 1


def test_an_error_of_the_worker_is_that_of_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    with torch.no_grad():
        trainer.policy_model.lm_head.weight.fill_(torch.nan)  # pyright: ignore
    with pytest.raises(NonFiniteLogitsError, match=r"update 1: the policy .*logits are NaN or infinite"):
        trainer.train()


class OwnResponses(PPOTrainer):
    def generate_responses(self, *given: Any) -> Any:
        return super().generate_responses(*given)


@pytest.mark.parametrize(
    ("what", "given", "trainer_class"),
    [
        ("an engine passed to the trainer", {"engine": TransformersEngine(lambda: 1)}, PPOTrainer),
        ("tools, environments or rollout_func", {"rollout_func": print}, PPOTrainer),
        (r"reward_funcs that compare with \('reference',\)", {"reward_funcs": PreferenceReward(print)}, PPOTrainer),
        ("the overridden OwnResponses.generate_responses", {}, OwnResponses),
    ],
)
def test_what_a_worker_cannot_sample_is_refused(
    what: str, given: dict[str, Any], trainer_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "PPOTrainer", trainer_class)
    with pytest.raises(
        ValueError, match=f"generation_overlap=1 .* cannot be done with {what}; set generation_overlap=0"
    ):
        make(tmp_path / "run", given=given)


def test_a_policy_that_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match=r"generation_overlap=1 sends a copy of the policy .* cannot be pickled"):
        make(tmp_path / "run", given={"model": policy})


def test_the_worker_of_a_killed_run_ends(tmp_path: Path) -> None:
    """With a process started as in a user's run, which samples when the kill comes."""
    script = """
import sys
from pathlib import Path
from tests.generation import test_overlap as tests
class Tells(tests.TrainerCallback):
    def on_optimizer_step(self, *args, **kwargs):
        print("worker", trainer._rollouts.ahead._process.pid, flush=True)
trainer = tests.make(Path(sys.argv[1]), Tells(), total_episodes=2000, save_strategy="no", response_length=50)
trainer.train()
"""
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        told = next(line.split() for line in run.stdout if line.startswith("worker"))
        assert Path("/proc", told[1]).exists()
        run.kill()
    deadline = time.monotonic() + 20
    while Path("/proc", told[1]).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def share_of_even_ids(completion_ids: Any, **columns: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


@pytest.mark.slow
def test_a_policy_learns_with_it(tmp_path: Path) -> None:
    """One update off-policy, with the correction that is the default."""
    how = {
        "total_episodes": 640,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 3e-3,
    }
    given = {"reward_funcs": share_of_even_ids}
    trainer = make(tmp_path / "run", **how, given=given, kl_coef=0.0, save_strategy="no", logging_steps=1)
    trainer.train()
    scores = logged(trainer, "objective/scores")
    assert np.mean(scores[-5:]) > np.mean(scores[:5]) + 0.3
    assert logged(trainer, "generation/lag")[1:] == [1] * 79


@pytest.mark.parametrize("adapter", [None, {"r": 2, "target_modules": "all-linear"}], ids=["whole", "lora"])
def test_a_policy_with_gradient_checkpointing_is_sampled_ahead(adapter: Any, tmp_path: Path) -> None:
    """It is the default, and transformers then hooks a local function to the embeddings, which cannot be pickled."""
    given = {} if adapter is None else {"peft_config": LoraConfig(**adapter)}
    trainer = make(tmp_path / "run", given=given, gradient_checkpointing=True, total_episodes=4)
    trainer.train()
    assert logged(trainer, "generation/lag") == [0, 1]
