"""Count what a reader of the package meets: `python benchmarks/structure.py [checkout ...]`, a column for each.

Modules, lines, files that an update runs through, frames from `train()` to the formula of the policy loss, reads of
the trainer's private fields, Protocols that restate it, and the words of docstrings. The update is one of a checkout's
tiny test models on the CPU, with text prompts and a reward function.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

COUNT_FRAMES = """
import json, sys, tempfile
from pathlib import Path
from datasets import Dataset
from transformers import TrainerCallback
from rlhf_ppo import PPOConfig, PPOTrainer
from tests.conftest import QUIET, count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer

found, files = [], set()

class SecondUpdate(TrainerCallback):
    def on_step_begin(self, args, state, control, **others):
        if state.global_step == 1:
            sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))

    def on_step_end(self, args, state, control, **others):
        if state.global_step == 2:
            sys.setprofile(None)

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
    args = PPOConfig(output_dir=folder, per_device_train_batch_size=4, total_episodes=8, response_length=4, **QUIET)
    trainer = PPOTrainer(
        args=args, processing_class=make_tokenizer(), model=tiny_policy(), value_model=tiny_scorer(),
        train_dataset=Dataset.from_list(prompt_rows(8)), reward_funcs=count_w4, callbacks=[SecondUpdate()],
    )
    sys.setprofile(watch)
    trainer.train()
    sys.setprofile(None)
def own(names):
    return [name for name in names if str(Path.cwd() / "rlhf_ppo") in name]

print(json.dumps([len(own(found)), len(set(own(found))), len(own(files))]))
"""


def lines(checkout: Path, folder: str) -> int:
    """Count the lines of a folder's Python files."""
    return sum(len(path.read_text().splitlines()) for path in (checkout / folder).rglob("*.py"))


def casts(checkout: Path) -> int:
    """Count the calls of `typing.cast` in the package."""
    nodes = (node for path in (checkout / "rlhf_ppo").rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return sum(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "cast" for node in nodes)


@functools.cache
def frames(checkout: Path) -> tuple[int, int, int]:
    """Count our frames from `train()` to the policy loss, their files, and all files that an update runs through."""
    own = {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    command = [sys.executable, "-c", COUNT_FRAMES]
    ran = subprocess.run(command, cwd=checkout, env=os.environ | own, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def modules(checkout: Path) -> dict[Path, str]:
    """Return the package's modules and their text."""
    return {path: path.read_text() for path in sorted((checkout / "rlhf_ppo").rglob("*.py"))}


def code_lines(text: str) -> int:
    """Count lines without docstrings, comments and blank lines."""
    strings = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    docs = [node for node in strings if isinstance(node.value, ast.Constant)]
    skipped = {line for node in docs for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), start=1)
    return sum(1 for number, line in lines if number not in skipped and line.strip() and line.strip()[0] != "#")


def private_reads(checkout: Path) -> int:
    """Count reads and writes of the trainer's private fields in other files than its own."""
    own = {"trainer.py", "trainer_base.py"}
    texts = (
        text for path, text in modules(checkout).items() if path.parent.name != "rlhf_ppo" or path.name not in own
    )
    return sum(len(re.findall(r"\b(?:run|trainer|self\.run|self\.trainer)\._[a-z]", text)) for text in texts)


def protocols(checkout: Path) -> int:
    """Count Protocols that restate the trainer: they declare its arguments, or a private field."""

    def restates(node: ast.AST) -> bool:
        if not isinstance(node, ast.ClassDef) or "Protocol" not in [ast.unparse(base) for base in node.bases]:
            return False
        fields = [ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)]
        methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
        return "args" in fields or any(re.match(r"_[a-z]", name) for name in [*fields, *methods])

    return sum(restates(node) for text in modules(checkout).values() for node in ast.walk(ast.parse(text)))


def docstrings(checkout: Path) -> list[str]:
    """Return all docstrings of the package; those of modules come first."""
    trees = [ast.parse(text) for text in modules(checkout).values()]
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    inner = [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    return [ast.get_docstring(node) or "" for node in (*trees, *inner)]


def share_of_what(checkout: Path) -> str:
    """Count "what" in 1,000 words of docstrings."""
    words = re.findall(r"[a-z']+", " ".join(docstrings(checkout)).lower())
    return f"{1000 * words.count('what') / len(words):.1f}"


def questions(checkout: Path) -> int:
    """Count docstrings of modules that begin with What, How or Which."""
    return sum(
        bool(re.match(r"(What|How|Which)\b", ast.get_docstring(ast.parse(text)) or ""))
        for text in modules(checkout).values()
    )


ROWS: dict[str, Callable[[Path], object]] = {
    "modules in the root": lambda checkout: len(list((checkout / "rlhf_ppo").glob("*.py"))),
    "modules": lambda checkout: len(modules(checkout)),
    "lines of code, without docstrings, comments and blanks": lambda checkout: (
        f"{sum(map(code_lines, modules(checkout).values())):,}"
    ),
    "files that an update runs through": lambda checkout: frames(checkout)[2],
    "reads of the trainer's private fields elsewhere": private_reads,
    "Protocols that restate the trainer": protocols,
    '"what" in 1,000 words of docstrings': share_of_what,
    "docstrings of modules that begin with What, How, Which": questions,
    "lines of the longest module": lambda checkout: max(
        len(path.read_text().splitlines()) for path in (checkout / "rlhf_ppo").rglob("*.py")
    ),
    "frames of ours from `train()` to the policy loss": lambda checkout: "{} in {} files".format(*frames(checkout)),
    "calls of `cast`": casts,
    "lines of the package": lambda checkout: f"{lines(checkout, 'rlhf_ppo'):,}",
    "lines of tests": lambda checkout: f"{lines(checkout, 'tests'):,}",
    "test files at the root of tests/": lambda checkout: len(list((checkout / "tests").glob("test_*.py"))),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0] + ".")
    parser.add_argument("checkouts", nargs="*", type=Path, help="a column for each; by default this one")
    checkouts = [path.resolve() for path in parser.parse_args().checkouts] or [Path(__file__).parents[1]]
    if absent := [str(path) for path in checkouts if not (path / "rlhf_ppo").is_dir()]:
        parser.error(f"no folder rlhf_ppo in {', '.join(absent)}")
    print("| |", " | ".join(checkout.name for checkout in checkouts), "|")
    print("|---" * (len(checkouts) + 1) + "|")
    for name, count in ROWS.items():
        print(f"| {name} |", " | ".join(str(count(checkout)) for checkout in checkouts), "|")


if __name__ == "__main__":
    main()
