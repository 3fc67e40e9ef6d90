"""`rlhf-ppo init`: it reads data, splits some off, and writes a file that the pipeline reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rlhf_ppo.cli.init import read_data
from rlhf_ppo.cli.main import init
from rlhf_ppo.cli.pipeline import check_steps, read_pipeline
from rlhf_ppo.data.sources import load_splits
from tests.conftest import make_tokenizer, save_models, tiny_config, tiny_policy, write_rows

ALL = "--model base --texts texts.jsonl --preferences pairs.jsonl --prompts prompts.jsonl"


def read(name: str) -> list[dict[str, Any]]:
    return [*load_splits(f"runs/pipeline/data/{name}")["train"]]


@pytest.fixture(autouse=True)
def _here(empty_place: Path) -> None:
    save_models(base=tiny_policy())
    write_rows("texts.jsonl", [{"text": "w4 w5 w6"}] * 60)
    pairs = [
        {"prompt": f"w{4 + row % 25} w{4 + row // 25}", "chosen": " w4 w5", "rejected": " w7"} for row in range(200)
    ]
    write_rows("pairs.jsonl", pairs)
    write_rows("prompts.jsonl", [{"prompt": f"w{4 + row % 20} w{4 + row // 20}"} for row in range(100)] * 2)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (ALL, ["sft", "reward", "judge_reward", "ppo", "judge", "report"]),
        (f"{ALL} --judge_model base", ["sft", "reward", "ppo", "judge", "report"]),
        ("--model base --prompts prompts.jsonl --reward_funcs length", ["ppo", "judge", "report"]),
    ],
)
def test_the_pipeline_accepts_the_file(options: str, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    init(options.split())

    steps = {step.name: step for step in read_pipeline("run.yaml").steps}
    assert list(steps) == names
    check_steps(steps.values())
    ppo, judge = steps["ppo"].options, steps["judge"].options
    printed = capsys.readouterr().out
    assert ("The judge is PPO's own reward" in printed) == ("--reward_funcs" in options)
    assert ("sft: 60 rows: whole texts of 3 tokens (median), 95% up to 3\n" in printed) == ("sft" in names)
    assert ("reward_model_path" in ppo) == ("reward" in names) and ppo["total_episodes"] >= 20 * 64
    assert (judge.get("judge_model") == "runs/pipeline/judge_reward") == ("judge_reward" in names)


def test_a_saved_adapter_is_a_model_to_start_from() -> None:
    base = AutoModelForCausalLM.from_pretrained("base")
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained("adapter")
    make_tokenizer().save_pretrained("adapter")
    init(ALL.replace("--model base", "--model adapter").split())
    steps = {step.name: step for step in read_pipeline("run.yaml").steps}
    assert steps["sft"].options["model_name_or_path"] == "adapter"
    check_steps(steps.values())


def test_the_first_split_of_a_data_set_without_train_is_named() -> None:
    DatasetDict({"train_sft": Dataset.from_list([{"text": "w4 w5 w6"}] * 60)}).save_to_disk("stories")
    init(ALL.replace("texts.jsonl", "stories").split())
    steps = {step.name: step for step in read_pipeline("run.yaml").steps}
    check_steps(steps.values())
    splits = {name: step.options.get("dataset_train_split") for name, step in steps.items()}
    assert splits.pop("sft") == "train_sft" and set(splits.values()) == {None}


def test_lora_is_one_switch() -> None:
    init([*ALL.split(), "--lora"])
    steps = {step.name: step for step in read_pipeline("run.yaml").steps}
    check_steps(steps.values())
    training = [steps[name].options for name in ("sft", "reward", "judge_reward", "ppo")]
    assert all(options["use_peft"] and options["lora_r"] == 16 for options in training)
    assert steps["ppo"].options["share_base_model"] and steps["reward"].options["model_name_or_path"].endswith("sft")


@pytest.mark.parametrize(
    ("width", "has_accelerator", "is_slow"), [(1024, False, True), (1024, True, False), (32, False, False)]
)
def test_a_large_model_without_an_accelerator_gets_sizes_for_two_cores(
    width: int, has_accelerator: bool, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: has_accelerator)
    tiny_config(hidden_size=width, intermediate_size=4 * width).save_pretrained("base")
    init(ALL.split())
    text = Path("run.yaml").read_text()
    written = yaml.safe_load(text)
    ppo, batch = written["ppo"], 16 if is_slow else 64
    assert ppo["per_device_train_batch_size"] * ppo.get("gradient_accumulation_steps", 1) == batch
    assert ppo["total_episodes"] == (10 if is_slow else 20) * batch
    assert {written[name]["num_train_epochs"] for name in ("sft", "reward", "judge_reward")} == {1 if is_slow else 3}
    assert (ppo.get("value_model_path") == "policy") == ("No GPU was found" in text) == is_slow
    check_steps(read_pipeline("run.yaml").steps)


@pytest.mark.parametrize(("major", "is_native"), [(7, False), (8, True)])
def test_bf16_is_on_for_a_gpu_that_does_not_emulate_it(
    major: int, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *_: SimpleNamespace(major=major))
    monkeypatch.setattr("torch.cuda._check_bf16_tensor_supported", lambda *_: True)
    init(ALL.split())
    assert yaml.safe_load(Path("run.yaml").read_text())["common"]["bf16"] is is_native


def test_no_prompt_is_in_two_parts() -> None:
    init(ALL.split())

    prompts, held_out = ({row["prompt"] for row in read(name)} for name in ("prompts", "held_out_prompts"))
    assert len(prompts) == 80 and len(held_out) == 20 and prompts.isdisjoint(held_out)
    pairs, others = (read(name) for name in ("pairs", "judge_pairs"))
    assert len(pairs) == 120 and len(others) == 80
    assert {row["prompt"] for row in pairs}.isdisjoint(row["prompt"] for row in others)
    judge = yaml.safe_load(Path("run.yaml").read_text())["judge"]
    assert judge["dataset_name"] == "runs/pipeline/data/held_out_prompts" and judge["num_prompts"] == 20


def test_split_off_columns_keep_their_types() -> None:
    """JSON would make a time of a date, and text files have no empty dicts."""
    rows = [{"prompt": f"w{4 + row}", "answer": f"20{row + 10}-03-04", "more": {}} for row in range(20)]
    Dataset.from_list(rows).save_to_disk("days")
    init("--model base --prompts days --reward_funcs correctness".split())

    found = read("prompts") + read("held_out_prompts")
    assert sorted(found, key=lambda row: row["answer"]) == rows


def test_prompts_without_room_for_a_response_are_dropped_at_the_start_and_an_update_fits_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of 64 prompts `train` evaluates on 6."""
    save_models(base=tiny_policy(max_position_embeddings=64))
    texts = [f"w{4 + row % 20} w{4 + row // 20} w4" for row in range(80)] + [f"w{row} " * 33 for row in range(4, 14)]
    write_rows("prompts.jsonl", [{"prompt": text} for text in texts])
    init("--model base --prompts prompts.jsonl --reward_funcs length".split())

    assert "dropped 10 of 90 prompts, longer than 32 tokens" in caplog.text
    rows = [read(name) for name in ("prompts", "held_out_prompts")]
    assert [len(each) for each in rows] == [64, 16] and {*rows[0][0]} == {"prompt"}
    assert max(len(row["prompt"].split()) for each in rows for row in each) == 3
    ppo = yaml.safe_load(Path("run.yaml").read_text())["ppo"]
    assert ppo["max_prompt_length"] == ppo["response_length"] == 32
    assert ppo["per_device_train_batch_size"] * ppo["gradient_accumulation_steps"] == 32


