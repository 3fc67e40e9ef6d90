"""The program `rlhf-ppo` and its short commands. Its help imports neither torch nor transformers."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rlhf_ppo.cli.errors import CommandParser, fail, user_errors
from rlhf_ppo.terminal import print_text, redact_words, restore_hidden_words

COMMANDS = {
    "demo": ("rlhf_ppo.cli.main", "Run all steps with a toy model, in minutes on two cores."),
    "init": ("rlhf_ppo.cli.main", "Read and split the data; write a commented file for `pipeline`."),
    "pipeline": ("rlhf_ppo.cli.main", "Run SFT, reward model, PPO, judge and report from one file."),
    "train": ("rlhf_ppo.cli.training_commands", "Train a policy with PPO, with the options of TRL's script."),
    "sft": ("rlhf_ppo.cli.training_commands", "Train a language model on texts (TRL's SFTTrainer)."),
    "reward": ("rlhf_ppo.cli.training_commands", "Train a reward model on preference pairs (TRL's RewardTrainer)."),
    "estimate": ("rlhf_ppo.cli.estimate", "Estimate the memory of `train` with the same options."),
    "judge": ("rlhf_ppo.cli.judge", "Measure how often a judge prefers one model over another."),
    "plot": ("rlhf_ppo.cli.main", "Draw the metrics of runs into a picture."),
    "report": ("rlhf_ppo.cli.main", "Write one HTML file about runs: curves, samples, responses token by token."),
    "configs": ("rlhf_ppo.cli.main", "Write accelerate's configurations and the example scripts into a directory."),
    "llm": ("rlhf_ppo.cli.aitraining", "Train with AITraining's options: --train --trainer ppo|reward|sft ..."),
}
"""Each command: the module that holds the function of its name, and its help."""


def main(argv: list[str] | None = None) -> None:
    """Run a command with only its own imports.

    Args:
        argv: The command and its options; None takes the program's own.

    Raises:
        SystemExit: The command does not exist or fails.
    """
    words = (restore_hidden_words(sys.argv[1:]) if argv is None else argv) or ["--help"]
    os.environ.setdefault("TQDM_DELAY", "1")  # no progress bars for steps of less than a second
    warnings.simplefilter("ignore", FutureWarning)  # between libraries
    command, options = words[0], words[1:]
    if command in ("-h", "--help"):
        print_text("usage: rlhf-ppo COMMAND [options]\n\nRLHF with PPO as a transformers.Trainer.\n")
        print_text("\n".join(f"  {name:<10}{does}" for name, (_, does) in COMMANDS.items()))
        print_text("\n`rlhf-ppo COMMAND --help` shows the options of a command.\nTry first: rlhf-ppo demo")
        return
    if command == "--version":
        print_text(f"rlhf_ppo {importlib.import_module('rlhf_ppo').__version__}")
        return
    if command not in COMMANDS:
        fail("rlhf-ppo", f"there is no command {command!r}: use one of {', '.join(COMMANDS)}")
    sys.argv[:] = redact_words(sys.argv)  # trackers write sys.argv into files; `options` is a copy
    try:
        getattr(importlib.import_module(COMMANDS[command][0]), command)(options)
    except KeyboardInterrupt:
        print_text(f"\nrlhf-ppo {command}: ended by SIGINT", sys.stderr)
        raise SystemExit(130) from None
    if "accelerate" in sys.modules:
        from accelerate import PartialState

        PartialState().destroy_process_group()


# ---- configs ----

PACKAGE = Path(__file__).parents[1]
SHIPPED = folder if (folder := PACKAGE / "shipped").is_dir() else PACKAGE.parent
"""Directory of the files: in a wheel in the package, in a checkout next to it."""

FOLDERS = {"accelerate_configs": ("*.yaml",), "examples": ("*.py", "*.yaml")}
"""Folders to write, and patterns of their files."""


def configs(argv: Sequence[str] | None = None) -> list[Path]:
    """Write `accelerate_configs/` and `examples/` into a directory.

    Args:
        argv: The directory, and `--overwrite`; None takes the program's own.

    Returns:
        The written files.

    Raises:
        SystemExit: Another file of that name exists already.
    """
    parser = CommandParser(
        "rlhf-ppo configs", description="Write accelerate's configurations and the example scripts into a directory."
    )
    parser.add_argument("directory", type=Path, nargs="?", default=Path(), help="By default the current one.")
    parser.add_argument("--overwrite", action="store_true", help="Replace existing files.")
    options = parser.parse_args(argv)
    copies = {
        source: options.directory / folder / source.name
        for folder, patterns in FOLDERS.items()
        for files in patterns
        for source in sorted((SHIPPED / folder).glob(files))
    }
    with user_errors(parser.prog):
        others = [
            path for source, path in copies.items() if path.exists() and path.read_bytes() != source.read_bytes()
        ]
        if others and not options.overwrite:
            names = ", ".join(map(str, others))
            raise ValueError(f"these files exist with other contents: {names}; add --overwrite to replace them")
        for source, path in copies.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read_bytes())
            print_text(path)
    print_text(f"Try, in {options.directory.resolve()}: python examples/first_run.py")
    return [*copies.values()]


# ---- init, demo, pipeline, plot, report ----

INIT_OPTIONS = {
    "model": "The language model to start from: a directory or a hub name. Required.",
    "texts": "Texts, or prompts with completions, to train it on first.",
    "preferences": "Pairs with `chosen` and `rejected` for the reward model.",
    "reward_funcs": "Instead of preferences: a built-in reward's name, file.py:function or an address.",
    "prompts": "Prompts for PPO: a file, a directory or a hub name; pairs contain prompts too. Required.",
    "prompt_column": "Column of the prompts in `prompts`; by default `prompt`, `text` or `messages`.",
    "judge_preferences": "Pairs for a second reward model, which judges; by default 40%% of the preferences.",
    "judge_model": "Instead of judge_preferences: a judge, such as gpt-4o-mini or a reward model that PPO never saw.",
}
"""Options of `init` and their help texts."""


def init(argv: Sequence[str] | None = None) -> None:
    """Read the data, split it, and write one commented file for `rlhf-ppo pipeline`.

    Args:
        argv: The options; None takes the program's own.

    Raises:
        SystemExit: An option is wrong, the data or the model cannot be read, or the file exists.
    """
    parser = CommandParser("rlhf-ppo init", description="Write a commented file for `rlhf-ppo pipeline`.")
    parser.add_argument("--file", default="run.yaml", help="The file to write.")
    parser.add_argument("--output_dir", "--output-dir", default="runs/pipeline", help="Where all results go.")
    for name, text in INIT_OPTIONS.items():
        words = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*words, help=text, required=name in ("model", "prompts"))
    parser.add_argument("--lora", action="store_true", help="Train LoRA adapters over one base in every step.")
    args = parser.parse_args(argv)
    path, folder = Path(args.file).expanduser(), Path(args.output_dir).expanduser() / "data"
    for existing, option in ((path, "file"), (folder, "output_dir")):
        if existing.exists():
            moved = "it" if option == "file" else f"all of {folder.parent}, whose finished steps would stay"
            parser.error(f"{existing} already exists: name another {option}, or move {moved} away")
    if not args.preferences and not args.reward_funcs:
        parser.error("PPO has no reward: give --preferences for a reward model, or --reward_funcs")
    if args.judge_preferences and args.judge_model:
        parser.error("judge_preferences train a judge, and judge_model is one: give one of them")
    from rlhf_ppo.cli.init import write_file

    write_file(args, path, folder)


def demo(argv: Sequence[str] | None = None) -> None:
    """Run RLHF from scratch: a language model, a reward model, PPO, and a judge.

    Args:
        argv: The directory of the results; None takes the program's own.

    Raises:
        SystemExit: With 1 if the judge does not clearly prefer PPO's stories, with 2 if the directory is not writable.
    """
    parser = CommandParser(
        "rlhf-ppo demo",
        description="Run RLHF from scratch, in minutes on two cores: a language model, a reward model, PPO, and a "
        "judge. Exits with 1 unless the judge clearly prefers PPO.",
    )
    parser.add_argument("output_dir", type=Path, nargs="?", default="demo_output", help="By default demo_output.")
    output_dir = parser.parse_args(argv).output_dir
    from rlhf_ppo.cli.demo import run_demo

    with user_errors(parser.prog):
        output_dir.mkdir(parents=True, exist_ok=True)
    if not run_demo(output_dir).is_clear:
        sys.exit(1)


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


def plot(argv: Sequence[str] | None = None) -> None:
    """Draw the metrics of one or several runs into a file.

    Args:
        argv: Directories with a `trainer_state.json`, and options.

    Raises:
        SystemExit: A run is missing, or has no metrics.
    """
    parser = CommandParser("rlhf-ppo plot", description="Draw the metrics of one or several runs into a file.")
    parser.add_argument("runs", nargs="*", help="Directory of a run; runs that differ only in the seed are averaged.")
    parser.add_argument("--separately", action="store_true", help="Draw a line for each run, without means.")
    parser.add_argument(
        "--seeds",
        nargs="+",
        action="append",
        default=[],
        metavar=("LABEL", "RUN"),
        help="A label, and runs to average.",
    )
    parser.add_argument("--output", default="curves.png", help="File to write: PNG, SVG or PDF.")
    parser.add_argument("--metrics", nargs="+", metavar="KEY", help="Metrics to draw; by default all.")
    parser.add_argument("--x", choices=("episode", "step"), default="episode", help="Horizontal axis.")
    options = parser.parse_args(argv)
    from rlhf_ppo.reporting.plots import plot_metrics
    from rlhf_ppo.reporting.run_log import grouped_directories

    with user_errors(parser.prog):
        groups = grouped_directories(options.runs, separately=options.separately)
        groups |= {label: seeds for label, *seeds in options.seeds}
        if not groups:
            raise ValueError("give directories of runs, or --seeds LABEL RUN RUN")
        plot_metrics(groups, options.output, metrics=options.metrics, x=options.x)
    print_text(f"The curves are in {options.output}.")


def report(argv: Sequence[str] | None = None) -> None:
    """Write one HTML file about one or several runs.

    Args:
        argv: Output directories of runs, and options.

    Raises:
        SystemExit: A run is missing, or one of its files is damaged.
    """
    parser = CommandParser("rlhf-ppo report", description="Write one HTML file about one or several runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Directory of a run; seeds of a run are averaged.")
    parser.add_argument("--output", default="report.html", help="File to write.")
    parser.add_argument(
        "--judged",
        nargs="+",
        default=[],
        metavar="DIR",
        help="Output directories of `rlhf-ppo judge`, in addition to those in the runs.",
    )
    options = parser.parse_args(argv)
    from rlhf_ppo.reporting.report import write_report

    with user_errors(parser.prog):
        path = write_report(options.runs, options.output, options.judged)
    print_text(f"The report is in {path}.")
