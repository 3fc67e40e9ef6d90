"""`rlhf-ppo pipeline`: SFT, reward model, PPO, judge and report from one file."""

from __future__ import annotations

import ctypes
import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_ppo.checkpoints.complete import last_complete_checkpoint, newest_trl_checkpoint
from rlhf_ppo.checkpoints.files import write_json
from rlhf_ppo.checkpoints.run import finished_checkpoints, locked
from rlhf_ppo.cli.errors import Problems, user_errors
from rlhf_ppo.cli.steps import (
    TRAINING,
    Entry,
    Pipeline,
    Step,
    hash_of_all,
    hashes_of,
    read_pipeline,
    read_record,
    why_incomplete,
    write_record,
)
from rlhf_ppo.processes.signals import discard_closed_terminal
from rlhf_ppo.reporting.judgements import SeedWinRates, read_win_rate
from rlhf_ppo.reporting.verdict import Verdict, recorded_runs, verdict_of
from rlhf_ppo.terminal import hide_from_ps, print_text, redact_words

_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)

REPLACED = "replaced"
"""Subdirectory of the pipeline's directory for results that no step reads any more."""


@dataclass(frozen=True)
class Plan:
    """The next action for a step.

    Attributes:
        action: "keep" a finished step; "continue" an unfinished one, from its newest checkpoint if it has one; begin
            "anew" if its result comes from other models, data or options.
        reason: Why a started step runs again; empty if it was interrupted.
        depends: Earlier steps that run again: if one writes another result, this step runs again too.
    """

    action: Literal["keep", "continue", "anew"]
    reason: str = ""
    depends: tuple[str, ...] = ()


def planned(pipeline: Pipeline) -> dict[str, Plan]:
    """Return the next action for each step, by its name.

    Raises:
        OSError: The record cannot be opened.
        ValueError: The record is damaged, or a finished step has other options or data now.
    """
    record, plans = read_record(pipeline.output_dir), dict[str, Plan]()
    for step in pipeline.steps:
        plan = _plan(step, record.get(step.name), _now(step, pipeline, record))
        again = tuple(name for name in pipeline.inputs_of(step) if plans[name].action != "keep" or plans[name].depends)
        plans[step.name] = replace(plan, depends=again)
    return plans


def _now(step: Step, pipeline: Pipeline, record: Mapping[str, Entry]) -> Entry:
    """Return the options, files and inputs that a step would start with now; unfinished models are left out."""
    outputs = {name: record[name].output for name in pipeline.inputs_of(step) if name in record}
    inputs = {name: hash_of_all(output) for name, output in outputs.items() if output is not None}
    return Entry(step.recorded_options(), pipeline.files_of(step), inputs)


def _plan(step: Step, before: Entry | None, now: Entry) -> Plan:
    if before is None:
        return Plan("continue")
    changes = before.changes(now)
    if inputs := before.changed_inputs(now):
        return Plan("anew", f"{' and '.join(inputs)} wrote something else since")
    if before.output is None:
        return Plan("continue", f"it was interrupted, and {changes}" if changes else "")
    missing = why_incomplete(before.output)
    if missing is not None:
        return Plan("anew", f"{missing}, and {changes}") if changes else Plan("continue", missing)
    if not changes:
        return Plan("keep")
    if step.kind == "report":
        return Plan("continue", changes)
    kept = _free(step.output_dir.with_name(f"{step.output_dir.name}-before"))
    raise ValueError(
        f"{step.name} was finished with other options or data: {changes}; restore them, name another output_dir, or "
        f"run it again: `{shlex.join(['mv', str(step.output_dir), str(kept)])}` keeps its result, and steps that read "
        "it run again too"
    )


