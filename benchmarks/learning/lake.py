"""Train `examples/agent_frozen_lake.py` in several settings and seeds, beside the optimum by dynamic programming.

    python benchmarks/learning/lake.py              # all settings and seeds that agents.jsonl lacks
    python benchmarks/learning/lake.py plain token  # some settings
    python benchmarks/learning/lake.py --table      # the table of the documentation

Each run has a process of its own with one thread. The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from intervals import mean
from run import code_version

FOLDER = Path(__file__).parent
EXAMPLE = FOLDER.parents[1] / "examples" / "agent_frozen_lake.py"
RESULTS = FOLDER / "agents.jsonl"
SLIPPERY = "--slippery --moves 50 --updates 125"
SETTINGS = {
    "plain": "",
    "token": "--gae token",
    "plain, longer": "--updates 47",
    "one credit, longer": "--updates 47 --credit episode",
    "rate 0.8": "--slippery --rate 0.8 --updates 62",
    "8x8": "--size 8 --moves 40 --updates 23 --progress",
    "8x8, goal alone": "--size 8 --moves 40 --updates 23",
    "slippery": SLIPPERY,
    "slippery, progress": f"{SLIPPERY} --progress",
}
"""Arguments of the example by the name of a setting."""


def optimum(size: int, moves: int, slippery: bool, rate: float) -> tuple[float, float]:
    """Return the share of games that the best player wins within a limit of moves, and that of a random player.

    V_0 = 0;  V_t(s) = max_a sum_s' p(s' | s, a) (r + V_{t-1}(s'))        and the mean over a for the random player
    """
    import gymnasium

    slips: dict[str, Any] = {"success_rate": rate} if slippery else {}
    lake: Any = gymnasium.make("FrozenLake-v1", map_name=f"{size}x{size}", is_slippery=slippery, **slips).unwrapped
    players = []
    for choose in (max, fmean):
        values = [0.0] * (size * size)
        for _ in range(moves):
            values = [
                choose(
                    [
                        sum(p * (reward + (0.0 if over else values[after])) for p, after, reward, over in outcomes)
                        for outcomes in lake.P[state].values()
                    ]
                )
                for state in range(size * size)
            ]
        players.append(values[0])
    return players[0], players[1]


def game_of(arguments: str) -> tuple[int, int, bool, float]:
    """Read size, limit of moves, slipperiness and success rate from a setting's arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--slippery", action="store_true")
    parser.add_argument("--rate", type=float, default=1 / 3)
    given, _ = parser.parse_known_args(arguments.split())
    return given.size, given.moves, given.slippery, given.rate


def train(setting: str, seed: int) -> dict[str, Any]:
    """Train one setting with one seed in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(EXAMPLE),
            *SETTINGS[setting].split(),
            f"--seed={seed}",
            f"--output_dir={folder}",
        ]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{setting}, seed {seed} failed:\n{run.stderr[-2000:]}")
    best, random = optimum(*game_of(SETTINGS[setting]))
    found = {"setting": setting, "optimum": round(best, 4), "random": round(random, 4)}
    return found | json.loads(run.stdout.splitlines()[-1]) | code_version()


def results() -> list[dict[str, Any]]:
    """Return the finished runs."""
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.exists() else []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the documentation."""
    lines = [
        "| Setting | optimum, random | won of 500 held-out games, by seed | episodes to 0.9 of the optimum | CPU s |",
        "|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        runs = sorted((row for row in rows if row["setting"] == setting), key=lambda row: row["seed"])
        if runs:
            won = ", ".join(f"{run['held_out']:.3f}" for run in runs)
            reached = ", ".join(str(reached_at(run, 0.9) or "not reached") for run in runs)
            seconds = fmean(run["cpu_seconds"] for run in runs)
            share = f"{runs[0]['optimum']:.3f}, {runs[0]['random']:.4f}"
            lines.append(f"| {setting} | {share} | {won} | {reached} | {seconds:.0f} |")
    return "\n".join(lines)


def reached_at(run: dict[str, Any], share: float) -> int | None:
    """Return the episodes after which an update's games are won as often as a share of the optimum."""
    wanted = share * run["optimum"]
    return next((128 * (place + 1) for place, won in enumerate(run["curve"]) if won >= wanted), None)


def ratio(rows: Sequence[dict[str, Any]]) -> str:
    """Compare the episodes to 0.9 of one credit for all tokens with those of a critic, by seed."""
    by_setting = {
        name: {row["seed"]: reached_at(row, 0.9) for row in rows if row["setting"] == name}
        for name in ("plain, longer", "one credit, longer")
    }
    critic, alike = by_setting.values()
    longest = 47 * 128  # a lower bound for runs that do not get there
    ratios = [(alike[seed] or longest) / (critic[seed] or longest) for seed in sorted(critic.keys() & alike.keys())]
    return f"one credit / critic: {mean(ratios).shown(2)} over {len(ratios)} seeds: {[round(r, 2) for r in ratios]}"


def main() -> None:
    """Train what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=list(SETTINGS), metavar="setting", help=", ".join(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print(table(results()), ratio(results()), sep="\n\n")
        return
    for setting in given.settings:
        for seed in given.seeds:
            if not any(row["setting"] == setting and row["seed"] == seed for row in results()):
                row = train(setting, seed)
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{setting}, seed {seed}: {row['held_out']} (optimum {row['optimum']})", flush=True)


if __name__ == "__main__":
    main()
