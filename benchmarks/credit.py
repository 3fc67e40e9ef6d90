"""Does a critic pay where each sentence has a reward of its own? A story model and a chat model, at equal CPU time.

    python benchmarks/credit.py --data ../shared/data --jobs 2    # runs what is missing
    python benchmarks/credit.py --table
    make chat-model
    python benchmarks/credit.py --setting chat --data ../shared/data --jobs 2

A response has up to 96 tokens; the story model's have about six sentences. The first four whole sentences have a
reward: the compound valence of VADER for the first and third, its negative for the second and fourth, so the story
must turn from glad to sad and back, and its total says nothing about any one sentence. `total` arms get the sum at the
last token, as GRPO does, the others each reward at the last token of its sentence.

critic: PPO with a value model of its own. head: with a head on the policy. Both have `lam` 0.95, critic-total-lam1 has
1. none: no critic; the baseline of a token is the batch's mean reward to come at its position. grpo: TRL's GRPO, 8
responses a prompt. Rates are constant; `SETTINGS` has the rest. Each arm tries the same rates on another seed and
takes the one with the highest objective at the last mark: the total minus `KL_COEF` times the KL. Each mark, in CPU
seconds of training, has a row with the means over sampled responses to held-out prompts. A stopped run starts again.

The chat model is SmolLM2-135M-Instruct in `chat-model/`. It trains a LoRA adapter; rlhf_ppo samples four responses a
prompt.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback

from rlhf_ppo import PPOConfig, PPOTrainer

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER / "learning"))
from evaluation import Evaluator  # noqa: E402  # pyright: ignore
from stories import HELD_OUT_HEROES, HEROES, compound, openings, read_lexicon, words_of  # noqa: E402  # pyright: ignore
from task import COMMON, Task  # noqa: E402  # pyright: ignore

ARMS = {
    "critic": "own value model, reward a sentence",
    "head": "head on the policy, reward a sentence",
    "none": "no critic, reward a sentence",
    "critic-total": "own value model, total",
    "critic-total-lam1": "own value model, total, lam 1",
    "none-total": "no critic, total",
    "grpo": "GRPO (TRL 1.16), total",
}
KL_COEF, LENGTH, SELECTION = 0.02, 96, (10,)
SIGNS = (1, -1, 1, -1)
"""Of the paid sentences: glad, sad, glad, sad."""


@dataclass(frozen=True)
class Setting:
    """How a model trains.

    Attributes:
        arms: Those that run.
        marks: CPU seconds of training.
        rates: Learning rates that each arm tries.
        final: Seeds.
        batch: Responses an update.
        epochs: Passes over them.
        mini_batches: Of a pass.
        num_measured: Sampled responses at a mark.
        adapter: Whether a LoRA adapter learns, with several responses a prompt.
    """

    arms: tuple[str, ...]
    marks: tuple[int, ...]
    rates: tuple[float, ...]
    final: tuple[int, ...]
    batch: int
    epochs: int
    mini_batches: int
    num_measured: int
    adapter: bool = False


SETTINGS = {
    "stories": Setting(tuple(ARMS), (15, 30, 60), (5e-5, 1e-4, 2e-4), (0, 1, 2, 3, 4), 64, 4, 2, 512),
    "chat": Setting(
        ("head", "none", "none-total", "grpo"), (300, 600, 1200), (5e-4, 1e-3), (0, 1, 2), 16, 1, 1, 128, adapter=True
    ),
}


def sentences(text: str) -> list[tuple[int, str]]:
    """Return the first four whole sentences, each with the index of the character after it."""
    return [(found.end(), found[0]) for found in re.finditer(r"[^.!?]+[.!?]+", text)][: len(SIGNS)]


def rewards_of(text: str, valence: dict[str, float]) -> list[float]:
    """Return the reward of each paid sentence, -1 to 1."""
    totals = [sum(valence.get(word, 0.0) for word in words_of(sentence)) for _, sentence in sentences(text)]
    return [sign * compound(total) for sign, total in zip(SIGNS, totals, strict=False)]


def at_tokens(ids: Sequence[int], valence: dict[str, float], decode: Callable[..., str]) -> list[float]:
    """Return the reward of each token: a sentence's at the first token with which the text reaches its end."""
    text = decode(ids, skip_special_tokens=True)
    result, left = [0.0] * len(ids), list(zip(sentences(text), rewards_of(text, valence), strict=True))
    for number in range(len(ids)):
        while left and len(decode(ids[: number + 1], skip_special_tokens=True)) >= left[0][0][0]:
            result[number] += left.pop(0)[1]
    return result


class NoCritic(PPOTrainer):
    """A token's advantage is the reward to come, minus the batch's mean at its position."""

    def compute_advantages(self, rollout: Any, rewards: Any) -> Any:
        """Compute advantages without a critic."""
        mask = rollout.loss_mask
        to_come = rewards.masked_fill(~mask, 0.0).flip(1).cumsum(dim=1).flip(1)
        baseline = to_come.sum(dim=0) / mask.sum(dim=0).clamp(min=1)
        return (to_come - baseline).masked_fill(~mask, 0.0), to_come.masked_fill(~mask, 0.0)