def _free(path: Path) -> Path:
    """Return the first of `path`, `path-2`, `path-3`... that does not exist."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], others) if not os.path.lexists(each))


def run_pipeline(
    pipeline: Pipeline, start: Callable[[Sequence[str]], int], say: Callable[[str], object] = print_text
) -> int:
    """Run the unfinished steps, each in its own process.

    A step is finished if its process succeeded and its output is unchanged. Other steps run: a training step continues
    from its newest complete checkpoint, or starts if there is none; judge and report always start. A step begins anew
    if an earlier step has written another model since; its old result is moved to `replaced`. After the last step, the
    win rates of all seeds are printed and saved together.

    Args:
        pipeline: The steps.
        start: Runs Python with these arguments and returns its exit code.
        say: Prints a line.

    Returns:
        The exit code of the step that failed; 128 plus the signal's number after a signal; or 0.

    Raises:
        InUseError: Another pipeline runs in the directory.
        OSError: The record cannot be written.
        ValueError: A step was finished with other options or data, the record is damaged, or the judge gave no
            verdict.
    """
    pipeline.output_dir.mkdir(parents=True, exist_ok=True)
    with locked(str(pipeline.output_dir)), _signals_noted() as noted:
        planned(pipeline)  # raises before anything is run
        return _run_steps(pipeline, start, say, noted)


def _run_steps(
    pipeline: Pipeline, start: Callable[[Sequence[str]], int], say: Callable[[str], object], noted: Sequence[int]
) -> int:
    record = read_record(pipeline.output_dir)
    for step in pipeline.steps:
        now = _now(step, pipeline, record)
        plan = _plan(step, record.get(step.name), now)
        if plan.action == "keep":
            say(f"{step.name}: finished before, in {step.output_dir}")
            continue
        if noted:
            say(f"{signal.Signals(noted[0]).name}: the pipeline has ended before {step.name}; {_AGAIN}")
            return 128 + noted[0]
        if plan.reason:
            say(f"{step.name} {'begins anew' if plan.action == 'anew' else 'is run again'}: {plan.reason}")
        words = [*_prepare(step, plan, pipeline.output_dir, say), *step.argv()]
        record[step.name] = now
        write_record(pipeline.output_dir, record)
        launch = pipeline.launch if step.kind in TRAINING else ()
        say(f"{step.name}: {shlex.join(redact_words(['rlhf-ppo', step.command, *words]))}")
        if code := start(["-m", *launch, *(["-m"] if launch else []), "rlhf_ppo", step.command, *words]):
            say(f"{step.name} has ended with exit code {code}; {_AGAIN}")
            return 128 + noted[0] if noted else code  # a launcher of several processes ends with 1 after a signal
        record[step.name] = replace(now, output=_written(step))
        write_record(pipeline.output_dir, record)
    rates = keep_win_rates(pipeline)
    verdict = keep_verdict(pipeline)
    if verdict:
        say("\n".join(verdict.lines()))
    if rates and (verdict is None or len(rates.rates) > 1):  # the verdict has that of one seed
        say("\n".join(rates.lines()))
    say(f"All steps are finished: {', '.join(step.name for step in pipeline.steps)}, in {pipeline.output_dir}")
    return 0


_AGAIN = "the same command continues"


def _written(step: Step) -> dict[str, str]:
    """Return the hashes of a step's output.

    Raises:
        ValueError: It has written nothing, or the judge gave no verdict.
    """
    files = list(step.written())
    if not files:
        raise ValueError(
            f"{step.name} has ended well, but {step.output_dir} holds no model; run the same command again"
        )
    if step.kind == "judge":
        check_result(step)
    return hashes_of(files)


def _prepare(step: Step, plan: Plan, pipeline_dir: Path, say: Callable[[str], object]) -> list[str]:
    """Return the option with which a step continues; move the old files of a step that begins anew."""
    checkpoint = None if plan.action == "anew" else _newest_checkpoint(step)
    # PPO starts no new run beside damaged checkpoints.
    is_damaged = step.kind == "ppo" and checkpoint is None and finished_checkpoints(step.output_dir)
    if (plan.action == "anew" or is_damaged) and step.kind != "report" and step.output_dir.exists():
        kept = _free(pipeline_dir / REPLACED / step.name)
        kept.parent.mkdir(exist_ok=True)
        os.rename(step.output_dir, kept)
        say(f"{step.name}: its earlier files are in {kept}")
    if step.kind not in TRAINING:
        for path in step.written():  # the judge would write beside them
            path.unlink()
    return [] if checkpoint is None else ["--resume_from_checkpoint", checkpoint]


def _newest_checkpoint(step: Step) -> str | None:
    if step.kind == "ppo":  # it chooses the checkpoint, and warns of damaged ones
        return "true" if last_complete_checkpoint(str(step.output_dir), warn=lambda _: None) else None
    newest = newest_trl_checkpoint(step.output_dir) if step.kind in TRAINING else None
    return None if newest is None else str(newest)


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Yield a list of the signals that arrive; the pipeline ends after the step that runs then."""
    noted: list[int] = []

    def note(number: int) -> None:
        noted.append(number)
        if number == signal.SIGHUP:
            discard_closed_terminal()

    with _handling((*_PASSED_ON, signal.SIGINT), note):
        yield noted


