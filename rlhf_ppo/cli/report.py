"""`rlhf-ppo report`: one HTML file about runs."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_ppo.cli.errors import CommandParser, user_errors
from rlhf_ppo.terminal.foreign import print_text


def report(argv: Sequence[str] | None = None) -> None:
    """Write one HTML file about one or several runs.

    Args:
        argv: Output directories of runs, and options.

    Raises:
        SystemExit: There is no such run, or a file of it is damaged.
    """
    parser = report_parser()
    options = parser.parse_args(argv)
    from rlhf_ppo.reporting.report import write_report

    with user_errors(parser.prog):
        path = write_report(options.runs, options.output, options.judged)
    print_text(f"The report is in {path}.")


def report_parser(prog: str = "rlhf-ppo report") -> CommandParser:
    """Return the parser of the command's options.

    Args:
        prog: What errors begin with.
    """
    parser = CommandParser(prog, description="Write one HTML file about one or several runs: open it in any browser.")
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="output directory of a run; runs that differ in their seed are averaged"
    )
    parser.add_argument("--output", default="report.html", help="the file; default: %(default)s")
    parser.add_argument(
        "--judged", nargs="+", default=[], metavar="DIR",
        help="where `rlhf-ppo judge` has kept its verdicts, beside those in the directory `judged` of each run",
    )  # fmt: skip
    return parser
