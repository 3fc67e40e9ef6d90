"""`rlhf-ppo pipeline`: SFT, reward model, PPO, judge and report from one file; `rlhf-ppo init` writes that file."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import yaml

from rlhf_ppo.cli.errors import CommandParser, Problems, user_errors
from rlhf_ppo.config.redaction import redact_words
from rlhf_ppo.terminal.text import print_text, visible

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

    Models that earlier steps write are not looked for. The steps of several seeds differ in nothing to check.

    Args:
        pipeline: The whole pipeline.
        steps: The steps to check.

    Returns:
        The problems of all steps.
    """
    problems, written = Problems(), {str(step.output_dir) for step in pipeline.steps}
    for step in {step.kind: step for step in steps}.values():
        with problems.section(step.kind):
            check_step(step, problems, written.__contains__)
    return problems


def check_step(step: Step, problems: Problems, coming: Callable[[str], bool]) -> None:
    """Check the options, data and models of a step.

    Args:
        step: The step.
        problems: Gets the problems.
        coming: Tells which paths the pipeline's steps write.
    """
    if step.kind == "report":
        from rlhf_ppo.cli.main import report_parser

        parser = report_parser()
        parser.exit_on_error = False
        with problems.collecting():
            try:
                parser.parse_args(step.argv())
            except argparse.ArgumentError as error:
                raise ValueError(str(error)) from None
        return
    from rlhf_ppo.cli.checks import check_step_options
    from rlhf_ppo.cli.commands import parse_options

    options = parse_options(PROGRAM, step.command, step.argv(), problems)
    check_step_options(problems, step.command, options, coming=coming)


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


# ---- rlhf-ppo init ----

INIT_PROGRAM = "rlhf-ppo init"
QUESTIONS = {
    "model": ("The language model to start from: a directory or a hub name", None),
    "texts": ("Texts or prompts with completions to train it on first (empty: none)", ""),
    "preferences": ("Pairs with `chosen` and `rejected` for the reward model (empty: a reward function instead)", ""),
    "prompts": ("Prompts for PPO: a file, a directory or a hub name", None),
    "output_dir": ("Where all of it goes", "runs/pipeline"),
}
"""Each option's question, and the answer that is none; None where one is needed."""

JUDGE_PREFERENCES = "Other pairs, for a second reward model that judges and that PPO never sees (empty: none)"
REWARD_FUNCTION = "What pays PPO instead: a built-in reward's name, file.py:function or an address"

HEAD = Template("""\
# For `rlhf-ppo pipeline $file`: the steps below, one after the other. Run it again after it was broken off: what is
# finished stays, what was begun goes on. Options of each step: `rlhf-ppo sft --help`, `reward`, `train`, `judge`.

output_dir: $output_dir
seeds: [0]                 # PPO and the judge run once for each: [0, 1, 2]
# launch: accelerate_configs/deepspeed_zero2.yaml   # for several GPUs; `rlhf-ppo configs .` writes these files

common:                    # given to every training step
  report_to: none          # or wandb, tensorboard, trackio
  bf16: $bf16
""")
SFT = Template("""
sft:
  model_name_or_path: $model
  dataset_name: $texts     # `text`, `messages`, or `prompt` and `completion`
  num_train_epochs: 1
  learning_rate: 2.0e-5
  per_device_train_batch_size: 8
  save_steps: 100          # from these it goes on
""")
REWARD = Template("""
reward:
$start  dataset_name: $preferences   # `chosen`, `rejected`, and `prompt` where there is one
  num_train_epochs: 1
  learning_rate: 1.0e-5
  per_device_train_batch_size: 8
  save_steps: 100
""")
JUDGE_REWARD = Template("""
judge_reward:              # a second reward model, which PPO never sees
$start  dataset_name: $judge_preferences   # pairs that `reward` does not have
  num_train_epochs: 1
  learning_rate: 1.0e-5
  per_device_train_batch_size: 8
  save_steps: 100
""")
PPO = Template("""
ppo:
$start  dataset_name: $prompts       # `prompt`
  response_length: 128     # tokens
  learning_rate: 3.0e-6
  kl_coef: 0.05            # higher keeps the policy nearer to where it started
  missing_eos_penalty: 1.0 # for responses that do not end
  total_episodes: 10000
  per_device_train_batch_size: 8
  gradient_accumulation_steps: 8
  save_steps: 20
""")
JUDGE = Template("""
judge:
  dataset_name: $prompts       # better prompts that PPO has not seen
$opponent$judge  max_new_tokens: 128
  num_prompts: 256
""")
REPORT = """
report: {}
"""


