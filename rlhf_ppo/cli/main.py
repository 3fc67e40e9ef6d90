"""The program `rlhf-ppo`, its short commands, from configs to report, and the short help of all commands.

The short help imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml
from rich.console import Console
from rich.table import Table

from rlhf_ppo.cli.errors import CommandParser, fail, user_errors
from rlhf_ppo.cli.options import JudgeArguments, LLMCommand
from rlhf_ppo.compat.params import UNAVAILABLE, LLMTrainingParams
from rlhf_ppo.terminal import (
    cell,
    escape_library_messages,
    print_text,
    redact_in_place,
    redact_traceback,
    restore_hidden_words,
)

COMMANDS = {
    "demo": ("rlhf_ppo.cli.main", "Run all steps with a toy model, in minutes on two cores."),
    "init": ("rlhf_ppo.cli.init", "Read the data, split it, and write a commented file for `pipeline`."),
    "pipeline": ("rlhf_ppo.cli.main", "Run SFT, reward model, PPO, judge and report from one file."),
    "train": ("rlhf_ppo.cli.commands", "Train a policy with PPO, with the options of TRL's script."),
    "sft": ("rlhf_ppo.cli.commands", "Train a language model on texts (TRL's SFTTrainer)."),
    "reward": ("rlhf_ppo.cli.commands", "Train a reward model on preference pairs (TRL's RewardTrainer)."),
    "estimate": ("rlhf_ppo.cli.estimate", "Estimate the memory of `train` with the same options."),
    "judge": ("rlhf_ppo.cli.judge", "Measure how often a judge prefers one model over another."),
    "eval": ("rlhf_ppo.cli.judge", "The same as judge."),
    "plot": ("rlhf_ppo.cli.main", "Draw the metrics of runs into a picture."),
    "report": ("rlhf_ppo.cli.main", "Write one HTML file about runs: curves, samples, responses token by token."),
    "configs": ("rlhf_ppo.cli.main", "Write accelerate's configurations and the example scripts into a directory."),
    "llm": ("rlhf_ppo.cli.aitraining", "Train with AITraining's options: --train --trainer ppo|reward|sft ..."),
}
"""Each subcommand, of one or two words: the module that holds the function of its name, and its help."""

FUNCTIONS = {"eval": "evaluate"}
"""Subcommands whose function has another name."""


def print_commands() -> None:
    """Print the commands, beginning with the commands for a first try."""
    console = Console(highlight=False)
    console.print("usage: rlhf-ppo COMMAND \\[options]\n\nRLHF with PPO as a transformers.Trainer.\n")
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, (_, does) in COMMANDS.items():
        table.add_row(cell(f"  {name}", "cyan"), cell(does))
    console.print(table)
    console.print("\n`rlhf-ppo COMMAND --help` shows the options of a command.\nTry first: rlhf-ppo demo")


def main(argv: list[str] | None = None) -> None:
    """Run a subcommand with only its own imports; the short help imports neither torch nor transformers.

    Args:
        argv: The subcommand and its options; None takes the program's own.

    Raises:
        SystemExit: The subcommand does not exist or fails.
    """
    if argv is None:
        argv, sys.excepthook = restore_hidden_words(sys.argv[1:]), _show_traceback
    os.environ.setdefault("TQDM_DELAY", "1")  # no bars of steps that take less than a second
    words = argv or ["--help"]
    command, options = words[0], words[1:]
    if command in ("-h", "--help"):
        print_commands()
        return
    if command == "--version":
        print_text(f"rlhf_ppo {importlib.import_module('rlhf_ppo').__version__}")
        return
    if command not in COMMANDS:
        fail("rlhf-ppo", f"there is no command {command!r}: use one of {', '.join(COMMANDS)}")
    if {"-h", "--help"} & {*options}:
        if (page := page_of(command)) is not None:
            print_page(command, page)
            return
    options = ["--help" if word in ("--help-all", "--help_all") else word for word in options]
    redact_in_place(sys.argv)  # trackers write it into files; `options` is a copy
    module = importlib.import_module(COMMANDS[command][0])
    if sys.excepthook is _show_traceback:
        escape_library_messages()
    try:
        getattr(module, FUNCTIONS.get(command, command))(options)
    except KeyboardInterrupt:
        print_text(f"\nrlhf-ppo {command}: ended by SIGINT", sys.stderr)
        raise SystemExit(130) from None
    if "accelerate" in sys.modules:
        from accelerate import PartialState

        PartialState().destroy_process_group()


def _show_traceback(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print a traceback, of the user's code only if the error is noted as its own, without secrets."""
    if any(note.startswith("raised ") for note in getattr(error, "__notes__", ())):
        error = error.with_traceback(_of_user(traceback))
    print_text(redact_traceback(error).rstrip(), sys.stderr)


