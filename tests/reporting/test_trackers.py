"""Trackers: what is in their files after a run, by their own readers, is what the run's log and sample tables say."""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.data.images import data_url
from rlhf_ppo.reporting.sample_tables import report_table
from tests.conftest import QUIET, count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK
from tests.vision import picture

TRACKERS = ["wandb", "tensorboard", *(["trackio"] if importlib.util.find_spec("trackio") else [])]
PROMPTS = Dataset.from_list(prompt_rows(5, seed=9))


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


def logged(history: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Update to name to value, as Trainer's callbacks call what is logged."""
    found = dict[int, dict[str, float]]()
    for entry in history:
        for name, value in entry.items():
            if name != "step":
                known = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
                found.setdefault(entry["step"], {})[known] = pytest.approx(value, rel=1e-6, abs=1e-12)
    return found


def check_tables(found: dict[int, Any], run: SimpleNamespace) -> None:
    assert found.keys() == run.samples.keys() and len(found) == 3
    for step, table in run.samples.items():
        rows = [[query, response, float(score)] for query, response, score in found[step]]
        assert rows == [
            [query, response, pytest.approx(score, abs=5e-4)] for *_, query, response, score in table.values
        ]


@pytest.mark.thorough
def test_wandb_holds_every_table_of_a_run(run: SimpleNamespace) -> None:
    """Trainer's own callback logs the metrics."""
    files = (run.place / "wandb").glob("offline-run-*/files/media/table/completions_*.table.json")
    ordered = sorted(files, key=lambda file: int(file.name.split("_")[1]))
    steps = zip(sorted(run.samples), ordered, strict=True)
    check_tables({step: json.loads(file.read_text())["data"] for step, file in steps}, run)


@pytest.mark.thorough
def test_tensorboard_holds_every_metric_and_every_table_of_a_run(run: SimpleNamespace) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, metrics = EventAccumulator(str(run.place / "tensorboard")).Reload(), dict[int, dict[str, float]]()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            metrics.setdefault(event.step, {})[name] = event.value
    expected = logged(run.history)
    assert {step: {name: values[name] for name in expected[step]} for step, values in metrics.items()} == expected
    assert {"eval/score", "eval/rewards/count_w4/mean"} <= expected[3].keys()
    texts = {
        event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("completions/text_summary")
    }
    rows = {step: [line.strip("| ").split(" | ") for line in text.splitlines()[2:]] for step, text in texts.items()}
    check_tables({step: [[html.unescape(cell) for cell in row] for row in table] for step, table in rows.items()}, run)


@pytest.mark.thorough
def test_trackio_holds_every_metric_and_every_table_of_a_run(run: SimpleNamespace) -> None:
    """It shows texts as they are."""
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    metrics, tables = dict[int, dict[str, Any]](), dict[int, Any]()
    for row in SQLiteStorage.get_logs("huggingface", "experiment__3"):
        if "completions" in row:
            tables[row["train/global_step"]] = [[*cells.values()] for cells in row["completions"]["_value"]]
        else:
            metrics.setdefault(row["train/global_step"], {}).update(row)
    for step, values in logged(run.history).items():
        names = {name for name in values if not name.startswith(("train/train_", "train/total_"))}  # of the whole run
        assert {name: metrics[step][name] for name in names} == {name: values[name] for name in names}
    check_tables(tables, run)


def test_wandb_gets_thumbnails_as_images(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, sent, url = importlib.import_module("wandb"), list[Any](), data_url(picture(1, 20, 10), 96)
    monkeypatch.setattr(wandb, "run", wandb)
    monkeypatch.setattr(wandb, "log", sent.append)
    trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=1), args=SimpleNamespace(report_to=["wandb"]))
    trainer.callback_handler = SimpleNamespace(callbacks=[])
    report_table(pd.DataFrame({"query": ["a", "b"], "images": [f"{url} {url}", ""]}), trainer)
    shown, none = sent[0]["completions"].get_column("images")
    assert [image.image.size for image in shown] == [(20, 10)] * 2 and none == []
