"""`rlhf-ppo pipeline`: SFT, reward model, PPO, judge and report from one file, each in its own process.

`pipeline.json` lists the started steps: their options, when they finished, and when the steps that they read finished.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.config.checks import PlainWords
from rlhf_ppo.data.files import write_json
from rlhf_ppo.ranks.signals import discard_closed_terminal
from rlhf_ppo.reporting.judgements import JUDGED, win_rate_beside
from rlhf_ppo.reporting.verdict import recorded_runs, verdict_of
from rlhf_ppo.run.checkpoints import free_path, last_complete_checkpoint, locked
from rlhf_ppo.terminal import hide_from_ps, print_text, redact_words, redacted

PROGRAM = "rlhf-ppo pipeline"
COMMANDS = {
    "sft": "sft",
    "reward": "reward",
    "judge_reward": "reward",
    "ppo": "train",
    "judge": "judge",
    "report": "report",
}
"""Sections of a pipeline's file that are steps, in order, and their commands."""
REWARD_MODELS = ("reward", "judge_reward")
TRAINING = ("sft", *REWARD_MODELS, "ppo")
OTHERS = ("output_dir", "seeds", "launch", "common")

RECORD = "pipeline.json"
REPLACED = "replaced"
"""Subdirectory of the pipeline's directory for results that no step reads any more."""

