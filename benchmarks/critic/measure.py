"""Train cells (task, variant, seed) of `benchmarks/learning`, audit their critics, and use the critics at inference.

    python benchmarks/critic/measure.py --data ../shared/data --tasks stories --variants preset:recommended --seeds 5
    python benchmarks/critic/tables.py

A finished cell is one line of `results.jsonl` of the work directory; the same command continues. Variants are those of
`benchmarks/learning/variants.py`, and `critic=` with what it starts from, see `critic_of`. The trained models stay in
the work directory, `rlhf-ppo generate` can load them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "learning"))

import arithmetic  # noqa: E402
import torch  # noqa: E402
from cell import TASKS, UNSEEN, health_of, module_of  # noqa: E402
from evaluation import Evaluator, seeded  # noqa: E402
from fitted import fit, train_run  # noqa: E402
from libraries import our_trainer  # noqa: E402
from preferences import scores_of  # noqa: E402
from rlhf_ppo.decoding import Candidate, Decoded, Sampling, best_of_n, value_guided_search  # noqa: E402
from run import code_version, read_results  # noqa: E402
from task import COMMON, Scores, Task, reward_of  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification  # noqa: E402
from variants import overrides  # noqa: E402

WORK = Path("runs/critic")
NUM_AUDITED = {"stories": 112, "emotions": 112, "preferences": 112, "exchanged": 112, "arithmetic": 128}
"""Held-out responses of an audit, 4 prefixes each, of a quarter as many prompts."""
NUM_PROMPTS = {"stories": 256, "emotions": 256, "preferences": 256, "exchanged": 256, "arithmetic": 1024}
"""Held-out prompts at inference; a prompt may be taken again."""
WARM = ["--lam", "0.95", "--learning_rate", "3e-4", "--num_train_epochs", "3"]
"""Of `rlhf-ppo critic train`; not tuned."""
N, WIDTH = 8, 4
BLOCK = {"stories": 8, "emotions": 8, "preferences": 4, "exchanged": 4, "arithmetic": 1}


def run_cell(name: str, variant: str, seed: int, data: Path, work: Path, infers: bool) -> dict[str, Any]:
    """Train with an audit after the last update, then choose responses with the saved critic.

    Args:
        name: The task.
        variant: See `variants.overrides`.
        seed: Of the training, the audit and the sampling.
        data: As of `benchmarks/learning/run.py`.
        work: Holds the tasks' models and gets the trained ones.
        infers: Whether responses are chosen.

    Returns:
        `final`, the evaluation of the policy as in `benchmarks/learning`; `audit`, the figures with their intervals;
        `findings` of the audit; `health`, the checks that spoke; `inference`, see `inference`; `settings`; and
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
        "critic_audit_steps": task.num_updates,
        "save_critic": True,
        "output_dir": str(folder),
        "overwrite_output_dir": True,
        "seed": seed,
    }
    policy, reference = (AutoModelForCausalLM.from_pretrained(task.policy) for _ in range(2))
    others = (
        {"value_model": critic_of(str(arguments.pop("critic")), name, task, seed, data, work)}
        if "critic" in changes
        else {}
    )
    trainer = our_trainer(task, policy, arguments, eval_dataset=audited(name, task), **others)
    trainer.train()
    trainer.save_model(str(folder))
    audit = json.loads((folder / "critic_audit.json").read_text(encoding="utf-8"))
    trained = time.process_time() - began
    reward = reward_of(task, scores_of)
    policy = AutoModelForCausalLM.from_pretrained(folder)
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "critic")
    found = {
        "final": Evaluator(task, reference, reward, seed)(policy, task.num_final),
        "audit": audit["figures"],
        "prefixes": audit["num_prefixes"],
        "findings": audit["findings"],
        "health": health_of(trainer.state.log_history),
        "inference": inference(name, task, (policy, critic, reference), reward, seed) if infers else {},
        "num_updates": task.num_updates,
        "settings": task.arguments | changes,
    }
    return found | {"cpu_seconds_of_training": trained, "cpu_seconds": time.process_time() - began}


def critic_of(kind: str, name: str, task: Task, seed: int, data: Path, work: Path) -> str:
    """Return where a critic starts from.

    Args:
        kind: `shallow`, the first half of the layers of `start_of`; `warm`, `start_of` fitted to the completions of
            another run; for arithmetic also `wide`, a language model twice as wide as the policy, and `fitted`, what
            `fitted.py` fitted to other runs.
        name: The task's.
        task: The task.
        seed: Of the run, which for `fitted` was one of `fitted.py`.
        data: As of `run_cell`.
        work: As of `run_cell`.
    """
    models = work / "models"
    if kind == "shallow":
        return str(shallow(task, models / f"{name}-shallow"))
    if kind == "warm":
        other = train_run(task, seed + 20, models / f"{name}-{seed + 20}")
        return str(fit(task, [other], models / f"{name}-warm-{seed}", WARM, start_of(task)))
    if kind == "fitted":
        return str(models / f"fitted-{seed}/fit-five")
    arithmetic.prepare(data, work / "arithmetic-wide", hidden_size=128)
    return str(work / "arithmetic-wide/policy")


def start_of(task: Task) -> Path:
    """Return what the critic starts from else: the reward model, or the policy where the reward is a function."""
    return task.reward if isinstance(task.reward, Path) else task.policy