def init(argv: Sequence[str] | None = None) -> None:
    """Write the file.

    Args:
        argv: The options. None takes the program's own. What is missing is asked for, where somebody can answer.

    Raises:
        SystemExit: An option is missing and nobody can answer, or the file is there already.
    """
    parser = CommandParser(prog=INIT_PROGRAM, description="Write a commented file for `rlhf-ppo pipeline`.")
    parser.add_argument("--file", default="run.yaml", help="The file to write.")
    for name, (question, _) in QUESTIONS.items():
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), help=question)
    parser.add_argument("--reward_funcs", "--reward-funcs", help=REWARD_FUNCTION)
    parser.add_argument("--judge_preferences", "--judge-preferences", help=JUDGE_PREFERENCES)
    parser.add_argument("--judge_model", "--judge-model", help="Such as gpt-4o-mini, or a reward model PPO never saw.")
    parser.add_argument("--bf16", action="store_true", help="Compute in bf16, as GPUs do.")
    args = parser.parse_args(argv)
    from rlhf_ppo.checkpoints.files import write_text  # imports torch

    with user_errors(INIT_PROGRAM):
        path = Path(args.file).expanduser()
        if path.exists():
            raise ValueError(f"file={args.file!r} is there already; name another with --file, or rename it")
        _complete(args)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, written(args))
    print_text(f"{args.file} is written; read it, then: rlhf-ppo pipeline {args.file}")


def _complete(args: argparse.Namespace) -> None:
    """Ask for what the options do not say."""
    asks = sys.stdin.isatty()
    for name, (question, default) in QUESTIONS.items():
        if getattr(args, name) is None:
            setattr(args, name, _asked(name, question, default) if asks else default)
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is missing: {question.lower()}")
    if not args.preferences and not args.reward_funcs:
        args.reward_funcs = _asked("reward_funcs", REWARD_FUNCTION, None) if asks else None
        if args.reward_funcs is None:
            raise ValueError("nothing pays PPO: give --preferences for a reward model, or --reward_funcs")
    if args.judge_model and args.judge_preferences:
        raise ValueError("--judge_model and --judge_preferences are two judges: give one of them")
    if asks and args.preferences and args.judge_model is None and args.judge_preferences is None:
        args.judge_preferences = _asked("judge_preferences", JUDGE_PREFERENCES, "")


def _asked(name: str, question: str, default: str | None) -> str:
    shown = f" [{default}]" if default else ""
    while True:
        try:
            answer = input(f"{question}{shown}: ").strip() or default
        except EOFError:
            print()
            raise ValueError(f"--{name} is missing: nobody answers any more") from None
        if answer is not None:
            return answer
        print_text(f"--{name} is needed")


def written(args: argparse.Namespace) -> str:
    """Return the file's text.

    Args:
        args: Every option has a value, but for texts, preferences, reward functions and judge, which may be empty.
    """
    names = ("model", "texts", "preferences", "judge_preferences", "prompts", "output_dir")
    values = {name: _scalar(getattr(args, name)) for name in names}
    parts = [HEAD.substitute(values, file=visible(args.file, one_line=True), bf16=str(args.bf16).lower())]
    starts_from = f"  {{}}: {values['model']}\n"
    if args.texts:
        parts.append(SFT.substitute(values))
    start = "" if args.texts else starts_from.format("model_name_or_path")
    if args.preferences:
        parts.append(REWARD.substitute(values, start=start))
    if args.judge_preferences:
        parts.append(JUDGE_REWARD.substitute(values, start=start))
    start = "" if args.texts else starts_from.format("sft_model_path")
    if args.reward_funcs:
        start += f"  reward_funcs: [{_scalar(args.reward_funcs)}]\n"
    parts.append(PPO.substitute(values, start=start))
    opponent = "" if args.texts else starts_from.format("opponent")
    parts.append(JUDGE.substitute(values, opponent=opponent, judge=_judge(args)))
    return "".join([*parts, REPORT])


def _judge(args: argparse.Namespace) -> str:
    if args.judge_model:
        return f"  judge_model: {_scalar(args.judge_model)}\n"
    if args.judge_preferences:
        return ""  # what `judge_reward` trains
    if args.preferences:
        path = _scalar(str(Path(args.output_dir) / "reward"))
        return f"  judge_model: {path}   # PPO's own reward model: better one that it never saw\n"
    return f"  judge: {_scalar(args.reward_funcs)}   # PPO's own reward: better one that it never saw\n"


def _scalar(text: str | None) -> str:
    """Write a text so that YAML reads it as the same text."""
    text = text or ""
    try:
        is_plain = yaml.safe_load(f"[{text}]") == [text] and visible(text, one_line=True) == text
    except yaml.YAMLError:
        is_plain = False
    return text if is_plain else json.dumps(text)