Record = dict[str, dict[str, Any]]
"""For each started step its `options`, its `inputs` (for each step that it reads, when that finished), and when it
`finished`, or None."""


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: Its name, such as `sft`, or `ppo-seed2` with several seeds.
        kind: A key of `COMMANDS`.
        output_dir: Its output directory.
        options: Its options, by name.
        runs: Directories of the runs that a report is about.
    """

    name: str
    kind: str
    output_dir: Path
    options: Mapping[str, object]
    runs: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """Return the arguments of the command."""
        return [*self.runs, *(word for name in self.options for word in self._option(name))]

    def _option(self, name: str) -> list[str]:
        words = self._words(name)
        if len(words) == 1 and words[0].startswith("-"):  # else argparse takes it for an option
            return [f"--{name}={words[0]}"]
        return [f"--{name}", *words]

    def _words(self, name: str) -> list[str]:
        value = self.options[name]
        return [
            json.dumps(word) if isinstance(word, dict | bool) else str(word)
            for word in (value if isinstance(value, list) else [value])
        ]

    def names(self, directory: Path) -> bool:
        """Return whether the step reads a directory or a path in it, which one of its options names."""
        read = os.path.realpath(directory)
        words = [word for name in self.options if name != "output_dir" for word in self._words(name)]
        return any(Path(os.path.realpath(os.path.expanduser(word))).is_relative_to(read) for word in words)

    def recorded_options(self) -> dict[str, Any]:
        """Return the options as JSON values, without secrets."""
        return json.loads(json.dumps(redacted(dict(self.options)), default=str))

    def has_output(self) -> bool:
        """Return whether the step's result exists; a report is always written again."""
        if self.kind == "judge":
            return win_rate_beside(self.output_dir / f"{JUDGED}.parquet").exists()
        return self.kind in TRAINING and any(self.output_dir.glob("*.safetensors"))

    def has_checkpoint(self) -> bool:
        """Return whether the step would continue from a checkpoint."""
        return self.kind in TRAINING and last_complete_checkpoint(self.output_dir) is not None


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's file.

    Attributes:
        output_dir: The directory of all steps' directories.
        steps: The steps, in order.
        launch: Module and arguments that launch training steps; empty to start them directly.
    """

    output_dir: Path
    steps: tuple[Step, ...]
    launch: tuple[str, ...] = ()

    def inputs_of(self, step: Step, record: Record) -> dict[str, str | None]:
        """Return the earlier steps whose output a step reads, and when they finished."""
        earlier = self.steps[: self.steps.index(step)]
        inputs = [other.name for other in earlier if step.names(other.output_dir)]
        return {name: record.get(name, {}).get("finished") for name in inputs}


# ---- The file ----


def read_pipeline(path: str | Path) -> Pipeline:
    """Read a pipeline's file.

    A later step uses the models of earlier steps unless its section names others: the reward models and the policy
    start from the model of `sft`; the model of `reward` scores PPO's responses; the judge compares the policy with the
    model of `sft`, by the model of `judge_reward`, and writes into the policy's directory, where model card and report
    find the result. A seed keeps the name of the step in which it was started.

    Args:
        path: A YAML file with the sections `COMMANDS`, and `output_dir`, `seeds`, `launch` and `common`.

    Raises:
        OSError: The file does not exist.
        ValueError: A section is wrong; the message names it and what to write.
    """
    try:
        content = yaml.load(Path(os.path.expanduser(path)).read_text(encoding="utf-8"), PlainWords)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not content.get("output_dir"):
        raise ValueError(f"{path} must name an output_dir, and hold sections such as `ppo:`, each with options")
    if unknown := content.keys() - {*COMMANDS, *OTHERS}:
        raise ValueError(f"{path} has the unknown sections {sorted(unknown)}; use {[*OTHERS, *COMMANDS]}")
    for name in {"common", *COMMANDS} & content.keys():
        options = content[name] = content[name] or {}
        if not isinstance(options, dict) or options.keys() & {"output_dir", *(["seed"] if name == "ppo" else [])}:
            raise ValueError(
                f"{name}={options!r:.80} must be options, one per line, without output_dir; PPO's seeds are at the "
                "top, such as `seeds: [0, 1, 2]`"
            )
    seeds = content.get("seeds") or [0]
    seeds = seeds if isinstance(seeds, list) else [seeds]
    if "report" in content and "ppo" not in content:
        raise ValueError(f"{path} has a section `report` without `ppo`, whose runs it shows: leave it out")
    folder = Path(os.path.expanduser(content["output_dir"]))
    steps = tuple(_steps(folder, content, _policies(seeds, read_record(folder))))
    launch = content.get("launch")
    if launch and not os.path.isfile(os.path.expanduser(launch)):
        raise ValueError(f"launch={launch!r} is no file: `rlhf-ppo configs .` writes accelerate_configs/ here")
    words = ("accelerate.commands.launch", "--config_file", os.path.expanduser(launch)) if launch else ()
    return Pipeline(folder, steps, words)


def _policies(seeds: Sequence[int], record: Record) -> dict[int, str]:
    """Name the step of each seed; a started seed keeps its name, and thus its result, if other seeds come or go."""
    started = {entry["options"]["seed"]: name for name, entry in record.items() if name.startswith("ppo")}
    alone = "ppo" if len(seeds) == 1 and "ppo" not in record else "ppo-seed{}"
    return {seed: started.get(seed, alone.format(seed)) for seed in seeds}


def _steps(folder: Path, content: Mapping[str, Any], policies: Mapping[int, str]) -> Iterator[Step]:
    common = content.get("common", {})
    models = {name: str(folder / name) for name in ("sft", *REWARD_MODELS) if name in content}
    for name in models:
        start = {"model_name_or_path": models.get("sft")} if name != "sft" else {}
        yield _step(name, name, folder / name, start | common | content[name])
    if "ppo" in content:
        start = {"sft_model_path": models.get("sft"), "reward_model_path": models.get("reward")}
        options = start | common | content["ppo"]
        _check_ppo(options)
        for seed, name in policies.items():
            yield _step(name, "ppo", folder / name, options | {"seed": seed})
    if "judge" in content:
        judge = content["judge"]
        for seed, policy in policies.items():
            start: dict[str, Any] = {"seed": seed}
            if "model_column" not in judge and "ppo" in content:
                start["model"] = str(folder / policy)
            if "opponent_column" not in judge:
                start["opponent"] = models.get("sft")
            if "judge" not in judge:
                start["judge_model"] = models.get("judge_reward")
            yield _step(policy.replace("ppo", "judge"), "judge", folder / policy / JUDGED, start | judge)
    if "report" in content:
        runs = tuple(str(folder / name) for name in policies.values())
        options = {"output": str(folder / "report.html"), **content["report"]}
        yield Step("report", "report", folder, options, runs)


def _step(name: str, kind: str, place: Path, options: Mapping[str, object]) -> Step:
    stated = {key: value for key, value in options.items() if value is not None}
    return Step(name, kind, place, {**stated, "output_dir": str(place)})


def _check_ppo(options: Mapping[str, object]) -> None:
    """Raise if no model or reward is named: the defaults, those of TRL's script, are models of the hub."""
    if "config" in options:
        return  # the file may name them
    if options.get("sft_model_path") is None:
        raise ValueError("ppo has no language model to start from: write a section `sft`, or sft_model_path")
    if not any(options.get(name) for name in ("reward_model_path", "reward_funcs", "environment")):
        raise ValueError(
            "ppo has no reward: write a section `reward`, or reward_model_path, reward_funcs or environment"
        )


# ---- Running ----


