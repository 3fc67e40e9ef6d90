"""A pipeline that is killed, signalled or without disk at any moment ends with the policy of one that was left alone.

`make test-kills` strikes at each of `MOMENTS` and at 50 random ones; the suite at a few. Every process is forked from
one that has imported everything, which takes longer than a step.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.cli.main import main
from rlhf_ppo.cli.pipeline import end_with_parent, run_pipeline
from rlhf_ppo.cli.steps import read_pipeline
from tests.conftest import save_models, tiny_policy, write_rows

OUT = Path("out")
TEXT = """
output_dir: out
common: {report_to: none, use_cpu: true, bf16: false, disable_tqdm: true, save_steps: 1, logging_steps: 1}
sft: {model_name_or_path: base, dataset_name: texts.jsonl, max_steps: 4, per_device_train_batch_size: 4}
reward: {dataset_name: pairs.jsonl, max_steps: 4, per_device_train_batch_size: 4}
judge_reward: {dataset_name: others.jsonl, max_steps: 4, per_device_train_batch_size: 4}
ppo: {dataset_name: prompts.jsonl, response_length: 6, total_episodes: 48, per_device_train_batch_size: 4,
      gradient_accumulation_steps: 1, num_mini_batches: 1, num_sample_generations: 0}
judge: {dataset_name: prompts.jsonl, num_prompts: 16, max_new_tokens: 6, num_shown: 0}
report: {}
"""


def written(path: str) -> Callable[[], bool]:
    return (OUT / path).exists


def finished(step: str) -> Callable[[], bool]:
    return lambda: step in finished_steps()


def finished_steps() -> list[str]:
    path = OUT / "pipeline.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    return [name for name, entry in record.items() if entry["output"] is not None]


MOMENTS: dict[str, Callable[[], bool]] = {
    "sft begins to save": written("sft/checkpoint-1"),
    "sft goes on after a save": written("sft/checkpoint-3"),
    "sft has ended": finished("sft"),
    "reward begins to save": written("reward/checkpoint-1"),
    "reward saves its model": written("reward/model.safetensors"),
    "judge_reward goes on after a save": written("judge_reward/checkpoint-2"),
    "judge_reward has ended": finished("judge_reward"),
    "ppo begins to save": written("ppo/checkpoint-1"),
    "ppo goes on after a save": written("ppo/checkpoint-5"),
    "ppo goes on, again": written("ppo/checkpoint-9"),
    "ppo saves its model": written("ppo/model.safetensors"),
    "ppo has ended": finished("ppo"),
    "judge runs": written("ppo/judged"),
    "judge has ended": finished("judge"),
}
"""When to kill: as soon as this is so."""

CHOSEN = ["reward saves its model", "ppo goes on after a save"]
NUM_KILLS = int(os.environ.get("NUM_KILLS", len(CHOSEN)))
RANDOM = 50 if NUM_KILLS >= 50 else 3
"""Random moments at which the pipeline is struck; `SEED` in the environment gives others."""

KILLS = CHOSEN if len(CHOSEN) >= NUM_KILLS else list(MOMENTS)[:NUM_KILLS]


def run(folder: str) -> None:
    """Run the pipeline in a process group of its own; the steps' output goes into a file."""
    os.setpgid(0, 0)
    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    raise SystemExit(run_pipeline(read_pipeline("run.yaml"), forked))


def forked(words: Sequence[str]) -> int:
    """Run `python -m rlhf_ppo ...` in a fork."""
    parent, process = os.getpid(), os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # as after exec
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent(parent)
    code: Any = 1
    try:
        main(list(words[2:]))
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except Exception:
        with suppress(OSError):  # of a full disk, too
            traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def start(folder: Path) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    process = context.Process(target=run, args=(str(folder),))
    process.start()
    return process


def end(process: Any, folder: Path) -> None:
    process.join(300)
    assert process.exitcode == 0, (folder / "output.txt").read_text()[-5000:]


def kill_all(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)


