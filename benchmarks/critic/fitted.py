"""Fit a critic to the kept completions of an arithmetic run by `rlhf-ppo critic train`; compare it with exact values.

    python benchmarks/critic/fitted.py --data ../shared/data --seeds 3

The value of a prefix is known: the probability that the policy completes the right answer, 0 behind a wrong digit.
A line of `fitted.jsonl` of the work directory has the figures of the run's own critic and of the fitted ones.
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
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "learning"))

import arithmetic  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from evaluation import seeded  # noqa: E402
from libraries import our_trainer  # noqa: E402
from run import code_version  # noqa: E402
from task import COMMON, Task  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification  # noqa: E402
from variants import RECOMMENDED, overrides  # noqa: E402

from rlhf_ppo.cli.critic import train_critic  # noqa: E402
from rlhf_ppo.evaluation.critic_audit import pair_counts  # noqa: E402

NUM_RESPONSES = 16
"""Sampled responses to each of the held-out prompts."""
FITS = {"all updates": range(1, 1000), "the last ten updates": range(31, 1000)}
"""Updates whose completions a critic is fitted to."""


def train_run(task: Task, seed: int, folder: Path) -> None:
    """Train with the recommended preset; keep policy, critic and all completions."""
    changes = overrides(RECOMMENDED, task.arguments["learning_rate"])
    arguments = COMMON | task.arguments | changes
    batch_size = arguments["per_device_train_batch_size"]
    arguments |= {
        "total_episodes": task.num_updates * batch_size, "local_rollout_forward_batch_size": batch_size,
        "num_completions_to_keep": batch_size, "save_critic": True, "output_dir": str(folder),
        "overwrite_output_dir": True, "seed": seed,
    }  # fmt: skip
    trainer = our_trainer(task, AutoModelForCausalLM.from_pretrained(task.policy), arguments)
    trainer.train()
    trainer.save_model(str(folder))


def fit(task: Task, run: Path, updates: Sequence[int], folder: Path, options: Sequence[str]) -> None:
    """Fit a critic to the completions of some updates, from the language model before training."""
    shutil.rmtree(folder, ignore_errors=True)
    kept = folder / "kept/completions"
    kept.mkdir(parents=True)
    for file in (run / "completions").iterdir():
        if int("".join(filter(str.isdigit, file.stem)) or 0) in updates:
            (kept / file.name).symlink_to(file.resolve())
    words = ["--completions", str(folder / "kept"), "--model_name_or_path", str(task.policy), "--lam", "1"]
    words += ["--output_dir", str(folder / "critic"), "--per_device_train_batch_size", "128", "--save_strategy", "no"]
    words += ["--report_to", "none", "--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false"]
    train_critic([*words, "--disable_tqdm", "true", *options])


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


def main() -> None:
    """Train, fit and compare, seed by seed."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="as for benchmarks/learning/run.py")
    parser.add_argument("--work", type=Path, default=Path("runs/critic"), help="where models and results are kept")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--fits", nargs="+", choices=FITS, default=list(FITS))
    parser.add_argument("--epochs", default="40")
    parser.add_argument("--learning-rate", default="1e-3")
    given = parser.parse_args()
    torch.set_num_threads(1)
    arithmetic.prepare(given.data, given.work / "arithmetic")
    task = arithmetic.load(given.data, given.work / "arithmetic")
    options = ["--num_train_epochs", given.epochs, "--learning_rate", given.learning_rate]
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        began, run = time.process_time(), given.work / f"models/fitted-{seed}"
        if not (run / "critic").exists():
            train_run(task, seed, run)
        ids, exact, written = prefixes(task, AutoModelForCausalLM.from_pretrained(run).eval(), seed)
        critics = {"of the run": run / "critic"}
        for name in given.fits:
            critics[name] = run / name.replace(" ", "_") / "critic"
            fit(task, run, FITS[name], critics[name].parent, [*options, "--seed", str(seed)])
        found = {
            name: figures(
                values_of(AutoModelForSequenceClassification.from_pretrained(path).eval(), ids), exact, written
            )
            for name, path in critics.items()
        }
        row = {"seed": seed, "options": options, "figures": found, "cpu_seconds": time.process_time() - began}
        with (given.work / "fitted.jsonl").open("a", encoding="utf-8") as results:
            results.write(f"{json.dumps(row | code_version())}\n")
        print(json.dumps(row, indent=1), flush=True)


if __name__ == "__main__":
    main()
