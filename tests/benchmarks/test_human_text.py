"""What the run on human text writes into the documentation."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_figures_and_samples_are_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from human_text import RUN, written

    said = {"win_rate": 0.625, "interval": [0.5, 0.75], "length_controlled": 0.6}
    log = [{"eval_score": 0.1, "eval_kl": 0.0}, {"step": 1}, {"eval_score": 1.25, "eval_kl": 7.04}]
    for seed in (0, 1):
        folder = tmp_path / RUN / f"ppo-seed{seed}"
        folder.mkdir(parents=True)
        (folder / "log_history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in log))
    judged = tmp_path / RUN / "ppo-seed0" / "judged" / "judged.parquet"
    judged.parent.mkdir()
    rows = {"prompt": ["I | you"] * 3, "model": [" b"] * 3, "opponent": [" c\nd"] * 3, "verdict": [0.5, -1.0, 0.0]}
    pd.DataFrame(rows).to_parquet(judged)
    results = {"win_rate": 0.625, "standard_error": 0.0123, "seeds": [{"seed": seed, **said} for seed in (0, 1)]}
    (tmp_path / RUN / "results.json").write_text(json.dumps(results))

    lines = list(written(tmp_path, {"sft": 60.0, "ppo-seed0": 120.4}, {"reward": 0.6, "judge_reward": 0.7}))
    assert "| 1 | 62.5% | 50.0% to 75.0% | 60.0% | 0.10 to 1.25 | 7.0 |" in lines
    assert "| mean | 62.5%, standard error 1.2 | | | | |" in lines
    assert any(
        line.startswith("The reward model orders 60.0% of the judge's pairs as people did, the judge 70.0%")
        for line in lines
    )
    assert any(line.startswith("3.0 minutes in all (sft 60 s, ppo-seed0 120 s) on ") for line in lines)
    assert lines[-3:] == [f"| I \\| you | c d | b | {better} |" for better in ("policy", "language model", "neither")]
