"""Run one workload through one trainer in this process and print what it took, as one line of JSON."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from bound import read_clock
from datasets import Dataset
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import TrainerCallback
from workloads import WORKLOADS, Workload, hyper_parameters, make_models, make_prompts, make_tokenizer


class Clock(TrainerCallback):
    """Reads the time at the end of each phase and of each update.

    On a CPU phases are CPU seconds of this process, which a busy machine leaves comparable; on an idle one they are
    the time of day times the busy threads. On a GPU they are the time of day, read once it has done all of the phase.

    Args:
        device: `cpu` or `cuda`.

    Attributes:
        updates: Of each update: seconds by phase (generate, score, learn); `wall`, seconds by the time of day; `cpu`,
            CPU seconds of this process.
        shared: Of each log of ours: `batch/shared_frac`, the share of the rows' tokens that was not computed.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.read = time.process_time if device == "cpu" else partial(read_clock, device)
        self.updates: list[dict[str, float]] = []
        self.shared: list[float] = []
        self.on_train_begin()

    def enter(self, phase: str) -> None:
        """Count the time since the last change to the phase that was, and change."""
        now = self.read()
        self.seconds[self.phase] += now - self.since
        self.phase, self.since = phase, now

    def during(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function's calls a phase; what follows a call is scoring, unless it was learning."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            result = function(*args, **kwargs)
            self.enter("score")
            return result

        return timed

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start."""
        self.phase, self.since = "score", self.read()
        self.began, self.cpu_began = time.perf_counter(), time.process_time()
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Keep the share of the tokens that rows have in common."""
        self.shared += [logs["batch/shared_frac"]] if "batch/shared_frac" in logs else []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """End an update."""
        self.enter("score")
        whole = {"wall": time.perf_counter() - self.began, "cpu": time.process_time() - self.cpu_began}
        self.updates.append(self.seconds | whole)
        self.on_train_begin()


PHASES = ("generate", "score", "learn")


def run_ours(models: dict[str, Any], arguments: dict[str, Any], clock: Clock, lengths: list[Any]) -> Callable[[], Any]:
    """Set up rlhf_ppo; return what trains."""
    from rlhf_ppo import PPOConfig, PPOTrainer

    class Timed(PPOTrainer):
        def estimate_advantages(self, rollout: Any) -> Any:
            responses = rollout.responses
            prompt_mask = responses.attention_mask[:, : responses.context_length]
            lengths.append((prompt_mask.sum(1), responses.response_mask.sum(1)))
            return super().estimate_advantages(rollout)

    trainer = Timed(PPOConfig(**arguments), **models, callbacks=[clock])
    trainer.generate_responses = clock.during("generate", trainer.generate_responses)
    trainer.learn = clock.during("learn", trainer.learn)
    return trainer.train


def run_trl(models: dict[str, Any], arguments: dict[str, Any], clock: Clock, lengths: list[Any]) -> Callable[[], Any]:
    """Set up TRL's PPO; return what trains. Its learning begins with the first forward pass that has gradients."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    forward = ppo_trainer.forward

    def forward_in_phase(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and clock.phase != "learn":
            clock.enter("learn")
        return forward(*args, **kwargs)

    ppo_trainer.batch_generation = clock.during("generate", ppo_trainer.batch_generation)
    ppo_trainer.forward = forward_in_phase
    trainer = PPOTrainer(PPOConfig(**arguments), **models, callbacks=[clock])

    return trainer.train


def run_grpo(models: dict[str, Any], arguments: dict[str, Any], clock: Clock, lengths: list[Any]) -> Callable[[], Any]:
    """Set up TRL's GRPO with a KL penalty, as many passes over the responses, and a reward of no cost.

    Args:
        models: Of the workload; the policy, its adapter, the tokenizer and the prompts are used.
        arguments: Of PPO, which are translated.
        clock: Reads an update at each of GRPO's optimizer steps; `num_ppo_epochs` of them use the same responses.
        lengths: Stays empty.
    """
    from trl import GRPOConfig, GRPOTrainer

    size, steps = arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]
    config = GRPOConfig(
        **{name: arguments[name] for name in SHARED_ARGUMENTS},
        max_steps=arguments["total_episodes"] // (size * steps) * arguments["num_ppo_epochs"],
        num_generations=8,
        steps_per_generation=steps,
        num_iterations=arguments["num_ppo_epochs"],
        max_completion_length=arguments["response_length"],
        beta=0.05,
    )
    rows, words = models["train_dataset"], models["processing_class"]
    words.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    texts = [{"prompt": " ".join(words.convert_ids_to_tokens(row["input_ids"]))} for row in rows][
        :: config.num_generations
    ]
    trainer = GRPOTrainer(
        models["model"], random_rewards, config, Dataset.from_list(texts), processing_class=words,
        peft_config=models["peft_config"], callbacks=[clock],
    )  # fmt: skip
    trainer._generate_and_score_completions = clock.during("generate", trainer._generate_and_score_completions)
    return trainer.train


SHARED_ARGUMENTS = (
    "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "temperature", "learning_rate", "bf16",
    "logging_steps", "save_strategy", "report_to", "disable_tqdm", "use_cpu", "gradient_checkpointing", "seed",
)  # fmt: skip


def random_rewards(completions: list[Any], **_: Any) -> list[float]:
    """Draw a reward for each response, at no cost."""
    return torch.rand(len(completions)).tolist()


def given(workload: Workload, device: str = "cpu") -> dict[str, Any]:
    """Make what both trainers are given besides their arguments."""
    return {
        "processing_class": make_tokenizer(workload),
        "train_dataset": make_prompts(
            workload, 2 * workload.batch_size if workload.copies == 1 else workload.batch_size
        ),
        **make_models(workload, device),
    }


TRAINERS = {"ours": run_ours, "trl": run_trl, "grpo": run_grpo}


def megabytes(field: str) -> float:
    """Read a field of this process's memory: VmRSS (now) or VmHWM (the peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def restart_peak(device: str = "cpu") -> None:
    """Let the peak of memory start anew from what is in use."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def memory_rise(function: Callable[[], Any], device: str = "cpu") -> float:
    """Call a function; return how far memory rose above what was in use, MB: the process's, on a GPU its tensors'."""
    before = torch.cuda.memory_allocated() / 2**20 if device == "cuda" else megabytes("VmRSS")
    restart_peak(device)
    function()
    return (torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else megabytes("VmHWM")) - before


def measure(
    trainer: str,
    workload: Workload,
    num_updates: int,
    options: dict[str, Any] | None = None,
    device: str = "cpu",
    **models: Any,
) -> dict[str, Any]:
    """Train for a few updates.

    Args:
        trainer: `ours`, `trl` (PPO) or `grpo` (TRL's too).
        workload: What to run.
        num_updates: How many; the first, which allocates, is reported apart.
        options: Arguments of the configuration besides the workload's.
        device: `cpu` or `cuda`.
        models: What the trainer is given besides, or in place of, the workload's models.

    Returns:
        What the clock read of the first update and of those after it, the peak of memory above that of the models and
        the trainer, MB, and for ours each later update's prompt and response lengths.
    """
    clock, lengths = Clock(device), []
    with tempfile.TemporaryDirectory() as folder:
        run = TRAINERS[trainer]
        arguments = {**hyper_parameters(workload, num_updates, folder, device), **(options or {})}
        train = run({**given(workload, device), **models}, arguments, clock, lengths)
        memory = memory_rise(train, device)
    return {
        "first": clock.updates[0],
        "updates": clock.updates[1:],
        "memory": memory,
        "shared": clock.shared,
        "lengths": [[side.tolist() for side in update] for update in lengths[1:]],
    }


def measure_alone(
    workload: Workload, num_updates: int, options: dict[str, Any] | None = None, **models: Any
) -> dict[str, Any]:
    """Measure our trainer as `measure` does, on the CPU with one thread, in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        return pool.submit(measure, "ours", workload, num_updates, options, **models).result()


def main() -> None:
    """Read the command line and print the measurement."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--one-body", action="store_true", help="value_model='policy', for ours")
    parser.add_argument(
        "--function", action="store_true", help="random rewards in place of the reward model, for ours"
    )
    parser.add_argument("--unshared", action="store_true", help="share_prefixes=False, for ours")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    workload, models = WORKLOADS[arguments.workload], {"value_model": "policy"} if arguments.one_body else {}
    models |= {"reward_model": None, "reward_funcs": random_rewards} if arguments.function else {}
    options = {"share_prefixes": False} if arguments.unshared else {}
    how = {"options": options, "device": arguments.device, **models}
    print(json.dumps(measure(arguments.trainer, workload, arguments.updates, **how)))


if __name__ == "__main__":
    main()
