"""`rlhf-ppo init`: measure data, model and machine, and write a file for `rlhf-ppo pipeline` that fits them."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import Environment

from rlhf_ppo.cli.errors import CommandParser, Problems, user_errors
from rlhf_ppo.terminal import cell, print_text, visible

if TYPE_CHECKING:  # these import torch
    from rlhf_ppo.cli.measuring import Data, Machine, Proposal

PROGRAM = "rlhf-ppo init"
QUESTIONS = {
    "model": ("The language model to start from: a directory or a hub name", None),
    "texts": ("Texts or prompts with completions to train it on first (empty: none)", ""),
    "preferences": ("Pairs with `chosen` and `rejected` for the reward model (empty: a reward function instead)", ""),
    "prompts": ("Prompts for PPO: a file, a directory or a hub name; pairs have prompts too", None),
    "output_dir": ("Where all of it goes", "runs/pipeline"),
}
"""Question for each option, and the default answer; None where an answer is needed."""

JUDGE_PREFERENCES = (
    "Other pairs, for a second reward model that judges and that PPO never sees (empty: split them off)"
)
REWARD_FUNCTION = "The reward of PPO instead: a built-in reward's name, file.py:function or an address"

MIN_PAIRS_TO_SPLIT = 100
JUDGE_SHARE = 0.4
"""Share of the pairs that train the judge's reward model."""
MAX_HELD_OUT = 256
MINUTES_ON = {"cpu": 12.0, "cuda": 60.0}
"""Default of `--minutes` by the type of device."""

TEMPLATE = Path(__file__).with_name("run.yaml.jinja")
"""The text of the file."""


def init(argv: Sequence[str] | None = None) -> None:
    """Measure data, model and machine, and write the file.

    Args:
        argv: The options; None takes the program's own. Missing ones are asked for at a terminal.

    Raises:
        SystemExit: An option is missing and nobody can answer, the data or the model are wrong, or the file exists.
    """
    parser = CommandParser(
        prog=PROGRAM,
        description="Measure data, model and machine, and write a commented file for `rlhf-ppo pipeline`.",
    )
    parser.add_argument("--file", default="run.yaml", help="The file to write.")
    for name, (question, _) in QUESTIONS.items():
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), help=question)
    parser.add_argument("--reward_funcs", "--reward-funcs", help=REWARD_FUNCTION)
    parser.add_argument("--judge_preferences", "--judge-preferences", help=JUDGE_PREFERENCES)
    parser.add_argument("--judge_model", "--judge-model", help="Such as gpt-4o-mini, or a reward model PPO never saw.")
    parser.add_argument("--minutes", type=float, help="About how long all steps may take; 12 on a CPU, 60 on a GPU.")
    parser.add_argument("--bf16", action="store_true", help="Compute in bf16; the default on GPUs that can do it.")
    args = parser.parse_args(argv)
    with user_errors(PROGRAM):
        path = Path(os.path.expanduser(args.file))
        if path.exists():
            raise ValueError(f"file={args.file!r} is there already; name another with --file, or rename it")
        if args.minutes is not None and not 0 < args.minutes < 1e6:
            raise ValueError(f"minutes={args.minutes} must be positive")
        _complete(args)
        folder = Path(os.path.expanduser(args.output_dir), "data")
        if folder.exists():
            raise ValueError(f"{folder} is there already: name another directory with --output_dir, or rename it")
    from rlhf_ppo.checkpoints.files import write_text  # imports torch
    from rlhf_ppo.cli.measuring import propose
    from rlhf_ppo.training.checks import check_writable

    with user_errors(PROGRAM):
        check_writable(str(path.parent), "file")
        check_writable(args.output_dir, "output_dir")
    machine, data = measure(args)
    with user_errors(PROGRAM):
        names, data, held_out = split(args, data, folder)
        minutes = MINUTES_ON.get(machine.device.type, 60.0) if args.minutes is None else args.minutes
        proposal = propose(machine, data, len(held_out), minutes)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, written(args, names, data, proposal, _computes_in_bf16(args, machine)))
    show(args, machine, data, held_out, proposal, minutes)
    print_text(f"{args.file} is written. Read it, then: rlhf-ppo pipeline {shlex.quote(args.file)}")


