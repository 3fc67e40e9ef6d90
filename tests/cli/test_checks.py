"""All problems of a command line are found before the first step and printed as one list."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rlhf_ppo.cli import commands, judge
from rlhf_ppo.cli.checks import check_step_options
from rlhf_ppo.cli.errors import Problems
from rlhf_ppo.cli.main import main
from tests.conftest import make_tokenizer, save_models, tiny_policy, tiny_scorer, write_rows


@pytest.fixture
def here(empty_place: Path) -> None:
    save_models(base=tiny_policy(), scorer=tiny_scorer())
    write_rows("rows.jsonl", [{"prompt": "w4 w5", "completion": " w6", "chosen": " w4", "rejected": " w7"}] * 20)
    write_rows("odd.jsonl", [{"prompt": {"a": 1}, "chosen": 3, "rejected": "w4", "text": [1]}])


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
            f"{PPO_QUICK} --kl_coef -1 --lerning_rate 1 --beta 1 --cliprange=wide --sft_model_path none "
            "--dataset_name no.jsonl --reward_model_path bare --reward_funcs lenght nowhere.py:f "
            "--value_model_path lost --ptx_dataset gone.jsonl",
            [
                "argument --cliprange: invalid float value: 'wide'",
                "there is no option --beta (use kl_coef)",
                "there is no option --lerning_rate; did you mean --learning_rate?",
                "kl_coef=-1.0 must be",
                "sft_model_path='none' could not be loaded",
                "reward_model_path='bare' could not be loaded",
                "value_model_path='lost' could not be loaded",
                "reward_funcs holds 'lenght', which is not a reward's name",
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


def test_dropped_prompts_are_said_once(here, caplog):
    Path("long.jsonl").write_text("".join(f'{{"prompt": "w1{" w2" * (row % 2 * 8)}"}}\n' for row in range(40)))
    options = f"{PPO_QUICK} --sft_model_path base --reward_model_path scorer --dataset_name long.jsonl"

    main(["train", *shlex.split(options), "--max_prompt_length", "4", "--dry_run"])

    assert [record.message for record in caplog.records if "dropped" in record.message] == [
        "train_dataset: dropped 18 of 36 prompts, longer than 4 tokens",
        "eval_dataset: dropped 2 of 4 prompts, longer than 4 tokens",
    ]


@pytest.mark.parametrize("command", ["sft", "reward"])
def test_an_adapter_is_no_model_to_train_whole(command, here, capsys):
    """transformers would load it, and fail at the first checkpoint."""
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained("base"), config).save_pretrained("adapter")
    make_tokenizer().save_pretrained("adapter")
    capsys.readouterr()
    options = f"{QUICK} --model_name_or_path adapter --dataset_name rows.jsonl"
    (found,) = problems_of(command, options, capsys)
    assert f"model_name_or_path='adapter' is an adapter, and {command} needs a whole model" in found


def test_a_dry_run_finds_errors_of_the_weights(here, capsys):
    options = f"{PPO_QUICK} --sft_model_path scorer --reward_funcs length --dataset_name rows.jsonl --dry_run"

    assert "sft_model_path='scorer' is not a language model" in problems_of("train", options, capsys)[0]


def test_paths_that_an_earlier_step_writes_are_not_checked(here):
    problems = Problems()
    words = f"{PPO_QUICK} --sft_model_path runs/sft --reward_model_path runs/reward --dataset_name rows.jsonl"
    options = commands.parse_options("ppo", "train", shlex.split(words), problems)

    with problems.section("ppo"):
        check_step_options(problems, "train", options, origins={"runs/reward": None})

    (message,) = problems.messages
    assert message.startswith("ppo: sft_model_path='runs/sft' could not be loaded")


LONG = {"prompt": "w4 " * 40, "chosen": " w4", "rejected": " w7"}
TALK = [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}]
FILES: dict[str, list[Any]] = {
    "texts": [{"text": "w4 w5"}] * 20,
    "talks": [{"messages": TALK, "chosen": TALK, "rejected": [*TALK[:1], TALK[1] | {"content": "w6"}]}] * 20,
    "asked": [{"prompt": TALK[:1]}] * 20,
    "long": [LONG] * 20,
    "gaps": [{"prompt": f"w{row}", "text": "w4", "chosen": " w4", "rejected": " w7"} for row in range(10)]
    + [{"prompt": None, "text": None, "chosen": None, "rejected": " w7"}] * 10,
}


@pytest.mark.parametrize(
    ("section", "options", "expected"),
    [
        ("sft", {}, None),
        ("sft", {"dataset_name": "gaps.jsonl"}, "the column `text` of row 10 holds nothing"),
        (
            "sft",
            {"dataset_name": "talks.jsonl"},
            "the column `messages` holds conversations, and the model's tokenizer",
        ),
        ("reward", {"dataset_name": "gaps.jsonl"}, "the column `chosen` of row 10 holds nothing"),
        ("reward", {"dataset_name": "talks.jsonl"}, "the column `chosen` holds conversations"),
        ("reward", {"dataset_name": "long.jsonl", "max_length": 16}, "the shortest has 41: raise max_length"),
        (
            "reward",
            {"use_peft": True, "lora_target_modules": "nope"},
            "lora_target_modules=['nope'] does not fit the model, which has ['down_proj', ",
        ),
        ("ppo", {"dataset_name": "gaps.jsonl"}, "has a prompt of type NoneType"),
        ("ppo", {"dataset_name": "asked.jsonl"}, "is a conversation, and the tokenizer has no chat template"),
        ("ppo", {"dataset_name": "long.jsonl", "max_prompt_length": 16}, "are longer than max_prompt_length=16"),
        ("ppo", {"response_length": 5000}, "lower response_length"),
        ("ppo", {"reward_funcs": ["own.py:needs"]}, "'needs' requires the arguments ['answer']"),
        ("ppo", {"reward_funcs": ["own.py:fine", "own.py:made"]}, None),
        ("ppo", {"reward_funcs": ["own.py:gone"]}, "own.py has no 'gone'; it defines ['needs', 'fine']"),
        ("ppo", {"reward_funcs": ["torn.py:f"]}, "torn.py cannot be read as Python"),
        ("judge", {"dataset_name": "asked.jsonl"}, "is a conversation, and the tokenizer has no chat template"),
        ("report", {"output": "rows.jsonl/report.html"}, "output='rows.jsonl' cannot be written"),
    ],
)
def test_a_pipeline_reads_all_data_before_its_first_step(section, options, expected, here, capsys):
    """The models that `sft` and `reward` will write stand for `base`, which they start from."""
    for name, rows in FILES.items():
        write_rows(f"{name}.jsonl", rows)
    Path("own.py").write_text(
        "raise SystemExit('a dry run executes no code of the user')\n"
        "def needs(completions, answer, *, weight: int = 1):\n    return []\n"
        "async def fine(completions, prompt: str = 'x', **kwargs):\n    return []\nmade = fine\n"
    )
    Path("torn.py").write_text("def f(:\n")
    sections: dict[str, Any] = {
        "output_dir": "run",
        "common": {"report_to": "none", "use_cpu": True},
        "sft": {"model_name_or_path": "base", "dataset_name": "texts.jsonl"},
        "reward": {"dataset_name": "rows.jsonl"},
        "ppo": {"dataset_name": "rows.jsonl", "response_length": 4, "per_device_train_batch_size": 4},
        "judge": {"dataset_name": "rows.jsonl", "judge": "length"},
        "report": {},
    }
    sections[section] |= options
    Path("run.yaml").write_text(json.dumps(sections))
    if expected is None:
        main(["pipeline", "run.yaml", "--dry-run"])
    else:
        [problem] = problems_of("pipeline", "run.yaml --dry-run", capsys)
        assert problem.startswith(f"{section}: ") and expected in problem
