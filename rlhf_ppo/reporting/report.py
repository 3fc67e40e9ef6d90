"""The report: one self-contained HTML file about one or several runs, without network or other files."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from rlhf_ppo.checkpoints.files import write_text
from rlhf_ppo.checkpoints.run import HISTORY_NAME, in_use
from rlhf_ppo.reporting.judgements import JUDGED, read_judged
from rlhf_ppo.reporting.report_data import report_data
from rlhf_ppo.reporting.run_log import SAMPLES_DIR, has_log, read_runs
from rlhf_ppo.terminal.text import visible

SCRIPTS = ("page.js", "chart.js", "curves.js", "overview.js", "judged.js", "responses.js", "settings.js", "live.js")
"""The scripts of the page, in their order."""
MAX_NAMES = 4
"""Largest number of runs that the page's title names."""


def write_report(
    runs: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    judged: Sequence[str | os.PathLike[str]] = (),
    refresh_seconds: float | None = None,
) -> Path:
    """Write the report of finished or running runs.

    Args:
        runs: Their output directories. Runs that differ only in their seed are drawn as mean and band.
        path: The HTML file.
        judged: Directories with verdicts of `rlhf-ppo judge`, in addition to `judged/` of the runs.
        refresh_seconds: Seconds after which the page reloads itself; None: it does not.

    Returns:
        The file.

    Raises:
        FileNotFoundError: A directory has no run, or no verdicts.
        ValueError: A run has logged nothing yet or is from another trainer, a file is damaged, or `path` is a
            directory.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"output={str(path)!r} is a directory; name a file in it, such as {str(path / 'report.html')!r}"
        )
    read = read_runs(runs)
    data = report_data(read, read_judged(runs, judged)) | {"refresh_seconds": refresh_seconds}
    names = [run.name for run in read]
    more = f" and {len(names) - MAX_NAMES} more runs" if len(names) > MAX_NAMES else ""
    page = render_page(data, ", ".join(names[:MAX_NAMES]) + more)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return path


def watch_report(
    runs: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    judged: Sequence[str | os.PathLike[str]] = (),
    seconds: float = 10.0,
) -> Path:
    """Write the report again whenever a run has logged something, until all runs have ended or Ctrl-C.

    The page reloads itself until then, at the same place. A run that has not logged anything yet is waited for.

    Args:
        runs: As of `write_report`.
        path: As of `write_report`.
        judged: As of `write_report`.
        seconds: Seconds between two looks at the runs, and between two reloads of the page.

    Returns:
        The file.

    Raises:
        FileNotFoundError: As of `write_report`.
        ValueError: As of `write_report`.
    """
    seen = None
    try:
        while any(in_use(run) for run in runs):
            found = [_changes(Path(run)) for run in runs]
            if found != seen and all(has_log(run) for run in runs):
                write_report(runs, path, judged, refresh_seconds=seconds)
                seen = found
            time.sleep(seconds)
    except KeyboardInterrupt:
        pass
    return write_report(runs, path, judged)


def _changes(run: Path) -> list[tuple[int, int]]:
    """Return time and size of the files and folders of a run that a report reads."""
    paths = (run / name for name in (HISTORY_NAME, "completions", SAMPLES_DIR, JUDGED))
    return [(path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else (0, 0) for path in paths]


def render_page(data: Mapping[str, Any], names: str) -> str:
    """Return the HTML of a report.

    Args:
        data: The result of `report_data`, and `refresh_seconds`.
        names: The names of the runs.
    """
    environment = Environment(loader=PackageLoader("rlhf_ppo.reporting", "page"), autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # keys stay in their order
    loader = environment.loader
    assert loader is not None
    sources = {name: loader.get_source(environment, name)[0] for name in ("page.css", *SCRIPTS)}
    return environment.get_template("page.html").render(
        data=data,
        names=visible(names, one_line=True),
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=version("rlhf_ppo"),
        style=Markup(sources["page.css"]),
        scripts=[Markup(sources[name]) for name in SCRIPTS],
    )