def read_record(output_dir: Path) -> Record:
    """Read `pipeline.json`; a directory without one gives an empty record."""
    path = output_dir / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def check_and_run(file: str, dry_run: bool) -> None:
    """Check all remaining steps of a pipeline, then run them.

    Args:
        file: The pipeline's file.
        dry_run: Print the remaining steps instead.

    Raises:
        SystemExit: The file or an option of a step is wrong, before anything is run; or a step has failed.
    """
    with user_errors(PROGRAM):
        pipeline = read_pipeline(file)
        record = read_record(pipeline.output_dir)
        remaining: list[Step] = []
        for step in pipeline.steps:
            reads_newer = any(step.names(other.output_dir) for other in remaining)
            if reads_newer or not is_finished(step, pipeline, record):
                remaining.append(step)
    check_steps(remaining)
    if dry_run:
        for step in remaining:
            print_text(f"{step.name}: {_shown(step, step.argv())}")
        return
    with user_errors(PROGRAM):
        code = run_pipeline(pipeline)
    if code:
        raise SystemExit(code)


def check_steps(steps: Iterable[Step]) -> None:
    """Check options and data of steps as their commands do; of several seeds, one is checked.

    Raises:
        SystemExit: An option is wrong; the message begins with the section.
    """
    from rlhf_ppo.cli.arguments import parse
    from rlhf_ppo.cli.judge import chat_judge, load_rows
    from rlhf_ppo.cli.judge_arguments import JudgeArguments
    from rlhf_ppo.cli.training_commands import parse_step
    from rlhf_ppo.rewards.resolve import resolve_rewards

    for kind, step in {step.kind: step for step in steps if step.kind != "report"}.items():
        if kind == "judge":
            (args,) = parse((JudgeArguments,), f"{PROGRAM}: {kind}", step.argv())
            with user_errors(f"{PROGRAM}: {kind}"):
                resolve_rewards(args.judge)
                load_rows(args)
                if args.asks_chat_model:
                    chat_judge(args)
        else:
            parse_step(COMMANDS[kind], step.argv(), f"{PROGRAM}: {kind}")


def is_finished(step: Step, pipeline: Pipeline, record: Record) -> bool:
    """Return whether a step has finished, its output exists, and no step that it reads is new or has run since.

    Raises:
        ValueError: It was finished, or interrupted after its first checkpoint, with other options.
    """
    entry = record.get(step.name)
    if entry is None or _new_inputs(entry, pipeline.inputs_of(step, record)):
        return False
    finished = entry["finished"] is not None and step.has_output()
    if not finished and not step.has_checkpoint():
        return False
    now = step.recorded_options()
    if changed := [name for name in {**entry["options"], **now} if entry["options"].get(name) != now.get(name)]:
        kept = free_path(step.output_dir.with_name(f"{step.output_dir.name}-before"))
        changes = ", ".join(f"{name}={entry['options'].get(name)!r} is now {now.get(name)!r}" for name in changed)
        raise ValueError(
            f"{step.name} was {'finished' if finished else 'interrupted'} with other options: {changes}; restore "
            f"them, name another output_dir, or run it again: `{shlex.join(['mv', str(step.output_dir), str(kept)])}` "
            "keeps its files, and steps that read them run again too"
        )
    return finished


def _new_inputs(entry: Mapping[str, Any], inputs: Mapping[str, str | None]) -> list[str]:
    """Return the steps that a step reads now, and did not read as they are now when it was started."""
    before = entry["inputs"]
    return [name for name, finished in inputs.items() if name not in before or before[name] != finished]


def run_pipeline(
    pipeline: Pipeline,
    start: Callable[[Sequence[str]], int] | None = None,
    say: Callable[[str], object] = print_text,
) -> int:
    """Run the unfinished steps, each in its own process.

    A training step that was interrupted continues from its newest complete checkpoint. A step whose input was written
    again starts over; its old result is moved to `replaced`. After the last step, the verdict is printed and saved.

    Args:
        pipeline: The steps.
        start: Runs Python with these arguments and returns its exit code; None starts a process.
        say: Prints a line.

    Returns:
        The exit code of the step that failed; 128 plus the signal's number after a signal; or 0.

    Raises:
        InUseError: Another pipeline runs in the directory.
        ValueError: A step was finished, or interrupted after its first checkpoint, with other options.
    """
    pipeline.output_dir.mkdir(parents=True, exist_ok=True)
    with locked(str(pipeline.output_dir)), _signals() as signals:
        record, num_judged = read_record(pipeline.output_dir), 0
        for number, step in enumerate(pipeline.steps):
            if is_finished(step, pipeline, record):
                say(f"{step.name}: finished before, in {step.output_dir}")
                continue
            code = 0
            if signals.number is None:
                say(f"Steps left: {', '.join(other.name for other in pipeline.steps[number:])}")
                code = _run(step, pipeline, record, start or partial(start_python, signals), say)
            if signals.number is not None or code:
                say(f"The pipeline ended in {step.name} with exit code {code}; run the same command to continue")
                return 128 + signals.number if signals.number is not None else code
            num_judged += step.kind == "judge"
    runs = recorded_runs([step.output_dir for step in pipeline.steps if step.kind == "ppo"])
    if runs:
        verdict = verdict_of(runs)
        verdict.save(pipeline.output_dir)
        if not num_judged == len(runs) == 1:  # the judge's step has printed it
            say("\n".join(verdict.lines()))
    say(f"All steps are finished: {', '.join(step.name for step in pipeline.steps)}, in {pipeline.output_dir}")
    return 0