def _of_user(traceback: TracebackType | None) -> TracebackType | None:
    """Return the frames after the last frame of this package and of Python's imports."""
    found, frame = traceback, traceback
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if name.startswith((f"{PACKAGE}{os.sep}", "<frozen")):
            found = frame.tb_next or found
        frame = frame.tb_next
    return found


# ---- configs ----

PACKAGE = Path(__file__).parents[1]
SHIPPED = folder if (folder := PACKAGE / "shipped").is_dir() else PACKAGE.parent
"""Directory of the files: in a wheel in the package, in a checkout next to it."""

FOLDERS = {"accelerate_configs": ("*.yaml",), "examples": ("*.py", "*.yaml", "*.ipynb")}
"""Folders to write, and patterns of their files."""


def configs(argv: Sequence[str] | None = None) -> list[Path]:
    """Write `accelerate_configs/` and `examples/` into a directory.

    Args:
        argv: The directory, and `--overwrite`; None takes the program's own.

    Returns:
        The written files.

    Raises:
        SystemExit: A file exists already or cannot be written.
    """
    parser = CommandParser(
        "rlhf-ppo configs", description="Write accelerate's configurations and the example scripts into a directory."
    )
    parser.add_argument(
        "directory", type=Path, nargs="?", default=Path(), help="Directory; by default the current one."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace existing files.")
    options = parser.parse_args(argv)
    with user_errors(parser.prog):
        written = write_configs(options.directory, options.overwrite)
    for path in written:
        print_text(path)
    print_text(f"Try, in {options.directory.resolve()}: python examples/first_run.py")
    return written


def write_configs(directory: Path, overwrite: bool = False) -> list[Path]:
    """Copy the files, or none if another file of the same name exists.

    Args:
        directory: The directory to write to; created if missing.
        overwrite: Whether to replace existing files.

    Returns:
        The written files.

    Raises:
        OSError: A file cannot be written.
        ValueError: Another file exists and `overwrite` is False, or the directory is a file.
    """
    copies = {
        source: directory / folder / source.name
        for folder, patterns in FOLDERS.items()
        for files in patterns
        for source in sorted((SHIPPED / folder).glob(files))
    }
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"directory={str(directory)!r} is a file; name a directory")
    others = [str(path) for source, path in copies.items() if path.exists() and not _is_same(source, path)]
    if others and not overwrite:
        verb = "exist" if len(others) > 1 else "exists"
        raise ValueError(f"{', '.join(others)} {verb} already, with other contents: add --overwrite to replace")
    for source, path in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with path.open("xb") as file:  # follows no link
            file.write(source.read_bytes())
    return list(copies.values())


def _is_same(source: Path, path: Path) -> bool:
    return path.is_file() and path.read_bytes() == source.read_bytes()


# ---- demo ----

DESCRIPTION = "Run RLHF from scratch, in minutes on two cores: a language model, a reward model, PPO, and a judge."


def demo(argv: Sequence[str] | None = None, program: str = "rlhf-ppo demo") -> None:
    """Run RLHF from scratch: a language model, a reward model, PPO, and a judge.

    Args:
        argv: The directory of the results; None takes the program's own.
        program: Name in `--help`.

    Raises:
        SystemExit: With 1 if the judge does not clearly prefer PPO's stories, with 2 if the directory is not writable.
    """
    parser = CommandParser(program, description=f"{DESCRIPTION} Exits with 1 unless the judge clearly prefers PPO.")
    parser.add_argument(
        "output_dir", type=Path, nargs="?", default=Path("demo_output"), help="Directory of the results."
    )
    output_dir = parser.parse_args(argv).output_dir
    from rlhf_ppo.cli.demo import run_demo
    from rlhf_ppo.training.checks import check_output_dir

    with user_errors(program):
        check_output_dir(str(output_dir))
        output_dir.mkdir(parents=True, exist_ok=True)

    warnings.simplefilter("ignore", FutureWarning)  # between libraries
    if not run_demo(output_dir).is_clear:
        sys.exit(1)


