"""Count what a reader of the package meets: `python benchmarks/structure.py [checkout ...]`, a column for each.

Modules in the root, frames from `train()` to the formula of the policy loss, casts, lines. The frames are those of one
update of a checkout's tiny test models on the CPU.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

COUNT_FRAMES = """
import json, sys, tempfile
from pathlib import Path
from datasets import Dataset
from rlhf_ppo import PPOConfig, PPOTrainer
from tests.conftest import QUIET, count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer

found = []

def watch(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "clipped_policy_loss" and not found:
        while frame.f_code.co_name != "train":
            found.append(frame.f_code.co_filename)
            frame = frame.f_back
        found.append(frame.f_code.co_filename)
        while frame.f_back.f_code.co_name == "train":
            frame = frame.f_back
            found.append(frame.f_code.co_filename)

with tempfile.TemporaryDirectory() as folder:
    args = PPOConfig(output_dir=folder, per_device_train_batch_size=4, total_episodes=4, response_length=4, **QUIET)
    trainer = PPOTrainer(
        args=args, processing_class=make_tokenizer(), model=tiny_policy(), value_model=tiny_scorer(),
        train_dataset=Dataset.from_list(prompt_rows(8)), reward_funcs=count_w4,
    )
    sys.setprofile(watch)
    trainer.train()
    sys.setprofile(None)
ours = [file for file in found if str(Path.cwd() / "rlhf_ppo") in file]
print(json.dumps([len(ours), len(set(ours))]))
"""


def lines(checkout: Path, folder: str) -> int:
    """Count the lines of a folder's Python files."""
    return sum(len(path.read_text().splitlines()) for path in (checkout / folder).rglob("*.py"))


def casts(checkout: Path) -> int:
    """Count the calls of `typing.cast` in the package."""
    nodes = (node for path in (checkout / "rlhf_ppo").rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return sum(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "cast" for node in nodes)


def frames(checkout: Path) -> str:
    """Count the frames of ours, and their files, from `train()` to the formula of the policy loss, both included."""
    own = {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    command = [sys.executable, "-c", COUNT_FRAMES]
    ran = subprocess.run(command, cwd=checkout, env=os.environ | own, capture_output=True, text=True, check=True)
    count, files = json.loads(ran.stdout.splitlines()[-1])
    return f"{count} in {files} files"


ROWS: dict[str, Callable[[Path], object]] = {
    "modules in the root": lambda checkout: len(list((checkout / "rlhf_ppo").glob("*.py"))),
    "modules": lambda checkout: len(list((checkout / "rlhf_ppo").rglob("*.py"))),
    "lines of the longest module": lambda checkout: max(
        len(path.read_text().splitlines()) for path in (checkout / "rlhf_ppo").rglob("*.py")
    ),
    "frames of ours from `train()` to the policy loss": frames,
    "calls of `cast`": casts,
    "lines of the package": lambda checkout: f"{lines(checkout, 'rlhf_ppo'):,}",
    "lines of tests": lambda checkout: f"{lines(checkout, 'tests'):,}",
    "test files at the root of tests/": lambda checkout: len(list((checkout / "tests").glob("test_*.py"))),
}


def main() -> None:
    """Print the table."""
    checkouts = [Path(name).resolve() for name in sys.argv[1:]] or [Path(__file__).parents[1]]
    print("| |", " | ".join(checkout.name for checkout in checkouts), "|")
    print("|---" * (len(checkouts) + 1) + "|")
    for name, count in ROWS.items():
        print(f"| {name} |", " | ".join(str(count(checkout)) for checkout in checkouts), "|")


if __name__ == "__main__":
    main()
