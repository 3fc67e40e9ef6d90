"""What a run was started with, in its directory: arguments without secrets, versions, names of models and rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from transformers import TrainingArguments

from rlhf_ppo.checkpoints.jsonfile import check_values, read_object, write_json
from rlhf_ppo.reporting.model_card import installed_versions

SETTINGS_NAME = "ppo_settings.json"

_PLACES = frozenset({"output_dir", "logging_dir", "run_name", "exp_name", "overwrite_output_dir", "local_rank"})
_SEEDS = frozenset({"seed", "data_seed"})
_SHOWN_ONLY = frozenset({"resume_from_checkpoint", "disable_tqdm", "report_to", "hub_model_id", "log_level"})


@dataclass(frozen=True)
class RunSettings:
    """What a run was started with; all empty for a run of before there was the file.

    Attributes:
        arguments: Those of `PPOConfig`, without secrets.
        versions: Package to version.
        made_of: `policy` and `rewards`: where they were loaded from, or their names.
        health: `thresholds` and `run`: what its health checks went by; empty without them.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    made_of: Mapping[str, Any] = field(default_factory=dict)
    health: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, output_dir: str | Path) -> Self:
        """Read `ppo_settings.json`.

        Raises:
            ValueError: It is damaged.
        """
        path = Path(output_dir, SETTINGS_NAME)
        if not path.exists():
            return cls()
        try:
            values = read_object(path, dict.fromkeys(("arguments", "versions", "made_of"), dict[str, Any]))
            check_values(SETTINGS_NAME, values["versions"], dict.fromkeys(values["versions"], str))
            types = {"policy": str | None, "rewards": list[str]}
            made_of = values["made_of"]
            check_values(SETTINGS_NAME, made_of, {name: kind for name, kind in types.items() if name in made_of})
            health = values.setdefault("health", {})
            check_values(SETTINGS_NAME, values, {"health": dict[str, dict]})
        except ValueError as error:
            raise ValueError(f"{output_dir} cannot be read: {error}") from error
        return cls(values["arguments"], values["versions"], made_of, health)

    def without_seed(self) -> str | None:
        """Return a text that runs have in common which differ in seed and place only; None if nothing is known."""
        if not self.arguments:
            return None
        left_out = _PLACES | _SEEDS | _SHOWN_ONLY
        told = {name: value for name, value in self.arguments.items() if name not in left_out}
        return json.dumps([told, self.made_of], sort_keys=True)


def save_settings(
    output_dir: str | Path, args: TrainingArguments, made_of: Mapping[str, Any], health: Mapping[str, Any]
) -> None:
    """Write `ppo_settings.json`.

    Args:
        output_dir: The run's directory.
        args: The run's arguments.
        made_of: The names of policy and rewards.
        health: What its health checks go by.
    """
    settings = {
        "arguments": args.to_dict(), "versions": installed_versions(), "made_of": dict(made_of), "health": dict(health)
    }  # fmt: skip
    write_json(Path(output_dir, SETTINGS_NAME), json.loads(json.dumps(settings, default=str)))
