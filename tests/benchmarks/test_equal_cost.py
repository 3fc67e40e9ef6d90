"""The comparison at equal CPU time: which runs are missing, which trial is chosen, what the clock counts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch


def row(arm: str, seed: int, minutes: float, single: float = 0.5, kl: float = 5.0) -> dict[str, Any]:
    return {
        "arm": arm,
        "seed": seed,
        "minutes": minutes,
        "single": single,
        "pairs": 0.0,
        "steps": 104,
        "peak_mb": 4560,
        "evaluation": {"kl": kl},
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    return path


def selection(**changes: tuple[float, float]) -> list[dict[str, Any]]:
    """Return GRPO's rows of both selection seeds; `changes` are (single, KL) of a trial, by its place."""
    from equal_cost import SELECTION, TRIALS, label

    trials = [(trial, *changes.get(f"trial{place}", (0.5, 5.0))) for place, trial in enumerate(TRIALS)]
    return [row(label("grpo", trial), seed, 10, single, kl) for trial, single, kl in trials for seed in SELECTION]


def test_a_seed_of_all_methods_comes_before_the_next_and_trials_come_last(tmp_path: Path) -> None:
    from equal_cost import FINAL, METHODS, SELECTION, TRIALS, missing, read

    nothing = missing(read(tmp_path / "absent.jsonl"))
    finals = len(FINAL) * len(METHODS)
    assert len(nothing) == finals + len(METHODS) * len(TRIALS) * len(SELECTION)
    assert [name for name, *_ in nothing[: len(METHODS)]] == [*METHODS]
    assert {(trial, seed in FINAL) for _, trial, seed in nothing[:finals]} == {(TRIALS[0], True)}
    assert {seed for *_, seed in nothing[finals:]} == {*SELECTION}


def test_a_method_trains_again_with_the_best_of_its_trials(tmp_path: Path) -> None:
    from equal_cost import FINAL, SELECTION, TRIALS, label, missing, read

    of_preset = [row(label("grpo", TRIALS[0]), seed, 20) for seed in FINAL]
    runs = missing(read(write(tmp_path / "rows.jsonl", of_preset + selection(trial1=(0.9, 5.0)))))
    assert [run for run in runs if run[0] == "grpo"] == [("grpo", TRIALS[1], seed) for seed in FINAL]
    runs = missing(read(write(tmp_path / "rows.jsonl", of_preset + selection(trial0=(0.9, 5.0)))))
    assert not [run for run in runs if run[0] == "grpo"]
    assert {seed for *_, seed in missing(read(write(tmp_path / "rows.jsonl", of_preset)))} == {*FINAL, *SELECTION}


def test_a_run_with_its_last_mark_is_not_missing(tmp_path: Path) -> None:
    from equal_cost import FINAL, TRIALS, label, missing, read

    name = label("grpo", TRIALS[0])
    finals = [row(name, FINAL[0], 5), row(name, FINAL[0], 20), row(name, FINAL[1], 10)]
    runs = missing(read(write(tmp_path / "rows.jsonl", selection(trial0=(0.9, 5.0)) + finals)))
    assert [seed for method, _, seed in runs if method == "grpo"] == [*FINAL[1:]]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"trial1": (0.6, 11.9)}, 1),
        ({"trial1": (0.6, 12.0)}, 0),
        ({"trial0": (0.5, 15.0), "trial1": (0.5, 14.0)}, 1),
    ],
    ids=["the most accurate", "of those below the KL", "the smallest KL if none is below"],
)
def test_the_chosen_trial(changes: dict[str, tuple[float, float]], place: int, tmp_path: Path) -> None:
    from equal_cost import TRIALS, chosen, read

    rows = selection(**changes)
    assert chosen("grpo", read(write(tmp_path / "rows.jsonl", rows))) == TRIALS[place]
    assert chosen("grpo", read(write(tmp_path / "rows.jsonl", rows[:-1]))) is None


