"""The report: one self-contained HTML file about one or several runs, without network or other files.

The file reads from the page to its data: curves, samples, responses and settings, then key figures.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from numpy.typing import NDArray
from transformers import TrainingArguments

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.conversation import as_lines
from rlhf_ppo.data.files import reading, write_text
from rlhf_ppo.reporting.completion_files import TOKEN_VALUES, read_completions
from rlhf_ppo.reporting.health import CHECKS, RunContext, warnings_of
from rlhf_ppo.reporting.judgements import JUDGED, Judged, judged_data, over_seeds, read_judged, student_quantile
from rlhf_ppo.reporting.plots import NOT_DRAWN, PANELS, mean_curve
from rlhf_ppo.reporting.run_log import (
    History,
    RecordedRun,
    grouped,
    read_audit,
    read_runs,
)
from rlhf_ppo.reporting.verdict import Verdict, verdict_of
from rlhf_ppo.terminal import is_secret, redacted, visible

SCRIPTS = (
    *("page.js", "chart.js", "curves.js", "overview.js", "critic.js", "judged.js", "responses.js", "settings.js"),
    "sections.js",
)
"""The scripts of the page, in their order."""
MAX_NAMES = 4
"""Largest number of runs that the page's title names."""


def write_report(
    runs: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    judged: Sequence[str | os.PathLike[str]] = (),
) -> Path:
    """Write the report of finished or running runs.

    Args:
        runs: Their output directories. Runs that differ only in their seed are drawn as mean and band.
        path: The HTML file.
        judged: Directories with verdicts of `rlhf-ppo judge`, in addition to `judged/` of the runs.

    Returns:
        The file.

    Raises:
        FileNotFoundError: A directory has no run, or no verdicts.
        ValueError: A run has no log of PPO, or a damaged file; or `path` is a file of another kind.
    """
    path = Path(os.path.expanduser(path))
    if path.exists() and path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(
            f"{path} exists and is not an HTML file, and the report would replace it: choose another name.html"
        )
    read = read_runs(runs)
    data = report_data(read, read_judged(runs, judged))
    names = [run.name for run in read]
    more = f" and {len(names) - MAX_NAMES} more runs" if len(names) > MAX_NAMES else ""
    page = render_page(data, ", ".join(names[:MAX_NAMES]) + more)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return path


