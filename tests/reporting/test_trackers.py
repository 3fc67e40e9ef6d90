"""Trackers: what is in their files after a run, by their own readers, is what the run's log and sample tables say."""

from __future__ import annotations

import html
import importlib.util
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset

from rlhf_ppo import PPOConfig, PPOTrainer
from tests.conftest import QUIET, count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK

TRACKERS = ["wandb", "tensorboard"]
PROMPTS = Dataset.from_list(prompt_rows(5, seed=9))
WITHOUT_STEPS = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"}
"""What W&B does not get as a metric of a step, by Trainer's callbacks."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A run of three updates, one evaluation and three sample tables that is told to every tracker at once."""
    place = tmp_path_factory.mktemp("tracked")
    settings = {
        "WANDB_DIR": place, "WANDB_SILENT": "true", "TENSORBOARD_LOGGING_DIR": place / "tensorboard",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, str(value))
        patch.chdir(place)
        given: dict[str, Any] = {
            **QUIET, **QUICK, "output_dir": "run", "report_to": TRACKERS, "exp_name": "experiment", "seed": 3,
            "logging_steps": 1, "num_sample_generations": 3, "eval_strategy": "steps", "eval_steps": 3,
            "sft_model_path": "some-org/sft", "reward_model_path": "some-org/reward",
        }  # fmt: skip
        trainer = PPOTrainer(
            PPOConfig(**given), make_tokenizer(), tiny_policy(), value_model=tiny_scorer(seed=2),
            train_dataset=Dataset.from_list(prompt_rows(32)), eval_dataset=PROMPTS, reward_funcs=count_w4,
        )  # fmt: skip
        trainer.train()
        trainer.save_state()
        wandb = importlib.import_module("wandb")
        wandb.finish()
        wandb.teardown()  # else its service may still be writing the file
        history = json.loads((place / "run" / "trainer_state.json").read_text())["log_history"]
        samples = {int(file.stem[-5:]): pd.read_csv(file) for file in (place / "run" / "_samples").iterdir()}
        yield SimpleNamespace(place=place, history=history, samples=samples, trainer=trainer)


class Read(SimpleNamespace):
    """What a tracker holds.

    Attributes:
        metrics: Update to name to value.
        tables: Update to rows, each a list of texts and numbers.
    """


def read_wandb(place: Path) -> Read:
    metrics, tables = dict[int, dict[str, float]](), dict[int, Any]()
    [directory] = (place / "wandb").glob("offline-run-*")
    files = {table["path"]: table for table in wandb_files(directory)}
    for row in wandb_rows(directory):
        step = row["train/global_step"]
        if "completions/path" in row:
            tables[step] = files[row["completions/path"]]["data"]
        metrics.setdefault(step, {}).update({name: value for name, value in row.items() if _is_metric(name)})
    return Read(metrics=metrics, tables=tables)


def wandb_files(directory: Path) -> list[dict[str, Any]]:
    files = (directory / "files").glob("media/table/completions_*.table.json")
    return [{"path": str(file.relative_to(directory / "files")), **json.loads(file.read_text())} for file in files]


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # no room for a header: the block ends in zeros
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)  # after the checksum
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def wandb_rows(directory: Path) -> list[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    history = [Record.FromString(data).history for data in wandb_records(next(directory.glob("*.wandb")))]
    rows = [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row.item} for row in history]
    return [row for row in rows if "train/global_step" in row]


def read_tensorboard(place: Path) -> Read:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, metrics = EventAccumulator(str(place / "tensorboard")).Reload(), dict[int, dict[str, float]]()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            metrics.setdefault(event.step, {})[name] = event.value
    texts = {
        event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("completions/text_summary")
    }
    rows = {step: [line.strip("| ").split(" | ") for line in text.splitlines()[2:]] for step, text in texts.items()}
    tables = {step: [[html.unescape(cell) for cell in row] for row in table] for step, table in rows.items()}
    return Read(metrics=metrics, tables=tables)


READERS: dict[str, Callable[[Path], Read]] = {
    "wandb": read_wandb, "tensorboard": read_tensorboard,
}  # fmt: skip


def _is_metric(name: str) -> bool:
    return name.startswith(("train/", "eval/")) and name != "train/global_step"


def logged(history: list[dict[str, Any]], left_out: set[str]) -> dict[int, dict[str, float]]:
    """Update to name to value, as Trainer's callbacks call what is logged."""
    found = dict[int, dict[str, float]]()
    for entry in history:
        for name, value in entry.items():
            if name != "step" and name not in left_out:
                of_eval = name.startswith("eval_")
                known = f"eval/{name.removeprefix('eval_')}" if of_eval else f"train/{name}"
                found.setdefault(entry["step"], {})[known] = value
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("tracker", READERS)
def test_a_tracker_holds_every_metric_and_every_table_of_a_run(tracker: str, run: SimpleNamespace) -> None:
    read = READERS[tracker](run.place)
    expected = logged(run.history, WITHOUT_STEPS if tracker == "wandb" else set())
    assert read.metrics.keys() == expected.keys() == {1, 2, 3}
    for step, values in expected.items():
        assert values.keys() <= read.metrics[step].keys(), (step, values.keys() - read.metrics[step].keys())
        for name, value in values.items():
            close = math.isclose(read.metrics[step][name], value, rel_tol=1e-6, abs_tol=1e-12)
            assert close, (step, name, read.metrics[step][name], value)
    assert {"eval/score", "eval/rewards/count_w4/mean"} <= expected[3].keys()
    assert read.tables.keys() == run.samples.keys() == {1, 2, 3}
    for step, table in run.samples.items():
        rows = [[query, response, float(score)] for query, response, score in read.tables[step]]
        assert rows == [
            [query, response, pytest.approx(score, abs=5e-4)] for *_, query, response, score in table.values
        ]
