"""One HTML file about one or several runs, which needs nothing else: no network, no other files."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from rlhf_ppo.checkpoints.jsonfile import write_text
from rlhf_ppo.reporting.judged import read_judged
from rlhf_ppo.reporting.report_data import report_data
from rlhf_ppo.reporting.run_groups import read_runs
from rlhf_ppo.terminal.foreign import visible

_SCRIPTS = ("page.js", "curves.js", "judged.js", "responses.js", "settings.js")


def write_report(
    runs: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    judged: Sequence[str | os.PathLike[str]] = (),
) -> Path:
    """Write the report of runs, finished ones or such that still go on.

    Args:
        runs: Their output directories. Those that differ in their seed only are drawn as mean and band.
        path: The HTML file.
        judged: Directories in which `rlhf-ppo judge` has kept its verdicts, beside those in `judged/` of the runs.

    Returns:
        The file.

    Raises:
        FileNotFoundError: There is no run, or no verdicts.
        ValueError: A run has logged nothing yet, is of another trainer, or a file of it is damaged; or the place for
            the report is a directory.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"output={str(path)!r} is a directory; name a file in it, such as {str(path / 'report.html')!r}"
        )
    read = read_runs(runs)
    page = _page(report_data(read, read_judged(runs, judged)), ", ".join(run.name for run in read))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return path


def _page(data: dict[str, object], names: str) -> str:
    environment = Environment(loader=PackageLoader("rlhf_ppo.reporting", "page"), autoescape=True)
    environment.policies["json.dumps_kwargs"] = {}  # keys stay in their order
    loader = environment.loader
    assert loader is not None
    sources = {name: loader.get_source(environment, name)[0] for name in ("page.css", *_SCRIPTS)}
    return environment.get_template("page.html").render(
        data=data,
        names=visible(names, one_line=True),
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=version("rlhf_ppo"),
        style=Markup(sources["page.css"]),
        scripts=[Markup(sources[name]) for name in _SCRIPTS],
    )
