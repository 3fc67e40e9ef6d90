"""Which steps of a pipeline run, with which inputs, and what happens after an interruption."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.cli.main import pipeline as command
from rlhf_ppo.cli.pipeline import Signals, read_pipeline, run_pipeline, start_python
from rlhf_ppo.reporting.verdict import Verdict
from tests.conftest import save_models, tiny_policy
from tests.pipeline.stand_ins import NAMES, TEXT, Killed, Steps, outputs

TRAINING = NAMES[:4]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(text: str = TEXT, strike: Callable[[str, str], None] = lambda *_: None) -> tuple[dict[str, bool], int | None]:
    """Run a pipeline until it ends; return which steps ran, each with whether it continued, and the exit code."""
    Path("run.yaml").write_text(text)
    steps, code = Steps(strike), None
    try:
        code = run_pipeline(read_pipeline("run.yaml"), steps)
    except Killed:
        pass
    return steps.started, code


def at(step: str, moment: str, act: Callable[[], Any]) -> Callable[[str, str], None]:
    return lambda name, now: act() if (name, now) == (step, moment) else None


def fail(error: type[BaseException]) -> None:
    raise error


def expect(begun: str, continued: str = "") -> dict[str, bool]:
    return {name: name in continued.split() for name in begun.split()} | {"report": False}


@pytest.mark.parametrize("error", [OSError, Killed])
@pytest.mark.parametrize(
    ("step", "moment", "continues"),
    [
        ("sft", "begins", False), ("sft", "saved", True), ("reward", "ends", True), ("ppo", "begins", False),
        ("ppo", "saved", True), ("ppo", "ends", True), ("judge", "ends", False),
    ],
)  # fmt: skip
def test_an_interrupted_pipeline_ends_as_one_that_was_left_alone(
    step: str, moment: str, continues: bool, error: type[BaseException]
) -> None:
    started, code = run(TEXT, at(step, moment, lambda: fail(error)))
    assert list(started) == NAMES[: NAMES.index(step) + 1] and code == (2 if error is OSError else None)
    assert run() == ({name: name == step and continues for name in NAMES[NAMES.index(step) :]}, 0)
    assert run() == (expect(""), 0)  # the report is always written again

    found = dict(outputs())
    shutil.rmtree("out")
    run()
    assert found == dict(outputs())


def test_steps_begin_anew_after_a_step_that_they_read_and_no_other() -> None:
    run()
    shutil.rmtree("out/reward")
    assert run()[0] == expect("reward ppo judge")
    assert Path("out/replaced/ppo/checkpoint-1").is_dir()  # nothing is deleted

    Path("out/ppo/model.safetensors").unlink()
    assert run()[0] == expect("ppo judge", continued="ppo")
    shutil.rmtree("out/sft")
    run(TEXT, at("ppo", "saved", lambda: fail(Killed)))
    assert run()[0] == expect("ppo judge", continued="ppo")
    assert sorted(path.name for path in Path("out/replaced").iterdir()) == [
        "judge_reward", "ppo", "ppo-2", "reward",
    ]  # fmt: skip


def test_a_dry_run_shows_the_steps_that_begin_anew(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("rlhf_ppo.cli.pipeline.check_steps", lambda steps: None)
    run()
    shutil.rmtree("out/reward")
    capsys.readouterr()
    command(["run.yaml", "--dry_run"])
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "reward", "ppo", "judge", "report",
    ]  # fmt: skip


def test_a_finished_step_with_other_options_is_an_error_that_says_what_to_do() -> None:
    run()
    before, changed = dict(outputs()), TEXT.replace("prompts.jsonl", "other.jsonl")
    with pytest.raises(
        ValueError, match=r"ppo was .* other options: dataset_name='prompts.jsonl' is now 'oth"
    ) as error:
        run(changed)
    assert dict(outputs()) == before

    subprocess.run(shlex.split(str(error.value).split("`")[1]), check=True)
    assert run(changed)[0] == expect("ppo judge")


def test_a_step_that_no_longer_reads_another_has_other_options(capsys: Any) -> None:
    """Its finished result stays."""
    run()
    before = dict(outputs())
    with pytest.raises(ValueError, match="judge was finished with other options: judge_model="):
        run(TEXT.replace("judge: {", "judge: {judge_model: other, "))
    assert dict(outputs()) == before

    shutil.rmtree("out/reward")
    run()
    assert "ppo starts over, because reward ran again;" in capsys.readouterr().out


def test_a_step_does_not_continue_with_other_options() -> None:
    """Interrupted before its first checkpoint it takes them; later it would mix two runs."""
    run(TEXT, at("ppo", "begins", lambda: fail(Killed)))
    changed = TEXT.replace("prompts.jsonl", "other.jsonl")
    run(changed, at("ppo", "saved", lambda: fail(Killed)))
    with pytest.raises(
        ValueError, match=r"ppo was interrupted .* dataset_name='other.jsonl' is now 'prompts"
    ) as error:
        run()
    assert run(changed, at("ppo", "ends", lambda: fail(Killed)))[0] == {"ppo": True}

    subprocess.run(shlex.split(str(error.value).split("`")[1]), check=True)
    assert run()[0] == expect("ppo judge")


def test_seeds_keep_their_results_when_others_come_and_go() -> None:
    run()
    assert run("seeds: [0, 3]" + TEXT)[0] == expect("ppo-seed3 judge-seed3")
    assert run("seeds: [3]" + TEXT)[0] == expect("")
    assert run("seeds: [7]" + TEXT)[0] == expect("ppo-seed7 judge-seed7")


def test_the_verdict_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge's step prints that of its own policy."""
    monkeypatch.setattr("rlhf_ppo.cli.pipeline.recorded_runs", list)
    monkeypatch.setattr("rlhf_ppo.cli.pipeline.verdict_of", lambda runs: Verdict("undecided", "The verdict.", ()))
    printed = []
    for text in (TEXT, TEXT, f"seeds: [0, 1]{TEXT}"):
        Path("run.yaml").write_text(text)
        lines: list[str] = []
        run_pipeline(read_pipeline("run.yaml"), Steps(), lines.append)
        printed.append(lines.count("The verdict."))
    assert printed == [0, 1, 1]  # judged now, judged before, and two policies


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_pipeline_after_the_running_step(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_ppo.cli.pipeline.discard_closed_terminal", lambda: None)
    before = signal.getsignal(number)
    started, code = run(TEXT, at("reward", "ends", lambda: signal.raise_signal(number)))

    assert list(started) == NAMES[:2] and code == 128 + number and signal.getsignal(number) == before
    assert run() == (dict.fromkeys(NAMES[2:], False), 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_pipeline_alone_reaches_the_step(number: int) -> None:
    signals = Signals()
    threading.Timer(1, signals.receive, (number, None)).start()
    started = time.monotonic()
    assert start_python(signals, ["-c", "import time; time.sleep(20)", "rlhf_ppo"]) == 128 + number
    assert time.monotonic() - started < 15


def test_the_steps_that_are_left_are_named() -> None:
    lines: list[str] = []
    Path("run.yaml").write_text(TEXT)
    run_pipeline(read_pipeline("run.yaml"), Steps(), lines.append)
    left = [line.removeprefix("Steps left: ").split(", ") for line in lines if line.startswith("Steps left")]
    assert left == [NAMES[number:] for number in range(len(NAMES))]


def test_training_steps_alone_are_launched() -> None:
    Path("run.yaml").write_text(f"launch: zero2.yaml{TEXT}")
    with pytest.raises(ValueError, match=r"launch='zero2.yaml' is no file: `rlhf-ppo configs .`"):
        read_pipeline("run.yaml")
    Path("zero2.yaml").touch()
    steps = Steps()
    run_pipeline(read_pipeline("run.yaml"), steps)

    launch = ["-m", "accelerate.commands.launch", "--config_file", "zero2.yaml", "-m", "rlhf_ppo"]
    assert [words[:6] == launch for words in steps.words] == [True] * 4 + [False] * 2
    assert steps.words[4][:3] == ["-m", "rlhf_ppo", "judge"]


# ---- Before anything is run, and with real processes ----

ROW = '{"text": "w4", "prompt": "w4 w5", "chosen": " w4", "rejected": " w7"}\n'
REAL = """
output_dir: out
common: {use_cpu: true, bf16: false, report_to: none}
sft: {model_name_or_path: base, dataset_name: rows.jsonl}
ppo: {dataset_name: rows.jsonl, reward_funcs: length}
judge: {dataset_name: rows.jsonl, judge: length}
"""


def prepare(text: str) -> None:
    Path("rows.jsonl").write_text(ROW * 600)
    save_models(base=tiny_policy())
    Path("run.yaml").write_text(text)


def never(*_: Any) -> int:
    pytest.fail("a step was run")


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("ppo: {", "ppo: {kl_coeff: 1, ", "rlhf-ppo pipeline: ppo: error: there is no option --kl_coeff"),
        ("judge: {dataset_name: rows", "judge: {dataset_name: gone", "judge: error: dataset_name='gone.jsonl'"),
        ("judge: length", "judge_model: gpt-4o-mini", "judge: error: OPENAI_API_KEY is not set"),
    ],
)
def test_a_mistake_in_a_later_step_is_reported_before_the_first_runs(
    right: str, wrong: str, words: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    prepare(REAL.replace(right, wrong))
    monkeypatch.setattr("rlhf_ppo.cli.pipeline.start_python", never)
    with pytest.raises(SystemExit, match="2"):
        command(["run.yaml"])
    assert words in capsys.readouterr().err


def test_a_second_pipeline_in_its_directory_is_refused(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(REAL)

    def started_again(*_: Any) -> int:
        monkeypatch.setattr("rlhf_ppo.cli.pipeline.start_python", never)
        with pytest.raises(SystemExit, match="2"):
            command(["run.yaml"])
        return 3

    monkeypatch.setattr("rlhf_ppo.cli.pipeline.start_python", started_again)
    with pytest.raises(SystemExit, match="3"):
        command(["run.yaml"])
    assert "output_dir='out' is in use: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_is_passed_on_and_ppo_continues_from_its_checkpoint() -> None:
    """A real pipeline, ended by SIGTERM while PPO runs, then continued."""
    prepare("""
output_dir: out
ppo: {sft_model_path: base, dataset_name: rows.jsonl, reward_funcs: length, response_length: 4, total_episodes: 80,
      per_device_train_batch_size: 4, gradient_accumulation_steps: 1, save_steps: 1, use_cpu: true, bf16: false}
""")
    words = [sys.executable, "-m", "rlhf_ppo", "pipeline", "run.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    wait_for(Path("out/ppo/checkpoint-2"))
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + signal.SIGTERM and "run the same command to continue" in " ".join(said.split())

    again = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "--resume_from_checkpoint true" in " ".join(again.split()) and Path("out/verdict.json").exists()


def wait_for(path: Path) -> None:
    until = time.monotonic() + 120
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)
