"""The steps and options that a pipeline's file defines."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_ppo.cli.pipeline import Step, read_pipeline

WHOLE = """
output_dir: runs/x
seeds: [3, 5]
common: {report_to: none, use_cpu: true}
sft: {model_name_or_path: base, dataset_name: texts.jsonl, learning_rate: 1.0e-4}
reward: {dataset_name: pairs.jsonl}
ppo: {dataset_name: prompts.jsonl, reward_funcs: [length, "f.py:g"], report_to: wandb}
judge: {dataset_name: prompts.jsonl}
report: {}
"""


def steps(text: str, folder: Path) -> dict[str, Step]:
    (folder / "run.yaml").write_text(text)
    return {step.name: step for step in read_pipeline(folder / "run.yaml").steps}


def test_each_step_takes_what_the_earlier_ones_made(tmp_path: Path) -> None:
    found = steps(WHOLE + "judge_reward: {dataset_name: others.jsonl}", tmp_path)

    assert list(found) == [
        "sft", "reward", "judge_reward", "ppo-seed3", "ppo-seed5", "judge-seed3", "judge-seed5", "report",
    ]  # fmt: skip
    for name in ("reward", "judge_reward"):
        assert found[name].options["model_name_or_path"] == "runs/x/sft"
    ppo = found["ppo-seed5"].options
    assert (ppo["sft_model_path"], ppo["reward_model_path"], ppo["seed"]) == ("runs/x/sft", "runs/x/reward", 5)
    judge = found["judge-seed5"].options
    assert (judge["model"], judge["opponent"], judge["seed"]) == ("runs/x/ppo-seed5", "runs/x/sft", 5)
    assert judge["output_dir"] == "runs/x/ppo-seed5/judged" and judge["judge_model"] == "runs/x/judge_reward"
    runs = ["runs/x/ppo-seed3", "runs/x/ppo-seed5"]
    assert found["report"].argv() == [*runs, "--output", "runs/x/report.html"]


def test_a_section_wins_over_common_and_options_become_words(tmp_path: Path) -> None:
    found = steps(WHOLE, tmp_path)

    assert found["sft"].options["report_to"] == "none" and found["ppo-seed3"].options["report_to"] == "wandb"
    assert "report_to" not in found["judge-seed3"].options and "judge_model" not in found["judge-seed3"].options
    words = found["ppo-seed3"].argv()
    assert words[words.index("--reward_funcs") + 1 :][:3] == ["length", "f.py:g", "--seed"]
    assert words[words.index("--use_cpu") + 1] == "true"
    dashes = steps(
        "output_dir: x\nseeds:\nppo: {sft_model_path: a, reward_funcs: length, stop_strings: ['---']}", tmp_path
    )
    assert "--stop_strings=---" in dashes["ppo"].argv()
    plain = steps("output_dir: x\nsft: {save_strategy: no, bf16: false, packing: True}", tmp_path)["sft"].argv()
    assert plain[:6] == ["--save_strategy", "no", "--bf16", "false", "--packing", "true"]


@pytest.mark.parametrize("spelled", ["runs/x/sft", "runs/x/sft/", "./runs/x/sft", "{}/runs/x/sft/checkpoint-1", "no"])
def test_a_step_reads_another_however_its_directory_is_spelled(spelled: str, empty_place: Path) -> None:
    named = f"sft_model_path: {spelled.format(empty_place)}"
    ppo = steps(WHOLE.replace("ppo: {", f"ppo: {{{named}, "), empty_place)["ppo-seed3"]
    assert ppo.names(Path("runs/x/sft")) == (spelled != "no")


@pytest.mark.parametrize(
    ("judge", "model", "opponent", "judge_model"),
    [
        ("{}", "x/ppo", "x/sft", "x/judge_reward"),
        ("{judge: length, opponent_column: c}", "x/ppo", None, None),
        ("{model: m, opponent: o, judge_model: j}", "m", "o", "j"),
    ],
)
def test_what_the_judge_s_section_names_is_not_taken_from_other_steps(
    judge: str, model: str, opponent: str | None, judge_model: str | None, tmp_path: Path
) -> None:
    text = f"output_dir: x\nsft: {{}}\njudge_reward: {{}}\nppo: {{reward_funcs: length}}\njudge: {judge}"
    found = steps(text, tmp_path)["judge"].options
    assert tuple(map(found.get, ("model", "opponent", "judge_model"))) == (model, opponent, judge_model)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "cannot be read as YAML"),
        ("ppo: {}", "must name an output_dir"),
        ("output_dir: x\nppo: {}\nsftt: {}", r"has the unknown sections \['sftt'\]"),
        ("output_dir: x\nppo: [a]", r"ppo=\['a'\] must be options"),
        ("output_dir: x\nsft: {output_dir: y}", "must be options, one per line, without output_dir"),
        ("output_dir: x\nppo: {seed: 4}", "seeds are at the top"),
        ("output_dir: x\nsft: {a: 1, a: 2}", "the key a is repeated"),
        ("output_dir: x\nppo: {sft_model_path: m}", "ppo has no reward"),
        ("output_dir: x\nppo: {reward_funcs: length}", "ppo has no language model to start from"),
        ("output_dir: x\nsft: {}\nreport: {}", "has a section `report` without `ppo`"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        steps(text, tmp_path)
