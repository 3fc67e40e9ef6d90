"""A signal in the middle of learning: the run ends after the current pass, and the resumed one finishes the update."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.checkpoints import last_complete_checkpoint, why_incomplete
from rlhf_ppo.checkpoints.files import write_manifest
from rlhf_ppo.data.rollout import Experience
from rlhf_ppo.processes import signals
from rlhf_ppo.processes.signals import MicroBatchStopCheck, RunStopped
from rlhf_ppo.reporting.completion_files import find_completions, read_completions
from rlhf_ppo.training import saving
from tests.faults import conftest
from tests.faults.conftest import make_saving
from tests.runs import DieAt, RunDied, assert_identical, end_of_run

RUN: dict[str, Any] = {
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "num_ppo_epochs": 2, "num_mini_batches": 2,
    "total_episodes": 12, "include_num_input_tokens_seen": "all", "score_scaling": True, "on_divergence": "skip",
    "lr_scheduler_type": "linear", "ptx_coef": 0.3,
}  # fmt: skip
"""Three updates, each with four optimizer steps of two micro-batches of responses and two of texts."""
TEXTS = [{"text": " ".join(f"w{row + word}" for word in range(1 + row))} for row in range(5)]


class Notes(TrainerCallback):
    """Keeps each event of an update, with a random number."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, float]] = []
        for name in ("step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end", "log"):
            setattr(self, f"on_{name}", self._noting(name))

    def _noting(self, name: str) -> Callable[..., None]:
        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.events.append((name, state.global_step, random.random()))

        return note


class SignalAt(TrainerCallback):
    """Sends a signal at the `count`th time that an event comes in an update; then waits for something."""

    def __init__(self, event: str, count: int, step: int = 1, wait: Callable[[], object] = lambda: None) -> None:
        setattr(self, f"on_{event}", self._signal)
        self.left, self.step, self.wait = count, step, wait

    def _signal(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                self.wait()


def nan_in_the_second_update(completion_ids: Any, trainer_state: Any, log_metric: Any, **columns: Any) -> list[float]:
    """A reward that is drawn, logs a metric, and gives one response of the second update none."""
    log_metric("mean_id", sum(completion_ids[0]) / len(completion_ids[0]))
    scores = [len(set(ids)) + random.random() for ids in completion_ids]
    return [math.nan, *scores[1:]] if trainer_state.global_step == 1 else scores


def make(output_dir: Path, *callbacks: Any, trainer_class: Any = PPOTrainer, **overrides: Any) -> PPOTrainer:
    """A trainer whose policy has dropout while it learns."""
    given = {"callbacks": list(callbacks), "reward_funcs": nan_in_the_second_update, "ptx_dataset": TEXTS}
    with patch.object(conftest, "PPOTrainer", trainer_class):
        trainer = make_saving(output_dir, given=given, **{**RUN, **overrides})
    trainer.policy_model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: functional.dropout(output, 0.1, torch.is_grad_enabled())
    )
    return trainer


def stop(trainer: PPOTrainer, **arguments: Any) -> str:
    """Train until a signal ends the run; return the checkpoint's name."""
    with pytest.raises(RunStopped) as stopped:
        trainer.train(**arguments)
    return os.path.basename(stopped.value.checkpoint)


def stopped_in_learning(output_dir: Path, **overrides: Any) -> Path:
    """Stop a run after three of the second update's four mini-batches; return the checkpoint."""
    return output_dir / stop(make(output_dir, SignalAt("optimizer_step", 3), **overrides))


def checkpoints(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.iterdir() if "checkpoint" in path.name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any]]:
    """The end of the run that was left alone, and its events."""
    trainer = make(tmp_path_factory.mktemp("whole") / "run", notes := Notes())
    trainer.train()
    return end_with_completions(trainer), notes.events


def end_with_completions(trainer: PPOTrainer) -> dict[str, Any]:
    """The end of a run, and the responses that it has kept of each update."""
    kept = {step: read_completions(path) for step, path in find_completions(str(trainer.args.output_dir)).items()}
    assert list(kept) == [1, 2, 3] and all(len(rows) == 3 for rows in kept.values())
    return end_of_run(trainer) | {"completions": kept}