def test_few_pairs_leave_the_judge_to_ppos_reward_model(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows("pairs.jsonl", [{"prompt": f"w{row}", "chosen": " w4", "rejected": " w7"} for row in range(10, 19)])
    init(ALL.split())

    assert (
        "own reward: the 9 pairs are not split: that needs 100 with different prompts. Give" in capsys.readouterr().out
    )
    assert yaml.safe_load(Path("run.yaml").read_text())["judge"]["judge_model"] == "runs/pipeline/reward"


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("row", "argument", "expected"),
    [
        ({"text": "w4 w5"}, "texts", (0, 2)),
        ({"messages": [turn("user", "w4"), turn("assistant", "w5 w6")], "prompt": "w4"}, "texts", (8, 3)),
        ({"messages": [turn("assistant", "w5 w6"), turn("user", "w4")]}, "texts", (0, 11)),
        (
            {"messages": [turn("user", "w4"), turn("assistant", "w5"), turn("user", "w4"), turn("assistant", "w6")]},
            "texts",
            (16, 2),
        ),
        ({"text": "Human: w4\n\nAssistant: w5 w6 w7"}, "texts", (3, 3)),
        ({"prompt": "w4", "completion": " w5 w6"}, "texts", (1, 2)),
        ({"prompt": [turn("user", "w4")], "completion": [turn("assistant", "w5 w6")]}, "texts", (8, 3)),
        ({"chosen": "w4 w5 w6 w7", "rejected": "w4 w5 x9"}, "preferences", (2, 2)),
        (
            {
                "chosen": [turn("user", "w4"), turn("assistant", "w5")],
                "rejected": [turn("user", "w4"), turn("assistant", "w6 w7")],
            },
            "preferences",
            (8, 3),
        ),
    ],
)
def test_lengths_are_counted_in_tokens(row: dict[str, Any], argument: str, expected: tuple[int, int]) -> None:
    """The template writes `w0 w1` first, and three tokens around each message, one of them behind it."""
    write_rows("rows.jsonl", [row])
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "w0 w1{% for m in messages %} w2 w3 {{ m.content }} w9{% endfor %}{{ ' w2 w3' if add_generation_prompt }}"
    )
    found = read_data("rows.jsonl", argument, tokenizer)
    assert (*found.prompts, *found.responses) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model base --prompts prompts.jsonl", "PPO has no reward"),
        (f"{ALL} --file there.yaml", "there.yaml already exists"),
        (f"{ALL} --output_dir full", "full/data already exists: name another output_dir, or move all of full, whose"),
        (f"{ALL} --judge_preferences prompts.jsonl --judge_model base", "give one of them"),
        ("--model base --prompts gone.jsonl --reward_funcs length", "prompts='gone.jsonl'"),
    ],
)
def test_a_wrong_option_writes_nothing(options: str, words: str, capsys: Any) -> None:
    Path("there.yaml").write_text("mine")
    Path("full/data").mkdir(parents=True)
    with pytest.raises(SystemExit, match="2"):
        init(options.split())

    assert words in capsys.readouterr().err
    assert Path("there.yaml").read_text() == "mine" and not Path("run.yaml").exists() and not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [("", 2, "the following arguments are required: --model, --prompts"), ("--help", 0, "hub name. Required.")],
)
def test_help_and_missing_options_import_no_torch(options: str, code: int, words: str) -> None:
    source = "import sys; from rlhf_ppo.cli.main import main; sys.modules['torch'] = None; main(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", source, "init", *options.split()], capture_output=True, text=True)
    assert done.returncode == code and words in " ".join((done.stdout + done.stderr).split())


