"""`rlhf-ppo pipeline`: SFT, reward model, PPO, judge and report from one file."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_ppo.cli.errors import CommandParser, user_errors
from rlhf_ppo.config.redaction import shown_words
from rlhf_ppo.pipeline.running import Plan, planned, run_pipeline, start_python
from rlhf_ppo.pipeline.steps import STEPS, Pipeline, Step, read_pipeline
from rlhf_ppo.terminal.foreign import print_text

PROGRAM = "rlhf-ppo pipeline"


def pipeline(argv: Sequence[str] | None = None) -> None:
    """Run the steps of a file that are left.

    Args:
        argv: The file, and `--dry_run`. None takes the program's own.

    Raises:
        SystemExit: The file or an option of a step is wrong, before anything is run; or a step has failed.
    """
    parser = CommandParser(prog=PROGRAM, description="Run the steps of a file that are left.")
    parser.add_argument("file", help=f"YAML with the sections {', '.join(STEPS)}; `rlhf-ppo init` writes one")
    parser.add_argument(
        "--dry_run", "--dry-run", action="store_true", help="Print the steps that are left, and run none."
    )
    args = parser.parse_args(argv)
    with user_errors(PROGRAM):
        read = read_pipeline(args.file)
        plans = planned(read)
    left = [(step, check_step(step)) for step in read.steps if plans[step.name] != Plan("keep")]
    if args.dry_run:
        _show(read, plans)
        return
    _check_what_is_named(left)
    with user_errors(PROGRAM):
        code = run_pipeline(read, start_python)
    if code:
        raise SystemExit(code)


def check_step(step: Step) -> Any:
    """Check a step's options as its command will, so that a mistake in the last one shows before the first has run.

    Args:
        step: The step.

    Returns:
        The options that name data or what scores, or None.

    Raises:
        SystemExit: An option is unknown or wrong; the sentence begins with the section's name.
    """
    program = f"{PROGRAM}: {step.kind}"
    if step.kind == "report":
        from rlhf_ppo.cli.report import report_parser

        report_parser(program).parse_args(step.argv())
        return None
    if step.kind == "judge":
        from rlhf_ppo.cli.judge import JudgeArguments
        from rlhf_ppo.cli.parser import PPOArgumentParser

        with user_errors(program):
            parser: Any = PPOArgumentParser(JudgeArguments, prog=program)  # pyright: ignore[reportArgumentType]
            (options,) = parser.parse_args_and_config(step.argv())
    else:
        from rlhf_ppo.cli.commands import parse_options

        with user_errors(program):
            options, *_ = parse_options(program, step.command, step.argv())
    return options


def _check_what_is_named(steps: Iterable[tuple[Step, Any]]) -> None:
    """Look for data, reward functions and the judge's key, as far as nothing is loaded."""
    from rlhf_ppo.cli.judge import check_judge
    from rlhf_ppo.cli.sources import check_is_there
    from rlhf_ppo.rewards.resolve import check_reward_name

    for step, options in steps:
        if options is None:
            continue
        with user_errors(f"{PROGRAM}: {step.kind}"):
            if options.dataset_name:
                check_is_there(options.dataset_name)
            for name in getattr(options, "reward_funcs", None) or ():
                check_reward_name(name)
            if step.kind == "judge":
                check_judge(options)


def _show(read: Pipeline, plans: Mapping[str, Plan]) -> None:
    for step in read.steps:
        plan = plans[step.name]
        words = shlex.join(shown_words(["rlhf-ppo", step.command, *step.argv()]))
        if plan.action == "keep":
            words = "finished before"
            if plan.depends:
                words += f"; run again if {' or '.join(plan.depends)} writes something else this time"
        elif plan.reason:
            words += f"  # {plan.reason}"
        print_text(f"{step.name}: {words}")
