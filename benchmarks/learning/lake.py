"""Train `examples/agent_frozen_lake.py` in several settings and seeds, against the optimum by dynamic programming.

    python benchmarks/learning/lake.py              # all settings and seeds that agents.jsonl lacks
    python benchmarks/learning/lake.py plain token  # some settings

Each run has its own process with one thread. The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from run import code_version

FOLDER = Path(__file__).parent
EXAMPLE = FOLDER.parents[1] / "examples" / "agent_frozen_lake.py"
RESULTS = FOLDER / "agents.jsonl"
EPISODES = 128
"""Of an update."""
SLIPPING: dict[str, Any] = {
    "kl_coef": 0.005,
    "warmup_steps": 5,
    "lr_scheduler_type": "warmup_stable_decay",
    "lr_scheduler_kwargs": {"num_decay_steps": 25},
}
"""Options for the lakes whose moves slip, chosen on seeds 10 and 11."""
SETTINGS = {
    "plain": "",
    "token": """--options '{"gae_level": "token"}'""",
    "plain, longer": "--updates 47",
    "rate 0.8": f"--slippery --rate 0.8 --updates 62 --held_out 4000 --options '{json.dumps(SLIPPING)}'",
    "8x8": "--size 8 --moves 40 --updates 23 --progress",
    "8x8, goal alone": "--size 8 --moves 40 --updates 23",
    "slippery": f"--slippery --moves 50 --updates 62 --options '{json.dumps(SLIPPING)}'",
}
"""Arguments of the example by the name of a setting."""
STORED = {"one credit, longer": "--updates 47"}
"""Settings of stored runs that the example no longer has: no critic, one credit for all tokens of an episode."""


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
    given, _ = parser.parse_known_args(shlex.split(arguments))
    return given.size, given.moves, given.slippery, given.rate


def train(setting: str, seed: int) -> dict[str, Any]:
    """Train one setting with one seed in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(EXAMPLE),
            *shlex.split(SETTINGS[setting]),
            f"--seed={seed}",
            f"--output_dir={folder}",
        ]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{setting}, seed {seed} failed:\n{run.stderr[-2000:]}")
    best, random = optimum(*game_of(SETTINGS[setting]))
    found = {"setting": setting, "optimum": round(best, 4), "random": round(random, 4)}
    return found | json.loads(run.stdout.splitlines()[-1]) | code_version()


def read_results() -> list[dict[str, Any]]:
    """Return the finished runs."""
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.exists() else []


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=list(SETTINGS), metavar="setting", help=", ".join(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    for setting in given.settings:
        for seed in given.seeds:
            if not any(row["setting"] == setting and row["seed"] == seed for row in read_results()):
                row = train(setting, seed)
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{setting}, seed {seed}: {row['held_out']} (optimum {row['optimum']})", flush=True)


if __name__ == "__main__":
    main()
