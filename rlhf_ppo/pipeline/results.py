"""What the judge said of the policy of each seed, and of all."""

from __future__ import annotations

from typing import Any

from rlhf_ppo.checkpoints.jsonfile import write_json
from rlhf_ppo.pipeline.steps import Pipeline, Step
from rlhf_ppo.reporting.judgements import read_win_rate
from rlhf_ppo.reporting.over_seeds import SeedWinRates

RESULTS = "results.json"
"""The file in the pipeline's directory with the figures of `SeedWinRates`."""


def keep_win_rates(pipeline: Pipeline) -> SeedWinRates | None:
    """Read what the judge wrote of each seed, and write it together.

    Args:
        pipeline: The steps, all of which are finished.

    Returns:
        The win rates; None where there is no judge.

    Raises:
        ValueError: What the judge wrote is gone, or damaged.
    """
    steps = [step for step in pipeline.steps if step.kind == "judge"]
    if not steps:
        return None
    said = [check_result(step) for step in steps]
    found = SeedWinRates(
        [step.options["seed"] for step in steps],
        [each["win_rate"] for each in said],
        [each["interval"] for each in said],
        [each.get("length_controlled") for each in said],
    )
    write_json(pipeline.output_dir / RESULTS, found.as_json())
    return found


def check_result(step: Step) -> dict[str, Any]:
    """Return what the judge wrote of a seed.

    Args:
        step: The judge's.

    Raises:
        ValueError: It is gone or damaged, or there is no verdict.
    """
    folder, again = step.output_dir, "run the same command again"
    try:
        said = read_win_rate(folder / "win_rate.json", ("win_rate", "interval"))
    except ValueError as error:
        raise ValueError(f"{folder} does not hold the judge's result: {error}; {again}") from None
    if said["win_rate"] is None:
        raise ValueError(f"the judge gave no verdict in {folder}: all failed; {again}")
    return said
