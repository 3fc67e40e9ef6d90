"""`rlhf-ppo pipeline`: SFT, reward model, PPO, judge and report from one file."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rlhf_ppo.cli.errors import CommandParser, Problems, user_errors
from rlhf_ppo.config.redaction import redact_words
from rlhf_ppo.terminal.text import print_text

if TYPE_CHECKING:  # these import torch
    from rlhf_ppo.pipeline.running import Plan
    from rlhf_ppo.pipeline.steps import Pipeline, Step

PROGRAM = "rlhf-ppo pipeline"


def pipeline(argv: Sequence[str] | None = None) -> None:
    """Run the remaining steps of a file.

    Args:
        argv: The file, and `--dry_run`. None takes the program's own.

    Raises:
        SystemExit: The file or an option of a step is wrong, before anything is run; or a step has failed.
    """
    parser = CommandParser(prog=PROGRAM, description="Run the remaining steps of a file.")
    parser.add_argument("file", help="YAML with a section for each step; `rlhf-ppo init` writes it.")
    parser.add_argument(
        "--dry_run", "--dry-run", action="store_true", help="Check everything, print the remaining steps, and exit."
    )
    args = parser.parse_args(argv)
    from rlhf_ppo.pipeline.running import Plan, planned, run_pipeline, start_python
    from rlhf_ppo.pipeline.steps import read_pipeline

    with user_errors(PROGRAM):
        read = read_pipeline(args.file)
        plans = planned(read)
    problems = check_steps(read, [step for step in read.steps if plans[step.name] != Plan("keep")])
    problems.fail(PROGRAM)
    if args.dry_run:
        _show(read, plans)
        print_text("Dry run: no problems found.")
        return
    with user_errors(PROGRAM):
        code = run_pipeline(read, start_python)
    if code:
        raise SystemExit(code)


def check_steps(pipeline: Pipeline, steps: Iterable[Step]) -> Problems:
    """Check options, data and models of steps as their commands do; each message begins with its section.

    Models that earlier steps write stand for the models that these steps start from. The steps of several seeds differ
    in nothing to check.

    Args:
        pipeline: The whole pipeline.
        steps: The steps to check.

    Returns:
        The problems of all steps.
    """
    problems = Problems()
    origins = {
        str(step.output_dir): step.options.get("model_name_or_path", step.options.get("sft_model_path"))
        for step in pipeline.steps
    }
    for step in {step.kind: step for step in steps}.values():
        with problems.section(step.kind):
            check_step(step, problems, origins)
    return problems


def check_step(step: Step, problems: Problems, origins: Mapping[str, str | None]) -> None:
    """Check the options, data and models of a step.

    Args:
        step: The step.
        problems: Gets the problems.
        origins: Directories that the pipeline's steps write, and the models that these start from.
    """
    if step.kind == "report":
        from rlhf_ppo.cli.main import report_parser
        from rlhf_ppo.training.checks import check_output_dir

        parser = report_parser()
        parser.exit_on_error = False
        with problems.collecting():
            try:
                output = parser.parse_args(step.argv()).output
            except argparse.ArgumentError as error:
                raise ValueError(str(error)) from None
            check_output_dir(os.path.dirname(output), "output")
        return
    from rlhf_ppo.cli.checks import check_step_options
    from rlhf_ppo.cli.commands import parse_options

    options = parse_options(PROGRAM, step.command, step.argv(), problems)
    check_step_options(problems, step.command, options, origins=origins)


def _show(read: Pipeline, plans: Mapping[str, Plan]) -> None:
    for step in read.steps:
        plan = plans[step.name]
        words = shlex.join(redact_words(["rlhf-ppo", step.command, *step.argv()]))
        if plan.action == "keep":
            words = "finished before"
            if plan.depends:
                words += f"; run again if {' or '.join(plan.depends)} writes something else this time"
        elif plan.reason:
            words += f"  # {plan.reason}"
        print_text(f"{step.name}: {words}")
