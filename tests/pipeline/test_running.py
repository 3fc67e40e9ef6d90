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

from rlhf_ppo.checkpoints.complete import newest_trl_checkpoint
from rlhf_ppo.cli.main import pipeline as command
from rlhf_ppo.cli.pipeline import run_pipeline, start_python
from rlhf_ppo.cli.steps import Pipeline, read_pipeline
from tests.conftest import save_models, tiny_policy
from tests.pipeline.stand_ins import Steps

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


ROW = '{"text": "w4", "prompt": "w4 w5", "chosen": " w4", "rejected": " w7"}\n'


@pytest.fixture
def real(read: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pipeline]:
    """Data and a model that the checks before the first step accept."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("cache").absolute())
    for name in ("texts", "pairs", "prompts"):
        Path(f"{name}.jsonl").write_text(ROW * 600)
    save_models(base=tiny_policy())
    return read


def failing(step: str) -> Callable[[str, str], None]:
    def strike(name: str, moment: str) -> None:
        if name == step:
            raise OSError

    return strike


def test_what_is_finished_is_not_run_again(read: Callable[..., Pipeline]) -> None:
    first, again = Steps(failing("ppo")), Steps()

    assert run_pipeline(read(), first) == 2 and first.names == ["sft", "reward", "ppo"]
    assert run_pipeline(read(), again) == 0 and again.names == ["ppo", "judge"]
    last, said = Steps(), list[str]()
    assert run_pipeline(read(), last, said.append) == 0 and last.words == []
    assert "Win rates:\n  seed 0: 75.00% (95% interval 50.00 to 100.00)" in said
    assert list(json.loads(Path("out/pipeline.json").read_text())) == NAMES


def test_a_finished_step_whose_options_have_changed_is_an_error(read: Callable[..., Pipeline]) -> None:
    run_pipeline(read(), Steps())
    changed = read(TEXT.replace("texts.jsonl", "others.jsonl"))

    with pytest.raises(ValueError, match=r"sft was .* other options or data: dataset_name='texts\.jsonl' is 'others"):
        run_pipeline(changed, Steps())


def test_a_training_step_goes_on_from_its_newest_whole_checkpoint(read: Callable[..., Pipeline]) -> None:
    states = {
        "checkpoint-2": "{}",
        "checkpoint-10": "{}",
        "checkpoint-20": '{"a',
        "checkpoint-30": "",
        "checkpoint-40": "{}",
    }
    for name, state in states.items():
        Path("out/sft", name, "optimizer_0").mkdir(parents=True)
        Path("out/sft", name, "made_of").touch()
        if state:
            Path("out/sft", name, "trainer_state.json").write_text(state)
    Path("out/sft/checkpoint-40/optimizer_0").rmdir()  # of save_only_model=True
    Path("out/sft/checkpoint-1").mkdir()
    Path("out/sft/checkpoint-1/made_of").touch()
    Path("out/ppo/checkpoint-1").mkdir(parents=True)
    started = Steps()
    run_pipeline(read(), started)

    sft = started.words[0]
    assert sft[sft.index("--resume_from_checkpoint") + 1] == "out/sft/checkpoint-10"
    assert started.started[1:3] == [("reward", False), ("ppo", False)]  # have none that is whole
    assert newest_trl_checkpoint(Path("nowhere")) is None


def test_checkpoints_of_ppo_that_are_all_damaged_are_moved_out_of_the_way(read: Callable[..., Pipeline]) -> None:
    """PPO starts no new run beside checkpoints that were once whole."""
    run_pipeline(read(), Steps())
    Path("out/ppo/model.safetensors").unlink()
    Path("out/ppo/checkpoint-1/made_of").write_text("damaged")
    started, said = Steps(), list[str]()
    run_pipeline(read(), started, said.append)

    assert started.started == [("ppo", False), ("judge", False)]
    assert "ppo is run again: out/ppo/model.safetensors is gone" in said
    assert "ppo: its earlier files are in out/replaced/ppo" in said
    assert Path("out/replaced/ppo/checkpoint-1").is_dir()


def test_what_is_kept_of_a_step_is_never_overwritten(read: Callable[..., Pipeline]) -> None:
    run_pipeline(read(), Steps())
    for number in range(3):
        Path("pairs.jsonl").write_text(f"{number}")
        Path("out/reward/model.safetensors").unlink()
        run_pipeline(read(), Steps())

    assert sorted(path.name for path in Path("out/replaced").iterdir()) == [
        "ppo", "ppo-2", "ppo-3", "reward", "reward-2", "reward-3",
    ]  # fmt: skip


def test_other_verdicts_in_the_judge_s_directory_stay(read: Callable[..., Pipeline]) -> None:
    run_pipeline(read(), Steps())
    for name in ("judged-2.parquet", "win_rate-2.json", "responses.parquet"):
        Path("out/ppo/judged", name).write_text("another judge's")
    Path("out/ppo/judged/win_rate.json").unlink()
    run_pipeline(read(), Steps())

    assert len(list(Path("out/ppo/judged").iterdir())) == 5


@pytest.mark.parametrize(
    ("win_rate", "words"),
    [('{"win_rate": null, "interval": null}', "no verdict"), ("{}", "lacks win_rate"), ("", "cut off")],
)
def test_a_judge_without_a_verdict_is_not_finished(win_rate: str, words: str, read: Callable[..., Pipeline]) -> None:
    class Silent(Steps):
        def judge(self, options: dict[str, str], runs: list[str]) -> None:
            super().judge(dict(options), runs)
            Path(options["output_dir"], "win_rate.json").write_text(win_rate)

    with pytest.raises(ValueError, match=f"{words}.*run the same command again"):
        run_pipeline(read(), Silent())
    again = Steps()
    run_pipeline(read(), again)
    assert again.names == ["judge"]


def test_a_step_that_wrote_nothing_is_not_finished(read: Callable[..., Pipeline]) -> None:
    with pytest.raises(ValueError, match="sft has ended well, but out/sft holds no model"):
        run_pipeline(read(), lambda _: 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_pipeline_after_a_step_that_ended_well(
    number: signal.Signals, read: Callable[..., Pipeline]
) -> None:
    def strike(name: str, moment: str) -> None:
        if (name, moment) == ("reward", "ends"):
            signal.raise_signal(number)

    before, said = signal.getsignal(number), list[str]()
    assert run_pipeline(read(), Steps(strike), said.append) == 128 + number
    assert said[-1] == f"{number.name}: the pipeline has ended before ppo; the same command continues"
    assert signal.getsignal(number) == before
    again = Steps()
    assert run_pipeline(read(), again) == 0 and again.names == ["ppo", "judge"]


def test_a_signal_gives_the_exit_code_where_a_launcher_gives_another(read: Callable[..., Pipeline]) -> None:
    def strike(name: str, moment: str) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise OSError

    assert run_pipeline(read(), Steps(strike)) == 128 + signal.SIGTERM


def test_the_end_of_the_terminal_is_no_error(read: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch) -> None:
    left = list[bool]()
    monkeypatch.setattr("rlhf_ppo.cli.pipeline.discard_closed_terminal", lambda: left.append(True))
    run_pipeline(read(), Steps(lambda *_: signal.raise_signal(signal.SIGHUP)))
    assert left


def test_a_signal_that_is_ignored_stays_ignored(read: Callable[..., Pipeline]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_pipeline(read(), Steps(lambda *_: signal.raise_signal(signal.SIGHUP))) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_launched_are_the_training_steps_alone(read: Callable[..., Pipeline]) -> None:
    Path("zero2.yaml").touch()
    started = Steps()
    run_pipeline(read(f"launch: zero2.yaml{TEXT}"), started)

    launch = ["-m", "accelerate.commands.launch", "--config_file", "zero2.yaml", "-m", "rlhf_ppo"]
    assert [words[:6] == launch for words in started.words] == [True, True, True, False]
    assert started.words[3][:3] == ["-m", "rlhf_ppo", "judge"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ppo: {", "ppo: {kl_coeff: 1, ", "ppo: there is no option --kl_coeff"),
        ("ppo: {", "ppo: {learning_rate: -1, ", "ppo: learning_rate=-1.0"),
        ("sft: {", "sft: {max_lenght: 1, ", "sft: there is no option --max_lenght"),
        ("sft: {", "sft: {config: none.yaml, ", "sft: --config 'none.yaml' cannot be read"),
        (
            "judge: length",
            "judge: length, judge_model: m",
            "judge: judge_model='m' and judge='length': give one of them",
        ),
        ("prompts.jsonl, judge", "promts.jsonl, judge", "judge: dataset_name='promts.jsonl': there is no such file"),
        (
            "ppo: {dataset_name: p",
            "ppo: {dataset_name: ./",
            "ppo: dataset_name='./rompts.jsonl': there is no such file",
        ),
        ("ppo: {", "report: {outptu: x}\nppo: {", "report: unrecognized arguments: --outptu"),
        ("ppo: {", "ppo: {reward_funcs: [lenght], ", "ppo: reward_funcs holds 'lenght'"),
        ("ppo: {", "ppo: {reward_funcs: 'f.py:g', ", "ppo: reward_funcs holds 'f.py:g', but there is"),
        ("ppo: {", "ppo: {gradient_accumulation_steps: 1000, ", "ppo: the training set has 540 prompts, fewer than"),
        ("judge: length", "judge: lenght", "judge: judge holds 'lenght'"),
        ("judge: length", "judge_model: gpt-4o-mini", "judge: the judge 'gpt-4o-mini' is asked at"),
        ("ppo: {dataset_name: prompts.jsonl}", "", "judge: model=None and model_column=None"),
        ("pairs.jsonl", "bare.jsonl", "reward: the data set has the columns ['a']"),
        ("texts.jsonl", "bare.jsonl", "sft: the data set has the columns ['a']"),
        ("model_name_or_path: base", "model_name_or_path: bsae", "sft: model_name_or_path='bsae' could not be loaded"),
    ],
)
def test_a_mistake_in_the_last_step_is_reported_before_the_first_has_run(
    old: str, new: str, words: str, real: Callable[..., Pipeline], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("bare.jsonl").write_text('{"a": 1}\n')
    real(TEXT.replace(old, new))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("rlhf_ppo.cli.pipeline.start_python", lambda _: pytest.fail("a step was run"))
    for options in ([], ["--dry-run"]):
        with pytest.raises(SystemExit) as stopped:
            command(["run.yaml", *options])

        (sentence,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert stopped.value.code == 2 and sentence.startswith(f"rlhf-ppo pipeline: error: {words}")


def test_the_problems_of_all_sections_are_in_one_list(
    real: Callable[..., Pipeline], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real(
        "output_dir: out\nseeds: [0, 1]\n"
        "sft: {model_name_or_path: none, dataset_name: gone.jsonl, max_lenght: 1}\n"
        "reward: {dataset_name: texts.jsonl, per_device_train_batch_size: two}\n"
        "ppo: {dataset_name: lost.jsonl, kl_coef: -1}\n"
        "judge: {dataset_name: away.jsonl, judge: lenght}\n"
        "report: {outptu: x}\n"
    )
    monkeypatch.setattr("rlhf_ppo.cli.pipeline.start_python", lambda _: pytest.fail("a step was run"))
    with pytest.raises(SystemExit, match="2"):
        command(["run.yaml"])

    first, *others = capsys.readouterr().err.splitlines()
    assert first == f"rlhf-ppo pipeline: error: {len(others)} problems:"
    sections = [line.removeprefix("  - ").partition(": ")[0] for line in others]
    assert sections == ["sft"] * 3 + ["reward"] + ["ppo"] * 2 + ["judge"] * 2 + ["report"], others
    assert "max_lenght" in others[0] and "'none' could not" in others[1] and "gone.jsonl" in others[2]
    assert "per_device_train_batch_size" in others[3]
    assert "kl_coef=-1" in others[4] and "lost.jsonl" in others[5]


def test_a_second_pipeline_in_its_directory_is_refused(
    real: Callable[..., Pipeline], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real()

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
    assert [path.name for path in Path("out").iterdir()] == ["pipeline.json"]  # and no lock


def test_a_dry_run_names_the_commands_and_starts_none(
    real: Callable[..., Pipeline], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real(TEXT.replace("ppo: {", "ppo: {reward_weights: {reward_model: 2}, "))
    monkeypatch.setattr("rlhf_ppo.cli.pipeline.start_python", lambda _: pytest.fail("a step was run"))
    command(["run.yaml", "--dry-run"])

    printed = capsys.readouterr().out
    assert "ppo: rlhf-ppo train --sft_model_path out/sft --reward_model_path out/reward" in printed
    assert """ --reward_weights '{"reward_model": 2}' """ in printed  # for the shell
    run_pipeline(real(TEXT), Steps())
    Path("out/sft/model.safetensors").unlink()
    capsys.readouterr()
    command(["run.yaml", "--dry-run"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("--output_dir out/sft  # out/sft/model.safetensors is gone")
    assert printed[1] == "reward: finished before; run again if sft writes something else this time"
    with pytest.raises(SystemExit) as stopped:
        command(["nowhere.yaml"])
    assert stopped.value.code == 2 and "nowhere.yaml" in capsys.readouterr().err


def test_a_process_s_exit_code_comes_back() -> None:
    assert start_python(["-c", "raise SystemExit(7)"]) == 7
    assert start_python(["-c", "import os; os.kill(os.getpid(), 9)"]) == 128 + signal.SIGKILL


BEGINS = "pipeline.end_with_parent = slow"
SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
PARENT = """
import os, time
from rlhf_ppo.cli import pipeline

def slow(parent, end_with_parent=pipeline.end_with_parent):
    print(os.getpid(), flush=True)
    time.sleep(1)
    end_with_parent(parent)

{}
raise SystemExit(pipeline.start_python(['-c', {!r}]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "patch"),
    [(signal.SIGHUP, ""), *((number, patch) for number in (signal.SIGTERM, signal.SIGKILL) for patch in ("", BEGINS))],
    ids=["HUP runs", "TERM runs", "TERM begins", "KILL runs", "KILL begins"],
)
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
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 128 + number)


def runs(process: int) -> bool:
    """Tell whether a process is there, and not only because nobody has asked how it ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
