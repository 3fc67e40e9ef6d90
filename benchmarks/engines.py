"""Compare the generation engines: response tokens per CPU second, in one process, in turn.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/engines.py
    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/engines.py --model chat-model

A random Llama of 18M parameters in float32 (8 layers x 384, heads of 64, 4,096 tokens) answers the same prompts of 8
to 96 tokens through each engine. One in 32 ids ends a response, after 32 tokens on average; the limit is 96. With
`--model` a chat model answers 16 questions of `examples/follow_instructions.py` in 32 tokens each: none ends early.
`make .venv-vllm/installed` makes the environment with vLLM; without vLLM the others are compared. vLLM runs with the
plugin of `tests/vllm`, which multiplies with plain PyTorch: its own kernels for CPUs cannot take new weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import runpy
import statistics
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from bound import bandwidth, decoded_bytes, forward_flops, matmul_rate
from transformers import AutoModelForCausalLM, AutoTokenizer
from workloads import Workload, llama, make_models, make_prompts, make_tokenizer

from rlhf_ppo import PPOConfig
from rlhf_ppo.data.prompts import PromptCollator
from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.generation.continuous import ContinuousEngine
from rlhf_ppo.generation.sampling import sample_with, sampling_config
from rlhf_ppo.generation.transformers_engine import TransformersEngine

HAS_VLLM = importlib.util.find_spec("vllm") is not None
HERE = Path(__file__).parents[1]
PLUGIN, EXAMPLE = HERE / "tests" / "vllm" / "plugin", HERE / "examples" / "follow_instructions.py"
ON_A_CPU = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
MODEL = {**llama(8, 384, 4096), "num_attention_heads": 6, "num_key_value_heads": 6, "tie_word_embeddings": False}
WORKLOAD = Workload(MODEL, (8, 96), 96)
STOPS = list(range(1, 129))
"""The ids that end a response: the first stop token alone would hardly ever be sampled."""


def speed(engine: Any, policy: Any, prompts: Prompts, config: Any) -> tuple[float, float, float, float]:
    """Generate a response to each prompt; return real tokens per CPU second, per second, per response, and the bound.

    The bound is that of `bound.py`, all prompts at a time: CPU seconds at the rates of this moment, over those taken.
    """
    torch.manual_seed(0)
    start, start_cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
        ids = sample_with(engine, policy, prompts, config).ids
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    is_stop = torch.isin(ids, torch.tensor(config.eos_token_id or [])).long()
    lengths = (is_stop.cumsum(dim=1) - is_stop == 0).sum(dim=1)
    tokens, model = float(lengths.sum()), policy.config.to_dict()
    products = sum(forward_flops(model, prompts.attention_mask.sum(dim=1), lengths)) / matmul_rate()
    bound = products + decoded_bytes(model, int(lengths.max())) / bandwidth()
    return tokens / cpu, tokens / seconds, tokens / len(ids), torch.get_num_threads() * bound / cpu


def make_vllm(args: PPOConfig, policy: Any, tokenizer: Any, rows: int) -> Any:
    """Start a colocated vLLM on this CPU."""
    os.environ.update(ON_A_CPU)  # before vLLM is imported
    sys.path.insert(0, str(PLUGIN))
    from vllm_on_cpu import patch_trl  # pyright: ignore[reportMissingImports]

    from rlhf_ppo.generation.vllm import start_vllm

    patch_trl()
    return start_vllm(args, policy, Accelerator(cpu=True), tokenizer, rows)


def chats(tokenizer: Any, rows: int) -> list[dict[str, Any]]:
    """Return questions of the example, each with one of its constraints, in the template of the model's chats."""
    example = runpy.run_path(str(EXAMPLE))
    asked = zip(cycle(example["questions"](None)), cycle(example["WORDINGS"]), range(rows))
    messages = [example["row"](question, [name], 0, "silver")["prompt"] for question, name, _ in asked]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return [{"input_ids": ids} for ids in rendered["input_ids"]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a directory with a chat model in float32, in place of the random model")
    parser.add_argument("--rows", type=int, help="prompts: 256, or 16 chats")
    parser.add_argument("--at-a-time", type=int, help="rows that are generated from at a time: 64 at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.rows = given.rows or (16 if given.model else 256)
    given.at_a_time = given.at_a_time or min(given.rows, 64)
    with tempfile.TemporaryDirectory() as folder:
        if not given.model:
            make_models(WORKLOAD)["model"].save_pretrained(folder)
            make_tokenizer(WORKLOAD).save_pretrained(folder)
        policy: Any = AutoModelForCausalLM.from_pretrained(given.model or folder, dtype=torch.float32).eval()
        tokenizer: Any = AutoTokenizer.from_pretrained(given.model or folder)
        rows: Any = chats(tokenizer, given.rows) if given.model else make_prompts(WORKLOAD, given.rows)
        stops, length = ([], 32) if given.model else (STOPS, WORKLOAD.response_length)
        engines: dict[str, Any] = {
            "transformers": TransformersEngine(given.at_a_time),
            "continuous": ContinuousEngine(given.at_a_time),
        }
        options = {"use_cpu": True, "bf16": False, "response_length": length, "report_to": "none"}
        if HAS_VLLM:
            options |= {"generation_engine": "vllm", "vllm_max_model_length": 192}
        args = PPOConfig(output_dir=folder, **options)
        if HAS_VLLM:
            engines["vllm"] = make_vllm(args, policy, tokenizer, given.at_a_time)
        config = sampling_config(args, stops)
        batch = PromptCollator(0)([*rows])
        compare(engines, policy, Prompts.from_collated(batch, torch.device("cpu")), given, config)


def compare(engines: dict[str, Any], policy: Any, prompts: Prompts, given: argparse.Namespace, config: Any) -> None:
    """Let each engine generate in turn, and print a table of medians."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in engines}
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
    print(f"{prompts.attention_mask.sum(dim=1).min()} to {prompts.attention_mask.sum(dim=1).max()} tokens a prompt")
    print("| engine | tokens per CPU second | ratio | tokens per second | tokens per response | of the bound |")
    print("|---|---|---|---|---|---|")
    medians = {name: [statistics.median(values) for values in zip(*rows, strict=True)] for name, rows in found.items()}
    for name, (cpu, wall, length, bound) in medians.items():
        each = ", ".join(f"{row[0]:.1f}" for row in found[name])
        ratio = cpu / medians["transformers"][0]
        print(f"| `{name}` | {cpu:.1f} ({each}) | {ratio:.2f}x | {wall:.1f} | {length:.1f} | {bound:.0%} |")
    if not HAS_VLLM:
        print("vLLM is not installed here: run this with .venv-vllm/bin/python after `make .venv-vllm/installed`")


if __name__ == "__main__":
    main()
