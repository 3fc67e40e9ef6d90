"""What the demonstration shows: figures on the progress bars, a table of metrics and a table of stories."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from transformers import ProgressCallback, Trainer, TrainerControl, TrainerState, TrainingArguments

from rlhf_ppo.demo.judge import pleasantness
from rlhf_ppo.terminal.foreign import cell

METRICS = {
    "eval_score": "reward model's score",
    "eval_kl": "KL to the SFT model, nats",
    "eval_response_length_mean": "response length, tokens",
    "eval_ended_frac": "share of responses that end",
}


class FiguresOnBar(ProgressCallback):
    """Trainer's progress bar with the latest figures behind it, instead of every log between two bars.

    Args:
        keys: The keys of the log to show.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__()
        self.keys = keys

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the figures."""
        figures = {key: f"{logs[key]:.2f}" for key in self.keys if logs and key in logs}
        if self.training_bar is not None and figures:
            self.training_bar.set_postfix(figures)


def show_on_bar(trainer: Trainer, *keys: str) -> None:
    """Make a trainer's progress bar show some of what it logs.

    Args:
        trainer: Any Trainer.
        keys: The keys of its log.
    """
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(FiguresOnBar(keys))


def metrics_table(before: dict[str, float], after: dict[str, float]) -> Table:
    """Tabulate evaluation metrics.

    Args:
        before: Metrics of the SFT model.
        after: Metrics of the PPO policy.

    Returns:
        One row for each of `METRICS`.
    """
    table = Table("", "before PPO", "after PPO", title="On held-out openings")
    for key, meaning in METRICS.items():
        table.add_row(meaning, f"{before[key]:.2f}", f"{after[key]:.2f}")
    return table


def stories_table(
    prompts: Sequence[str], heroes: Sequence[str], before: Sequence[str], after: Sequence[str], num_rows: int = 5
) -> Table:
    """Tabulate stories side by side, each with its pleasantness as the judge reads it.

    Args:
        prompts: The openings.
        heroes: "She" or "He" for each opening.
        before: The SFT model's continuations.
        after: The PPO policy's.
        num_rows: Number of rows shown, from the first.

    Returns:
        One row for each opening.
    """
    table = Table("opening", "before PPO", "after PPO", title="Stories (pleasantness)", show_lines=True)
    for prompt, hero, first, second in list(zip(prompts, heroes, before, after, strict=True))[:num_rows]:
        table.add_row(cell(prompt), cell(_judged(first, hero)), cell(_judged(second, hero)))
    return table


def _judged(response: str, hero: str) -> str:
    valence = pleasantness(response, hero)
    return f"{response.strip()} ({'not a story' if valence == -math.inf else f'{valence:+.0f}'})"
