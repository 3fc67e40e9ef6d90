"""SFT and reward models: a signal ends them with a checkpoint, from which they end bit for bit as undisturbed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

from rlhf_ppo.checkpoints.complete import newest_trl_checkpoint
from rlhf_ppo.cli import commands
from rlhf_ppo.processes.signals import STOPPING, RunStopped
from rlhf_ppo.reporting.judgements import RewardAccuracy, read_accuracy
from tests.conftest import save_models, tiny_policy, write_rows
from tests.faults.test_full_disk import largest_file

OPTIONS = (
    "--model_name_or_path base --output_dir out --max_steps 6 --per_device_train_batch_size 2 --report_to none "
    "--learning_rate 1e-2 --use_cpu --bf16 false --disable_tqdm true --save_strategy no"
).split()
DATA = {"sft": "texts.jsonl", "reward": "pairs.jsonl"}


class Does(TrainerCallback):
    """Does something once, at an event after a number of steps."""

    def __init__(self, event: str, step: int, act: Callable[[], Any]) -> None:
        setattr(self, event, self._act)
        self.step, self.act = step, act

    def _act(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with dropout, which reads random numbers, and data of two passes and a half."""
    folder = tmp_path_factory.mktemp("trl")
    save_models(folder, base=tiny_policy(attention_dropout=0.2))
    texts = [{"prompt": f"w{row}", "completion": f" w4 w{row + 5}"} for row in range(5)]
    write_rows(folder / "texts.jsonl", texts)
    pairs = [{"prompt": "w1", "chosen": " w4 w4", "rejected": f" w{6 + row}"} for row in range(5)]
    write_rows(folder / "pairs.jsonl", pairs)
    return folder


