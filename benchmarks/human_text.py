"""Run `examples/human_text.yaml`, measure its steps, and write figures, samples and report into the documentation.

python benchmarks/human_text.py ../shared/data/ethics_util/train_pairs.jsonl

`--work` names the directory in which it runs; finished steps stay there, with their seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "HUMAN_TEXT.md"
REPORT = ROOT / "benchmarks" / "assets" / "human-text-report.html"
RUN = Path("runs/human_text")
NUM_SAMPLES = 10
NUM_PAIRS = 1000


def run(pairs: Path, work: Path) -> dict[str, float]:
    """Prepare the data and run the pipeline; return the seconds of each step."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    kept = work / "seconds.json"
    seconds: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {}
    if not seconds:
        began = time.monotonic()
        script = [sys.executable, str(ROOT / "examples/human_text.py"), str(pairs.resolve()), "human_text"]
        subprocess.run(script, cwd=work, env=environment, check=True)
        seconds["preparing the data"] = time.monotonic() - began
    words = [sys.executable, "-m", "rlhf_ppo", "pipeline", str(ROOT / "examples/human_text.yaml")]
    process = subprocess.Popen(words, cwd=work, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    step, began = None, time.monotonic()
    for line in process.stdout:
        print(line, end="", flush=True)
        started = re.match(r"([\w-]+): rlhf-ppo ", line)
        if step is not None and (started or line.startswith("All steps are finished")):
            seconds[step] = time.monotonic() - began
            kept.write_text(json.dumps(seconds))
        if started:
            step, began = started[1], time.monotonic()
    if process.wait():
        raise SystemExit(process.returncode)
    return seconds


@torch.no_grad()
def accuracy(model: Path, pairs: Path) -> float:
    """Return the share of the first pairs that a reward model orders as people did."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    scorer = AutoModelForSequenceClassification.from_pretrained(model).eval()
    rows = [json.loads(line) for line in pairs.read_text().splitlines()[:NUM_PAIRS]]
    right = 0
    for start in range(0, len(rows), 128):
        some = rows[start : start + 128]
        texts = [row["prompt"] + row[side] + tokenizer.eos_token for side in ("chosen", "rejected") for row in some]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        chosen, rejected = scorer(**inputs).logits.view(2, -1)
        right += int((chosen > rejected).sum())
    return right / len(rows)


def written(work: Path, seconds: dict[str, float], accuracies: dict[str, float]) -> Iterator[str]:
    """Yield the lines of the page: win rates, what PPO did, the seconds, and samples as they come."""
    seeds = [path.name.removeprefix("ppo-seed") for path in sorted((work / RUN).glob("ppo-seed*"))]
    rates = {seed: json.loads((run_of(work, seed) / "judged" / "win_rate.json").read_text()) for seed in seeds}
    yield "| Seed | Win rate over SFT | 95 % interval | at equal length | reward on held-out prompts | KL |"
    yield "|---|---|---|---|---|---|"
    for seed, said in rates.items():
        first, last = evaluations(run_of(work, seed))
        low, high = said["interval"]
        yield (
            f"| {seed} | {said['win_rate']:.1%} | {low:.1%} to {high:.1%} | {said['length_controlled']:.1%} "
            f"| {first['eval_score']:.2f} to {last['eval_score']:.2f} | {last['eval_kl']:.1f} |"
        )
    if len(rates) > 1:
        each = [said["win_rate"] for said in rates.values()]
        error = stdev(each) / len(each) ** 0.5
        yield f"| mean | {fmean(each):.1%}, standard error {100 * error:.1f} | | | | |"
    yield ""
    yield (
        f"The reward model orders {accuracies['reward']:.1%} of the judge's pairs as people did, the judge "
        f"{accuracies['judge_reward']:.1%} of the reward model's (the first {NUM_PAIRS:,} each); neither has learned "
        "from those."
    )
    yield ""
    total = sum(seconds.values()) / 60
    steps = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    yield (
        f"{total:.1f} minutes in all ({steps}) on {os.cpu_count()} cores ({platform.machine()}), torch "
        f"{torch.__version__}, threads: {torch.get_num_threads()}."
    )
    yield ""
    yield f"The first {NUM_SAMPLES} held-out prompts, with what either model wrote, as they come (seed 0):"
    yield ""
    yield "| Prompt | language model | policy | judge prefers |"
    yield "|---|---|---|---|"
    table = pd.read_parquet(run_of(work, "0") / "judged" / "judged.parquet").astype(object)
    for row in table.head(NUM_SAMPLES).to_dict("records"):
        better = "policy" if row["verdict"] > 0 else "language model" if row["verdict"] < 0 else "neither"
        texts = [cell(row[name]) for name in ("prompt", "opponent", "model")]
        yield f"| {' | '.join(texts)} | {better} |"


def run_of(work: Path, seed: str) -> Path:
    """Return the directory of a seed's run."""
    return work / RUN / f"ppo-seed{seed}"


def evaluations(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first and the last evaluation of a run."""
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    found = [entry for entry in log if "eval_score" in entry]
    return found[0], found[-1]


def cell(text: str) -> str:
    """Return a text that fits into a table."""
    return " ".join(str(text).replace("|", "\\|").split())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run examples/human_text.yaml and write it into the documentation.")
    parser.add_argument("pairs", type=Path, help="JSON lines with prompt, chosen and rejected")
    parser.add_argument("--work", type=Path, help="where it runs; by default a directory that is removed")
    options = parser.parse_args()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        seconds = run(options.pairs, work)
        unseen = {"reward": "judge_pairs", "judge_reward": "pairs"}
        accuracies = {
            name: accuracy(work / RUN / name, work / "human_text" / f"{pairs}.jsonl") for name, pairs in unseen.items()
        }
        PAGE.write_text("\n".join(written(work, seconds, accuracies)) + "\n")
        shutil.copyfile(work / RUN / "report.html", REPORT)
    print(f"{PAGE} and {REPORT} are written")
