"""What a report shows, as JSON values: curves, health checks, settings, samples and responses token by token."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.health import HealthThresholds
from rlhf_ppo.config.redaction import is_secret, shown
from rlhf_ppo.reporting.completion_files import TOKEN_VALUES, read_completions
from rlhf_ppo.reporting.health import CHECKS, Surroundings
from rlhf_ppo.reporting.health.callback import said
from rlhf_ppo.reporting.judged import Judged, judged_data, over_seeds
from rlhf_ppo.reporting.plots import PANELS, mean_curve
from rlhf_ppo.reporting.run_groups import RecordedRun, grouped
from rlhf_ppo.reporting.run_log import Log
from rlhf_ppo.reporting.run_settings import SETTINGS_NAME
from rlhf_ppo.terminal.foreign import from_csv_cell, visible

MAX_POINTS = 1000
"""Most points of a curve; of a longer one each stretch keeps its extremes, and the first and last point are kept."""
MAX_UPDATES = 16
"""Most updates of a run whose responses, or samples, are in a report."""
MAX_TOKENS = 200_000
"""About how many tokens of responses are in a report; with longer responses there are fewer of each update."""
MAX_SAMPLES = 8

_HEALTH = "health/"
_SETTLED = frozenset(
    ("output_dir run_name accelerator_config activation_checkpointing dataloader_pin_memory debug do_eval").split()
)
"""Arguments that TrainingArguments sets by itself, or that say only where a run is."""

_NO_METRICS = frozenset({"step", "episode", "epoch", "total_flos", "num_input_tokens_seen"})


def report_data(runs: Sequence[RecordedRun], judged: Sequence[Judged] = ()) -> dict[str, Any]:
    """Gather what a report shows.

    Args:
        runs: The runs, at least one.
        judged: What a judge said of them.

    Returns:
        `groups` (label and the indices of its runs), `metrics` (key, what it says, and a curve for each group), `runs`
        (name, health, samples, responses), `checks` (what each health check means), `judged`, `judged_seeds`,
        `settings` and `versions`. Numbers are the log's, those of tokens have four digits, and what is not finite is
        None.

    Raises:
        ValueError: A file of a run is damaged.
    """
    groups = grouped(runs)
    numbers = {id(run): number for number, run in enumerate(runs)}
    data = {
        "groups": [
            {"label": label, "runs": [numbers[id(run)] for run in group], "seeds": [_seed(run) for run in group]}
            for label, group in groups.items()
        ],
        "metrics": _metrics([[run.log for run in group] for group in groups.values()]),
        "runs": [_run(run, MAX_TOKENS // len(runs)) for run in runs],
        "checks": {
            check.name: {"symptom": check.symptom, "cause": check.cause, "advice": check.advice} for check in CHECKS
        },
        "judged": [judged_data(each) for each in judged],
        "judged_seeds": over_seeds(judged),
        "settings": _settings([group[0] for group in groups.values()]),
        "versions": _versions(runs),
    }
    return _shown(data)


def curve(logs: Sequence[Log], metric: str, episodes: Mapping[float, float]) -> dict[str, list[Any]] | None:
    """Return the mean of a metric over runs, and its standard deviation, at each update that is drawn.

    Args:
        logs: The logs of the runs.
        metric: The key.
        episodes: Episodes after each update.

    Returns:
        `step`, `episode`, `mean` and `std`, or None where no run has logged it.
    """
    steps, means, deviations = mean_curve(logs, metric, "step")
    if len(steps) == 0:
        return None
    kept = drawn_points(means, deviations)
    return {
        "step": steps[kept].astype(int).tolist(),
        "episode": [episodes.get(step) for step in steps[kept].tolist()],
        "mean": means[kept].tolist(),
        "std": deviations[kept].tolist(),
    }


def drawn_points(means: NDArray[np.float64], deviations: NDArray[np.float64]) -> NDArray[np.intp]:
    """Choose the points of a curve that are drawn, so that its picture shows every extreme.

    A curve of more than `MAX_POINTS` points is cut into stretches of equal length. Each keeps its lowest and highest
    mean, and the lowest and highest edge of its band.

    Args:
        means: The curve, `(N,)`; NaN where there is no value.
        deviations: Half the height of its band, `(N,)`.

    Returns:
        Their places, in order, at most `MAX_POINTS` unless there are fewer; the first and the last are among them.
    """
    if len(means) <= MAX_POINTS:
        return np.arange(len(means))
    edges = [means] if not deviations.any() else [means, means - deviations, means + deviations]
    bounds = np.linspace(0, len(means), (MAX_POINTS - 2) // (2 * len(edges)) + 1).astype(int)
    kept = {0, len(means) - 1}
    for start, end in itertools.pairwise(bounds.tolist()):
        for edge in edges:
            part = edge[start:end]
            kept |= {start + int(np.where(np.isnan(part), np.inf, part).argmin())}
            kept |= {start + int(np.where(np.isnan(part), -np.inf, part).argmax())}
    return np.array(sorted(kept))


def _metrics(groups: Sequence[Sequence[Log]]) -> list[dict[str, Any]]:
    logged = dict.fromkeys(key for logs in groups for log in logs for entry in log for key in entry)
    keys = [key for key in PANELS if key in logged]
    keys += sorted(key for key in logged if key not in PANELS and key not in _NO_METRICS)
    episodes = [
        {entry["step"]: entry["episode"] for log in logs for entry in log if "step" in entry and "episode" in entry}
        for logs in groups
    ]
    both = list(zip(groups, episodes, strict=True))
    return [
        {"key": key, "says": PANELS.get(key, ""), "curves": [curve(logs, key, known) for logs, known in both]}
        for key in keys
        if not key.startswith(_HEALTH)
    ]


def _run(run: RecordedRun, num_tokens: int) -> dict[str, Any]:
    return {
        "name": run.name,
        "last_step": max(int(entry.get("step", 0)) for entry in run.log),
        "health": _health(run),
        "samples": [{"step": step, "rows": _samples(run.samples[step])} for step in _spread(list(run.samples))],
        "responses": _responses(run.completions, num_tokens),
    }


def _health(run: RecordedRun) -> list[dict[str, Any]]:
    """Say of each check when it fired first and last, at how many of its logs, and what it said at which update."""
    found, words = [], _words(run)
    for key in dict.fromkeys(key for entry in run.log for key in entry if key.startswith(_HEALTH)):
        steps = [(entry.get("step"), entry[key]) for entry in run.log if key in entry]
        fired = [step for step, value in steps if value > 0]
        first, last = (fired[0], fired[-1]) if fired else (None, None)
        name = key.removeprefix(_HEALTH)
        spoken = [{"step": step, "words": each} for step, each in words.get(name, ())]
        found.append(
            {"check": name, "first": first, "last": last, "fired": len(fired), "logs": len(steps), "said": spoken}
        )
    return found


def _words(run: RecordedRun) -> dict[str, list[tuple[int, str]]]:
    """Say again what the checks have said; nothing for a run of a version that did not keep what they went by."""
    if not (health := run.settings.health):
        return {}
    try:
        return said(run.log, HealthThresholds(**health["thresholds"]), Surroundings(**health["run"]))
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the run {run.name} has a {SETTINGS_NAME} that is damaged, or of a newer rlhf_ppo: {error!r}"
        ) from error


def _settings(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return a row for each argument: its value in each group, and whether one of them is not the default."""
    defaults = {each.name: each for each in dataclasses.fields(PPOConfig)}
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.settings.arguments if not is_secret(name)):
        values = [_said(shown(run.settings.arguments.get(name), name)) for run in runs]
        default = defaults.get(name)
        is_derived = default is not None and str(default.metadata.get("help", "")).startswith("Derived")
        standard = dataclasses.MISSING if default is None else default.default
        is_chosen = standard is not dataclasses.MISSING and not is_derived and name not in _SETTLED
        changed = is_chosen and any(value != _said(standard) for value in values)
        differs = len(set(values)) > 1 and name not in _SETTLED
        rows.append({"name": name, "values": values, "changed": changed, "differs": differs})
    for name in dict.fromkeys(name for run in runs for name in run.settings.made_of):
        values = [_said(shown(run.settings.made_of.get(name), name)) for run in runs]
        rows.append({"name": name, "values": values, "changed": True, "differs": len(set(values)) > 1})
    return rows


