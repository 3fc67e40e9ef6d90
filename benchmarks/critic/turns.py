"""Compare the critic's values on FrozenLake with the returns of the episodes that the same policy plays on.

    python benchmarks/critic/turns.py --seeds 5

The game is `rate 0.8` of `benchmarks/learning/lake.py`: one of five moves slips. Values are those before each turn in
the last 8 updates, of episodes that the critic has not learned from. A line of `turns.jsonl` has a seed's figures:

- EV: explained variance of the returns of the turns, discounted as in training, KL penalty included;
- EV of move, of field: the same for a quadratic in the move's number, and for the mean return of the other episodes
  with the same field at the same move, which knows all that the game's rules allow to know;
- tau: Kendall's tau-b between the value and that mean, among fields at the same move;
- slope, bias: slope of the returns on the values, and mean of value minus return.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parent / "learning"), str(FOLDER.parents[1] / "examples")]

import agent_frozen_lake as example  # noqa: E402
import intervals  # noqa: E402
import numpy as np  # noqa: E402
from lake import SETTINGS  # noqa: E402
from run import code_version  # noqa: E402

from rlhf_ppo.evaluation.critic_audit import pair_counts  # noqa: E402

RESULTS = FOLDER / "turns.jsonl"
NUM_UPDATES = 8
"""Updates at the end of a run whose rollouts are read."""
MIN_OTHERS = 8
"""Other episodes with the same field at the same move, so that their mean return says something."""
Turns = list[tuple[int, int, float, float]]
"""Move's number, field, value and return of each turn."""


def turns_of(rollout: Any, gamma: float, kl_coef: float) -> Turns:
    """Return the turns of a rollout; the token before a turn names the field.

    G_k = r_k + gamma G_{k+1},   r_k = sum over the turn of (token scores - kl_coef * (log p - log p_ref))

    The last turn is paid the score, too.
    """
    turns: Turns = []
    rewards = rollout.token_scores - kl_coef * (rollout.logprobs - rollout.ref_logprobs)
    first = rollout.query_responses.shape[1] - rollout.response_mask.shape[1]
    for row, written in enumerate(rollout.response_mask.tolist()):
        starts = [place for place, mine in enumerate(written) if mine and (place == 0 or not written[place - 1])]
        to_come, of_row = 0.0, list[tuple[int, int, float, float]]()
        for move, start in reversed([*enumerate(starts)]):
            end = start + [*written[start:], False].index(False)
            paid = float(rollout.scores[row]) if move == len(starts) - 1 else 0.0
            to_come = paid + float(rewards[row, start:end].sum()) + gamma * to_come
            field = int(rollout.query_responses[row, first + start - 1])
            of_row.append((move, field, float(rollout.values[row, start]), to_come))
        turns += of_row
    return turns


def figures(turns: Turns) -> dict[str, float]:
    """Return the figures of the docstring above; turns without enough others are left out of all."""
    groups: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for move, field, value, returned in turns:
        groups[move, field].append((value, returned))
    rows: list[tuple[int, float, float, float]] = []
    ranked: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (move, _), pairs in groups.items():
        if len(pairs) <= MIN_OTHERS:
            continue
        total = sum(returned for _, returned in pairs)
        rows += [(move, value, returned, (total - returned) / (len(pairs) - 1)) for value, returned in pairs]
        ranked[move].append((float(np.mean([value for value, _ in pairs])), total / len(pairs)))
    moves, values, returns, others = np.array(rows).T
    quadratic = np.polyval(np.polyfit(moves, returns, 2), moves)
    agreement, of_values, of_means = np.sum([pair_counts(*np.array(pairs).T) for pairs in ranked.values()], axis=0)
    return {
        "EV": explained(values, returns),
        "EV of move": explained(quadratic, returns),
        "EV of field": explained(others, returns),
        "tau": float(agreement / np.sqrt(of_values * of_means)),
        "slope": float(np.polyfit(values, returns, 1)[0]),
        "bias": float(np.mean(values - returns)),
        "turns": len(rows),
    }


def explained(predicted: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(G - predicted) / Var(G)."""
    return float(1 - np.var(returns - predicted) / np.var(returns))


def measure(seed: int, arguments: str) -> dict[str, Any]:
    """Train a player; return the games that it wins and the figures of its critic."""
    rollouts: list[Any] = []

    class Kept(example.PPOTrainer):
        def estimate_advantages(self, rollout: Any) -> Any:
            rollouts.append((rollout, self.args))
            del rollouts[:-NUM_UPDATES]
            return super().estimate_advantages(rollout)

    usual, example.PPOTrainer = example.PPOTrainer, Kept
    try:
        with tempfile.TemporaryDirectory() as folder:
            given = example.command_line([*shlex.split(arguments), f"--seed={seed}", f"--output_dir={folder}"])
            found = example.train(given)
    finally:
        example.PPOTrainer = usual
    turns = [turn for rollout, args in rollouts for turn in turns_of(rollout, args.gamma, args.kl_coef)]
    return {"seed": seed, "games won": found["held_out"]} | figures(turns) | code_version()


def main() -> None:
    """Measure the seeds that are missing; print a line for each figure, with its interval over seeds."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    rows = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.exists() else []
    for seed in range(given.seeds):
        if not any(row["seed"] == seed for row in rows):
            rows.append(measure(seed, SETTINGS["rate 0.8"]))
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print("| figure | mean over seeds |\n| --- | --- |")
    for name in (name for name, value in rows[0].items() if isinstance(value, float)):
        print(f"| {name} | {intervals.mean([row[name] for row in rows]).shown()} |")


if __name__ == "__main__":
    main()
