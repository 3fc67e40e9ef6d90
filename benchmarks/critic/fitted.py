"""Fit critics to the kept completions of arithmetic runs by `rlhf-ppo critic train`; compare them with exact values.

    python benchmarks/critic/fitted.py --data ../shared/data --seeds 5
    python benchmarks/critic/tables.py

The value of a prefix is known: the probability that the policy completes the right answer, 0 behind a wrong digit.
A line of `fitted.jsonl` of the work directory has the figures of the run's own critic and of the fitted ones, the gold
reward of the best of 8 responses by each, and that of a run whose critic starts from the one fitted to other runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "learning"))

import arithmetic  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from evaluation import Evaluator, seeded  # noqa: E402
from libraries import our_trainer  # noqa: E402
from rlhf_ppo.cli.critic import train_critic  # noqa: E402
from rlhf_ppo.decoding import Sampling, best_of_n  # noqa: E402
from rlhf_ppo.evaluation.critic_audit import pair_counts  # noqa: E402
from run import code_version  # noqa: E402
from task import COMMON, Task  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification  # noqa: E402
from variants import RECOMMENDED, overrides  # noqa: E402

NUM_RESPONSES = 16
"""Sampled responses to each of the held-out prompts."""
N, NUM_PROMPTS = 8, 1024
"""Responses of a best of n, and the prompts that it is measured on."""
OTHERS = range(20, 120, 20)
"""What is added to a run's seed for those of the other runs."""


def train_run(task: Task, seed: int, folder: Path, **others: Any) -> Path:
    """Train with the recommended preset, where it is not done yet; keep policy, critic and all completions."""
    if (folder / "critic").exists():
        return folder
    changes = overrides(RECOMMENDED, task.arguments["learning_rate"])
    arguments = COMMON | task.arguments | changes
    batch_size = arguments["per_device_train_batch_size"]
    arguments |= {
        "total_episodes": task.num_updates * batch_size, "local_rollout_forward_batch_size": batch_size,
        "num_completions_to_keep": batch_size, "save_critic": True, "output_dir": str(folder),
        "overwrite_output_dir": True, "seed": seed,
    }  # fmt: skip
    trainer = our_trainer(task, AutoModelForCausalLM.from_pretrained(task.policy), arguments, **others)
    trainer.train()
    trainer.save_model(str(folder))
    return folder


def fit(task: Task, runs: Sequence[Path], folder: Path, options: Sequence[str], start: Path | None = None) -> Path:
    """Fit a critic to the completions of runs, from a model; None is the language model before training."""
    shutil.rmtree(folder, ignore_errors=True)
    words = ["--completions", *map(str, runs), "--model_name_or_path", str(start or task.policy), "--lam", "1"]
    words += ["--output_dir", str(folder), "--per_device_train_batch_size", "128", "--report_to", "none"]
    words += ["--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false", "--disable_tqdm", "true"]
    train_critic([*words, *options])
    return folder


def best_of(task: Task, policy: Any, critic: Any, seed: int) -> dict[str, float]:
    """Return the gold reward of random responses and of those that a critic chooses among `N`, the same for all."""
    prompts = [task.held_out[row % len(task.held_out)] for row in range(NUM_PROMPTS)]
    with seeded(seed):
        found = best_of_n(policy, critic, task.tokenizer, prompts, N, Sampling(3, 1.0, batch_size=512))
    texts = [[task.tokenizer.decode(one.ids, skip_special_tokens=True) for one in each] for each in found.candidates]
    gold = [task.judge([prompt] * N, each) for prompt, each in zip(prompts, texts, strict=True)]
    return {"random": fmean(map(fmean, gold)), f"best of {N}": fmean(task.judge(prompts, found.texts))}


