"""The judge's result over seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.cli.pipeline import keep_win_rates
from rlhf_ppo.cli.steps import Pipeline, read_pipeline

TEXT = """
output_dir: out
seeds: {}
ppo: {{sft_model_path: m, reward_funcs: length, dataset_name: d}}
judge: {{dataset_name: d, judge: length}}
"""


def judged(seeds: dict[int, dict[str, Any]]) -> Pipeline:
    Path("run.yaml").write_text(TEXT.format(list(seeds)))
    read = read_pipeline("run.yaml")
    for step, said in zip([step for step in read.steps if step.kind == "judge"], seeds.values(), strict=True):
        step.output_dir.mkdir(parents=True)
        (step.output_dir / "win_rate.json").write_text(json.dumps(said))
    return read


def test_the_win_rates_of_all_seeds_are_kept_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rate = {"interval": [0.4, 0.9], "length_controlled": 0.55}
    found = keep_win_rates(judged({3: {"win_rate": 0.6, **rate}, 9: {"win_rate": 0.8, **rate}}))

    assert found is not None and (found.seeds, found.rates, found.mean) == ([3, 9], [0.6, 0.8], 0.7)
    kept = json.loads(Path("out/results.json").read_text())
    assert kept["win_rate"] == 0.7 and kept["seeds"][1] == {"seed": 9, "win_rate": 0.8, **rate}


def test_without_a_judge_there_is_nothing_to_keep_and_a_lost_result_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("output_dir: out\nppo: {sft_model_path: m, reward_funcs: length, dataset_name: d}")
    assert keep_win_rates(read_pipeline("run.yaml")) is None and not Path("out").exists()

    lost = judged({0: {"win_rate": 0.5, "interval": [0.4, 0.6]}, 1: {"win_rate": 0.5}})
    with pytest.raises(ValueError, match=r"ppo-seed1/judged does not hold the judge's result: .* lacks interval"):
        keep_win_rates(lost)
    Path("out/ppo-seed1/judged/win_rate.json").unlink()
    with pytest.raises(
        ValueError, match=r"ppo-seed1/judged does not hold the judge's result: it has no win_rate\.json"
    ):
        keep_win_rates(lost)
