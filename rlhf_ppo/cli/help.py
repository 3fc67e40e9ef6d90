"""Short help of the commands with many options, printed without importing torch or transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml
from rich.console import Console
from rich.table import Table

from rlhf_ppo.cli.options import JudgeArguments, LLMCommand
from rlhf_ppo.compat.params import UNAVAILABLE, LLMTrainingParams
from rlhf_ppo.terminal.text import cell


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
"""The pages of the commands whose options are fields of classes that import torch."""

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


def _judge() -> Page:
    titles = {
        "dataset_name": "Prompts",
        "model": "Compared responses",
        "judge_model": "Judge",
        "max_new_tokens": "Generation",
        "output_dir": "Output",
    }
    return Page(
        "Measure how often a judge prefers one model's responses over another's.",
        _sections(titles, JudgeArguments),
        (
            "rlhf-ppo judge --model runs/ppo --opponent runs/sft --judge_model runs/judge_reward "
            "--dataset_name held_out.jsonl",
            "rlhf-ppo judge --model runs/ppo --opponent_column reference --judge_model gpt-4o-mini "
            "--dataset_name held_out.jsonl --num_prompts 100",
        ),
        "--config FILE reads options from a YAML file.",
    )


def _llm() -> Page:
    titles = {
        "train": "Command",
        "model": "Model and data",
        "lr": "Optimization",
        "peft": "Adapters",
        "log": "Logs, checkpoints and hub",
        "model_ref": "PPO",
    }
    return Page(
        "Train with the options of `aitraining llm`: --trainer ppo, reward or sft.",
        _sections(titles, LLMCommand, LLMTrainingParams),
        (
            "rlhf-ppo llm --train --trainer sft --model models/base --data-path texts.jsonl --project-name runs/sft",
            "rlhf-ppo llm --train --trainer ppo --model runs/sft --rl-reward-model-path runs/reward "
            "--data-path prompts.jsonl --project-name runs/ppo",
        ),
        "Options of AITraining that are missing here are errors that name an alternative.",
    )


def page_of(command: str) -> Page | None:
    """Return the short help of a command; None if its parser prints its help."""
    if command in ("judge", "eval", "llm"):
        return _llm() if command == "llm" else _judge()
    page = yaml.safe_load(PAGES.read_text(encoding="utf-8")).get(command)
    if page is None:
        return None
    groups = page.pop("groups").items()
    return Page(
        groups={title: [Option(name, **each) for name, each in group.items()] for title, group in groups}, **page
    )


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
    r"""Print a command line that can be copied: lines break between options, with a `\` at the end.

    Args:
        console: The terminal.
        command: The command line.
    """
    lines, line = [], ""
    for part in command.replace(" --", "\n--").split("\n"):
        if line and len(line) + len(part) + 5 > console.width:
            lines, line = [*lines, f"{line} \\"], f"    {part}"
        else:
            line = f"{line} {part}" if line else f"  {part}"
    for each in [*lines, line]:
        console.print(cell(each), soft_wrap=True)
