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
    parser.add_argument("runs", nargs="*", help="directory of a run, or of one of its checkpoints; a line for each")
    parser.add_argument(
        "--seeds",
        nargs="+",
        action="append",
        default=[],
        metavar=("LABEL", "RUN"),
        help="a label and runs that differ in their seed: their mean and a band of one standard deviation",
    )
    parser.add_argument("--output", default="curves.png", help="the file; default: %(default)s")
    parser.add_argument("--metrics", nargs="+", help="keys to draw, such as objective/scores; default: all")
    parser.add_argument("--x", choices=("episode", "step"), default="episode", help="default: %(default)s")
    options = parser.parse_args(argv)
    groups: dict[str, list[str]] = {run: [run] for run in options.runs}
    for label, *seeds in options.seeds:
        if not seeds or label in groups:
            parser.error(f"--seeds {label}: give a label of its own, and then the runs")
        groups[label] = seeds
    if not groups:
        parser.error("give directories of runs, or --seeds LABEL RUN RUN")
    from rlhf_ppo.reporting.plots import plot_metrics

    with user_errors(parser.prog):
        plot_metrics(groups if options.seeds else options.runs, options.output, metrics=options.metrics, x=options.x)
    print(f"The curves are in {options.output}.")
