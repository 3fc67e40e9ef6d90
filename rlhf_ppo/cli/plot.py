"""`rlhf-ppo plot`: the metrics of runs, as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_ppo.cli.errors import CommandParser, user_errors


def plot(argv: Sequence[str] | None = None) -> None:
    """Draw the metrics of one or several runs into a file.

    Args:
        argv: Directories with a `trainer_state.json`, and options.

    Raises:
        SystemExit: There is no such run, or nothing to draw.
    """
    parser = CommandParser("rlhf-ppo plot", description="Draw the metrics of one or several runs into a file.")
    parser.add_argument("runs", nargs="+", help="directory of a run, or of one of its checkpoints")
    parser.add_argument("--output", default="curves.png", help="the file; default: %(default)s")
    parser.add_argument("--metrics", nargs="+", help="keys to draw, such as objective/scores; default: all")
    options = parser.parse_args(argv)
    from rlhf_ppo.reporting.plots import plot_metrics

    with user_errors(parser.prog):
        plot_metrics(options.runs, options.output, metrics=options.metrics)