def render_page(data: Mapping[str, object], names: str) -> str:
    """Return the HTML of a report.

    Args:
        data: The result of `report_data`.
        names: The names of the runs.
    """
    loader = PackageLoader("rlhf_ppo.reporting", "page")
    environment = Environment(loader=loader, autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # keys stay in their order
    sources = {name: loader.get_source(environment, name)[0] for name in ("page.css", *SCRIPTS)}
    return environment.get_template("page.html").render(
        data=data,
        names=visible(names, one_line=True),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=version("rlhf_ppo"),
        style=Markup(sources["page.css"]),
        scripts=[Markup(sources[name]) for name in SCRIPTS],
    )


# Data

MAX_POINTS = 1000
"""Largest number of points of a curve; longer curves keep their extremes, first and last point."""
MAX_UPDATES = 16
"""Largest number of updates of a run with responses, or samples."""
MAX_TOKENS = 200_000
"""Approximate number of response tokens in a report."""
MAX_SAMPLES = 8
MAX_FRONTIER = 40
"""Largest number of points of score against KL; each is the mean of a stretch of updates."""

_KEY_FIGURES = {
    "objective/scores": "score",
    "eval_score": "score of held-out prompts",
    "objective/kl": "KL to the reference, nats",
    "response/ended_frac": "responses that ended",
    "response/length_mean": "response length, tokens",
    "policy/entropy_avg": "entropy, nats per token",
}
_BOUNDS = {"response/ended_frac": (0, 1), "response/length_mean": (0, math.inf), "policy/entropy_avg": (0, math.inf)}
_MIN_LOGS = 6
"""Smallest number of logs of a single run for which an interval is computed."""

_HEALTH, _JUDGED = "health/", f"{JUDGED}/"
_OF_TRAINING = frozenset(
    (
        "learning_rate lr_scheduler_type warmup_steps weight_decay optim max_grad_norm per_device_train_batch_size "
        "gradient_accumulation_steps max_steps num_train_epochs"
    ).split()
)
"""Arguments of TrainingArguments that change what a run learns: listed with PPO's own, before all others."""
_INHERITED = {field.name for field in dataclasses.fields(TrainingArguments)} - _OF_TRAINING
_NOT_CHOSEN = frozenset(
    ("output_dir run_name accelerator_config activation_checkpointing dataloader_pin_memory debug do_eval").split()
)
"""Arguments that TrainingArguments sets itself, or that only name places."""


def report_data(runs: Sequence[RecordedRun], judged: Sequence[Judged] = ()) -> dict[str, Any]:
    """Collect the data of the page as JSON values.

    Args:
        runs: The runs, at least one.
        judged: Tables of judged pairs.

    Returns:
        `groups` (label and the indices of its runs); of each group `verdicts` (see `headline`), `figures` (see
        `key_figures`), `frontier` (see `score_against_kl`) and `metrics` (key, meaning, and a curve); `runs` (name,
        health, critic, samples, responses), `checks` (the meaning of each health check), `judged`, `judged_seeds`,
        `settings` and `versions`. Token values have four digits, and numbers that are not finite are None.
    """
    groups = grouped(runs)
    logs = [[run.log for run in group] for group in groups.values()]
    unscaled = [[_without_scaling(log) for log in of_group] for of_group in logs]
    figures = key_figures(unscaled)
    numbers = {id(run): number for number, run in enumerate(runs)}
    data = {
        "groups": [
            {
                "label": label,
                "runs": [numbers[id(run)] for run in group],
                "seeds": [run.settings.arguments.get("seed") for run in group],
            }
            for label, group in groups.items()
        ],
        "verdicts": [
            headline(verdict_of(group), {figure["key"]: figure["groups"][number] for figure in figures})
            for number, group in enumerate(groups.values())
        ],
        "figures": figures,
        "frontier": [score_against_kl(of_group) for of_group in unscaled],
        "metrics": _metrics(logs),
        "runs": [_run(run, MAX_TOKENS // len(runs)) for run in runs],
        "checks": {
            check.name: {"symptom": check.symptom, "cause": check.cause, "advice": check.advice} for check in CHECKS
        },
        "judged": [judged_data(table) for table in judged],
        "judged_seeds": over_seeds(judged),
        "settings": _settings([group[0] for group in groups.values()]),
        "versions": _versions(runs),
    }
    return _escaped(data)


def _without_scaling(log: History) -> History:
    """Return a log with each score in the reward's unit: the scale of `score_scaling` changes in training."""
    raw = "objective/raw_scores"
    return [{**entry, "objective/scores": entry[raw]} if raw in entry else entry for entry in log]


def curve(logs: Sequence[History], metric: str, episodes: Mapping[float, float]) -> dict[str, list[Any]] | None:
    """Return a metric's mean over runs and standard deviation, at each drawn update.

    Args:
        logs: The logs of the runs.
        metric: The key.
        episodes: Episodes after each update.

    Returns:
        `step`, `episode`, `mean` and `std`, or None if no run logged the metric. A curve of more than `MAX_POINTS`
        points has `level` too: the mean of the stretch around each drawn point, for smoothing.
    """
    steps, means, deviations = mean_curve(logs, metric, "step")
    if len(steps) == 0:
        return None
    kept = drawn_points(means, deviations)
    drawn = {
        "step": steps[kept].astype(int).tolist(),
        "episode": [episodes.get(step) for step in steps[kept].tolist()],
        "mean": means[kept].tolist(),
        "std": deviations[kept].tolist(),
    }
    return drawn if len(kept) == len(means) else drawn | {"level": _levels(means, kept).tolist()}


def _levels(means: NDArray[np.float64], kept: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the mean of the finite points around each kept point."""
    edges = np.concatenate([[0], (kept[:-1] + kept[1:] + 1) // 2])
    is_number = np.isfinite(means)
    sums, counts = np.add.reduceat(np.where(is_number, means, 0.0), edges), np.add.reduceat(is_number, edges)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def drawn_points(means: NDArray[np.float64], deviations: NDArray[np.float64]) -> NDArray[np.intp]:
    """Select the points of a curve to draw, with all visible extremes.

    A curve of more than `MAX_POINTS` points is split into stretches of equal length. Each stretch keeps its lowest and
    highest mean, and the lowest and highest edges of its band.

    Args:
        means: The curve, `(N,)`; NaN: no value.
        deviations: Half the height of its band, `(N,)`.

    Returns:
        At most `MAX_POINTS` sorted indices, with the first and the last.
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


def _metrics(groups: Sequence[Sequence[History]]) -> list[dict[str, Any]]:
    logged = dict.fromkeys(key for logs in groups for log in logs for entry in log for key in entry)
    keys = [key for key in PANELS if key in logged]
    keys += sorted(key for key in logged if key not in PANELS and key not in NOT_DRAWN)
    episodes = [
        {entry["step"]: entry["episode"] for log in logs for entry in log if "step" in entry and "episode" in entry}
        for logs in groups
    ]
    both = list(zip(groups, episodes, strict=True))
    return [
        {"key": key, "says": PANELS.get(key, ""), "curves": [curve(logs, key, known) for logs, known in both]}
        for key in keys
        if not key.startswith((_HEALTH, _JUDGED))
    ]


def _run(run: RecordedRun, num_tokens: int) -> dict[str, Any]:
    return {
        "name": run.name,
        "last_step": max(int(entry.get("step", 0)) for entry in run.log),
        "health": _health(run),
        "critic": read_audit(run.directory),
        "samples": [{"step": step, "rows": _samples(run.samples[step])} for step in _select_evenly(list(run.samples))],
        "responses": _responses(run.completions, num_tokens),
    }


def _health(run: RecordedRun) -> list[dict[str, Any]]:
    """Return for each check its first and last finding, their number, and its warnings."""
    checks, words = [], warnings_of(run.log, RunContext(**run.settings.health))
    for key in dict.fromkeys(key for entry in run.log for key in entry if key.startswith(_HEALTH)):
        steps = [(entry.get("step"), entry[key]) for entry in run.log if key in entry]
        fired = [step for step, value in steps if value > 0]
        first, last = (fired[0], fired[-1]) if fired else (None, None)
        name = key.removeprefix(_HEALTH)
        spoken = [{"step": step, "words": text} for step, text in words.get(name, ())]
        checks.append(
            {"check": name, "first": first, "last": last, "fired": len(fired), "logs": len(steps), "said": spoken}
        )
    return checks


def _settings(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return a row for each argument: its values, default and help, and whether it differs from the default."""
    fields = {field.name: field for field in dataclasses.fields(PPOConfig)}
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.settings.arguments if not is_secret(name)):
        values = [_as_text(redacted(run.settings.arguments.get(name), name)) for run in runs]
        help_text, default = _help_and_default(fields.get(name))
        is_chosen = name not in _NOT_CHOSEN
        changed = default is not None and is_chosen and any(value != default for value in values)
        row = {"name": name, "values": values, "changed": changed, "differs": is_chosen and len(set(values)) > 1}
        rows.append(row | {"default": default, "help": help_text})
    rows.sort(key=lambda row: row["name"] in _INHERITED)
    names = dict.fromkeys(name for run in runs for name in run.settings.made_of)
    for name in (name for name in names if not name.startswith("reward_")):  # `rewards` names them, and other rewards
        values = [_as_text(redacted(run.settings.made_of.get(name), name)) for run in runs]
        rows.append({"name": name, "values": values, "changed": True, "differs": len(set(values)) > 1})
    return rows


def _help_and_default(field: dataclasses.Field[object] | None) -> tuple[str, str | None]:
    """Return the help of an argument and its default as a text; None for one that is derived or has no default."""
    if field is None:
        return "", None
    help_text = str(field.metadata.get("help", ""))
    if field.default is dataclasses.MISSING or help_text.startswith("Derived"):
        return help_text, None
    return help_text, _as_text(field.default)


def _as_text(value: object) -> str:
    value = getattr(value, "value", value)  # enums
    if value is None:
        return "not set"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))  # gamma=1 is the default of 1.0
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value) or "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _versions(runs: Sequence[RecordedRun]) -> dict[str, str]:
    versions_of: dict[str, dict[str, None]] = {}
    for run in runs:
        for package, installed in run.settings.versions.items():
            versions_of.setdefault(package, {})[installed] = None
    return {package: ", ".join(versions) for package, versions in versions_of.items()}


def _select_evenly(steps: Sequence[int]) -> list[int]:
    """Select updates evenly, with the first and the last."""
    indices = np.linspace(0, len(steps) - 1, min(len(steps), MAX_UPDATES)).round().astype(int)
    return [steps[index] for index in dict.fromkeys(indices.tolist())]


def _samples(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a sample table; the response of an episode of several turns has a line for each message."""
    with reading(path):
        rows = pd.read_csv(path, dtype=str, keep_default_na=False, nrows=MAX_SAMPLES).to_dict("records")
    return [
        {
            "prompt": str(row["query"]),
            "response": as_lines(row["messages"]) if row.get("messages") else str(row["model response"]),
            "score": None if row["score"] == "" else float(row["score"]),
            **({"images": str(row["images"]).split()} if row.get("images") else {}),
        }
        for row in rows
    ]


def _responses(files: Mapping[int, Path], num_tokens: int) -> list[dict[str, Any]]:
    steps = _select_evenly(list(files))
    updates = {step: read_completions(files[step]) for step in steps}
    longest = max((len(row["token_id"]) for rows in updates.values() for row in rows), default=1)
    num_rows = max(2, num_tokens // max(1, len(steps) * longest))
    return [
        {"step": step, "kept": len(rows), "rows": [_response(row) for row in rows[:num_rows]]}
        for step, rows in updates.items()
    ]


def _response(row: Mapping[str, Any]) -> dict[str, Any]:
    figures = {name.removeprefix("token_"): [_four_digits(value) for value in row[name]] for name in TOKEN_VALUES}
    return {
        "prompt": row["prompt"],
        "score": row["score"],
        "rewards": {name.removeprefix("rewards/"): row[name] for name in row if name.startswith("rewards/")},
        "extra": {name.removeprefix("extra/"): _as_text(row[name]) for name in row if name.startswith("extra/")},
        "kl": row["kl"],
        "length": row["length"],
        "ended": row["ended"],
        "text": row["token_text"],
        "id": row["token_id"],
        "written": row["token_written"],
        "tokens": figures,
        **({"images": row["images"]} if row.get("images") else {}),
        "episode": None if row.get("messages") is None else _episode(row),
    }


def _episode(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ended an episode, the rewards of its turns, and who answered each turn."""
    speakers: list[list[str]] = []
    for message in json.loads(row["messages"]):
        if message["role"] == "assistant":
            speakers.append([])
        elif speakers:
            speakers[-1].append(str(message.get("name") or "environment"))
    return {"end": row["end"], "turn_reward": row["turn_reward"], "speakers": [", ".join(names) for names in speakers]}


def _four_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _escaped(value: object) -> Any:
    """Return a value with escaped control characters, and with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    if isinstance(value, str):
        return visible(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Key figures: the verdict, first and last values with intervals, and score against KL


def key_figures(groups: Sequence[Sequence[History]]) -> list[dict[str, Any]]:
    """Return the first and the last value of the main metrics, with 95% intervals.

    Args:
        groups: The logs of the runs of each group.

    Returns:
        `key`, `name`, `is_share` and `groups` of each metric that was logged; for each group `first`, `last`, `low`
        and `high` as of `first_and_last`, or None.
    """
    rows = []
    for key, name in _KEY_FIGURES.items():
        figures = [first_and_last(logs, key) for logs in groups]
        if any(figures):
            bounds = _BOUNDS.get(key, (-math.inf, math.inf))
            for figure in filter(None, figures):
                figure |= {
                    end: float(np.clip(edge, *bounds)) for end in ("low", "high") if (edge := figure[end]) is not None
                }
            rows.append({"key": key, "name": name, "is_share": bounds == (0, 1), "groups": figures})
    return rows


def first_and_last(logs: Sequence[History], key: str) -> dict[str, float | None] | None:
    """Return a metric at the first log and at the end of training.

    The end is the mean of the last tenth of a run's logs, at least three; with fewer than six logs, the last log.

    Args:
        logs: The logs of runs that differ only in their seed.
        key: The metric.

    Returns:
        `first` (None if each run logged the metric once) and `last`, means over runs; `low` and `high`, the 95%
        interval of `last` (Student's t) over runs, or for a single run over its last logs; None without an interval.
        None if no run logged the metric.
    """
    series = [[log[key] for log in of_run if key in log and math.isfinite(log[key])] for of_run in logs]
    series = [values for values in series if values]
    if not series:
        return None
    ends = [values[-max(3, len(values) // 10) :] if len(values) >= _MIN_LOGS else values[-1:] for values in series]
    means = [float(np.mean(end)) for end in ends]
    first = float(np.mean([values[0] for values in series])) if any(len(values) > 1 for values in series) else None
    last = float(np.mean(means))
    half = _half_interval(means if len(series) > 1 else ends[0])
    low, high = (None, None) if half is None else (last - half, last + half)
    return {"first": first, "last": last, "low": low, "high": high}


def _half_interval(values: Sequence[float]) -> float | None:
    """Return half the width of the 95% interval of a mean, or None for a single value."""
    freedom = len(values) - 1
    if freedom < 1:
        return None
    return float(student_quantile(freedom) * np.std(values, ddof=1) / math.sqrt(len(values)))


def headline(verdict: Verdict, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verdict as JSON values; if no judge compared the policy, its sentence is a summary of the log.

    Args:
        verdict: The verdict.
        figures: The result of `first_and_last` for each metric.
    """
    shown = dataclasses.asdict(verdict)
    if verdict.outcome == "not judged":
        shown["reasons"] = ["No judge compared this policy with the model it started from.", *verdict.reasons]
        shown["sentence"] = _of_log(figures)
    return shown


def _of_log(figures: Mapping[str, Any]) -> str:
    """Return a sentence on how score, KL and the share of ended responses changed."""
    keys = ("objective/scores", "objective/kl", "response/ended_frac")
    score, kl, ended = map(figures.get, keys)
    if score is None or score["first"] is None:
        return "The log is too short for a change of the score."
    first, last, low, high = (score[name] for name in ("first", "last", "low", "high"))
    rose = "rose" if last > first else "fell"
    change = "went" if low is None else "did not change clearly:" if low <= first <= high else rose
    spread = "" if low is None else f" (95% interval {low:.3g} to {high:.3g})"
    at_kl = "" if kl is None else f", at a KL of {kl['last']:.3g} nats per response"
    of_ended = "" if ended is None else f"; {ended['last']:.0%} of responses ended"
    return f"The score {change} from {first:.3g} to {last:.3g}{spread}{at_kl}{of_ended}."


def score_against_kl(logs: Sequence[History]) -> list[dict[str, float]]:
    """Return the path of a group in the plane of KL and score.

    Args:
        logs: The logs of the runs, which are averaged.

    Returns:
        `step`, `kl` and `score` of at most `MAX_FRONTIER` points. Each point is the mean of a stretch of updates, and
        `step` is the last of them.
    """
    scores, kls = (mean_curve(logs, key, "step")[:2] for key in ("objective/scores", "objective/kl"))
    steps, in_scores, in_kls = np.intersect1d(scores[0], kls[0], assume_unique=True, return_indices=True)
    table = np.stack([steps, kls[1][in_kls], scores[1][in_scores]], axis=1)
    table = table[np.isfinite(table).all(axis=1)]
    parts = np.array_split(table, max(1, min(len(table), MAX_FRONTIER)))
    points = [(int(part[-1, 0]), *part[:, 1:].mean(axis=0).tolist()) for part in parts if len(part)]
    return [{"step": step, "kl": kl, "score": score} for step, kl, score in points]
