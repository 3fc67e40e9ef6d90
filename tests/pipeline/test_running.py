"""Which steps of a pipeline run, with what, and what happens when one is broken off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.cli.pipeline import pipeline as command
from rlhf_ppo.pipeline.running import newest_whole_checkpoint, run_pipeline, start_python
from rlhf_ppo.pipeline.steps import Pipeline, read_pipeline

TEXT = """
output_dir: out
sft: {model_name_or_path: base, dataset_name: texts.jsonl}
reward: {dataset_name: pairs.jsonl}
ppo: {dataset_name: prompts.jsonl}
judge: {dataset_name: prompts.jsonl, judge: length}
"""
NAMES = ["sft", "reward", "ppo", "judge"]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pipeline]:
    monkeypatch.chdir(tmp_path)
    for name in ("texts", "pairs", "prompts"):
        Path(f"{name}.jsonl").touch()

    def make(text: str = TEXT) -> Pipeline:
        Path("run.yaml").write_text(text)
        return read_pipeline("run.yaml")

    return make


class Starts:
    """Notes what is started, and writes what the judge would; a step that is named fails."""

    def __init__(self, failing: str | None = None) -> None:
        self.failing, self.words = failing, []

    def __call__(self, words: Sequence[str]) -> int:
        self.words.append(list(words))
        if "judge" in words:
            folder = Path(words[words.index("--output_dir") + 1])
            folder.mkdir(parents=True)
            (folder / "win_rate.json").write_text('{"win_rate": 0.75, "interval": [0.5, 1.0]}')
        return 3 if self.failing is not None and self.failing in words else 0

    @property
    def commands(self) -> list[str]:
        return [words[words.index("rlhf_ppo") + 1] for words in self.words]


def test_what_is_finished_is_not_run_again(read: Callable[..., Pipeline]) -> None:
    first, again = Starts(failing="train"), Starts()

    assert run_pipeline(read(), first) == 3 and first.commands == ["sft", "reward", "train"]
    assert run_pipeline(read(), again) == 0 and again.commands == ["train", "judge"]
    last, said = Starts(), []
    assert run_pipeline(read(), last, said.append) == 0 and last.words == []
    assert "Win rates:\n  seed 0: 75.00% (95% interval 50.00 to 100.00)" in said
    assert list(json.loads(Path("out/pipeline.json").read_text())) == NAMES


def test_a_finished_step_whose_options_have_changed_is_an_error(read: Callable[..., Pipeline]) -> None:
    run_pipeline(read(), Starts())
    changed = read(TEXT.replace("texts.jsonl", "others.jsonl"))

    with pytest.raises(ValueError, match=r"sft was .* other options: dataset_name='texts\.jsonl' is 'others"):
        run_pipeline(changed, Starts())
    Path("out/pipeline.json").write_text("{")
    with pytest.raises(ValueError, match=r"pipeline.json cannot be read"):
        run_pipeline(read(), Starts())


def test_a_training_step_goes_on_from_its_newest_whole_checkpoint(read: Callable[..., Pipeline]) -> None:
    states = {"checkpoint-2": "{}", "checkpoint-10": "{}", "checkpoint-20": '{"a', "checkpoint-30": ""}
    for name, state in states.items():
        Path("out/sft", name).mkdir(parents=True)
        if state:
            Path("out/sft", name, "trainer_state.json").write_text(state)
    Path("out/ppo/checkpoint-1").mkdir(parents=True)
    started = Starts()
    run_pipeline(read(), started)

    sft, reward, ppo, _ = started.words
    assert sft[sft.index("--resume_from_checkpoint") + 1] == "out/sft/checkpoint-10"
    assert "--resume_from_checkpoint" not in reward  # has none: from the beginning
    assert ppo[ppo.index("--resume_from_checkpoint") + 1] == "true"  # chooses by itself
    assert newest_whole_checkpoint(Path("nowhere")) is None


def test_a_judge_that_was_broken_off_leaves_nothing(read: Callable[..., Pipeline]) -> None:
    Path("out/ppo/judged").mkdir(parents=True)
    Path("out/ppo/judged/judged.parquet").touch()
    run_pipeline(read(), Starts())

    assert not Path("out/ppo/judged/judged.parquet").exists()


def test_launched_are_the_training_steps_alone(read: Callable[..., Pipeline]) -> None:
    Path("zero2.yaml").touch()
    started = Starts()
    run_pipeline(read(f"launch: zero2.yaml{TEXT}"), started)

    launch = ["-m", "accelerate.commands.launch", "--config_file", "zero2.yaml", "-m", "rlhf_ppo"]
    assert [words[:6] == launch for words in started.words] == [True, True, True, False]
    assert started.words[3][:3] == ["-m", "rlhf_ppo", "judge"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ppo: {", "ppo: {kl_coeff: 1, ", "pipeline: ppo: error: "),
        ("ppo: {", "ppo: {learning_rate: -1, ", "learning_rate=-1.0"),
        ("sft: {", "sft: {max_lenght: 1, ", "pipeline: sft: error: "),
        ("judge: length", "judge: length, judge_model: m", "give one of them"),
        ("prompts.jsonl, judge", "promts.jsonl, judge", "dataset_name='promts.jsonl': there is no such file"),
        ("ppo: {dataset_name: p", "ppo: {dataset_name: ./", "dataset_name='./rompts.jsonl': there is no such file"),
        ("ppo: {", "report: {outptu: x}\nppo: {", "pipeline: report: error: unrecognized arguments: --outptu"),
        ("ppo: {", "ppo: {reward_funcs: [lenght], ", "pipeline: ppo: error: reward_funcs holds 'lenght'"),
        (
            "ppo: {",
            "ppo: {reward_funcs: 'f.py:g', ",
            "pipeline: ppo: error: reward_funcs holds 'f.py:g', but there is",
        ),
        ("judge: length", "judge: lenght", "pipeline: judge: error: judge holds 'lenght'"),
        ("judge: length", "judge_model: gpt-4o-mini", "set the environment variable OPENAI_API_KEY"),
        ("ppo: {dataset_name: prompts.jsonl}", "", "pipeline: judge: error: model=None and model_column=None"),
    ],
)
def test_a_mistake_in_the_last_step_is_said_before_the_first_has_run(
    old: str, new: str, words: str, read: Callable[..., Pipeline], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(TEXT.replace(old, new))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("rlhf_ppo.cli.pipeline.start_python", lambda _: pytest.fail("a step was run"))
    with pytest.raises(SystemExit) as stopped:
        command(["run.yaml"])

    (sentence,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert stopped.value.code == 2 and sentence.startswith("rlhf-ppo pipeline") and words in sentence


def test_a_second_pipeline_in_its_directory_is_refused(
    read: Callable[..., Pipeline], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read()

    def started_again(_: Sequence[str]) -> int:
        monkeypatch.setattr("rlhf_ppo.cli.pipeline.start_python", lambda _: pytest.fail("a step was run"))
        with pytest.raises(SystemExit) as stopped:
            command(["run.yaml"])
        assert stopped.value.code == 2
        return 3

    monkeypatch.setattr("rlhf_ppo.cli.pipeline.start_python", started_again)
    with pytest.raises(SystemExit) as ended:
        command(["run.yaml"])

    assert ended.value.code == 3  # the first goes on, to where its own step fails
    assert "rlhf-ppo pipeline: error: output_dir='out' is in use: " in capsys.readouterr().err
    assert not list(Path("out").iterdir())


def test_a_dry_run_names_the_commands_and_starts_none(
    read: Callable[..., Pipeline], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(TEXT.replace("ppo: {", "ppo: {reward_weights: {reward_model: 2}, "))
    monkeypatch.setattr("rlhf_ppo.cli.pipeline.start_python", lambda _: pytest.fail("a step was run"))
    command(["run.yaml", "--dry-run"])

    printed = capsys.readouterr().out
    assert "ppo: rlhf-ppo train --sft_model_path out/sft --reward_model_path out/reward" in printed
    assert """ --reward_weights '{"reward_model": 2}' """ in printed  # for the shell
    with pytest.raises(SystemExit) as stopped:
        command(["nowhere.yaml"])
    assert stopped.value.code == 2 and "nowhere.yaml" in capsys.readouterr().err


def test_a_process_s_exit_code_comes_back() -> None:
    assert start_python(["-c", "raise SystemExit(7)"]) == 7
    assert start_python(["-c", "import os; os.kill(os.getpid(), 9)"]) == 128 + signal.SIGKILL


SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
PARENT = """
import os, time
from rlhf_ppo.pipeline import running

def slow(parent, end_with_parent=running.end_with_parent):
    print(os.getpid(), flush=True)
    time.sleep(1)
    end_with_parent(parent)

{}
raise SystemExit(running.start_python(['-c', {!r}]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("patch", ["", "running.end_with_parent = slow"], ids=["it runs", "it begins"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_step_does_not_outlive_the_pipeline(number: int, patch: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(patch, SLEEPER)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(next(line for line in parent.stdout if line.strip().isdecimal()))
    os.kill(parent.pid, number)
    code = parent.wait(20)

    until = time.monotonic() + 20
    while runs(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not runs(child)
    assert code == (128 + signal.SIGTERM if number == signal.SIGTERM else -signal.SIGKILL)


def runs(process: int) -> bool:
    """Tell whether a process is there, and not only because nobody has asked how it ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
