"""The line that a run ends with: where its policy, its curves, its report and its samples are."""

from __future__ import annotations

import os
from pathlib import Path

from rlhf_ppo.reporting.run_log import has_log

SAMPLES_DIR = "_samples"
"""Where in `output_dir` the sample tables are saved; `push_to_hub` leaves such a directory out."""


def where_results_are(policy: str | os.PathLike[str], output_dir: str | os.PathLike[str]) -> str:
    """Name the policy's directory, and what there is of curves, report and samples, in one line.

    Args:
        policy: Where the policy was saved.
        output_dir: The run's directory, with its log and its samples.
    """
    parts = [f"The policy is in {policy}"]
    if has_log(output_dir):
        parts += [f"its curves: `rlhf-ppo plot {output_dir}`", f"its report: `rlhf-ppo report {output_dir}`"]
    if Path(output_dir, SAMPLES_DIR).is_dir():
        parts.append(f"its samples: {Path(output_dir, SAMPLES_DIR)}")
    return "; ".join(parts) + "."
