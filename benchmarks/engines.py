"""Compare the generation engines: response tokens per CPU second, in one process, in turn.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/engines.py

A random Llama of 18M parameters in float32 (8 layers x 384, heads of 64, 4,096 tokens) answers the same prompts of 8
to 96 tokens through each engine. One in 32 ids ends a response, after 32 tokens on average; the limit is 96.
`make .venv-vllm/installed` makes the environment with vLLM; without vLLM the others are compared. vLLM runs with the
plugin of `tests/vllm`, which multiplies with plain PyTorch: its own kernels for CPUs cannot take new weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from workloads import Workload, llama, make_models, make_prompts, make_tokenizer

from rlhf_ppo import PPOConfig
from rlhf_ppo.data.prompts import PromptCollator
from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.generation.continuous import ContinuousEngine
from rlhf_ppo.generation.sampler import sample_with
from rlhf_ppo.generation.transformers_engine import TransformersEngine, sampling_config

HAS_VLLM = importlib.util.find_spec("vllm") is not None
PLUGIN = Path(__file__).parents[1] / "tests" / "vllm" / "plugin"
ON_A_CPU = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
MODEL = {**llama(8, 384, 4096), "num_attention_heads": 6, "num_key_value_heads": 6, "tie_word_embeddings": False}
WORKLOAD = Workload(MODEL, (8, 96), 96)
STOPS = list(range(1, 129))
"""The ids that end a response: the first stop token alone would hardly ever be sampled."""


def speed(engine: Any, policy: Any, prompts: Prompts, config: Any) -> tuple[float, float, float]:
    """Generate a response to each prompt; return real tokens per CPU second, per second, and per response."""
    torch.manual_seed(0)
    start, start_cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
        ids = sample_with(engine, policy, prompts, config).ids
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    is_stop = torch.isin(ids, torch.tensor(STOPS)).long()
    tokens = float((is_stop.cumsum(dim=1) - is_stop == 0).sum())
    return tokens / cpu, tokens / seconds, tokens / len(ids)


def make_vllm(args: PPOConfig, policy: Any, tokenizer: Any, rows: int) -> Any:
    """Start a colocated vLLM on this CPU."""
    os.environ.update(ON_A_CPU)  # before vLLM is imported
    sys.path.insert(0, str(PLUGIN))
    from vllm_on_cpu import patch_trl  # pyright: ignore[reportMissingImports]

    from rlhf_ppo.generation.vllm import start_vllm

    patch_trl()
    return start_vllm(args, policy, Accelerator(cpu=True), tokenizer, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256, help="prompts")
    parser.add_argument("--at-a-time", type=int, default=64, help="rows that are generated from at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_models(WORKLOAD)["model"].save_pretrained(folder)
        tokenizer = make_tokenizer(WORKLOAD)
        tokenizer.save_pretrained(folder)
        policy: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        engines: dict[str, Any] = {
            "transformers": TransformersEngine(lambda: given.at_a_time),
            "continuous": ContinuousEngine(lambda: given.at_a_time),
        }
        options = {"use_cpu": True, "bf16": False, "response_length": WORKLOAD.response_length, "report_to": "none"}
        if HAS_VLLM:
            options |= {"generation_engine": "vllm", "vllm_max_model_length": 192}
        args = PPOConfig(output_dir=folder, **options)
        if HAS_VLLM:
            engines["vllm"] = make_vllm(args, policy, tokenizer, given.at_a_time)
        config = sampling_config(args, STOPS[0])
        config.eos_token_id = STOPS
        compare(engines, policy, given, config)


def compare(engines: dict[str, Any], policy: Any, given: argparse.Namespace, config: Any) -> None:
    """Let each engine generate in turn, and print a table of medians."""
    batch = PromptCollator(0)(list(make_prompts(WORKLOAD, given.rows)))
    prompts = Prompts.from_collated(batch, torch.device("cpu"))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
    for engine in engines.values():
        few = Prompts(prompts.input_ids[:8], prompts.attention_mask[:8], {})
        speed(engine, policy, few, config)  # warms up
    for _ in range(given.rounds):
        for name, engine in engines.items():
            found[name].append(speed(engine, policy, prompts, config))
    parameters = sum(weight.numel() for weight in policy.parameters())
    print(
        f"{parameters / 1e6:.1f}M parameters, {given.rows} prompts, {given.at_a_time} at a time, {platform.machine()}"
    )
    print(f"load average {', '.join(f'{load:.1f}' for load in os.getloadavg())}; {given.rounds} rounds in turn")
    print(
        "| engine | tokens per CPU second | ratio | tokens per second | tokens per response |\n|---|---|---|---|---|"
    )
    medians = {name: [statistics.median(values) for values in zip(*rows, strict=True)] for name, rows in found.items()}
    for name, (cpu, wall, length) in medians.items():
        print(f"| `{name}` | {cpu:.0f} | {cpu / medians['transformers'][0]:.2f}x | {wall:.0f} | {length:.1f} |")
    if not HAS_VLLM:
        print("vLLM is not installed here: run this with .venv-vllm/bin/python after `make .venv-vllm/installed`")


if __name__ == "__main__":
    main()
