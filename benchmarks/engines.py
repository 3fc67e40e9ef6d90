"""Compare the generation engines that run in one process: response tokens per second, alternating in one run.

    python benchmarks/engines.py --workload ragged --rows 64 --at-a-time 16

The model, the prompts and the mean length of the responses are those of `benchmarks/workloads.py`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any, cast

import torch
from workloads import STOP, TEMPERATURE, WORKLOADS, make_models, make_prompts

from rlhf_ppo import PPOConfig
from rlhf_ppo.data.datasets import PromptCollator
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.generation.continuous import ContinuousEngine
from rlhf_ppo.generation.sequences import response_mask
from rlhf_ppo.generation.transformers_engine import TransformersEngine, sampling_config


def tokens_per_second(engine: Any, policy: Any, prompts: Prompts, args: PPOConfig) -> float:
    """Generate a response to each prompt, and count the real tokens per CPU second of the process."""
    torch.manual_seed(0)
    start = time.process_time()
    ids = engine.sample(policy, prompts, sampling_config(args, STOP)).ids
    return float(response_mask(ids, STOP).sum()) / (time.process_time() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="ragged")
    parser.add_argument("--rows", type=int, default=64, help="prompts")
    parser.add_argument("--at-a-time", type=int, default=16, help="local_rollout_forward_batch_size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    workload = WORKLOADS[given.workload]
    policy = make_models(workload)["model"].eval()
    batch = PromptCollator(0)(list(make_prompts(workload, given.rows)))
    prompts = Prompts.from_collated(batch, torch.device("cpu"))

    def rows() -> int:
        return given.at_a_time

    engines = {"transformers": TransformersEngine(rows), "continuous": ContinuousEngine(rows)}
    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(
            output_dir=folder, use_cpu=True, response_length=workload.response_length, temperature=TEMPERATURE
        )
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(given.rounds + 1):  # the first round warms up
        for name, engine in engines.items():
            speed = tokens_per_second(engine, cast(Any, policy), prompts, args)
            if number > 0:
                speeds[name].append(speed)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, median in medians.items():
        print(f"{name}: {median:.0f} tokens/s (CPU), {median / medians['transformers']:.2f}x of generate")


if __name__ == "__main__":
    main()