class Clock(TrainerCallback):
    """Counts the CPU seconds of training, measures at each mark and ends the run after the last."""

    def __init__(self, measure: Callable[[], dict[str, float]], marks: Sequence[float]) -> None:
        self.measure, self.marks = measure, list(marks)
        self.seconds, self.began = 0.0, 0.0
        self.rows: list[dict[str, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self.began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure, if it is time, while the clock stands still."""
        seconds = self.seconds + time.process_time() - self.began
        if self.marks and seconds >= self.marks[0]:
            self.seconds = seconds
            self.rows.append({"mark": self.marks.pop(0), "steps": state.global_step, **self.measure()})
            control.should_training_stop = not self.marks
            self.began = time.process_time()


def adapter_of(setting: Setting) -> dict[str, Any]:
    """Return the argument with which both libraries add an adapter, or none."""
    return {"peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")} if setting.adapter else {}


def our_trainer(
    arm: str,
    setting: Setting,
    policy: Any,
    tokenizer: Any,
    rows: Any,
    valence: dict[str, float],
    options: dict[str, Any],
) -> Any:
    """Make rlhf_ppo's trainer of an arm."""
    kind, *of_arm = arm.split("-")
    pays_total, lam = "total" in of_arm, 1.0 if "lam1" in of_arm else 0.95

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> Any:
        if pays_total:
            return [sum(rewards_of(text, valence)) for text in completions]
        return [at_tokens(ids, valence, tokenizer.decode) for ids in completion_ids]

    args = PPOConfig(
        **COMMON | options, per_device_train_batch_size=setting.batch, response_length=LENGTH, lam=lam,
        num_ppo_epochs=setting.epochs, num_mini_batches=setting.mini_batches, total_episodes=setting.batch * 1000,
        local_rollout_forward_batch_size=setting.batch, num_generations=4 if setting.adapter else 1,
    )  # fmt: skip
    make = NoCritic if kind == "none" else PPOTrainer
    critic = None if kind == "critic" else "policy"
    return make(
        args, tokenizer, policy, value_model=critic, reward_funcs=reward, train_dataset=rows, **adapter_of(setting)
    )


def grpo_trainer(
    setting: Setting, policy: Any, tokenizer: Any, rows: Any, valence: dict[str, float], options: Any
) -> Any:
    """Make TRL's GRPOTrainer with as many passes and mini-batches."""
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    shared = {**options, "beta": options["kl_coef"]}
    same = {name: value for name, value in shared.items() if name not in ("kl_coef", "critic_learning_rate")}
    common = {name: value for name, value in COMMON.items() if name not in ("num_sample_generations", "stop_token")}
    config = GRPOConfig(
        **common | same, per_device_train_batch_size=setting.batch // setting.mini_batches,
        steps_per_generation=setting.mini_batches, num_iterations=setting.epochs, num_generations=8,
        max_completion_length=LENGTH, max_steps=100_000,
    )  # fmt: skip

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [sum(rewards_of(text, valence)) for text in completions]

    return GRPOTrainer(policy, reward, config, rows, processing_class=tokenizer, **adapter_of(setting))


def prompts_of(heroes: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return beginnings of stories about some heroes; for a chat model, requests to go on with them."""
    texts = openings(heroes)
    if tokenizer.chat_template is None:
        return texts
    asked = [f"Continue with four short sentences: {text.removeprefix('<s>')}" for text in texts]
    system = {"role": "system", "content": "Write short sentences."}
    chats = [[system, {"role": "user", "content": text}] for text in asked]
    return [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]  # pyright: ignore


def run(arm: str, seed: int, rate: float, setting: Setting, data: Path) -> list[dict[str, Any]]:
    """Train an arm in this process; return a row for each mark, and one before training."""
    torch.set_num_threads(1)
    valence, path = read_lexicon(data), Path("chat-model") if setting.adapter else data / "stories260K"
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    policy, reference = (AutoModelForCausalLM.from_pretrained(path) for _ in range(2))

    def totals(_prompts: Sequence[str], texts: Sequence[str]) -> list[float]:
        return [sum(rewards_of(text, valence)) for text in texts]

    task = Task(
        tokenizer, path, totals, totals, prompts_of(HEROES, tokenizer), prompts_of(HELD_OUT_HEROES, tokenizer),
        {"temperature": 1.0, "response_length": LENGTH},
    )  # fmt: skip
    batch_size = setting.num_measured // 4  # the log-probabilities of the whole vocabulary are in memory
    evaluate = Evaluator(task, reference, totals, seed, batch_size)
    clock = Clock(lambda: evaluate(policy, setting.num_measured), setting.marks)
    before = {"mark": 0, "steps": 0, **clock.measure()}
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder, "seed": seed, "learning_rate": rate, "kl_coef": KL_COEF, "temperature": 1.0,
            "critic_learning_rate": 5 * rate, "lr_scheduler_type": "constant",
        }  # fmt: skip
        if arm == "grpo":
            rows = Dataset.from_dict({"prompt": task.prompts * 3})
            trainer = grpo_trainer(setting, policy, tokenizer, rows, valence, options)
        else:
            rows = Dataset.from_dict({"input_ids": tokenizer(task.prompts * 3)["input_ids"]})
            trainer = our_trainer(arm, setting, policy, tokenizer, rows, valence, options)
        trainer.add_callback(clock)
        trainer.train()
    return [{"arm": arm, "seed": seed, "rate": rate, **row} for row in (before, *clock.rows)]


def read(path: Path) -> list[dict[str, Any]]:
    """Read the rows."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def rows_at(
    rows: list[dict[str, Any]], arm: str, rate: float, seeds: Sequence[int], mark: float
) -> list[dict[str, Any]]:
    """Return an arm's rows at a mark."""
    wanted = {(arm, rate, seed, mark) for seed in seeds}
    return [row for row in rows if (row["arm"], row["rate"], row["seed"], row["mark"]) in wanted]


def objective(row: dict[str, Any]) -> float:
    """Return the quantity that training maximizes: total minus KL penalty."""
    return row["reward"] - KL_COEF * row["kl"]


def chosen_rate(arm: str, rows: list[dict[str, Any]], setting: Setting) -> float | None:
    """Return the rate with the highest mean objective on the selection seeds; None until all have their rows."""
    found = {rate: rows_at(rows, arm, rate, SELECTION, setting.marks[-1]) for rate in setting.rates}
    if any(len(runs) < len(SELECTION) for runs in found.values()):
        return None
    return max(setting.rates, key=lambda rate: sum(map(objective, found[rate])))


def table(rows: list[dict[str, Any]], setting: Setting) -> str:
    """Summarize trials and final seeds."""
    from intervals import mean  # pyright: ignore

    lines = ["| trial | rate | total | KL, nats | objective |", "|---|---|---|---|---|"]
    for arm in setting.arms:
        for rate in setting.rates:
            lines += [
                f"| {arm} | {rate:g} | {row['reward']:.2f} | {row['kl']:.1f} | {objective(row):.2f} |"
                for row in rows_at(rows, arm, rate, SELECTION, setting.marks[-1])
            ]
    lines += ["", "| method | CPU seconds | seeds | updates | total | KL, nats | objective |", "|---" * 7 + "|"]
    for arm in setting.arms:
        for mark in setting.marks:
            runs = rows_at(rows, arm, chosen_rate(arm, rows, setting) or 0.0, setting.final, mark)
            if runs:
                per_update = setting.epochs * setting.mini_batches if arm == "grpo" else 1
                columns = (
                    [run["reward"] for run in runs],
                    [run["kl"] for run in runs],
                    [objective(run) for run in runs],
                )
                shown = " | ".join(mean(values).shown(2) for values in columns)
                steps = sum(run["steps"] for run in runs) / len(runs) / per_update
                lines.append(f"| {ARMS[arm]} | {mark} | {len(runs)} | {steps:.0f} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run one cell, run what is missing, or print the tables."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=str(__doc__).partition("\n")[0])
    parser.add_argument("--setting", choices=SETTINGS, default="stories", help="the model, and how it trains")
    parser.add_argument("--data", type=Path, help="holds stories260K and vader_lexicon")
    parser.add_argument("--results", type=Path, help="rows are appended; default: credit.jsonl or credit-chat.jsonl")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--table", action="store_true", help="print the tables instead")
    parser.add_argument("--cell", nargs=3, metavar=("ARM", "SEED", "RATE"), help="train one run and print its rows")
    options = parser.parse_args()
    setting = SETTINGS[options.setting]
    name = "credit.jsonl" if options.setting == "stories" else f"credit-{options.setting}.jsonl"
    results_path = options.results or FOLDER / name
    if options.table:
        print(table(read(results_path), setting))
        return
    if options.data is None:
        parser.error("--data must be given")
    if options.cell is not None:
        arm, seed, rate = options.cell
        for row in run(arm, int(seed), float(rate), setting, options.data):
            print("ROW", json.dumps(row), flush=True)
        return

    def train(cell: tuple[str, int, float]) -> None:
        command = [sys.executable, __file__, "--setting", options.setting, "--data", options.data, "--cell", *cell]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        rows = [line.removeprefix("ROW ") for line in done.stdout.splitlines() if line.startswith("ROW ")]
        with results_path.open("a", encoding="utf-8") as results:
            results.writelines(f"{row}\n" for row in rows)
        print(*cell, rows[-1] if rows else done.stderr[-2000:], flush=True)

    def runs(cells: list[tuple[str, int, float]]) -> None:
        done = {(row["arm"], row["seed"], row["rate"]) for row in read(results_path)}
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(train, [cell for cell in cells if cell not in done]))

    runs([(arm, seed, rate) for seed in SELECTION for arm in setting.arms for rate in setting.rates])
    rates = {arm: chosen_rate(arm, read(results_path), setting) for arm in setting.arms}
    runs([(arm, seed, rate) for seed in setting.final for arm, rate in rates.items() if rate is not None])


if __name__ == "__main__":
    main()