def _complete(args: argparse.Namespace) -> None:
    """Ask for missing options, if one that is needed is missing."""
    is_complete = args.model and args.prompts and (args.preferences or args.reward_funcs)
    asks = sys.stdin.isatty() and not is_complete
    for name, (question, default) in QUESTIONS.items():
        if getattr(args, name) is None:
            setattr(args, name, _asked(name, question, default) if asks else default)
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is missing: {question.lower()}")
    if not args.preferences and not args.reward_funcs:
        args.reward_funcs = _asked("reward_funcs", REWARD_FUNCTION, None) if asks else None
        if args.reward_funcs is None:
            raise ValueError("PPO has no reward: give --preferences for a reward model, or --reward_funcs")
    if args.judge_model and args.judge_preferences:
        raise ValueError("--judge_model and --judge_preferences are two judges: give one of them")
    if asks and args.preferences and args.judge_model is None and args.judge_preferences is None:
        args.judge_preferences = _asked("judge_preferences", JUDGE_PREFERENCES, "")


def _asked(name: str, question: str, default: str | None) -> str:
    shown = f" [{default}]" if default else ""
    while True:
        print_text(f"{question}{shown}:")
        try:
            answer = input("> ").strip() or default
        except EOFError:
            print()
            raise ValueError(f"--{name} is missing, and the input has ended") from None
        if answer is not None:
            return answer
        print_text(f"--{name} is needed")


# ---- Measuring and splitting ----


def measure(args: argparse.Namespace) -> tuple[Machine, dict[str, Data]]:
    """Measure the model on this machine, and all data; the problems are in one list.

    Args:
        args: The options, complete.

    Returns:
        The model, and the data by option.

    Raises:
        SystemExit: The model or the data are wrong.
    """
    from rlhf_ppo.cli.measuring import measure_data, measure_machine
    from rlhf_ppo.cli.training import load_tokenizer
    from rlhf_ppo.rewards.resolve import check_reward_name

    problems, machine, tokenizer, data = Problems(), None, None, {}
    with problems.collecting():
        machine = measure_machine(args.model)
        tokenizer = load_tokenizer(args.model, False, "model")
    if args.reward_funcs:
        with problems.collecting():
            check_reward_name(args.reward_funcs)
    for name in ("texts", "preferences", "judge_preferences", "prompts"):
        if path := getattr(args, name):
            with problems.collecting():
                data[name] = measure_data(path, name, tokenizer)
    problems.fail(PROGRAM)
    assert machine is not None
    return machine, data


