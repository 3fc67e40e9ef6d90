"""Damage to any file of a checkpoint: `True` falls back to the one before, its own name is refused with the file's."""

from __future__ import annotations

import dataclasses
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
from rlhf_ppo.checkpoints.files import MANIFEST_NAME, _hash_of_json, write_manifest
from rlhf_ppo.checkpoints.state import _SKIPPED, PROGRESS_NAME
from rlhf_ppo.training.guards import Skipped
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
    with pytest.raises(ValueError, match=r"checkpoint-2' is not a complete checkpoint: its optimizer.pt was changed"):
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
    with pytest.raises(ValueError, match=f"is not a complete checkpoint: it has no {name}"):
        make_saving(run).train(resume_from_checkpoint=str(run / "checkpoint-2"))


WRONG_VALUES = {
    "ppo_state.json": {
        "epoch": [-1, 0.5, "0", None, 3],
        "batches_in_epoch": [-1, 3, True],
        "episode": [0, 3, -4],
        "pending_metrics": [{}, [1]],
        "num_processes": ["2"],
        "unknown": [1],
        "skipped": [{"rows": -1}, {"others": 1}, [1]],
        "optimization": [{"learning_rate": "high"}, {"learning_rate": [None]}, []],
    },
    "trainer_state.json": {
        "global_step": [-1, 1, "2", None, 10**300],
        "log_history": [None, [3]],
        "best_metric": ["high"],
        "unknown": [1],
        "stateful_callbacks": [[1], {"TrainerControl": 1}],
    },
    "ppo_arguments.json": {"arguments": [[], 3], "optimizer": [3, {}]},
    "ppo_run.json": {"id": [3, None], "earlier": [[], {"a": "b"}]},
}


@pytest.mark.parametrize("file", WRONG_VALUES)
def test_values_that_no_run_can_have_are_refused_by_name(file: str, run: Path) -> None:
    """Also where a manifest was written anew for them."""
    path = run / "checkpoint-2" / file
    before = path.read_text()
    for name, values in WRONG_VALUES[file].items():
        for value in values:
            path.write_text(json.dumps({**json.loads(before), name: value}))
            write_manifest(str(run / "checkpoint-2"))
            reason = why_incomplete(str(run / "checkpoint-2"))
            assert reason and name in reason and file in reason, (name, value, reason)
    for text in ("[]", "3", "null", "{", "[" * 100_000, "1" * 9999):
        path.write_text(text)
        write_manifest(str(run / "checkpoint-2"))
        assert file in (why_incomplete(str(run / "checkpoint-2")) or ""), text[:9]


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


# ---- A manifest that was written anew ----


def add_a_key(content: bytes) -> bytes:
    return json.dumps({**json.loads(content), "of_a_later_version": 1}).encode()


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("model.safetensors", DAMAGES["cut in half"], "its model.safetensors is cut off"),
        ("value_model/model.safetensors", DAMAGES["emptied"], "its value_model/model.safetensors is cut off"),
        ("optimizer.pt", DAMAGES["cut in half"], "its optimizer.pt is cut off"),
        ("trainer_state.json", add_a_key, "its trainer_state.json has of_a_later_version, which this version"),
        ("ppo_state.json", add_a_key, "its ppo_state.json has of_a_later_version"),
    ],
)
def test_a_new_manifest_for_a_damaged_file_does_not_keep_a_run_from_falling_back(
    name: str, damage: Callable[[bytes], bytes], said: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run / "checkpoint-2" / name
    path.write_bytes(damage(path.read_bytes()))
    write_manifest(str(run / "checkpoint-2"))
    trainer = make_saving(run)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)
    assert f"Skipping {run / 'checkpoint-2'}: {said}" in caplog.text and trainer._initial_global_step == 1


def test_a_checkpoint_knows_what_the_guard_counts() -> None:
    assert {field.name for field in dataclasses.fields(Skipped)} == _SKIPPED


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda parts: st.lists(parts, max_size=2) | st.dictionaries(st.text(max_size=5), parts, max_size=2),
    max_leaves=4,
)
"""JSON values of all kinds, NaN and huge numbers too."""
READ_BACK = ("trainer_state.json", "ppo_state.json", "ppo_run.json", "ppo_arguments.json", "manifest.json")


@pytest.mark.parametrize("file", READ_BACK)
def test_a_file_of_any_shape_is_named_or_makes_no_difference(file: str, finished: Path, tmp_path: Path) -> None:
    """Nothing is raised: the run falls back to the checkpoint before."""
    checkpoint = Path(shutil.copytree(finished / "checkpoint-2", tmp_path / "checkpoint-2"))
    before = json.loads((checkpoint / file).read_text())
    before.pop("xxh3_128", None)

    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(["", *before]), ODD)
    def read(key: str, value: Any) -> None:
        content = {**before, key: value} if key else value
        if file == MANIFEST_NAME and isinstance(content, dict):
            content = {**content, "xxh3_128": _hash_of_json(content)}  # true to itself
        (checkpoint / file).write_text(json.dumps(content))
        if file != MANIFEST_NAME:
            write_manifest(str(checkpoint))
        reason = why_incomplete(str(checkpoint))
        assert reason is None or file in reason or PROGRESS_NAME in reason or file == MANIFEST_NAME

    read()