def shallow(task: Task, folder: Path) -> Path:
    """Save a critic with the first half of the layers."""
    kind = AutoModelForCausalLM if start_of(task) == task.policy else AutoModelForSequenceClassification
    model = kind.from_pretrained(start_of(task))
    layers = model.base_model.layers
    model.base_model.layers = layers[: len(layers) // 2]
    model.config.num_hidden_layers = len(layers) // 2
    model.save_pretrained(folder)
    task.tokenizer.save_pretrained(folder)
    return folder


def audited(name: str, task: Task) -> list[dict[str, Any]]:
    """Return the prompts of an audit, four or more times each."""
    number = NUM_AUDITED[name]
    ids = task.tokenizer(repeated(task.held_out[: number // 4], number))["input_ids"]
    return [{"input_ids": each} for each in ids]


def repeated(prompts: Sequence[str], number: int) -> list[str]:
    """Return a number of prompts, from the first again where there are fewer."""
    return list(islice(cycle(prompts), number))


# ---- Inference ----


def inference(name: str, task: Task, models: Sequence[Any], reward: Scores, seed: int) -> dict[str, Any]:
    """Choose responses to held-out prompts in several ways.

    Args:
        name: The task.
        task: The same.
        models: Policy, critic and reference.
        reward: The training reward.
        seed: Of the sampling; all ways but the search choose among the same responses.

    Returns:
        For each way: `gold`, `reward`, `log_ratio` to the reference (nats), and per prompt the sampled `tokens`, the
        `valued` rows of the critic and the responses that the reward `scored`.
    """
    policy, critic, reference = models
    said, prompts = task.arguments, repeated(task.held_out, NUM_PROMPTS[name])
    how = Sampling(said["response_length"], said["temperature"], batch_size=512)
    ids = task.tokenizer(prompts)["input_ids"]
    asked = task.tokenizer.batch_decode(ids, skip_special_tokens=True)
    ways: dict[str, tuple[list[Candidate], tuple[float, float, float]]] = {}
    with seeded(seed):
        best = best_of_n(policy, critic, task.tokenizer, prompts, N, how)
    texts = [[text_of(task, each) for each in candidates] for candidates in best.candidates]
    scores = [reward([prompt] * N, each) for prompt, each in zip(asked, texts, strict=True)]
    cost = best.num_sampled_tokens / len(prompts)
    for n in (1, 4, N):
        rows = [(candidates[:n], row[:n]) for candidates, row in zip(best.candidates, scores, strict=True)]
        if n == 1:
            ways["random"] = [candidates[0] for candidates, _ in rows], (cost / N, 0, 0)
            continue
        ways[f"best of {n} by the critic"] = (
            [max(candidates, key=lambda each: each.value) for candidates, _ in rows], (cost * n / N, n, 0),
        )  # fmt: skip
        ways[f"best of {n} by the reward"] = (
            [candidates[max(range(n), key=row.__getitem__)] for candidates, row in rows], (cost * n / N, 0, n),
        )  # fmt: skip
    if name == "arithmetic":
        with seeded(seed):
            weighted = best_of_n(policy, critic, task.tokenizer, prompts, N, how, weighted=True)
        ways[f"weighted best of {N}"] = weighted.chosen, (cost, N, 0)
        commonest = [Counter(each).most_common(1)[0][0] for each in texts]
        ways[f"majority of {N}"] = (
            [best.candidates[row][texts[row].index(text)] for row, text in enumerate(commonest)], (cost, 0, 0),
        )  # fmt: skip
    with seeded(seed):
        found = value_guided_search(policy, critic, task.tokenizer, prompts, WIDTH, BLOCK[name], how)
    ways[f"search, width {WIDTH}"] = found.chosen, (*cost_of(found, len(prompts)), 0)
    figures = {}
    for way, (chosen, (tokens, valued, scored)) in ways.items():
        said_texts = [text_of(task, each) for each in chosen]
        ratio = log_ratio(policy, reference, ids, [each.ids for each in chosen], said["temperature"])
        figures[way] = {
            "gold": fmean(task.judge(asked, said_texts)), "reward": fmean(reward(asked, said_texts)),
            "log_ratio": ratio, "tokens": tokens, "valued": valued, "scored": scored,
        }  # fmt: skip
    everything = [fmean(task.judge([prompt] * N, each)) for prompt, each in zip(asked, texts, strict=True)]
    figures["random"]["gold"] = fmean(everything)
    figures["random"]["reward"] = fmean(map(fmean, scores))
    return figures


def cost_of(found: Decoded, num_prompts: int) -> tuple[float, float]:
    """Return the sampled tokens and the critic's rows per prompt."""
    return found.num_sampled_tokens / num_prompts, found.num_valued_rows / num_prompts


def text_of(task: Task, candidate: Candidate) -> str:
    """Return a response as the reward reads it."""
    return task.tokenizer.decode(candidate.ids, skip_special_tokens=True)


@torch.no_grad()
def log_ratio(
    policy: Any,
    reference: Any,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float,
) -> float:
    """Return the mean of `log pi(y|x) - log pi_ref(y|x)` over responses, nats."""
    total = 0.0
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([[*prompt, *response]])
        taken = torch.tensor(response)[:, None]
        ours, theirs = (
            (model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1).gather(1, taken)
            for model in (policy, reference)
        )
        total += float((ours - theirs).sum())
    return total / len(prompts)


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
    parser.add_argument("--audit-only", action="store_true", help="choose no responses")
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
                measured = run_cell(name, variant, seed, given.data, given.work, not given.audit_only)
                found = json.dumps(cell | measured | code_version())
                line = json.dumps(json.loads(found, parse_float=lambda digits: round(float(digits), 5)))
                with (given.work / "results.jsonl").open("a", encoding="utf-8") as results:
                    results.write(f"{line}\n")
                print(name, variant, seed, "is finished", flush=True)


if __name__ == "__main__":
    main()