@pytest.mark.parametrize(
    ("event", "count", "checkpoint"),
    [
        ("substep_end", 3, "checkpoint-1-2"),  # between two micro-batches
        ("optimizer_step", 3, "checkpoint-1-3"),  # between two mini-batches
        ("optimizer_step", 4, "checkpoint-2"),
        ("substep_end", 1, "checkpoint-1-0"),
        ("substep_end", 2, "checkpoint-1-1"),
        ("substep_end", 4, "checkpoint-1-3"),
        ("optimizer_step", 1, "checkpoint-1-1"),
        ("optimizer_step", 2, "checkpoint-1-2"),
    ],
)
def test_the_resumed_run_finishes_the_update(
    event: str, count: int, checkpoint: str, whole: Any, tmp_path: Path
) -> None:
    run, first, second = tmp_path / "run", Notes(), Notes()
    assert stop(make(run, first, SignalAt(event, count))) == checkpoint
    assert last_complete_checkpoint(str(run)) == str(run / checkpoint)
    assert checkpoints(run) == sorted({"checkpoint-1", checkpoint})
    random.seed(count)
    torch.manual_seed(count)

    resumed = make(run, second)
    resumed.train(resume_from_checkpoint=True)

    assert_identical(end_with_completions(resumed), whole[0])
    assert first.events + second.events == whole[1]
    assert checkpoints(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize(
    ("before", "now", "epochs", "watched"),
    [(None, 1e-9, [None, None, 1.0], [False, False, True]), (9.0, None, [2.0, None, None], [True, True, False])],
)
def test_kl_stop_may_change_in_the_middle_of_an_update(
    before: float | None, now: float | None, epochs: list[float | None], watched: list[bool], tmp_path: Path
) -> None:
    stopped_in_learning(tmp_path / "run", kl_stop=before)
    resumed = make(tmp_path / "run", kl_stop=now)
    resumed.train(resume_from_checkpoint=True)
    logged = resumed.state.log_history[:3]
    assert [each.get("policy/kl_stop_epoch") for each in logged] == epochs
    assert ["policy/kl_avg" in each for each in logged] == watched


def test_the_learned_epochs_are_logged_where_only_the_value_model_goes_on(tmp_path: Path) -> None:
    options = {"kl_stop": 9.0, "num_critic_epochs": 3}
    assert stop(make(tmp_path / "run", SignalAt("optimizer_step", 5), **options)) == "checkpoint-1-5"
    resumed = make(tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=True)
    assert [each.get("policy/kl_stop_epoch") for each in resumed.state.log_history[:3]] == [2.0, 2.0, 2.0]


def test_another_loss_in_the_middle_of_an_update_is_refused(tmp_path: Path) -> None:
    stopped_in_learning(tmp_path / "run")
    with pytest.raises(ValueError, match="ends with the policy_loss and gae_level that it began with"):
        make(tmp_path / "run", policy_loss="cispo").train(resume_from_checkpoint=True)


class DiesSaving(PPOTrainer):
    """Dies where the second update would be saved."""

    def _save_checkpoint(self, *args: Any) -> None:
        if self.state.global_step == 2:
            raise RunDied
        super()._save_checkpoint(*args)


@pytest.mark.parametrize(
    ("callbacks", "trainer_class", "kept"),
    [([DieAt("on_optimizer_step", 1)], PPOTrainer, [1]), ([], DiesSaving, [1, 2])],
)
def test_a_kill_while_the_rest_is_learned_loses_and_repeats_no_response(
    callbacks: list[Any], trainer_class: Any, kept: list[int], whole: Any, tmp_path: Path
) -> None:
    """Before the half-learned update's responses are written, and between them and its checkpoint."""
    run = tmp_path / "run"
    assert stop(make(run, SignalAt("optimizer_step", 3))) == "checkpoint-1-3"
    with pytest.raises(RunDied):
        make(run, *callbacks, trainer_class=trainer_class).train(resume_from_checkpoint=True)
    assert list(find_completions(run)) == kept
    written = {path: (path.read_bytes(), path.stat().st_ino) for path in (run / "completions").iterdir()}
    resumed = make(run)
    resumed.train(resume_from_checkpoint=True)

    assert_identical(end_with_completions(resumed), whole[0])
    assert {path: (path.read_bytes(), path.stat().st_ino) for path in written} == written
    assert len(list((run / "completions").iterdir())) == 3  # none has a second file


def test_an_update_may_be_stopped_again(whole: Any, tmp_path: Path) -> None:
    """By the same trainer too; what was half learned before gives way to the newer, and is not counted."""
    run, notes = tmp_path / "run", Notes()
    trainer = make(run, notes, SignalAt("substep_end", 1), SignalAt("optimizer_step", 2), save_total_limit=1)
    assert stop(trainer) == "checkpoint-1-0" and checkpoints(run) == ["checkpoint-1", "checkpoint-1-0"]
    assert stop(trainer, resume_from_checkpoint=True) == "checkpoint-1-2"
    assert checkpoints(run) == ["checkpoint-1", "checkpoint-1-2"]
    trainer.train(resume_from_checkpoint=True)

    assert_identical(end_with_completions(trainer), whole[0])
    assert notes.events == whole[1] and checkpoints(run) == ["checkpoint-3"]


def test_no_micro_batch_begins_after_the_signal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begun: list[bool] = []

    class Counting(PPOTrainer):
        def policy_loss(self, *args: Any) -> Any:
            begun.append(self._run.signals.received is not None)
            return super().policy_loss(*args)

    run = tmp_path / "run"
    signalled = SignalAt("substep_end", 2, wait=lambda: trainer._run.signals.wait_until_logged())
    trainer = make(run, signalled, trainer_class=Counting, save_strategy="no")
    stop(trainer)

    assert begun == [False] * (8 + 3) and checkpoints(run) == ["checkpoint-1-1"]
    said = capfd.readouterr().err
    assert "SIGTERM: the run ends with a checkpoint after the current pass of learning. A second" in said
    assert (
        f"ended in update 2 of 3, 1 of 4 mini-batches learned, with the checkpoint {run}/checkpoint-1-1; res" in said
    )


def test_the_line_on_the_signal_comes_before_that_on_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the thread is that writes it."""
    on_signal = signals._Watcher.on_signal
    monkeypatch.setattr(signals._Watcher, "on_signal", lambda *given: (time.sleep(0.5), on_signal(*given)))
    stop(make(tmp_path / "run", SignalAt("substep_end", 1, step=0), save_strategy="no"))

    told = [line.partition(";")[0] for line in capfd.readouterr().err.splitlines() if line.startswith("SIGTERM")]
    assert [" ".join(line.split()[:4]) for line in told] == ["SIGTERM: the run ends", "SIGTERM: the run has"]


@pytest.mark.parametrize("name", ["num_ppo_epochs", "num_mini_batches", "seed"])
def test_an_update_is_finished_as_it_was_begun(name: str, tmp_path: Path) -> None:
    stopped_in_learning(tmp_path / "run")
    before = RUN.get(name, 3)

    with pytest.raises(ValueError, match=f"with the settings it began with, but {name} was {before} and is 1 now"):
        make(tmp_path / "run", **{name: 1}).train(resume_from_checkpoint=True)
    make(tmp_path / "run", **{name: 1}).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))


@pytest.mark.slow
def test_another_number_of_prompts_is_an_error(tmp_path: Path) -> None:
    stopped_in_learning(tmp_path / "run")
    resumed = make(tmp_path / "run")
    resumed.train_dataset = resumed.train_dataset.select(range(6))

    with pytest.raises(ValueError, match="the number of prompts was 8 and is 6 now"):
        resumed.train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_another_number_of_processes_is_an_error(tmp_path: Path) -> None:
    checkpoint = stopped_in_learning(tmp_path / "run")
    state = json.loads((checkpoint / "ppo_state.json").read_text())
    (checkpoint / "ppo_state.json").write_text(json.dumps({**state, "num_processes": 2}))
    write_manifest(str(checkpoint))

    with pytest.raises(ValueError, match="the number of processes was 2 and is 1 now"):
        make(tmp_path / "run").train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_what_holds_something_else_is_skipped_or_refused(
    whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = stopped_in_learning(tmp_path / "run")
    file = checkpoint / "partial_update_0.safetensors"
    with safe_open(file, framework="pt") as opened:
        tensors, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()
    ids = tensors["experience.query_responses"]
    for wrong in ({"experience.query_responses": ids[:1]}, {"experience.unknown": ids.clone()}):
        save_file({**tensors, **wrong}, file, metadata)
        write_manifest(str(checkpoint))
        with pytest.raises(ValueError, match=r"its partial_update_0.safetensors is missing, or holds something"):
            make(tmp_path / "run").train(resume_from_checkpoint=True)
    save_file(tensors, file, {"values": metadata["values"].replace('"num_minibatches": 3', '"num_minibatches": "3"')})
    write_manifest(str(checkpoint))

    resumed = make(tmp_path / "run")
    with caplog.at_level("WARNING", "rlhf_ppo"):
        resumed.train(resume_from_checkpoint=True)
    assert f"Skipping {checkpoint}: its partial_update_0.safetensors is missing, or holds something" in caplog.text
    assert_identical(end_with_completions(resumed), whole[0])


@pytest.mark.slow
def test_a_run_that_goes_on_from_before_gives_it_up(tmp_path: Path) -> None:
    checkpoint = stopped_in_learning(tmp_path / "run")
    stop(make(tmp_path / "run", SignalAt("step_begin", 1)), resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))

    assert why_incomplete(str(checkpoint)) is None
    assert last_complete_checkpoint(str(tmp_path / "run")) == str(tmp_path / "run" / "checkpoint-1")


@pytest.mark.slow
def test_what_a_kill_leaves_of_it_is_removed(tmp_path: Path) -> None:
    with (
        patch.object(saving.complete, "commit_checkpoint", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        stopped_in_learning(tmp_path / "run")
    assert checkpoints(tmp_path / "run") == ["checkpoint-1", "unfinished-checkpoint"]

    make(tmp_path / "run").train(resume_from_checkpoint=True)
    assert checkpoints(tmp_path / "run") == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


@pytest.mark.slow
def test_what_callbacks_asked_for_is_not_forgotten(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        """Asks for the end in the second update's learning."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 1

    run = tmp_path / "run"
    assert stop(make(run, Stops(), SignalAt("optimizer_step", 3))) == "checkpoint-1-3"
    resumed = make(run)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2


@pytest.mark.slow
def test_an_overridden_learn_may_pass_it_over(tmp_path: Path) -> None:
    class Passes(PPOTrainer):
        def learn(self, model: Any, experience: Experience) -> float:
            seen.append(experience)
            return 0.0

    seen: list[Experience] = []
    stopped_in_learning(tmp_path / "run")
    make(tmp_path / "run", trainer_class=Passes).train(resume_from_checkpoint=True)
    assert len(seen) == 2 and seen[0] is not seen[1]


@pytest.mark.slow
def test_an_experience_of_the_users_own_is_learned_to_its_end(tmp_path: Path) -> None:
    class Own(Experience):
        """Has methods that no checkpoint keeps."""

    class Estimates(PPOTrainer):
        def estimate_advantages(self, rollout: Any) -> Experience:
            return Own(**vars(super().estimate_advantages(rollout)))

    run = tmp_path / "run"
    assert stop(make(run, SignalAt("substep_end", 1), trainer_class=Estimates)) == "checkpoint-2"


def test_several_processes_ask_each_other_as_often_as_their_passes_last() -> None:
    asked: list[float] = []

    class Signals:
        def raise_if_any_rank_stopped(self, device: Any, figure: float = 0.0) -> float:
            asked.append(figure)
            return 2 * figure

    between = MicroBatchStopCheck(cast(Any, Signals()), num_processes=2, device=torch.device("cpu"))
    for seconds, expected in ((0.0, 8), (0.8, 1), (8 * 0.5, 2), (8 * 60.0, 8)):
        between.seconds = seconds
        asked.clear()
        between.check_before_minibatch()
        for index in range(8):
            between.check_before_micro_batch(index)
        assert len(asked) == expected
