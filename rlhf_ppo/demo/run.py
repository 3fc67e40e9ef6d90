"""The demonstration from end to end: train, judge and show."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from rlhf_ppo.demo.corpus import openings
from rlhf_ppo.demo.judge import Verdicts, compare
from rlhf_ppo.demo.pipeline import (
    HELD_OUT_SEED,
    DemoSize,
    tell_stories,
    train_language_model,
    train_policy,
    train_reward_model,
)
from rlhf_ppo.demo.show import metrics_table, stories_table
from rlhf_ppo.reporting.plots import plot_metrics
from rlhf_ppo.terminal.foreign import cell


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration measured, all of it on held-out data.

    Attributes:
        reward_accuracy: Share of preference pairs that the reward model orders as the reader did, in [0, 1].
        before: Evaluation metrics of the SFT model, under the keys of `PPOTrainer.evaluate`.
        after: The same of the PPO policy.
        verdicts: The judge's, on PPO against SFT.
    """

    reward_accuracy: float
    before: dict[str, float]
    after: dict[str, float]
    verdicts: Verdicts


def run_demo(output_dir: Path, size: DemoSize | None = None, console: Console | None = None) -> DemoResult:
    """Train a language model, a reward model and a PPO policy, and ask the judge whether PPO helped.

    Sets torch to one thread: as fast as more for models so small, and sums then round the same way on every machine.

    Args:
        output_dir: Gets `sft/`, `reward_model/`, `ppo/` (each loads with `from_pretrained`) and `curves.png`.
        size: How much data and training; `DemoSize()` by default.
        console: Where results are printed; the terminal by default.

    Returns:
        The measurements that were printed.
    """
    torch.set_num_threads(1)
    size, console = size or DemoSize(), console or Console()
    sft_dir, reward_model_dir, ppo_dir = (output_dir / name for name in ("sft", "reward_model", "ppo"))

    console.rule("1. A language model learns to tell stories (SFT)")
    train_language_model(sft_dir, size)

    console.rule("2. A reward model learns which stories readers like")
    accuracy = train_reward_model(sft_dir, reward_model_dir, size)
    console.print(f"It prefers the story that the reader preferred in {accuracy:.1%} of held-out pairs")

    console.rule("3. The language model learns to tell stories that score high (PPO)")
    before, after = train_policy(sft_dir, reward_model_dir, ppo_dir, size)
    plot_metrics([ppo_dir], output_dir / "curves.png")

    console.rule("4. The judge, who knows the grammar, compares")
    held_out = openings(size.num_held_out, HELD_OUT_SEED)
    prompts, heroes = list(held_out["prompt"]), list(held_out["hero"])
    sft_stories, ppo_stories = tell_stories(sft_dir, prompts), tell_stories(ppo_dir, prompts)
    verdicts = compare(ppo_stories, sft_stories, heroes)
    console.print(stories_table(prompts, heroes, sft_stories, ppo_stories))
    console.print(metrics_table(before, after))
    console.print(cell(f"Curves: {output_dir / 'curves.png'}"))
    console.print(f"Judge prefers PPO over SFT: {verdicts.win_rate:.2%} (ties {verdicts.tie_rate:.2%})")
    return DemoResult(accuracy, before, after, verdicts)