def test_a_chat_model_with_raw_dialogues_is_told_what_happens_to_its_template(capsys: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained("base")
    rows = [{"question": f"\n\nHuman: w{row % 20} w{row % 7}\n\nAssistant:", "prompt": "w9"} for row in range(140)]
    write_rows("raw.jsonl", rows)
    init("--model base --prompts raw.jsonl --prompt_column question --reward_funcs length".split())

    printed = capsys.readouterr().out
    assert "the model's chat template is not used" in printed and "ends a response at the next Human" in printed
    steps = read_pipeline("run.yaml").steps
    check_steps(steps)
    assert steps[0].options["stop_strings"] == ["\n\nHuman:"]
    assert r'stop_strings: ["\n\nHuman:"] #' in Path("run.yaml").read_text()
    assert {*read("prompts")[0]} == {"prompt"} and read("prompts")[0]["prompt"].startswith("\n\nHuman: w")


def test_rows_without_a_prompt_are_dropped_and_errors_name_the_row_among_the_others(capsys: Any) -> None:
    rows = [{"text": text} for text in ["w4", "", "w5", " ", None, "w6 <eos>", "w7"]]
    write_rows("prompts.jsonl", rows)
    with pytest.raises(SystemExit, match="2"):
        init("--model base --prompts prompts.jsonl --reward_funcs length".split())
    printed = capsys.readouterr()
    assert printed.out == "prompts.jsonl: dropped 3 of 7 rows without a prompt; the others are numbered anew.\n"
    assert "row 2 of prompts.jsonl ends in the EOS token" in printed.err


QUESTION = "\n\nHuman: w4 w5\n\nAssistant:"
CHAT = [turn("system", "w6"), turn("user", "w4")]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"text": QUESTION}, QUESTION),
        ({"text": f"{QUESTION} "}, f"{QUESTION} "),
        ({"text": f"{QUESTION} w6"}, QUESTION),
        ({"text": f"{QUESTION} w6{QUESTION} w7"}, f"{QUESTION} w6{QUESTION}"),
        ({"text": "Human: w4\n\nAssistant: w6"}, "Human: w4\n\nAssistant:"),
        ({"text": "w4 w5"}, "w4 w5"),
        ({"prompt": CHAT}, CHAT),
        ({"prompt": [*CHAT, turn("assistant", "w7")]}, CHAT),
        ({"messages": [*CHAT, turn("assistant", "w7"), *CHAT, turn("assistant", "w8")]},
         [*CHAT, turn("assistant", "w7"), *CHAT]),
    ],
)  # fmt: skip
def test_the_last_answer_of_a_dialogue_is_no_part_of_its_prompt(
    row: dict[str, Any], prompt: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows("rows.jsonl", [{**row, "topic": "w9"}] * 2)
    found = read_data("rows.jsonl", "prompts", make_tokenizer()).rows
    assert [{name: row[name] for name in row if name != "topic"} for row in found] == [
        {"text" if "text" in row else "prompt": prompt}
    ] * 2
    is_cut = prompt not in row.values()
    assert capsys.readouterr().out == is_cut * (
        "rows.jsonl: 2 of 2 prompts end in an answer; the policy writes its own instead.\n"
    )