# ---- pipeline ----


def pipeline(argv: Sequence[str] | None = None) -> None:
    """Run the remaining steps of a file.

    Args:
        argv: The file, and `--dry_run`. None takes the program's own.

    Raises:
        SystemExit: The file or an option of a step is wrong, before anything is run; or a step has failed.
    """
    parser = CommandParser(prog="rlhf-ppo pipeline", description="Run the remaining steps of a file.")
    parser.add_argument("file", help="YAML with a section for each step; `rlhf-ppo init` writes it.")
    parser.add_argument(
        "--dry_run", "--dry-run", action="store_true", help="Check everything, print the remaining steps, and exit."
    )
    args = parser.parse_args(argv)
    from rlhf_ppo.cli.pipeline import check_and_run

    check_and_run(args.file, args.dry_run)


# ---- plot ----


def plot(argv: Sequence[str] | None = None) -> None:
    """Draw the metrics of one or several runs into a file.

    Args:
        argv: Directories with a `trainer_state.json`, and options.

    Raises:
        SystemExit: A run is missing, or has no metrics.
    """
    parser = CommandParser("rlhf-ppo plot", description="Draw the metrics of one or several runs into a file.")
    parser.add_argument(
        "runs",
        nargs="*",
        help="Directory of a run or of a checkpoint. Each run is a line; runs that differ only in the seed are drawn "
        "as their mean with a band of one standard deviation.",
    )
    parser.add_argument("--separately", action="store_true", help="Draw each run as a line of its own, without means.")
    parser.add_argument(
        "--seeds",
        nargs="+",
        action="append",
        default=[],
        metavar=("LABEL", "RUN"),
        help="A label, and runs to average, even if they differ in more than the seed.",
    )
    parser.add_argument("--output", default="curves.png", help="File to write: PNG, SVG or PDF.")
    parser.add_argument(
        "--metrics", nargs="+", metavar="KEY", help="Metrics to draw, such as objective/scores; by default all."
    )
    parser.add_argument("--x", choices=("episode", "step"), default="episode", help="Horizontal axis.")
    options = parser.parse_args(argv)
    if not options.runs and not options.seeds:
        parser.error("give directories of runs, or --seeds LABEL RUN RUN")
    from rlhf_ppo.reporting.plots import plot_metrics
    from rlhf_ppo.reporting.run_log import grouped_directories

    with user_errors(parser.prog):
        groups = grouped_directories(options.runs, separately=options.separately)
        for label, *seeds in options.seeds:
            if not seeds or label in groups:
                raise ValueError(f"--seeds {label}: give an unused label, then the runs")
            groups[label] = seeds
        plot_metrics(groups, options.output, metrics=options.metrics, x=options.x)
    print_text(f"The curves are in {options.output}.")


# ---- report ----


def report(argv: Sequence[str] | None = None) -> None:
    """Write one HTML file about one or several runs.

    Args:
        argv: Output directories of runs, and options.

    Raises:
        SystemExit: A run is missing, or a file of it is damaged.
    """
    parser = report_parser()
    options = parser.parse_args(argv)
    from rlhf_ppo.reporting.report import write_report

    with user_errors(parser.prog):
        path = write_report(options.runs, options.output, options.judged)
    print_text(f"The report is in {path}.")


def report_parser() -> CommandParser:
    """Return the parser of the command's options."""
    parser = CommandParser(
        "rlhf-ppo report", description="Write one HTML file about one or several runs, for any browser."
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="Output directory of a run; runs that differ in their seed are averaged.",
    )
    parser.add_argument("--output", default="report.html", help="File to write.")
    parser.add_argument(
        "--judged", nargs="+", default=[], metavar="DIR",
        help="Further output directories of `rlhf-ppo judge`, besides the directory `judged` of each run.",
    )  # fmt: skip
    return parser


# ---- Short help ----


class Option(NamedTuple):
    """An option in the short help.

    Attributes:
        name: Name of the dataclass field.
        help: One sentence.
        default: Its default; None is not shown.
        value: Placeholder of the value; "" derives it from the default.
    """

    name: str
    help: str
    default: Any = None
    value: str = ""


