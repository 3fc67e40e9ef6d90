"""Damage to any file of a checkpoint: `True` falls back to the one before, its own name is refused with the file's."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.checkpoints import last_complete_checkpoint, why_incomplete
from rlhf_ppo.checkpoints.files import write_manifest
from tests.conftest import prompt_rows
from tests.faults.conftest import make_saving
from tests.runs import assert_identical, parameters


def flip_one_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "cut in half": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "one bit flipped": flip_one_bit,
    "a byte more": lambda content: content + b"\0",
    "removed": lambda content: None,
}


def files_of(checkpoint: Path) -> Iterator[str]:
    return (str(path.relative_to(checkpoint)) for path in sorted(checkpoint.rglob("*")) if path.is_file())


def named_after_damage(checkpoint: Path, damage: Callable[[bytes], bytes | None]) -> dict[str, str | None]:
    """What is said of the checkpoint when one of its files is damaged, for each of them."""
    said = {}
    for name in list(files_of(checkpoint)):
        path = checkpoint / name
        content = path.read_bytes()
        if (damaged := damage(content)) is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
        said[name] = why_incomplete(str(checkpoint))
        path.write_bytes(content)
    return said


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_to_any_file_is_said_by_its_name(kind: str, run: Path) -> None:
    checkpoint = run / "checkpoint-2"
    assert why_incomplete(str(checkpoint)) is None
    said = named_after_damage(checkpoint, DAMAGES[kind])
    assert said.keys() == set(files_of(checkpoint)) and len(said) >= 16
    assert not {name: reason for name, reason in said.items() if not reason or name not in reason}
    assert why_incomplete(str(checkpoint)) is None


def test_a_damaged_newest_one_is_skipped_and_refused_by_name(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = run / "checkpoint-2" / "optimizer.pt"
    path.write_bytes(flip_one_bit(path.read_bytes()))
    trainer = make_saving(run)
    with pytest.raises(ValueError, match=r"checkpoint-2' is no complete checkpoint: its optimizer.pt was changed"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    whole = make_saving(run.with_name("whole"))
    whole.train()

    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)

    assert f"Skipping {run / 'checkpoint-2'}: its optimizer.pt was changed" in caplog.text
    assert trainer._initial_global_step == 1
    assert_identical(parameters(trainer), parameters(whole))
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-2")  # written anew


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_missing_optimizer_does_not_start_anew_in_silence(name: str, run: Path) -> None:
    """Also if somebody has written a new manifest without it."""
    (run / "checkpoint-2" / name).unlink()
    write_manifest(str(run / "checkpoint-2"))
    with pytest.raises(ValueError, match=f"is no complete checkpoint: it has no {name}"):
        make_saving(run).train(resume_from_checkpoint=str(run / "checkpoint-2"))


@pytest.mark.parametrize("save_only_model", [False, True])
def test_a_damaged_best_model_is_not_taken_for_the_end(save_only_model: bool, tmp_path: Path) -> None:
    """Each update is worse than the first one, whose checkpoint is damaged before the end."""

    class Damages(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            path = tmp_path / "checkpoint-1" / "model.safetensors"
            if state.global_step == 2 and damages:
                path.write_bytes(flip_one_bit(path.read_bytes()))

    def worse(prompts: Any, trainer_state: Any, **columns: Any) -> list[float]:
        return [-float(trainer_state.global_step)] * len(prompts)

    def best_of(output_dir: Path) -> PPOTrainer:
        dataset = Dataset.from_list(prompt_rows(2))
        given = {"reward_funcs": worse, "eval_dataset": dataset, "callbacks": [Damages()]}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "score", "eval_strategy": "steps"}
        return make_saving(output_dir, **best, eval_steps=1, save_only_model=save_only_model, given=given)

    damages = False
    trainer = best_of(tmp_path / "other")
    trainer.train()
    assert trainer.state.best_global_step == 1
    damages = True
    with pytest.raises(ValueError, match=r"the best checkpoint, .*checkpoint-1, is no longer complete: its model"):
        best_of(tmp_path).train()


def test_a_checkpoint_of_a_later_version_is_skipped_by_name(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("trainer_state.json", "ppo_state.json"):
        path, before = run / "checkpoint-2" / name, (run / "checkpoint-2" / name).read_text()
        path.write_text(json.dumps({**json.loads(before), "of_a_later_version": 1}))
        write_manifest(str(run / "checkpoint-2"))
        assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-1")
        assert f"Skipping {run / 'checkpoint-2'}: its {name} has of_a_later_version, which this version" in caplog.text
        path.write_text(before)


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda parts: st.lists(parts, max_size=2) | st.dictionaries(st.text(max_size=5), parts, max_size=2),
    max_leaves=4,
)
"""JSON values of all kinds, NaN and huge numbers too."""
READ_BACK = ("trainer_state.json", "ppo_state.json", "ppo_run.json", "ppo_arguments.json")


@pytest.mark.parametrize("file", READ_BACK)
def test_a_file_of_any_shape_is_named_or_makes_no_difference(file: str, finished: Path, tmp_path: Path) -> None:
    """Nothing is raised: the run falls back to the checkpoint before."""
    checkpoint = Path(shutil.copytree(finished / "checkpoint-2", tmp_path / "checkpoint-2"))
    before = json.loads((checkpoint / file).read_text())

    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(["", *before]), ODD)
    def read(key: str, value: Any) -> None:
        content = {**before, key: value} if key else value
        (checkpoint / file).write_text(json.dumps(content))
        write_manifest(str(checkpoint))
        reason = why_incomplete(str(checkpoint))
        assert reason is None or file in reason

    read()