def split(
    args: argparse.Namespace, data: Mapping[str, Data], folder: Path
) -> tuple[dict[str, str], dict[str, Data], Any]:
    """Split prompts and pairs for the judge off, and write them.

    Args:
        args: The options.
        data: The data by option.
        folder: The directory for the files.

    Returns:
        The file of each section's data, the data of each section, and the judge's prompts.
    """
    from dataclasses import replace

    from rlhf_ppo.cli.measuring import distinct_prompts
    from rlhf_ppo.data.sources import hold_out_pairs

    names, found = {}, {}
    for option, section in (("texts", "sft"), ("preferences", "reward"), ("judge_preferences", "judge_reward")):
        if option in data:
            names[section], found[section] = getattr(args, option), data[option]
    splits = {}
    if "reward" in found and "judge_reward" not in found and not args.judge_model:
        pairs = found["reward"]
        if len(pairs.rows) >= MIN_PAIRS_TO_SPLIT:
            ours, theirs = hold_out_pairs(pairs.rows, int(JUDGE_SHARE * len(pairs.rows)), 1.0)
            if theirs is not None and len(ours):
                splits |= {"reward": ours, "judge_reward": theirs}
                found["reward"], found["judge_reward"] = replace(pairs, rows=ours), replace(pairs, rows=theirs)
    prompts = data["prompts"]
    rows, held_out = distinct_prompts(prompts.rows), prompts.held_out
    if held_out is None:
        num_rows = max(1, min(MAX_HELD_OUT, len(rows) // 5))
        if len(rows) < 2:
            raise ValueError(f"prompts={args.prompts!r} has one distinct prompt; PPO and the judge need others")
        shuffled = rows.shuffle(seed=0)
        rows, held_out = shuffled.select(range(num_rows, len(rows))), shuffled.select(range(num_rows))
    else:
        held_out = distinct_prompts(held_out).shuffle(seed=0)
        held_out = held_out.select(range(min(MAX_HELD_OUT, len(held_out))))
    splits |= {"ppo": rows, "judge": held_out}
    found["ppo"] = replace(prompts, rows=rows)
    files = {"reward": "pairs", "judge_reward": "judge_pairs", "ppo": "prompts", "judge": "held_out_prompts"}
    folder.mkdir(parents=True)
    for section, dataset in splits.items():
        names[section] = str(Path(args.output_dir, "data", f"{files[section]}.jsonl"))
        _write_rows(dataset, folder / f"{files[section]}.jsonl")
    return names, found, held_out


def _write_rows(rows: Any, path: Path) -> None:
    from rlhf_ppo.checkpoints.files import replacing
    from rlhf_ppo.terminal import hide_data_bars

    with hide_data_bars(0), replacing(path) as temporary:
        rows.to_json(temporary, force_ascii=False)


def _computes_in_bf16(args: argparse.Namespace, machine: Machine) -> bool:
    import torch

    return args.bf16 or (machine.device.type == "cuda" and torch.cuda.is_bf16_supported())


# ---- Writing and showing ----


def written(
    args: argparse.Namespace, names: Mapping[str, str], data: Mapping[str, Data], proposal: Proposal, bf16: bool
) -> str:
    """Return the text of the pipeline's file.

    Args:
        args: The options.
        names: The data of each section.
        data: The measured data of each section.
        proposal: The options of each section.
        bf16: Whether to compute in bf16.
    """
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"scalar": scalar, "comment": _comment}
    sections = proposal.sections

    def options(section: str) -> str:
        return "\n".join(f"  {name}: {_number(value)}" for name, value in sections[section].items())

    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        args=args,
        file=visible(args.file, one_line=True),
        time=f"Expected time on this machine: {describe_time(proposal.minutes)}.",
        notes=proposal.notes,
        names=names,
        data=data,
        bf16=bf16,
        sections=sections,
        options=options,
    )


def _comment(text: str) -> str:
    return textwrap.fill(text, 79, initial_indent="# ", subsequent_indent="# ")


def describe_time(minutes: Mapping[str, float]) -> str:
    """Return the expected time of all steps and of each."""
    parts = ", ".join(f"{name} {_minutes(value)}" for name, value in minutes.items())
    return f"about {_minutes(sum(minutes.values()))} minutes ({parts})"


def _minutes(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def _number(value: float) -> str:
    return f"{value:.1e}" if isinstance(value, float) and value < 0.01 else str(value).lower()


def show(
    args: argparse.Namespace,
    machine: Machine,
    data: Mapping[str, Data],
    held_out: Any,
    proposal: Proposal,
    minutes: float,
) -> None:
    """Print what was measured, and the expected time."""
    from rich.console import Console
    from rich.table import Table

    positions = "" if machine.positions is None else f", {machine.positions:,} positions"
    processors = "" if machine.device.type == "cuda" else f" with {os.cpu_count()} cores"
    names = {"sft": "texts", "reward": "pairs", "judge_reward": "judge's pairs", "ppo": "prompts"}
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("model", f"{machine.parameters:,} parameters{positions}, on {machine.device.type}{processors}")
    for section, each in data.items():
        table.add_row(names[section], cell(each.describe()))
    table.add_row("held out", f"{len(held_out):,} prompts, for the judge")
    table.add_row("time", describe_time(proposal.minutes))
    for note, steps in proposal.notes.items():
        table.add_row("note", cell(f"{', '.join(steps)}: {note}"))
    if sum(proposal.minutes.values()) > 1.1 * minutes:
        table.add_row("note", f"A shorter run than this, in {minutes:g} minutes, would learn nothing.")
    Console(highlight=False).print(table)


def scalar(text: str | None) -> str:
    """Write a text so that YAML reads it as the same text."""
    text = text or ""
    try:
        is_plain = yaml.safe_load(f"[{text}]") == [text] and visible(text, one_line=True) == text
    except yaml.YAMLError:
        is_plain = False
    return text if is_plain else yaml.safe_dump(text, default_style='"', width=math.inf).strip()
