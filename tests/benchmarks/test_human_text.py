"""The page that human_text.py writes from a pipeline's directory, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd


def test_the_page_has_each_seed_their_mean_the_seconds_and_samples(tmp_path: Path) -> None:
    from human_text import RUN, written

    for seed, rate in (("0", 0.6), ("1", 0.7)):
        judged = tmp_path / RUN / f"ppo-seed{seed}" / "judged"
        judged.mkdir(parents=True)
        figures = {"win_rate": rate, "interval": [rate - 0.1, rate + 0.1], "length_controlled": 0.5}
        (judged / "win_rate.json").write_text(json.dumps(figures))
        log = [{"loss": 1.0}, {"eval_score": 0.25, "eval_kl": 0.0}, {"eval_score": 0.5, "eval_kl": 4.0}]
        (judged.parent / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        rows = [{"prompt": "a|b", "opponent": "c", "model": "d", "verdict": verdict} for verdict in (1.0, -1.0, 0.0)]
        pd.DataFrame(rows).to_parquet(judged / "judged.parquet")
    lines = [*written(tmp_path, {"sft": 60.0, "report": 30.0}, {"reward": 0.55, "judge_reward": 0.58})]

    assert lines[2:5] == [
        "| 0 | 60.0% | 50.0% to 70.0% | 50.0% | 0.25 to 0.50 | 4.0 |",
        "| 1 | 70.0% | 60.0% to 80.0% | 50.0% | 0.25 to 0.50 | 4.0 |",
        "| mean | 65.0%, standard error 5.0 | | | | |",
    ]
    assert any(line.startswith("1.5 minutes in all (sft 60 s, report 30 s) on ") for line in lines)
    assert [line.rpartition(" | ")[2] for line in lines[-3:]] == ["policy |", "language model |", "neither |"]
    assert lines[-1].startswith("| a\\|b | c | d |")