def kill_pipeline(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def terminate(pid: int) -> None:
    os.killpg(pid, signal.SIGTERM)


def hang_up(pid: int) -> None:
    os.killpg(pid, signal.SIGHUP)


def fill_disk(pid: int, size: int = 0) -> None:
    """Let no file of the pipeline and its step grow beyond a size, as if the disk had no more."""
    for each in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
        with suppress(ProcessLookupError):
            resource.prlimit(each, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def nearly_fill_disk(pid: int) -> None:
    fill_disk(pid, size=40_000)  # a model has 100 kB


FAULTS = [kill_all, kill_pipeline, terminate, hang_up, fill_disk, nearly_fill_disk]


def strike(process: Any, moment: Callable[[], bool], fault: Callable[[int], None], delay: float) -> None:
    """Let something happen to the pipeline, and wait until it has ended, and its step."""
    until = time.monotonic() + 300
    while not moment() and process.is_alive() and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(delay)
    with suppress(ProcessLookupError, FileNotFoundError):  # it has ended well before
        fault(process.pid)
    process.join(300)
    while time.monotonic() < until:
        try:
            os.killpg(process.pid, 0)  # the step, which takes SIGTERM
        except ProcessLookupError:
            return
        time.sleep(0.001)
    raise AssertionError("the step has outlived the pipeline")


def files() -> dict[str, tuple[int, str]]:
    """Return when each file of the finished steps was written, and its hash; not cards, to which the judge adds.

    The judge's lie in the policy's directory, and are written anew where it was broken off.
    """
    steps = finished_steps()
    found = [file for step in steps for file in (OUT / step).rglob("*") if file.is_file() and file.name != "README.md"]
    found = [file for file in found if "judge" in steps or OUT / "ppo/judged" not in file.parents]
    return {str(file): (file.stat().st_mtime_ns, hashed(file)) for file in found}


def hashed(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prepared(folder: Path) -> Path:
    folder.mkdir()
    save_models(folder, base=tiny_policy(max_position_embeddings=64))
    rows = {
        "texts": [{"prompt": f"w{row % 9}", "completion": f" w4 w{row % 7}"} for row in range(16)],
        "pairs": [{"prompt": "w1", "chosen": " w4 w4", "rejected": f" w{6 + row % 9}"} for row in range(16)],
        "others": [{"prompt": "w2", "chosen": " w4", "rejected": f" w{6 + row % 9} w7"} for row in range(16)],
        "prompts": [{"prompt": f"w{row % 20} w{row % 7}"} for row in range(48)],
    }
    for name, lines in rows.items():
        write_rows(folder / f"{name}.jsonl", lines)
    (folder / "run.yaml").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a pipeline that was left alone."""
    folder = prepared(tmp_path_factory.mktemp("pipeline") / "alone")
    end(start(folder), folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400 + 60 * len(KILLS))
def test_a_killed_pipeline_ends_as_one_that_was_left_alone(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared(tmp_path / "killed")
    monkeypatch.chdir(folder)
    chance, before, killed = random.Random(0), {}, []
    for number, name in enumerate(KILLS):
        process = start(folder)
        strike(process, MOMENTS[name], (kill_all, kill_pipeline)[number % 2], delay=chance.uniform(0, 0.02))
        killed.append(f"{name}: {'all' if number % 2 == 0 else 'pipeline'}, code {process.exitcode}")
        now = files()
        assert {path: now.get(path) for path in before} == before, name
        before = now
    process = start(folder)
    end(process, folder)

    print(f"{len(killed)} kills:", *killed, sep="\n  ")
    now = files()
    assert {path: now.get(path) for path in before} == before
    assert all(each.endswith(f"code {-signal.SIGKILL}") for each in killed)
    assert_same_end(folder, alone)
    assert "--resume_from_checkpoint true" in (folder / "output.txt").read_text()  # PPO did not begin anew
    steps = [json.loads(line)["step"] for line in (OUT / "ppo/log_history.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 13))


def assert_same_end(folder: Path, alone: Path) -> None:
    for model in ("sft", "reward", "judge_reward", "ppo"):
        path = folder / OUT / model / "model.safetensors"
        assert hashed(path) == hashed(alone / OUT / model / path.name), model
    assert (folder / OUT / "results.json").read_text() == (alone / OUT / "results.json").read_text()
    (verdict,) = re.findall(r"^- Win rate .*", (folder / OUT / "ppo/README.md").read_text(), re.MULTILINE)
    assert f"{json.loads((OUT / 'results.json').read_text())['win_rate']:.2%}" in verdict


@pytest.mark.slow
def test_what_is_deleted_is_made_again_and_nothing_else(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SFT from its beginning, PPO from its last checkpoint; both write the same, so that no other step is run."""
    folder = Path(shutil.copytree(alone, tmp_path / "deleted"))
    monkeypatch.chdir(folder)
    shutil.rmtree(OUT / "sft")
    for path in ("ppo/model.safetensors", "report.html"):
        (OUT / path).unlink()
    (folder / "output.txt").unlink()
    end(start(folder), folder)

    started = re.findall(r"^(\w+): rlhf-ppo", (folder / "output.txt").read_text(), re.MULTILINE)
    assert started == ["sft", "ppo", "report"]
    assert_same_end(folder, alone)


@pytest.mark.slow
@pytest.mark.timeout(600 + 40 * RANDOM)
def test_kills_signals_and_full_disks_at_random_moments(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment is that at which a file appears that a pipeline left alone has written, and up to 0.1 seconds later."""
    written = [path for path in (alone / OUT).rglob("*") if path.is_file()]
    moments = [path.relative_to(alone) for path in sorted(written, key=lambda path: path.stat().st_mtime_ns)]
    chance, struck, ends = random.Random(int(os.environ.get("SEED", 0))), list[str](), 0
    while len(struck) < RANDOM:
        folder, before, code = prepared(tmp_path / f"struck{ends}"), dict[str, Any](), 1
        monkeypatch.chdir(folder)
        while code and len(struck) < RANDOM:
            left = [path for path in moments if not path.exists()] or moments
            fault, path = chance.choice(FAULTS), left[int(len(left) * chance.random() ** 2)]
            process = start(folder)
            strike(process, path.exists, fault, chance.uniform(0, 0.1))
            now, code = files(), process.exitcode
            assert {path: now.get(path) for path in before} == before, struck
            before = now
            if code:  # else all steps have ended well before the fault, or despite it
                struck.append(f"{fault.__name__} at {path}: code {code}")
        end(start(folder), folder)
        assert_same_end(folder, alone)
        ends += 1
    print(f"{len(struck)} faults in {ends} pipelines:", *struck, sep="\n  ")
