"""Train cells (task, variant, seed) of `benchmarks/learning`, and audit their critics.

    python benchmarks/critic/measure.py --data ../shared/data --tasks stories --variants preset:recommended --seeds 5
    python benchmarks/critic/tables.py

A finished cell is one line of `results.jsonl` of the work directory; the same command continues. Variants are those of
`benchmarks/learning/variants.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "learning"))

import torch  # noqa: E402
from cell import TASKS, UNSEEN, health_of, module_of  # noqa: E402
from evaluation import Evaluator  # noqa: E402
from libraries import our_trainer  # noqa: E402
from preferences import scores_of  # noqa: E402
from run import code_version, read_results  # noqa: E402
from task import COMMON, Task, reward_of  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from variants import overrides  # noqa: E402

WORK = Path("runs/critic")
NUM_AUDITED = {"stories": 112, "emotions": 112, "preferences": 112, "exchanged": 112, "arithmetic": 128}
"""Held-out responses of an audit, 4 prefixes each, of a quarter as many prompts."""


def run_cell(name: str, variant: str, seed: int, data: Path, work: Path) -> dict[str, Any]:
    """Train with an audit after the last update, then choose responses with the saved critic.

    Args:
        name: The task.
        variant: See `variants.overrides`.
        seed: Of the training, the audit and the sampling.
        data: As of `benchmarks/learning/run.py`.
        work: Holds the tasks' models and gets the trained ones.

    Returns:
        `final`, the evaluation of the policy as in `benchmarks/learning`; `audit`, the figures with their intervals;
        `findings` of the audit; `health`, the checks that spoke; `settings`; and
        `cpu_seconds` of training with audit and of all.
    """
    began, task = time.process_time(), module_of(name).load(data, work / name)
    folder = work / "models" / f"{name}-{variant}-{seed}".replace("/", "_")
    changes = overrides(variant, task.arguments["learning_rate"])
    arguments = COMMON | task.arguments | changes
    batch_size = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
    arguments |= {
        "total_episodes": task.num_updates * batch_size,
        "local_rollout_forward_batch_size": batch_size,
        "per_device_eval_batch_size": 256,
        "save_critic": True,
        "output_dir": str(folder),
        "overwrite_output_dir": True,
        "seed": seed,
    }
    policy, reference = (AutoModelForCausalLM.from_pretrained(task.policy) for _ in range(2))
    trainer = our_trainer(task, policy, arguments, eval_dataset=audited(name, task))
    trainer.train()
    trainer.save_model(str(folder))
    trainer.audit_critic()
    audit = json.loads((folder / "critic_audit.json").read_text(encoding="utf-8"))
    trained = time.process_time() - began
    reward = reward_of(task, scores_of)
    policy = AutoModelForCausalLM.from_pretrained(folder)
    found = {
        "final": Evaluator(task, reference, reward, seed)(policy, task.num_final),
        "audit": audit["figures"],
        "prefixes": audit["num_prefixes"],
        "findings": audit["findings"],
        "health": health_of(trainer.state.log_history),
        "num_updates": task.num_updates,
        "settings": task.arguments | changes,
    }
    return found | {"cpu_seconds_of_training": trained, "cpu_seconds": time.process_time() - began}


def audited(name: str, task: Task) -> list[dict[str, Any]]:
    """Return the prompts of an audit, four or more times each."""
    number = NUM_AUDITED[name]
    ids = task.tokenizer(repeated(task.held_out[: number // 4], number))["input_ids"]
    return [{"input_ids": each} for each in ids]


def repeated(prompts: Sequence[str], number: int) -> list[str]:
    """Return a number of prompts, from the first again where there are fewer."""
    return list(islice(cycle(prompts), number))


def main() -> None:
    """Prepare the tasks, and run the cells that are left, seed by seed."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="as for benchmarks/learning/run.py")
    parser.add_argument("--work", type=Path, default=WORK, help="where models and results are kept")
    parser.add_argument("--tasks", nargs="+", choices=(*TASKS, *UNSEEN), default=list(TASKS))
    parser.add_argument("--variants", nargs="+", default=["preset:recommended"])
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.tasks:
        module_of(name).prepare(given.data, given.work / name)
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for name in given.tasks:
            for variant in given.variants:
                cell = {"task": name, "variant": variant, "seed": seed}
                if any(cell.items() <= done.items() for done in read_results(given.work)):
                    continue
                measured = run_cell(name, variant, seed, given.data, given.work)
                found = json.dumps(cell | measured | code_version())
                line = json.dumps(json.loads(found, parse_float=lambda digits: round(float(digits), 5)))
                with (given.work / "results.jsonl").open("a", encoding="utf-8") as results:
                    results.write(f"{line}\n")
                print(name, variant, seed, "is finished", flush=True)


if __name__ == "__main__":
    main()
