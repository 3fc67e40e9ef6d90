"""generation_overlap=1: which weights sample which rollout, resume, signals, death of the worker."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from accelerate.utils import set_seed
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import TrainerCallback

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.generation import overlap
from rlhf_ppo.generation.continuous import ContinuousEngine
from rlhf_ppo.generation.sampling import NonFiniteLogitsError
from rlhf_ppo.generation.transformers_engine import TransformersEngine, sampling_config
from rlhf_ppo.processes.distributed import derive_seed, preserve_rng
from rlhf_ppo.processes.signals import RunStopped
from rlhf_ppo.rewards.judges import PreferenceReward
from tests.conftest import count_w4, needs_continuous, prompt_rows, tiny_policy
from tests.faults import conftest as faults
from tests.faults.conftest import make_saving
from tests.generation import workers
from tests.oracles import Llama, log_softmax, weights_of
from tests.runs import KeepsWeights, assert_identical, end_of_run, logged, record_rollouts

pytestmark = pytest.mark.usefixtures("quick_workers")
quick_workers = workers.quick_workers

RUN: dict[str, Any] = {
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_ppo_epochs": 2, "num_mini_batches": 2,
    "total_episodes": 12, "learning_rate": 1e-2, "temperature": 0.8, "generation_overlap": 1,
}  # fmt: skip
"""Six updates of two prompts each; a pass has four."""
STOPS = {6: "w3", 8: "w5", 10: "w7"}


class WatchesWorker(KeepsWeights):
    """Notes too whether the worker had a rollout to sample during each update's last step."""

    def __init__(self) -> None:
        super().__init__()
        self.worked: dict[int, bool] = {}
        self.trainer: Any = None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.worked[state.global_step] = self.trainer._rollouts.ahead.running is not None


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
    ends = [*STOPS.values()] if engine == "transformers" else None
    trainer = make(tmp_path / "ahead", kept := WatchesWorker(), generation_engine=engine, stop_strings=ends)
    rollouts, kept.trainer = record_rollouts(trainer), trainer
    trainer.train()
    plain = make(tmp_path / "plain", generation_overlap=0)
    of_plain = record_rollouts(plain)
    plain.train()

    own = ContinuousEngine(lambda: 2)
    if engine == "transformers":
        own = TransformersEngine(lambda: 2, trainer.tokens.stop_strings)
        rows = [row for each in rollouts for row in zip(each.responses, each.response_mask, strict=True)]
        written = [ids[mask].tolist() for ids, mask in rows]
        assert STOPS.keys() & {row[-1] for row in written}
        assert not any(STOPS.keys() & {*row[:-1]} for row in written)
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
    assert kept.worked == {update: update < 5 for update in range(6)}


def prompts_of_length(length: int) -> Prompts:
    return Prompts(torch.full((2, length), 5), torch.ones(2, length, dtype=torch.bool), {})


def test_jobs_are_of_an_update_and_a_rank(tmp_path: Path) -> None:
    rollouts, prompts = make(tmp_path / "run")._rollouts, prompts_of_length(3)
    with patch.object(PPOConfig, "process_index", 1):
        of_rank_1 = rollouts._job(prompts, 1)
    assert len({rollouts._job(prompts, 0).seed, rollouts._job(prompts, 1).seed, of_rank_1.seed}) == 3
    with pytest.raises(ValueError, match="the longest prompt"):
        rollouts._job(prompts_of_length(61), 1)