class Page(NamedTuple):
    """Short help of a command.

    Attributes:
        summary: One sentence.
        groups: Title: options.
        examples: Command lines.
        more: Sentence about the options that are not shown.
    """

    summary: str
    groups: Mapping[str, Iterable[Option]]
    examples: Sequence[str]
    more: str = "--help-all lists all options. --config FILE reads options from a YAML file."


PAGES = Path(__file__).with_name("help.yaml")
"""The pages: of commands whose options are fields of classes that import torch, also the options."""

_DATACLASSES = {"judge": (JudgeArguments,), "llm": (LLMCommand, LLMTrainingParams)}
"""Classes whose fields are the options of a page; the page has the title of each section by its first option."""

_PLACEHOLDERS = {bool: "", int: "N", float: "X"}


def _sections(titles: Mapping[str, str], *dataclasses: type) -> dict[str, list[Option]]:
    """Group the fields of dataclasses into sections.

    Args:
        titles: First option of each section: its title.
        dataclasses: Their fields, in order; unsupported ones are left out.
    """
    groups: dict[str, list[Option]] = {}
    title = ""
    hints = {name: hint for dataclass in dataclasses for name, hint in get_type_hints(dataclass).items()}
    for each in (each for dataclass in dataclasses for each in fields(dataclass)):
        title = titles.get(each.name, title)
        if each.name in UNAVAILABLE or each.metadata["help"].startswith("Not available"):
            continue
        default = None if each.default in (MISSING, "default") else each.default
        placeholder = _placeholder(hints[each.name])
        groups.setdefault(title, []).append(Option(each.name, each.metadata["help"], default, placeholder))
    return groups


def _placeholder(annotation: Any) -> str:
    """Return the placeholder of a value, from its type; "" for a switch."""
    kind = annotation if get_origin(annotation) is Literal else next(iter(get_args(annotation)), annotation)
    return "|".join(get_args(kind)) if get_origin(kind) is Literal else _PLACEHOLDERS.get(kind, "TEXT")


def page_of(command: str) -> Page | None:
    """Return the short help of a command; None if its parser prints its help."""
    name = "judge" if command == "eval" else command
    page = yaml.safe_load(PAGES.read_text(encoding="utf-8")).get(name)
    if page is None:
        return None
    if titles := page.pop("titles", None):
        groups = _sections(titles, *_DATACLASSES[name])
    else:
        listed = page.pop("groups").items()
        groups = {title: [Option(name, **each) for name, each in group.items()] for title, group in listed}
    return Page(groups=groups, **page)


def print_page(command: str, page: Page) -> None:
    """Print the short help of a command.

    Args:
        command: Name of the command.
        page: Its help.
    """
    console = Console(highlight=False)
    console.print(cell(f"usage: rlhf-ppo {command} [options]\n\n{page.summary}"))
    dash = "-" if command == "llm" else "_"
    for title, options in page.groups.items():
        console.print(cell(f"\n{title}", "bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=24)
        table.add_column()
        for option in options:
            table.add_row(_left(option, dash), cell(option.help).append(_default(option.default), style="dim"))
        console.print(table)
    console.print(cell("\nExamples", "bold"))
    for example in page.examples:
        print_command(console, example)
    console.print(cell(f"\n{page.more}"))


def _left(option: Option, dash: str) -> Any:
    value = option.value or _PLACEHOLDERS.get(type(option.default), "TEXT")
    return cell(f"  --{option.name.replace('_', dash)}", "cyan").append(f" {value}".rstrip(), style="none")


def _default(default: Any) -> str:
    if default is None or default is False:
        return ""
    return f" [default: {'on' if default is True else default}]"


def print_command(console: Console, command: str) -> None:
    r"""Print a command line that can be copied: lines break between options, with a `\` at the end."""
    lines, line = [], ""
    for part in command.replace(" --", "\n--").split("\n"):
        if line and len(line) + len(part) + 5 > console.width:
            lines, line = [*lines, f"{line} \\"], f"    {part}"
        else:
            line = f"{line} {part}" if line else f"  {part}"
    for each in [*lines, line]:
        console.print(cell(each), soft_wrap=True)