@pytest.fixture
def train(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_runs: None) -> Callable[..., Trainer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", files / "cache")
    for path in files.iterdir():
        if path.name != "cache":
            (tmp_path / path.name).symlink_to(path)

    def run(command: str, *words: str, callback: TrainerCallback | None = None) -> Trainer:
        name = {"sft": "sft_trainer", "reward": "measured_reward_trainer"}[command]
        make = getattr(commands, name)

        def with_callback(*args: Any) -> Trainer:
            trainer = make(*args)
            if callback is not None:
                trainer.add_callback(callback)
            return trainer

        with monkeypatch.context() as patched:
            patched.setattr(commands, name, with_callback)
            return getattr(commands, command)([*OPTIONS, "--dataset_name", DATA[command], *words])

    return run


def model() -> bytes:
    return Path("out/model.safetensors").read_bytes()


def stopped_at(train: Any, command: str, number: int, event: str, step: int, *words: str) -> RunStopped:
    with pytest.raises(RunStopped) as stopped:
        train(command, *words, callback=Does(event, step, lambda: os.kill(os.getpid(), number)))
    return stopped.value


@pytest.mark.parametrize("command", DATA)
def test_a_signal_ends_training_with_a_checkpoint_that_continues_exactly(
    command: str, train: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    train(command)
    undisturbed = model()
    moments = ["on_step_begin", "on_optimizer_step", "on_step_end"]
    for number, event in zip(STOPPING, moments, strict=False):
        shutil.rmtree("out")
        ended = stopped_at(train, command, number, event, 4)
        done = 4 if event == "on_step_end" else 5

        assert ended.code == 128 + number and ended.checkpoint == f"out/checkpoint-{done}"
        assert not Path("out/model.safetensors").exists(), "no final model"
        first, last = [
            line for line in capfd.readouterr().err.splitlines() if line.startswith(signal.Signals(number).name)
        ]
        assert "the run ends with a checkpoint after the current step" in first
        assert f"after step {done} of 6, with the checkpoint out/checkpoint-{done}; continue with resume_from" in last
        train(command, "--resume_from_checkpoint", "True")
        assert model() == undisturbed
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


EVALUATED = "--eval_strategy steps --eval_steps 1 --load_best_model_at_end true --metric_for_best_model".split()


@pytest.mark.parametrize(
    "words",
    [
        ["--save_strategy", "best", *EVALUATED, "eval_loss", "--greater_is_better", "true"],  # the first is the best
        ["--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "1", *EVALUATED, "eval_loss",
         "--greater_is_better", "true"],
        ["--save_strategy", "epoch", "--eval_strategy", "epoch"],
        ["--save_strategy", "steps", "--save_steps", "6"],
    ],
    ids=["best", "one checkpoint", "epoch", "last step"],
)  # fmt: skip
def test_the_checkpoint_is_there_whatever_is_saved_and_evaluated(words: list[str], train: Any) -> None:
    """The best model is not loaded, and no checkpoint is deleted, before the run has ended."""
    given = [*words, "--dataset_test_split", "train"]
    train("sft", *given)
    undisturbed = model()
    shutil.rmtree("out")
    step = 6 if words[-1] == "6" else 4
    ended = stopped_at(train, "sft", signal.SIGTERM, "on_step_end", step, *given)

    assert ended.checkpoint == f"out/checkpoint-{step}" and str(newest_trl_checkpoint("out")) == ended.checkpoint
    train("sft", *given, "--resume_from_checkpoint", "True")
    assert model() == undisturbed


def test_a_signal_in_the_final_save_waits_for_the_model(train: Any, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = train("sft")
    undisturbed, save = model(), type(trainer)._save
    shutil.rmtree("out")

    def signalled(*args: Any, **given: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        save(*args, **given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(trainer), "_save", signalled)
        train("sft")

    assert "SIGTERM: the run ends when its model is saved" in capfd.readouterr().err
    assert model() == undisturbed


def test_resuming_takes_the_newest_whole_checkpoint(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    train("sft", "--save_strategy", "steps", "--save_steps", "2")
    undisturbed = model()
    Path("out/checkpoint-6/trainer_state.json").unlink()  # a kill
    os.truncate("out/checkpoint-4/optimizer.pt", 1000)
    Path("out/model.safetensors").unlink()
    begun: list[int] = []
    train("sft", "--resume_from_checkpoint", "True", callback=Does("on_train_begin", 2, lambda: begun.append(2)))
    assert begun == [2] and model() == undisturbed

    shutil.rmtree("out")
    Path("out/checkpoint-2").mkdir(parents=True)
    Path("out/checkpoint-2/trainer_state.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        train("sft", "--resume_from_checkpoint", "True")
    assert "output_dir='out' holds no complete checkpoint; leave it out to start" in capsys.readouterr().err


def test_a_full_disk_is_named_with_the_checkpoint_that_is_whole(
    train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    train("reward")
    undisturbed = model()
    shutil.rmtree("out")
    words = ["--save_strategy", "steps", "--save_steps", "2"]
    full = largest_file(50_000)
    with pytest.raises(SystemExit, match="2"):
        try:
            train("reward", *words, callback=Does("on_step_begin", 3, full.__enter__))
        finally:
            full.__exit__(None, None, None)
    said = capsys.readouterr().err.splitlines()[-1]
    assert "no space is left for out, which is incomplete" in said and "ut/checkpoint-2 is complete: make room" in said
    train("reward", "--resume_from_checkpoint", "True")
    assert model() == undisturbed


@pytest.mark.parametrize("command", DATA)
def test_no_link_that_was_planted_is_written_through(command: str, train: Any) -> None:
    saves = ["--save_strategy", "steps", "--save_steps", "3"]
    train(command, *saves)
    names = [path.relative_to("out") for path in Path("out").rglob("*") if path.is_file()]
    assert {"checkpoint-3", "checkpoint-6", "."} <= {str(name.parent) for name in names}
    shutil.rmtree("out")
    for name in names:
        link, victim = Path("out", name), Path("victims", name).absolute()
        for place in (link, victim):
            place.parent.mkdir(parents=True, exist_ok=True)
        victim.write_text("mine")
        link.symlink_to(victim)
    shutil.rmtree("out/checkpoint-6")
    Path("out/checkpoint-6").symlink_to(Path("victims/checkpoint-6").absolute())
    train(command, *saves)
    assert {path.read_text() for path in Path("victims").rglob("*") if path.is_file()} == {"mine"}
    assert not any(path.is_symlink() for path in Path("out").rglob("*"))


def test_a_model_without_held_out_pairs_has_no_accuracy_of_an_earlier_one(train: Callable[..., Trainer]) -> None:
    """Five pairs are too few to set one aside."""
    Path("out").mkdir()
    RewardAccuracy.of(0.9, 100).save("out")
    train("reward")
    assert read_accuracy("out") is None


def test_a_model_with_settings_that_generation_ignores_is_saved(train: Callable[..., Trainer], files: Path) -> None:
    shutil.copytree(files / "base", "odd")
    Path("odd/generation_config.json").write_text('{"temperature": 0.6, "bos_token_id": 2, "eos_token_id": 1}')
    train("sft", "--model_name_or_path", "odd", "--max_steps", "1")
    assert "temperature" not in Path("out/generation_config.json").read_text()
