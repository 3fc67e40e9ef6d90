"""Troubleshooting names figures, checks and options that there are."""

import re
from dataclasses import fields
from pathlib import Path

from rlhf_ppo import PPOConfig

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text()


def first_cells(page: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", (DOCS / page).read_text(), re.MULTILINE))


def test_its_figures_are_logged_and_its_checks_are_made() -> None:
    figures = set(re.findall(r"`((?:objective|policy|val|response|rewards|time)/[\w<>/]+)`", PAGE))
    assert len(figures) > 8 and figures <= first_cells("metrics.md")

    checks = set(re.findall(r"check `(\w+)`", PAGE))
    assert len(checks) > 1 and checks <= first_cells("health.md")


def test_what_it_turns_are_options() -> None:
    """In the last column; values stand behind `=`."""
    turned = [row.strip("| ").rpartition(" | ")[2] for row in PAGE.splitlines() if row.startswith("| ")]
    named = {name for cell in turned for name in re.findall(r"`([a-z]+_[a-z_]+)(?:=[^`]*)?`", cell)}

    assert len(named) > 15
    assert named - {f.name for f in fields(PPOConfig)} - {"eval_score", "reward_variance"} == set()
