r"""Audit the critic of a run of `follow.py` that has finished its `--max_steps`; no further update is made.

    python benchmarks/follow_audit.py critic --output_dir RUN --seed 1 --max_steps 40 --dataset_name FILE \
        --resume_from_checkpoint True --local_rollout_forward_batch_size 32

Further arguments are those of the run. The prompts are held-out questions, with constraints, wordings and words drawn
as in training, the same for all runs. The result is a line of `--results`.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from follow import EXAMPLE, Clock, Measured, OwnCritic

import rlhf_ppo


class Finished(Measured):
    """Saves no model."""

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class FinishedOwnCritic(Finished, OwnCritic):
    """Saves no model; its value model is its own."""


def main() -> None:
    """Audit, and append a line to the results."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=str(__doc__).partition("\n")[0])
    parser.add_argument("arm", choices=("critic", "one-body"))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prefixes", type=int, default=2, help="of the response to each prompt")
    parser.add_argument("--continuations", type=int, default=4, help="of each prefix, and of each prompt")
    parser.add_argument("--results", type=Path, default=Path("audits.jsonl"))
    given, others = parser.parse_known_args()
    torch.set_num_threads(1)
    rlhf_ppo.PPOTrainer = Finished if given.arm == "one-body" else FinishedOwnCritic  # pyright: ignore
    Finished.clock = Clock(given.arm, [], given.results, others)
    sys.argv = [str(EXAMPLE), *others]
    ran = runpy.run_path(str(EXAMPLE), run_name="__main__")
    held_out = ran["all_questions"][: ran["NUM_HELD_OUT"]]
    rows = ran["rows_to_train_on"](held_out, seed=0)[: given.prompts]
    began = time.process_time()
    found = ran["trainer"].audit_critic(rows, num_prefixes=given.prefixes, num_continuations=given.continuations)
    row = {
        "arm": given.arm, "seed": ran["args"].seed, "updates": ran["trainer"].state.global_step,
        "prompts": found.num_prompts, "prefixes": found.num_prefixes, "continuations": found.num_continuations,
        "figures": {name: each._asdict() for name, each in found.figures.items()}, "findings": found.findings,
        "cpu_seconds": round(time.process_time() - began),
    }  # fmt: skip
    with given.results.open("a", encoding="utf-8") as results:
        results.write(json.dumps(row) + "\n")
    print(found)


if __name__ == "__main__":
    main()
