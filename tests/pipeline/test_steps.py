"""What a pipeline's file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_ppo.cli.steps import Step, read_pipeline

WHOLE = """
output_dir: runs/x
seeds: [3, 5]
common: {report_to: none, use_cpu: true}
sft: {model_name_or_path: base, dataset_name: texts.jsonl, learning_rate: 1.0e-4}
reward: {dataset_name: pairs.jsonl}
ppo: {dataset_name: prompts.jsonl, reward_funcs: [length, "f.py:g"], report_to: wandb}
judge: {dataset_name: prompts.jsonl, judge_model: held-out}
report: {}
"""
PPO = "{sft_model_path: m, reward_funcs: length, dataset_name: d}"


def steps(text: str, folder: Path) -> dict[str, Step]:
    (folder / "run.yaml").write_text(text)
    return {step.name: step for step in read_pipeline(folder / "run.yaml").steps}


def test_each_step_takes_what_the_earlier_ones_made(tmp_path: Path) -> None:
    found = steps(WHOLE, tmp_path)

    assert list(found) == ["sft", "reward", "ppo-seed3", "ppo-seed5", "judge-seed3", "judge-seed5", "report"]
    assert [step.command for step in found.values()] == [
        "sft", "reward", "train", "train", "judge", "judge", "report",
    ]  # fmt: skip
    assert found["reward"].options["model_name_or_path"] == "runs/x/sft"
    ppo = found["ppo-seed5"].options
    assert (ppo["sft_model_path"], ppo["reward_model_path"], ppo["seed"]) == ("runs/x/sft", "runs/x/reward", 5)
    judge = found["judge-seed5"].options
    assert (judge["model"], judge["opponent"], judge["seed"]) == ("runs/x/ppo-seed5", "runs/x/sft", 5)
    assert judge["output_dir"] == "runs/x/ppo-seed5/judged"  # where its card and the report look for it
    runs = ["runs/x/ppo-seed3", "runs/x/ppo-seed5"]
    assert found["report"].argv() == [*runs, "--output", "runs/x/report.html"]


def test_a_section_wins_over_what_is_common_and_common_over_nothing(tmp_path: Path) -> None:
    found = steps(WHOLE, tmp_path)

    assert found["sft"].options["report_to"] == "none" and found["ppo-seed3"].options["report_to"] == "wandb"
    assert "report_to" not in found["judge-seed3"].options
    words = found["ppo-seed3"].argv()
    assert words[words.index("--reward_funcs") + 1 :][:3] == ["length", "f.py:g", "--seed"]
    assert words[words.index("--use_cpu") + 1] == "true" and "--learning_rate" in found["sft"].argv()


def test_a_step_that_is_left_out_is_not_run_and_nothing_is_taken_from_it(tmp_path: Path) -> None:
    found = steps(f"output_dir: x\nppo: {PPO}\njudge: {{opponent_column: c}}", tmp_path)

    assert list(found) == ["ppo", "judge"]
    assert "reward_model_path" not in found["ppo"].options
    assert found["judge"].options == {
        "model": "x/ppo",
        "opponent_column": "c",
        "seed": 0,
        "output_dir": "x/ppo/judged",
    }


def test_words_that_yaml_takes_for_truth_values_stay_words(tmp_path: Path) -> None:
    found = steps("output_dir: x\nsft: {save_strategy: no, bf16: false, packing: True}", tmp_path)

    words = found["sft"].argv()
    assert words[:6] == ["--save_strategy", "no", "--bf16", "false", "--packing", "true"]


def test_a_judge_without_ppo_judges_what_it_names(tmp_path: Path) -> None:
    found = steps("output_dir: x\nsft: {}\njudge: {model: m}", tmp_path)

    assert (found["judge"].options["model"], found["judge"].options["opponent"]) == ("m", "x/sft")
    assert "model" not in steps("output_dir: x\nsft: {}\njudge: {}", tmp_path)["judge"].options


def test_a_second_reward_model_judges_where_no_other_judge_is_named(tmp_path: Path) -> None:
    text = f"{WHOLE.replace('judge_model: held-out', '')}\njudge_reward: {{dataset_name: others.jsonl}}"
    found = steps(text, tmp_path)

    assert list(found)[:4] == ["sft", "reward", "judge_reward", "ppo-seed3"]
    second = found["judge_reward"]
    assert second.command == "reward" and second.output_dir == Path("runs/x/judge_reward")
    assert second.options["model_name_or_path"] == "runs/x/sft" and second.options["use_cpu"] is True
    assert found["judge-seed5"].options["judge_model"] == "runs/x/judge_reward"
    assert found["ppo-seed5"].options["reward_model_path"] == "runs/x/reward"
    named = steps(text.replace("judge: {dataset_name: prompts.jsonl, ", "judge: {judge: length, "), tmp_path)
    assert "judge_model" not in named["judge-seed3"].options


def test_a_column_stands_for_the_model_that_would_be_compared(tmp_path: Path) -> None:
    text = WHOLE.replace("judge_model: held-out", "judge_model: held-out, opponent_column: people")

    assert "opponent" not in steps(text, tmp_path)["judge-seed3"].options


def test_an_environment_may_pay(tmp_path: Path) -> None:
    found = steps("output_dir: x\nppo: {sft_model_path: m, environment: maze.py:Maze}", tmp_path)

    assert found["ppo"].argv()[:4] == ["--sft_model_path", "m", "--environment", "maze.py:Maze"]


@pytest.mark.parametrize("folder", [".", "~"])
def test_training_steps_are_launched(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "zero2.yaml").write_text("")
    place = folder.replace(".", str(tmp_path))
    (tmp_path / "run.yaml").write_text(f"output_dir: x\nlaunch: {place}/zero2.yaml\nsft: {{dataset_name: d}}")

    launch = read_pipeline(tmp_path / "run.yaml").launch
    assert launch == ("accelerate.commands.launch", "--config_file", f"{tmp_path}/zero2.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "cannot be read as YAML"),
        ("- a", "must hold sections"),
        ("", "must hold sections"),
        ("output_dir: x\nppo: {}\nsftt: {}", r"has the sections \['sftt'\]"),
        ("ppo: {}", "output_dir=None"),
        ("output_dir: 3\nppo: {}", "output_dir=3"),
        ("output_dir: x", "has no step"),
        ("output_dir: x\nppo: [a]", r"ppo=\['a'\] must be options"),
        ("output_dir: x\nppo: {1: 2}", "must be options"),
        ("output_dir: x\nppo: {output_dir: y}", "ppo has an output_dir of its own"),
        ("output_dir: x\nppo: {seed: 4}", r"write `seeds: \[4\]` on top"),
        ("output_dir: x\nseeds: []\nppo: {}", r"seeds=\[\]"),
        ("output_dir: x\nseeds: [1, 1]\nppo: {}", r"seeds=\[1, 1\]"),
        ("output_dir: x\nseeds: [true]\nppo: {}", r"seeds=\[True\]"),
        ("output_dir: x\nlaunch: nowhere.yaml\nsft: {}", "launch='nowhere.yaml'"),
        ("output_dir: x\nsft: {}\nsft: {a: 1}", "the key sft is repeated"),
        ("output_dir: x\nsft: {a: 1, a: 2}", "the key a is repeated"),
        ("output_dir: x\nppo: {sft_model_path: m}", "ppo has no reward"),
        ("output_dir: x\nppo: {reward_funcs: length}", "ppo has no language model to start from"),
        ("output_dir: x\nsft: {}\nreport: {}", "the section `ppo` is missing"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        steps(text, tmp_path)
