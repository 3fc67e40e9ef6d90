"""The program `rlhf-ppo`."""

from __future__ import annotations

import importlib
import sys
from types import TracebackType

from rlhf_ppo.cli.errors import fail
from rlhf_ppo.config.redaction import hide_in, shown_traceback, with_hidden_words
from rlhf_ppo.terminal.foreign import print_text

COMMANDS = {
    "llm": ("rlhf_ppo.cli.llm", "AITraining's command line: --train --trainer ppo|reward|sft ..."),
    "sft": ("rlhf_ppo.cli.commands", "train a language model on texts (TRL's SFTTrainer)"),
    "reward": ("rlhf_ppo.cli.commands", "train a reward model on pairs of responses (TRL's RewardTrainer)"),
    "train": ("rlhf_ppo.cli.commands", "PPO, with the options of TRL's script"),
    "estimate": ("rlhf_ppo.cli.commands", "memory and time that `train` would take with the same options"),
    "judge": ("rlhf_ppo.cli.judge", "the share of prompts for which a judge prefers one model over another"),
    "eval": ("rlhf_ppo.cli.judge", "another name of judge"),
    "init": ("rlhf_ppo.cli.init", "write a commented file for `pipeline`"),
    "pipeline": ("rlhf_ppo.cli.pipeline", "SFT, reward model, PPO, judge and report from one file"),
    "plot": ("rlhf_ppo.cli.plot", "draw the metrics of runs"),
    "report": ("rlhf_ppo.cli.report", "one HTML file about runs: curves, samples, responses token by token"),
    "configs": ("rlhf_ppo.cli.configs", "write accelerate's configurations and the example scripts into a directory"),
    "demo": ("rlhf_ppo.cli.demo", "all steps with a toy model, in minutes"),
}
"""Each subcommand: the module that holds the function of its name, and what it does."""

FUNCTIONS = {"eval": "evaluate"}
"""Subcommands that are not called as their function is."""


def usage() -> str:
    """Return what `rlhf-ppo --help` prints."""
    lines = [f"  {name:9}{does}" for name, (_, does) in COMMANDS.items()]
    return "\n".join(["usage: rlhf-ppo COMMAND [options]; rlhf-ppo COMMAND --help lists the options", "", *lines])


def main(argv: list[str] | None = None) -> None:
    """Run a subcommand. What it needs is imported then: neither the list of commands nor `--version` needs torch.

    Args:
        argv: The subcommand and its options; None takes the program's own.

    Raises:
        SystemExit: There is no such subcommand, or it failed.
    """
    if argv is None:
        argv, sys.excepthook = with_hidden_words(sys.argv[1:]), _show_traceback
    command, *options = argv or ["--help"]
    if command in ("-h", "--help"):
        print_text(usage())
        return
    if command == "--version":
        print_text(f"rlhf_ppo {importlib.import_module('rlhf_ppo').__version__}")
        return
    if command not in COMMANDS:
        fail("rlhf-ppo", f"there is no command {command!r}: use one of {', '.join(COMMANDS)}")
    hide_in(sys.argv)  # `options` are a copy; trackers write these into files
    module = importlib.import_module(COMMANDS[command][0])
    try:
        getattr(module, FUNCTIONS.get(command, command))(options)
    except KeyboardInterrupt:
        print_text(f"\nrlhf-ppo {command}: ended by SIGINT", sys.stderr)
        raise SystemExit(130) from None
    if "accelerate" in sys.modules:
        from accelerate import PartialState

        PartialState().destroy_process_group()


def _show_traceback(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print a traceback, whose error may quote anything, visible."""
    print_text(shown_traceback(error).rstrip(), sys.stderr)