def test_weights_wait_for_the_worker(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    ahead, policy, other = trainer._rollouts.ahead, tiny_policy(), tiny_policy(seed=1)
    assert ahead is not None

    def job(update: int) -> overlap.Job:
        return trainer._rollouts._job(prompts_of_length(3), update)

    with trainer._rollouts.in_use():
        ahead.begin()
        ahead.hand_over(policy, 0)
        first, second = (ahead.take(job(update), torch.device("cpu")) for update in (1, 2))
        ahead.start(job(1))
        assert torch.equal(ahead.take(job(2), torch.device("cpu")).query_responses, second.query_responses)
        ahead.start(job(1))
        ahead.hand_over(other, 1)
        found = ahead.take(job(1), torch.device("cpu"))
        assert found.sampling_logprobs is not None and first.sampling_logprobs is not None
        assert not torch.equal(found.sampling_logprobs, first.sampling_logprobs)
        save_file({"others": torch.zeros(1)}, tmp_path / overlap.SAMPLING_WEIGHTS_NAME, {"version": "3"})
        with pytest.raises(ValueError, match="has not the weights of this policy"):
            ahead.load(str(tmp_path), policy)


def test_an_evaluation_is_of_the_policy_as_it_is(tmp_path: Path) -> None:
    given = {"eval_dataset": Dataset.from_list(prompt_rows(4, seed=1))}
    trainer = make(tmp_path / "run", given=given, eval_strategy="steps", eval_steps=2, total_episodes=8)
    trainer.train()
    found = trainer.evaluate()
    for name in ("eval_score", "eval_entropy", "eval_response_length_mean"):
        assert logged(trainer, name)[1] == found[name]


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
                trainer._rollouts.ahead.patience = 3.0  # pyright: ignore

    trainer = make(tmp_path / "run", Strikes())
    with pytest.raises(RuntimeError, match=message):
        trainer.train()
    assert len(quick_workers) == 1


@pytest.mark.parametrize("stopped_too", [False, True])
def test_a_signal_reaches_the_run_and_not_the_worker(
    stopped_too: bool, whole: Any, quick_workers: Any, tmp_path: Path
) -> None:
    """A terminal sends SIGINT to both. A run that waits for a worker that hangs ends at a signal."""

    class Strikes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(quick_workers[-1].pid, signal.SIGSTOP if stopped_too else signal.SIGINT)
                if stopped_too:
                    trainer._rollouts.ahead.patience = 30.0  # pyright: ignore
                    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()

    trainer = make(tmp_path / "run", Strikes())
    if stopped_too:
        with pytest.raises(RunStopped):
            trainer.train()
        trainer = make(tmp_path / "run")
    trainer.train(resume_from_checkpoint=stopped_too)
    assert_identical(end_of_run(trainer), whole)


def test_an_error_of_the_worker_is_that_of_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    with torch.no_grad():
        trainer.policy_model.lm_head.weight.fill_(torch.nan)  # pyright: ignore
    with pytest.raises(NonFiniteLogitsError, match=r"update 1: the policy .*logits are NaN or infinite"):
        trainer.train()


def settings_here() -> tuple[Any, ...]:
    """How PyTorch computes in this process."""
    backends = torch.backends
    precisions = backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision  # pyright: ignore
    reduced = backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    of_torch = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.is_autocast_enabled("cpu")
    return *precisions, reduced, backends.cudnn.deterministic, *of_torch


def scaled_by_settings(module: Any, given: Any, hidden: Any) -> Any:
    return hidden * (1 + zlib.crc32(repr(settings_here()).encode()) / 2**32)


@pytest.mark.usefixtures("determinism_restored")
def test_the_worker_computes_as_the_trainer_does(tmp_path: Path) -> None:
    policy, before, threads = tiny_policy(), overlap.numerics(), torch.get_num_threads()
    policy.model.norm.register_forward_hook(scaled_by_settings)
    torch.set_num_threads(threads + 1)
    trainer = make(tmp_path / "run", given={"model": policy}, total_episodes=2, full_determinism=True, bf16=True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        trainer.train()
        assert settings_here() == ("tf32", "bf16", False, True, True, threads + 1, False)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
        overlap.set_numerics(before)
    assert logged(trainer, "sampling/sampling_logp_difference/max")[0] < 0.02  # bf16's digits


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
    assert logged(trainer, "sampling/sampling_logp_difference/max")[0] < 1e-5