def test_a_mark_that_was_measured_twice_counts_the_last_time_and_the_table_has_each_method_at_each_mark(
    tmp_path: Path,
) -> None:
    from equal_cost import FINAL, TRIALS, draw, label, read, table

    name = label("grpo", TRIALS[0])
    finals = [row(name, seed, minutes, 0.5) for seed in FINAL for minutes in (5, 10, 20)]
    again = row(name, FINAL[0], 5, 1.0)
    rows = read(write(tmp_path / "rows.jsonl", selection(trial0=(0.9, 5.0)) + finals + [again]))
    lines = table(rows).splitlines()
    assert [line for line in lines if line.startswith("| GRPO")] == [
        "| GRPO (TRL 1.16) | 5 | 5 | 0.36 [0.19, 0.53] | 0.60 [0.32, 0.88] | 0.00 [0.00, 0.00] |  |  |  |",
        "| GRPO (TRL 1.16) | 10 | 5 | 0.30 [0.30, 0.30] | 0.50 [0.50, 0.50] | 0.00 [0.00, 0.00] |  |  |  |",
        "| GRPO (TRL 1.16) | 20 | 5 | 0.30 [0.30, 0.30] | 0.50 [0.50, 0.50] | 0.00 [0.00, 0.00] | 5.00 [5.00, 5.00] "
        "| 13 | 4.6 |",
    ]
    of_two_seeds = {key: line for key, line in rows.items() if key[1] not in FINAL[2:]}
    assert "| GRPO (TRL 1.16) | 20 | 2 | 0.30 | 0.50 | 0.00 | 5.00 | 13 | 4.6 |" in table(of_two_seeds)
    draw(rows, tmp_path / "picture.svg")
    draw(
        of_two_seeds | {key: line for key, line in rows.items() if key[1] in FINAL and key[2] == 5},
        tmp_path / "two.svg",
    )
    assert "GRPO" in (tmp_path / "picture.svg").read_text() and "GRPO" not in (tmp_path / "two.svg").read_text()
    rate = f"{TRIALS[1][0]:g}"
    others = {(key[0].replace("0.0005", rate), *key[1:]): line for key, line in rows.items()}
    assert f"| GRPO (TRL 1.16), rate {rate} | 20 | 5 | 0.30" in table(rows | others)
    assert "CPU minutes of training" in (tmp_path / "picture.svg").read_text()


KINDS = ["short", "lower", "no_comma", "word", "opening", "question"]
KINDS += ["opening+short", "lower+no_comma", "no_comma+word", "opening+word"]


class Trainer:
    """Takes an hour to measure; a third of the answers to each kind of prompt are right."""

    obeys = True

    def __init__(self, now: list[float]) -> None:
        self.now = now

    def table_of_answers(self) -> pd.DataFrame:
        self.now[0] += 3600
        return pd.DataFrame({"constraints": KINDS * 3, "strict": [1.0] * 10 + [0.0] * 20})

    def evaluate(self) -> dict[str, float]:
        self.now[0] += 3600
        return {"eval_kl": 2.0}


def test_the_clock_stands_still_while_it_measures_and_continues_after_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import follow

    now = [1000.0]
    monkeypatch.setattr(follow.time, "process_time", lambda: now[0])
    args = SimpleNamespace(output_dir=str(tmp_path), seed=7, max_steps=9, learning_rate=0.5)
    control = SimpleNamespace(should_training_stop=False)

    optimizer = SimpleNamespace(param_groups=[{"initial_lr": 0.5}, {"initial_lr": 1.0}])

    def clock() -> Any:
        clock_of_run = follow.Clock("an arm", [2, 1, 5], tmp_path / "rows.jsonl", ["--x"], decays=True)
        clock_of_run.trainer = Trainer(now)
        return clock_of_run

    def step(of: Any, number: int, seconds: float) -> None:
        now[0] += seconds
        of.on_step_end(args, SimpleNamespace(global_step=number), control, optimizer=optimizer)
        of.on_save(args, SimpleNamespace(global_step=number), control)

    first = clock()
    first.on_train_begin(args, SimpleNamespace(global_step=0), control, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.0]
    for number, seconds in enumerate((59, 2, 70, 10), 1):
        step(first, number, seconds)
    now[0] += 10_000  # killed; the checkpoint of the third step is the last that is read
    second = clock()
    second.on_train_begin(args, SimpleNamespace(global_step=3), control, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5 * 169 / 300, 169 / 300])
    assert second.marks == [5] and not control.should_training_stop
    step(second, 4, 170)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    assert control.should_training_stop
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["minutes"], row["steps"], row["cpu_seconds"]) for row in rows] == [
        (1, 2, 61),
        (2, 3, 131),
        (5, 4, 301),
    ]
    assert [(row["arm"], row["seed"]) for row in rows] == [("an arm", 7)] * 3
    assert [row["evaluation"] for row in rows] == [{}, {}, {"kl": 2.0}], "sampled answers at the end only"
    assert [(row["single"], row["pairs"]) for row in rows] == [(pytest.approx(1 / 3), pytest.approx(1 / 3))] * 3


def test_a_trainer_that_does_not_obey_is_ended_by_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import follow

    now = [0.0]
    monkeypatch.setattr(follow.time, "process_time", lambda: now[0])
    clock = follow.Clock("theirs", [1], tmp_path / "rows.jsonl", [])
    clock.trainer = Trainer(now)
    clock.trainer.obeys = False
    now[0] = 60
    args = SimpleNamespace(output_dir=str(tmp_path), seed=7, max_steps=9, learning_rate=0.5)
    with pytest.raises(follow.TimeIsUp):
        clock.on_step_end(args, SimpleNamespace(global_step=1), SimpleNamespace())


def test_a_copy_of_a_wrapped_model_computes_with_its_own_weights() -> None:
    import follow

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for module in (model, model[0]):
        vars(module)["forward"] = lambda inputs, original=module: type(original).forward(original, inputs)
    theirs = object.__new__(follow.Theirs)
    theirs.measures = lambda policy: policy
    theirs.trainer = SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped))
    copied, inputs = theirs.copied(), torch.ones(1, 2)
    before = copied(inputs)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(copied(inputs), before) and not torch.equal(model(inputs), before)
