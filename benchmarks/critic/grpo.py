"""Train TRL's GRPO on a task with as many generated tokens as PPO, and evaluate it alike.

    python benchmarks/critic/grpo.py --data ../shared/data --tasks arithmetic --seeds 10

A cell is a line of `results.jsonl` of the work directory, with the variant `grpo` and what `--changes` says. Batch,
schedule, episodes and passes over each batch are those of the task; GRPO has TRL's defaults for the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "learning"))

import torch  # noqa: E402
from cell import module_of  # noqa: E402
from evaluation import Evaluator  # noqa: E402
from preferences import scores_of  # noqa: E402
from run import code_version, read_results  # noqa: E402
from task import Task, reward_of  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


def train(task: Task, policy: Any, seed: int, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Train a policy in place; return its arguments of `GRPOConfig`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    said = task.arguments
    arguments = {
        "per_device_train_batch_size": said["per_device_train_batch_size"],
        "max_completion_length": said["response_length"],
        "temperature": said["temperature"],
        "beta": said.get("kl_coef", 0.05),
        "learning_rate": said["learning_rate"],
        "num_iterations": said["num_ppo_epochs"],
        "steps_per_generation": 1,
    } | changes
    steps = {"max_steps": task.num_updates * arguments["num_iterations"]}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    quiet |= {"gradient_checkpointing": False, "output_dir": str(folder), "seed": seed, "logging_steps": 1000}
    trainer = GRPOTrainer(
        policy,
        less_penalty(task),
        GRPOConfig(**arguments, **steps, **quiet),
        train_dataset=Dataset.from_dict({"prompt": task.prompts}),
        processing_class=task.tokenizer,
    )
    trainer.train()
    return arguments


def less_penalty(task: Task) -> Any:
    """Return the task's reward less its `missing_eos_penalty`, as a reward function of TRL."""
    score, penalty = reward_of(task, scores_of), task.arguments.get("missing_eos_penalty", 0.0)

    def reward(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **others: Any
    ) -> list[float]:
        is_cut = [ids[-1] != task.tokenizer.eos_token_id for ids in completion_ids]
        return [value - penalty * cut for value, cut in zip(score(prompts, completions), is_cut, strict=True)]

    return reward


def main() -> None:
    """Run the cells that are left."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="as for benchmarks/learning/run.py")
    parser.add_argument("--work", type=Path, default=Path("runs/critic"), help="where models and results are kept")
    parser.add_argument("--tasks", nargs="+", choices=("arithmetic", "stories", "preferences"), default=["arithmetic"])
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--changes", type=json.loads, default={}, help="arguments of GRPOConfig, as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    variant = ",".join(["grpo", *(f"{name}={value}" for name, value in given.changes.items())])
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for name in given.tasks:
            cell = {"task": name, "variant": variant, "seed": seed}
            if any(cell.items() <= done.items() for done in read_results(given.work)):
                continue
            module_of(name).prepare(given.data, given.work / name)
            began, task = time.process_time(), module_of(name).load(given.data, given.work / name)
            policy, reference = (AutoModelForCausalLM.from_pretrained(task.policy) for _ in range(2))
            settings = train(task, policy, seed, given.work / "grpo", given.changes)
            final = Evaluator(task, reference, reward_of(task, scores_of), seed)(policy, task.num_final)
            found = cell | {"final": final, "settings": settings, "cpu_seconds": time.process_time() - began}
            with (given.work / "results.jsonl").open("a", encoding="utf-8") as results:
                results.write(f"{json.dumps(found | code_version())}\n")
            print(name, variant, seed, found["final"], f"{found['cpu_seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
