"""Measure the peak memory of LoRA over one base against four separate models, each in its own process.

*separate*: policy, reference, value model and reward model with separate weights, policy and value model wholly
trained. *adapters apart*: the same four, but policy and value model are trained as LoRA adapters. *one base*: policy,
value model and reward model are adapters over one base, the reference is the policy without its own. *one base and a
reward model*: the same with a whole reward model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import megabytes, restart_peak
from workloads import Workload, hyper_parameters, llama, make_models, make_prompts, make_tokenizer

SHAPES = {
    "160M": Workload(llama(12, 768, 50304), (32, 64), 24, batch_size=4, micro_batch_size=2, num_ppo_epochs=1),
    "74M": Workload(llama(8, 768, 8192), (32, 64), 24, batch_size=4, micro_batch_size=2, num_ppo_epochs=1),
    "tiny": Workload(llama(1, 32, 64), (2, 6), 8, batch_size=4, micro_batch_size=2, num_ppo_epochs=1),
}
KINDS = ("separate", "adapters apart", "one base", "one base and a reward model")


def write_models(workload: Workload, folder: Path) -> None:
    """Write the policy, a value model, a reward model, and an adapter over the policy as another reward model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    models: dict[str, Any] = make_models(workload)
    for name in ("model", "value_model", "reward_model"):
        models[name].save_pretrained(folder / name)
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    adapter = LoraConfig(target_modules="all-linear", task_type="SEQ_CLS", init_lora_weights=False)
    get_peft_model(scorer, adapter).save_pretrained(folder / "reward_adapter")


def given(kind: str, folder: Path) -> dict[str, Any]:
    """Make what the trainer is given of models."""
    from peft import LoraConfig

    paths = {name: str(folder / name) for name in ("model", "value_model", "reward_model")}
    adapter = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    if kind == "separate":
        return paths
    if kind == "adapters apart":
        return {**paths, "ref_model": paths["model"], "peft_config": adapter, "value_peft_config": adapter}
    reward = paths["reward_model"] if "reward model" in kind else str(folder / "reward_adapter")
    return {"model": paths["model"], "reward_model": reward, "peft_config": adapter}


def measure(kind: str, workload: Workload, folder: Path, num_updates: int) -> dict[str, float]:
    """Train for a few updates in this process.

    Args:
        kind: One of `KINDS`.
        workload: What to run.
        folder: What `write_models` wrote.
        num_updates: How many.

    Returns:
        Memory above that of this process before there were models, MB: the peak while the trainer is made, and the
        peak while it trains; KL and importance ratio of the first update.
    """
    from rlhf_ppo import PPOConfig, PPOTrainer

    tokenizer, prompts = make_tokenizer(workload), make_prompts(workload, 2 * workload.batch_size)
    arguments = hyper_parameters(workload, num_updates, str(folder / "run"))
    before = megabytes("VmRSS")
    restart_peak()
    args = PPOConfig(**arguments, share_base_model=kind.startswith("one base"))
    trainer = PPOTrainer(args, tokenizer, train_dataset=prompts, **given(kind, folder))
    making = megabytes("VmHWM") - before
    restart_peak()
    trainer.train()
    training = megabytes("VmHWM") - before
    first = trainer.state.log_history[0]
    return {"making": making, "training": training, "kl": first["objective/kl"], "ratio": first["val/ratio"]}


def compare(shape: str, num_updates: int) -> None:
    """Measure each kind in a process of its own, and print a table."""
    print(f"| {shape} | making, MB | training, MB | peak of *separate* | of *adapters apart* | first KL | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_models(SHAPES[shape], Path(folder))
        for kind in KINDS:
            command = [sys.executable, __file__, "--shape", shape, "--updates", str(num_updates), "--kind", kind]
            environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
            run = subprocess.run(
                [*command, "--models", folder], env=environment, check=True, stdout=subprocess.PIPE, text=True
            )
            found = json.loads(run.stdout.splitlines()[-1])
            peaks[kind] = max(found["making"], found["training"])
            ratios = [f"{peaks[kind] / peaks[other]:.2f}x" if other in peaks else "" for other in KINDS[:2]]
            cells = [f"{found['making']:.0f}", f"{found['training']:.0f}", *ratios, f"{found['kl']:.1g}"]
            print(f"| {kind} | {' | '.join(cells)} | {found['ratio']:.7f} |", flush=True)


def main() -> None:
    """Read the command line; print the table, or one process's measurement."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="160M")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--kind", choices=KINDS, help="measure this one in this process")
    parser.add_argument("--models", type=Path, help="with --kind: where the models are")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.kind is None:
        compare(arguments.shape, arguments.updates)
    else:
        print(json.dumps(measure(arguments.kind, SHAPES[arguments.shape], arguments.models, arguments.updates)))


if __name__ == "__main__":
    main()
