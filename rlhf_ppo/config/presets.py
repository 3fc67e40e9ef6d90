"""Presets: named sets of options, each a YAML file."""

from pathlib import Path
from typing import Any

import yaml

PRESETS = Path(__file__).parents[1] / "presets"
"""Directory of the files; docs/recipes.md gives their sources."""


def preset(name: str) -> dict[str, Any]:
    """Return the options of a preset: `PPOConfig(**preset("recommended"), output_dir="run")`.

    Args:
        name: "trl", "nplus" (arXiv 2403.17031), "aitraining", "recommended" or "recommended-lora", whose learning
            rates are too large for full weights: give the trainer a `peft_config` or a `PeftModel`, and
            `value_model="policy"` or `share_base_model=True`.
    """
    return yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