def _said(value: Any) -> str:
    value = getattr(value, "value", value)  # of enums
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _versions(runs: Sequence[RecordedRun]) -> dict[str, str]:
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for package, version in run.settings.versions.items():
            found.setdefault(package, {})[version] = None
    return {package: ", ".join(versions) for package, versions in found.items()}


def _seed(run: RecordedRun) -> Any:
    return run.settings.arguments.get("seed")


def _spread(steps: Sequence[int]) -> list[int]:
    """Choose updates evenly, the first and the last among them."""
    places = np.linspace(0, len(steps) - 1, min(len(steps), MAX_UPDATES)).round().astype(int)
    return [steps[place] for place in dict.fromkeys(places.tolist())]


def _samples(path: Path) -> list[dict[str, Any]]:
    try:
        rows = pd.read_csv(path, keep_default_na=False, nrows=MAX_SAMPLES).to_dict("records")
        return [
            {
                "prompt": from_csv_cell(str(row["query"])),
                "response": from_csv_cell(str(row["model response"])),
                "score": math.nan if row["score"] == "" else float(row["score"]),
            }
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def _responses(files: Mapping[int, Path], num_tokens: int) -> list[dict[str, Any]]:
    steps = _spread(list(files))
    updates = {step: read_completions(files[step]) for step in steps}
    longest = max((len(row["token_id"]) for rows in updates.values() for row in rows), default=1)
    num_rows = max(2, num_tokens // max(1, len(steps) * longest))
    return [
        {"step": step, "kept": len(rows), "rows": [_response(row) for row in rows[:num_rows]]}
        for step, rows in updates.items()
    ]


def _response(row: Mapping[str, Any]) -> dict[str, Any]:
    figures = {name.removeprefix("token_"): [_short(value) for value in row[name]] for name in TOKEN_VALUES}
    return {
        "prompt": row["prompt"],
        "score": row["score"],
        "rewards": {name.removeprefix("rewards/"): row[name] for name in row if name.startswith("rewards/")},
        "extra": {name.removeprefix("extra/"): _said(row[name]) for name in row if name.startswith("extra/")},
        "kl": row["kl"],
        "length": row["length"],
        "ended": row["ended"],
        "text": row["token_text"],
        "id": row["token_id"],
        "written": row["token_written"],
        "tokens": figures,
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _shown(value: Any) -> Any:
    """Return a value with visible texts, and None in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {_shown(key): _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, str):
        return visible(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
