"""`rlhf-ppo plot`: the metrics of runs, as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_ppo.cli.errors import CommandParser, user_errors
from rlhf_ppo.terminal.foreign import print_text


def plot(argv: Sequence[str] | None = None) -> None:
    """Draw the metrics of one or several runs into a file.

    Args:
        argv: Directories with a `trainer_state.json`, and options.

    Raises:
        SystemExit: There is no such run, or nothing to draw.
    """
    parser = CommandParser("rlhf-ppo plot", description="Draw the metrics of one or several runs into a file.")
    parser.add_argument(
        "runs",
        nargs="*",
        help="directory of a run, or of one of its checkpoints; a line for each; of runs that differ in their seed "
        "only, the mean and a band of one standard deviation",
    )
    parser.add_argument("--separately", action="store_true", help="a line for each seed too")
    parser.add_argument(
        "--seeds",
        nargs="+",
        action="append",
        default=[],
        metavar=("LABEL", "RUN"),
        help="a label and runs that are drawn together, whatever they differ in",
    )
    parser.add_argument("--output", default="curves.png", help="the file; default: %(default)s")
    parser.add_argument("--metrics", nargs="+", help="keys to draw, such as objective/scores; default: all")
    parser.add_argument("--x", choices=("episode", "step"), default="episode", help="default: %(default)s")
    options = parser.parse_args(argv)
    if not options.runs and not options.seeds:
        parser.error("give directories of runs, or --seeds LABEL RUN RUN")
    from rlhf_ppo.reporting.plots import plot_metrics
    from rlhf_ppo.reporting.run_groups import grouped_directories

    with user_errors(parser.prog):
        groups = grouped_directories(options.runs, separately=options.separately)
        for label, *seeds in options.seeds:
            if not seeds or label in groups:
                raise ValueError(f"--seeds {label}: give a label of its own, and then the runs")
            groups[label] = seeds
        plot_metrics(groups, options.output, metrics=options.metrics, x=options.x)
    print_text(f"The curves are in {options.output}.")