@contextmanager
def _handling(numbers: Sequence[int], handle: Callable[[int], None]) -> Iterator[None]:
    """Call a function for each of these signals, then the previous handler; ignored signals stay ignored.

    Only the main thread can handle signals; in others this does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.getsignal(number) for number in numbers if is_main}
    previous = {number: handler for number, handler in previous.items() if handler not in (signal.SIG_IGN, None)}

    def both(number: int, frame: Any) -> None:
        handle(number)
        if callable(before := previous[number]) and before is not signal.default_int_handler:
            before(number, frame)

    for number in previous:
        signal.signal(number, both)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def start_python(words: Sequence[str]) -> int:
    """Run Python, pass signals on to it, and wait for its end.

    Args:
        words: Its arguments.

    Returns:
        Its exit code; 128 plus the signal's number if a signal ended it.
    """
    words, environment = _without_secrets(words)
    parent, signals = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)

    def begin() -> None:
        end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)

    try:
        process = subprocess.Popen([sys.executable, *words], env=environment, preexec_fn=begin)
        with _passing_on(process):
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)  # one that came before is passed on now
            code = process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    return 128 - code if code < 0 else code


def _without_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command line without secrets, and the environment that holds them."""
    start = next((place for place, word in enumerate(words, 1) if word == "rlhf_ppo"), len(words))
    hidden, secrets = hide_from_ps(words[start:])
    return [*words[:start], *hidden], {**os.environ, **secrets}


def end_with_parent(parent: int) -> None:
    """Let the system send SIGTERM to this process when its parent dies, so that no step outlives the pipeline.

    Args:
        parent: Id of the parent, which may have died already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass SIGTERM and SIGHUP on; the process gets SIGINT from the terminal itself."""
    with _handling(_PASSED_ON, process.send_signal), _handling([signal.SIGINT], lambda _: None):
        yield


# ---- Win rates over seeds ----

RESULTS = "results.json"
"""File in the pipeline's directory with the figures of `SeedWinRates`."""


def keep_win_rates(pipeline: Pipeline) -> SeedWinRates | None:
    """Read the judge's result of each seed, and write `results.json`.

    Args:
        pipeline: The steps, all finished.

    Returns:
        The win rates; None without a judge.

    Raises:
        ValueError: A result of the judge is missing or damaged.
    """
    steps = [step for step in pipeline.steps if step.kind == "judge"]
    if not steps:
        return None
    results = [check_result(step) for step in steps]
    found = SeedWinRates(
        [step.options["seed"] for step in steps],
        [each["win_rate"] for each in results],
        [each["interval"] for each in results],
        [each.get("length_controlled") for each in results],
    )
    write_json(pipeline.output_dir / RESULTS, found.as_json())
    return found


def keep_verdict(pipeline: Pipeline) -> Verdict | None:
    """Make the verdict on the policies of all seeds, and write it as `verdict.json`.

    Args:
        pipeline: The steps, all finished.

    Returns:
        The verdict; None if the pipeline trains no policy whose run can be read.
    """
    runs = recorded_runs([step.output_dir for step in pipeline.steps if step.kind == "ppo"])
    if not runs:
        return None
    verdict = verdict_of(runs)
    verdict.save(pipeline.output_dir)
    return verdict


def check_result(step: Step) -> dict[str, Any]:
    """Return the judge's result of a seed.

    Args:
        step: The judge's step.

    Raises:
        ValueError: It is missing or damaged, or there is no verdict.
    """
    folder, again = step.output_dir, "run the same command again"
    try:
        result = read_win_rate(folder / "win_rate.json", ("win_rate", "interval"))
    except ValueError as error:
        raise ValueError(f"{folder} does not hold the judge's result: {error}; {again}") from None
    if result["win_rate"] is None:
        raise ValueError(f"the judge gave no verdict in {folder}: all failed; {again}")
    return result


PROGRAM = "rlhf-ppo pipeline"


def check_and_run(file: str, dry_run: bool) -> None:
    """Check all remaining steps of a pipeline, then run them.

    Args:
        file: The pipeline's file.
        dry_run: Print the remaining steps instead.

    Raises:
        SystemExit: The file or an option of a step is wrong, before anything is run; or a step has failed.
    """
    with user_errors(PROGRAM):
        read = read_pipeline(file)
        plans = planned(read)
    problems = check_steps(read, [step for step in read.steps if plans[step.name] != Plan("keep")])
    problems.fail(PROGRAM)
    if dry_run:
        _show(read, plans)
        print_text("Dry run: no problems found.")
        return
    with user_errors(PROGRAM):
        code = run_pipeline(read, start_python)
    if code:
        raise SystemExit(code)


def check_steps(pipeline: Pipeline, steps: Iterable[Step]) -> Problems:
    """Check options, data and models of steps as their commands do; each message begins with its section.

    A model that an earlier step will write is checked as the model that this step starts from. One seed is checked.

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
        from rlhf_ppo.training.checks import check_writable

        parser = report_parser()
        parser.raises_errors = True
        with problems.collecting():
            output = parser.parse_args(step.argv()).output
            check_writable(os.path.dirname(output), "output")
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
