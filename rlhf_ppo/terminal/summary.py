"""The table that a run ends with: where its figures began and where they have come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from rlhf_ppo.terminal.foreign import cell
from rlhf_ppo.terminal.lines import duration, number

_ROWS = {
    "objective/scores": "score",
    "objective/raw_scores": "score before scaling",
    "objective/kl": "KL to the reference",
    "objective/rlhf_reward": "score and KL penalty",
    "response/length_mean": "response length, tokens",
    "response/ended_frac": "share that ended",
    "policy/entropy_avg": "entropy, nats per token",
    "policy/clipfrac_avg": "share of tokens clipped",
    "val/explained_variance": "explained variance",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "time/tokens_per_second": "tokens per second",
}
_IN_EVALUATION = {
    "eval_score": "held-out score",
    "eval_kl": "held-out KL",
    "eval_ended_frac": "held-out share that ended",
}


def summary_table(log_history: Sequence[Mapping[str, Any]]) -> Table | None:
    """Tabulate the first and the last log of a run, and its lowest and highest.

    Args:
        log_history: All logs of the run, of earlier starts too.

    Returns:
        One row for each figure that was logged; None where no update of PPO was.
    """
    updates = [log for log in log_history if "loss" in log]
    if not any(key.startswith("objective/") for log in updates for key in log):
        return None
    evaluations = [log for log in log_history if "eval_runtime" in log]
    table = Table("", "first", "last", "lowest", "highest", title=_title(log_history, updates), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for logs, rows in ((updates, _with_rewards(_ROWS, updates)), (evaluations, _IN_EVALUATION)):
        for key, meaning in rows.items():
            if values := [float(log[key]) for log in logs if key in log]:
                table.add_row(cell(meaning), *map(number, (values[0], values[-1], min(values), max(values))))
    return table


def _with_rewards(rows: Mapping[str, str], updates: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Add the rewards behind the score where there are several."""
    keys = [key for key in updates[-1] if key.startswith("rewards/") and key.endswith("/mean")]
    rewards = {key: key.removeprefix("rewards/").removesuffix("/mean") for key in keys} if len(keys) > 1 else {}
    return {"objective/scores": rows["objective/scores"], **rewards, **rows}


def _title(log_history: Sequence[Mapping[str, Any]], updates: Sequence[Mapping[str, Any]]) -> str:
    last = updates[-1]
    seconds = [log["train_runtime"] for log in log_history if "train_runtime" in log]
    parts = [f"{last['step']} updates" if last["step"] != 1 else "1 update"]
    if "episode" in last:
        parts.append(f"{last['episode']:g} episodes")
    if seconds:
        parts.append(f"{duration(seconds[-1])} since the run was started")
    return ", ".join(parts)