@torch.no_grad()
def prefixes(task: Task, policy: Any, seed: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Sample responses of three tokens.

    Returns:
        Ids of prompts and responses `(B, C + 3)`; the exact value of the prefix of 0, 1 and 2 tokens, `(B, 3)`; and
        which prefixes are within a response.
    """
    tokenizer = task.tokenizer
    ids = torch.tensor(tokenizer(task.held_out)["input_ids"]).repeat_interleave(NUM_RESPONSES, 0)
    asked = [prompt for prompt in task.held_out for _ in range(NUM_RESPONSES)]
    right = torch.tensor(tokenizer([f"{arithmetic.answer_of(prompt)}<eos>" for prompt in asked])["input_ids"])
    with seeded(seed):
        said = policy.generate(ids, do_sample=True, top_k=0, max_new_tokens=3, pad_token_id=0, eos_token_id=1)
    said = torch.nn.functional.pad(said, (0, ids.shape[1] + 3 - said.shape[1]))
    shares = policy(torch.cat((ids, right), 1)).logits[:, ids.shape[1] - 1 : -1].softmax(-1)
    of_right = shares.gather(2, right[:, :, None])[:, :, 0].double()
    to_come = of_right.flip(1).cumprod(1).flip(1)
    responses = said[:, ids.shape[1] :]
    agrees = torch.cat((torch.ones_like(responses[:, :1]), (responses == right).long()[:, :2].cumprod(1)), 1)
    written = torch.cat((torch.ones_like(responses[:, :1]), (responses != 1).long()[:, :2].cumprod(1)), 1).bool()
    return said, (to_come * agrees).numpy(), written.numpy()


@torch.no_grad()
def values_of(critic: Any, ids: Any) -> np.ndarray:
    """Return the critic's value of the prefixes of 0, 1 and 2 tokens, `(B, 3)`."""
    states = critic.base_model(ids).last_hidden_state
    return critic.score(states)[:, -4:-1, 0].double().numpy()


def figures(values: np.ndarray, exact: np.ndarray, written: np.ndarray) -> dict[str, float]:
    """Compare values with exact ones: explained variance, slope, and ranks among the prefixes of one prompt."""
    groups: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for start in range(0, len(values), NUM_RESPONSES):
        rows = slice(start, start + NUM_RESPONSES)
        ours, true, real = values[rows].round(5), exact[rows].round(9), written[rows]
        groups["tau"].append(pair_counts(ours[real], true[real]))
        for place in (1, 2):
            kept = real[:, place]
            groups["tau at equal position"].append(pair_counts(ours[kept, place], true[kept, place]))
    v, g = values[written], exact[written]
    ranks = {}
    for name, counts in groups.items():
        agreement, first, second = np.sum(counts, axis=0)
        ranks[name] = float(agreement / np.sqrt(first * second)) if first and second else 0.0
        ranks[f"{name}, pairs that differ"] = float(agreement / second)
    of_prompt = np.repeat(exact[:, :1], 3, axis=1)[written]
    design = np.stack([np.ones_like(g), of_prompt, *(np.nonzero(written)[1] == place for place in (1, 2))], axis=1)
    of_both = design @ np.linalg.lstsq(design, g, rcond=None)[0]
    explained = {
        name: float(1 - np.var(g - p) / np.var(g))
        for name, p in {"EV": v, "EV of prompt": of_prompt, "EV of both": of_both}.items()
    }
    return explained | ranks | {"slope": float(np.cov(v, g)[0, 1] / np.var(v)), "bias": float(v.mean() - g.mean())}


def measured(task: Task, seed: int, work: Path, options: Sequence[str]) -> dict[str, Any]:
    """Train a run and the other ones, fit critics, and compare them on the run's policy."""
    run = train_run(task, seed, work / f"fitted-{seed}")
    others = [train_run(task, seed + each, work / f"fitted-{seed + each}") for each in OTHERS]
    fits = {
        "fitted to this run": fit(task, [run], run / "fit-one", [*options, "--seed", str(seed)]),
        "fitted to five other runs": fit(task, others, run / "fit-five", [*options, "--seed", str(seed)]),
    }
    policy = AutoModelForCausalLM.from_pretrained(run).eval()
    held_out = prefixes(task, policy, seed)
    found = {}
    for name, path in {"of the run": run / "critic", **fits}.items():
        critic = AutoModelForSequenceClassification.from_pretrained(path).eval()
        found[name] = figures(values_of(critic, held_out[0]), *held_out[1:]) | best_of(task, policy, critic, seed)
    started = work / f"started-{seed}"
    shutil.rmtree(started, ignore_errors=True)
    train_run(task, seed, started, value_model=str(fits["fitted to five other runs"]))
    reference = AutoModelForCausalLM.from_pretrained(task.policy)
    evaluate, gold = Evaluator(task, reference, arithmetic.is_right, seed), {}
    for name, path in {"from the policy": run, "from the critic fitted to five other runs": started}.items():
        trained = AutoModelForCausalLM.from_pretrained(path)
        gold[name] = evaluate(trained, task.num_final)["gold"]
    ids, exact, written = prefixes(task, trained.eval(), seed)
    critic = AutoModelForSequenceClassification.from_pretrained(started / "critic").eval()
    found["of a run that began with the latter"] = figures(values_of(critic, ids), exact, written)
    return {"figures": found, "gold": gold}


def main() -> None:
    """Train, fit and compare, seed by seed."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="as for benchmarks/learning/run.py")
    parser.add_argument("--work", type=Path, default=Path("runs/critic"), help="where models and results are kept")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", default="20")
    parser.add_argument("--learning-rate", default="1e-3")
    parser.add_argument("--weight-decay", default="0.1")
    given = parser.parse_args()
    torch.set_num_threads(1)
    arithmetic.prepare(given.data, given.work / "arithmetic")
    task = arithmetic.load(given.data, given.work / "arithmetic")
    options = ["--num_train_epochs", given.epochs, "--learning_rate", given.learning_rate]
    options += ["--weight_decay", given.weight_decay]
    file = given.work / "fitted.jsonl"
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        done = [json.loads(each) for each in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
        if any(row["seed"] == seed and row["options"] == options for row in done):
            continue
        began = time.process_time()
        row = {"seed": seed, "options": options} | measured(task, seed, given.work / "models", options)
        found = json.dumps(row | {"cpu_seconds": time.process_time() - began} | code_version())
        line = json.dumps(json.loads(found, parse_float=lambda digits: round(float(digits), 5)))
        with file.open("a", encoding="utf-8") as results:
            results.write(f"{line}\n")
        print(json.dumps(row, indent=1), flush=True)


if __name__ == "__main__":
    main()
