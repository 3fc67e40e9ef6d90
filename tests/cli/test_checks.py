"""All problems of a command line are found before the first step and printed as one list."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.cli import commands, judge
from rlhf_ppo.cli.checks import check_step_options
from rlhf_ppo.cli.errors import Problems
from rlhf_ppo.cli.main import main
from tests.conftest import make_tokenizer, tiny_policy, tiny_scorer


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, model in (("base", tiny_policy()), ("scorer", tiny_scorer())):
        model.save_pretrained(name)
        make_tokenizer().save_pretrained(name)
    row = {"prompt": "w4 w5", "completion": " w6", "chosen": " w4", "rejected": " w7"}
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 20)
    Path("odd.jsonl").write_text(json.dumps({"prompt": {"a": 1}, "chosen": 3, "rejected": "w4", "text": [1]}) + "\n")
    return tmp_path


def problems_of(command: str, options: str, capsys: Any) -> list[str]:
    with pytest.raises(SystemExit, match="2"):
        main([command, *shlex.split(options)])
    first, *others = capsys.readouterr().err.splitlines()
    if not others:
        return [first.removeprefix(f"rlhf-ppo {command}: error: ")]
    assert first == f"rlhf-ppo {command}: error: {len(others)} problems:"
    return [line.removeprefix("  - ") for line in others]


QUICK = "--output_dir out --report_to none --use_cpu --max_steps 1"
PPO_QUICK = f"{QUICK} --response_length 4 --per_device_train_batch_size 4"


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        (
            "train",
            f"{PPO_QUICK} --kl_coef -1 --lerning_rate 1 --cliprange=wide --sft_model_path none "
            "--dataset_name no.jsonl --reward_model_path bare --reward_funcs lenght nowhere.py:f "
            "--ptx_dataset gone.jsonl",
            [
                "argument --cliprange: invalid float value: 'wide'",
                "there is no option --lerning_rate; did you mean --learning_rate?",
                "kl_coef=-1.0 must be",
                "sft_model_path='none' could not be loaded",
                "reward_model_path='bare' could not be loaded",
                "reward_funcs holds 'lenght', which names no reward",
                "reward_funcs holds 'nowhere.py:f', but there is no file",
                "dataset_name='no.jsonl': there is no such file",
                "ptx_dataset='gone.jsonl': there is no such file",
            ],
        ),
        (
            "train",
            f"{PPO_QUICK} --sft_model_path base --reward_model_path none --dataset_name odd.jsonl",
            ["reward_model_path='none'", "row 0 of train_dataset has a prompt of type dict"],
        ),
        (
            "sft",
            f"{QUICK} --model_name_or_path none --dataset_name odd.jsonl --max_steps -7",
            [
                "max_steps=-7 must be",
                "model_name_or_path='none'",
                "dataset_name='odd.jsonl': the column `text` of row 0",
            ],
        ),
        (
            "reward",
            f"{QUICK} --dataset_name odd.jsonl",
            ["model_name_or_path=None", "the column `chosen` holds int64"],
        ),
        (
            "judge",
            "--model none --opponent gone --judge lenght --dataset_name odd.jsonl --batch_size 0",
            ["batch_size=0", "judge holds 'lenght'", "model='none'", "opponent='gone'", "the column 'prompt' holds"],
        ),
    ],
)
def test_all_problems_are_in_one_list(command, options, expected, here, capsys):
    for words in (options, f"{options} --dry_run"):
        found = problems_of(command, words, capsys)

        assert len(found) == len(expected)
        for message, beginning in zip(found, expected, strict=True):
            assert beginning in message


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("train", f"{PPO_QUICK} --sft_model_path base --reward_model_path scorer --dataset_name rows.jsonl"),
        ("sft", f"{QUICK} --model_name_or_path base --dataset_name rows.jsonl"),
        ("reward", f"{QUICK} --model_name_or_path base --dataset_name rows.jsonl"),
        ("judge", "--model base --opponent base --judge_model scorer --dataset_name rows.jsonl"),
    ],
)
def test_a_dry_run_trains_and_writes_nothing(command, options, here, capsys, monkeypatch):
    monkeypatch.setattr(commands, "train_and_save", lambda *_, **__: pytest.fail("it trains"))
    monkeypatch.setattr(judge, "judge_responses", lambda *_: pytest.fail("it judges"))

    main([command, *shlex.split(options), "--dry_run"])

    assert "Dry run: no problems found" in capsys.readouterr().out
    assert not [path for folder in ("out", "judged") for path in Path(folder).rglob("*")]


def test_a_dry_run_finds_errors_of_the_weights(here, capsys):
    options = f"{PPO_QUICK} --sft_model_path scorer --reward_funcs length --dataset_name rows.jsonl --dry_run"

    assert "sft_model_path='scorer' is no language model" in problems_of("train", options, capsys)[0]


def test_paths_that_an_earlier_step_writes_are_not_checked(here):
    problems = Problems()
    words = f"{PPO_QUICK} --sft_model_path runs/sft --reward_model_path runs/reward --dataset_name rows.jsonl"
    options = commands.parse_options("ppo", "train", shlex.split(words), problems)

    with problems.section("ppo"):
        check_step_options(problems, "train", options, coming=lambda path: path == "runs/reward")

    (message,) = problems.messages
    assert message.startswith("ppo: sft_model_path='runs/sft' could not be loaded")