def _run(
    step: Step,
    pipeline: Pipeline,
    record: Record,
    start: Callable[[Sequence[str]], int],
    say: Callable[[str], object],
) -> int:
    """Run a step, record it, and return its exit code."""
    inputs, before = pipeline.inputs_of(step, record), record.get(step.name)
    words = step.argv()
    if step.kind == "judge":  # it would write beside its earlier table
        table = step.output_dir / f"{JUDGED}.parquet"
        for path in (table, win_rate_beside(table)):
            path.unlink(missing_ok=True)
    elif step.kind in TRAINING and step.output_dir.exists():
        if before is not None and (new := _new_inputs(before, inputs)):
            kept = free_path(pipeline.output_dir / REPLACED / step.name)
            kept.parent.mkdir(exist_ok=True)
            os.rename(step.output_dir, kept)
            say(f"{step.name} starts over, because {' and '.join(new)} ran again; its earlier files are in {kept}")
        elif step.has_checkpoint():
            words += ["--resume_from_checkpoint", "true"]
    entry = record[step.name] = {"options": step.recorded_options(), "inputs": inputs, "finished": None}
    write_json(pipeline.output_dir / RECORD, record)
    launch = pipeline.launch if step.kind in TRAINING else ()
    say(f"{step.name}: {_shown(step, words)}")
    code = start(["-m", *launch, *(["-m"] if launch else []), "rlhf_ppo", COMMANDS[step.kind], *words])
    if code == 0:
        entry["finished"] = datetime.now(UTC).isoformat()
        write_json(pipeline.output_dir / RECORD, record)
    return code


def _shown(step: Step, words: Sequence[str]) -> str:
    return shlex.join(redact_words(["rlhf-ppo", COMMANDS[step.kind], *words]))


# ---- Processes ----


@dataclass
class Signals:
    """A received signal, and the running step to which signals are passed on."""

    number: int | None = None
    process: subprocess.Popen[bytes] | None = None

    def receive(self, number: int, frame: object) -> None:
        """Note a signal and pass it on; SIGINT to all processes of the step, as a terminal does."""
        self.number = number
        if number == signal.SIGHUP:
            discard_closed_terminal()
        if self.process is not None:
            self.pass_on(self.process)

    def pass_on(self, process: subprocess.Popen[bytes]) -> None:
        """Send the signal to a step that may have ended."""
        with suppress(ProcessLookupError):
            if self.number == signal.SIGINT:
                os.killpg(process.pid, signal.SIGINT)
            elif self.number is not None:
                process.send_signal(self.number)


@contextmanager
def _signals() -> Iterator[Signals]:
    """Let signals end the pipeline after the running step; ignored signals stay ignored, as under nohup."""
    received = Signals()
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    previous = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number in numbers if previous[number] != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, received.receive)
    try:
        yield received
    finally:
        for number in handled:
            signal.signal(number, previous[number])


def start_python(signals: Signals, words: Sequence[str]) -> int:
    """Run Python, pass signals on to it, and wait for its end.

    Args:
        signals: Gets the process.
        words: Arguments of Python; secrets among those of the command are passed through the environment.

    Returns:
        Its exit code; 128 plus the signal's number if a signal ended it.
    """
    first = list(words).index("rlhf_ppo") + 1
    hidden, secrets = hide_from_ps(words[first:])
    # In its own group it gets no Ctrl+C from the terminal, only the one that is passed on.
    command = [sys.executable, *words[:first], *hidden]
    signals.process = subprocess.Popen(command, env={**os.environ, **secrets}, process_group=0)
    signals.pass_on(signals.process)  # one that came before
    code = signals.process.wait()
    signals.process = None
    return 128 - code if code < 0 else code
