"""`rlhf-ppo init`: it measures data, model and machine, splits data off, and writes a file that the pipeline reads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import yaml

from rlhf_ppo.cli.init import QUESTIONS, init, scalar
from rlhf_ppo.cli.measuring import Data, Machine, learning_rate, measure_data, propose, seconds_of
from rlhf_ppo.cli.pipeline import check_steps
from rlhf_ppo.cli.steps import read_pipeline
from rlhf_ppo.data.sources import load_splits
from tests.conftest import make_tokenizer, save_models, tiny_policy, write_rows

ALL = "--model base --texts texts.jsonl --preferences pairs.jsonl --prompts prompts.jsonl"


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


@pytest.fixture(autouse=True)
def _here(empty_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
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
        (f"{ALL} --judge_preferences pairs.jsonl", ["sft", "reward", "judge_reward", "ppo", "judge", "report"]),
        (f"{ALL} --judge_model base", ["sft", "reward", "ppo", "judge", "report"]),
        ("--model base --prompts prompts.jsonl --reward_funcs length", ["ppo", "judge", "report"]),
        (
            "--model base --preferences pairs.jsonl --prompts pairs.jsonl",
            ["reward", "judge_reward", "ppo", "judge", "report"],
        ),
        (
            "--model base --texts texts.jsonl --prompts prompts.jsonl --reward-funcs length",
            ["sft", "ppo", "judge", "report"],
        ),
    ],
)  # fmt: skip
def test_the_pipeline_finds_nothing_wrong_in_the_file(options: str, names: list[str], capsys: Any) -> None:
    init(options.split())

    read_back = read_pipeline("run.yaml")
    assert [step.name for step in read_back.steps] == names
    assert check_steps(read_back, read_back.steps).messages == []
    ppo = next(step.options for step in read_back.steps if step.name == "ppo")
    assert ("reward_model_path" in ppo) == ("reward" in names)
    assert ("reward_funcs" in ppo) == ("--reward" in options)
    judge = next(step.options for step in read_back.steps if step.name == "judge")
    assert (judge.get("judge_model") == "runs/pipeline/judge_reward") == ("judge_reward" in names)
    assert capsys.readouterr().out.endswith("run.yaml is written. Read it, then: rlhf-ppo pipeline run.yaml\n")


def test_each_prompt_is_in_one_part() -> None:
    init(ALL.split())

    prompts, held_out = (read(f"runs/pipeline/data/{name}.jsonl") for name in ("prompts", "held_out_prompts"))
    assert len(prompts) == 80 and len(held_out) == 20
    assert {row["prompt"] for row in prompts + held_out} == {row["prompt"] for row in read("prompts.jsonl")}
    pairs, others = (read(f"runs/pipeline/data/{name}.jsonl") for name in ("pairs", "judge_pairs"))
    assert len(pairs) == 120 and len(others) == 80
    assert {row["prompt"] for row in pairs}.isdisjoint(row["prompt"] for row in others)
    judge = next(step for step in read_pipeline("run.yaml").steps if step.kind == "judge").options
    assert judge["dataset_name"] == "runs/pipeline/data/held_out_prompts.jsonl" and judge["num_prompts"] == 20


def test_a_split_for_tests_is_held_out() -> None:
    Path("both").mkdir()
    write_rows("both/train.jsonl", [{"prompt": f"w{4 + row}"} for row in range(20)])
    write_rows("both/test.jsonl", [{"prompt": f"w{24 + row}"} for row in range(4)])
    init("--model base --prompts both --reward_funcs length".split())

    assert len(read("runs/pipeline/data/prompts.jsonl")) == 20
    held_out = {row["prompt"] for row in read("runs/pipeline/data/held_out_prompts.jsonl")}
    assert held_out == {"w24", "w25", "w26", "w27"}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


FORMATS = {
    "pairs with a prompt": {"prompt": "w4 w5", "chosen": " w6 w7 w8", "rejected": " w9"},
    "pairs with a prompt, not separated": {"chosen": "w4 w5 w6 w7 w8", "rejected": "w4 w5 x9"},
    "pairs of conversations": {
        "chosen": [turn("user", "w4 w5"), turn("assistant", "w6 w7 w8")],
        "rejected": [turn("user", "w4 w5"), turn("assistant", "w9")],
    },
    "pairs of conversations, with a prompt": {
        "prompt": [turn("user", "w4 w5")],
        "chosen": [turn("assistant", "w6 w7 w8")],
        "rejected": [turn("assistant", "w9")],
    },
    "pairs in hh-rlhf's raw text": {
        "chosen": "\n\nHuman: w4 \n\nAssistant: w6 w7 w8",
        "rejected": "\n\nHuman: w4 \n\nAssistant: w9",
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_pairs_in_each_format_of_trl_are_measured_and_separated(name: str) -> None:
    write_rows("pairs.jsonl", [FORMATS[name]] * 8)
    found = measure_data("pairs.jsonl", "preferences", make_tokenizer())

    assert found.form == name.partition(",")[0]
    length = 3 if "hh-rlhf" in name else 2  # "Human:" and "Assistant:" are unknown words
    assert found.prompts == [length] * 8 and found.totals == [length + 3] * 8
    assert found.responses == [3, 1] * 8
    row = found.rows[0]
    assert "w6" not in str(row["prompt"]) and "w4" not in str(row["chosen"]) + str(row["rejected"])


@pytest.mark.parametrize(
    ("row", "argument", "expected"),
    [
        ({"text": "w4 w5"}, "texts", ("text", [], [2])),
        ({"messages": [turn("user", "w4"), turn("assistant", "w5 w6")]}, "texts", ("messages", [], [3])),
        ({"prompt": "w4", "completion": " w5 w6"}, "texts", ("prompt and completion", [1], [2])),
        ({"prompt": "w4 w5 w6"}, "prompts", ("prompt", [3], [])),
        ({"input_ids": [4, 5]}, "prompts", ("input_ids", [2], [])),
        ({"chosen": "w4 w5 w6", "rejected": "w4 x7"}, "prompts", ("prompt", [1], [])),
    ],
)
def test_lengths_are_counted_in_tokens(row: dict[str, Any], argument: str, expected: tuple[Any, ...]) -> None:
    write_rows("rows.jsonl", [row])
    found = measure_data("rows.jsonl", argument, make_tokenizer())

    assert (found.form, found.prompts, found.responses) == expected


MACHINE = Machine(10**7, 512, torch.device("cpu"), 2**33, 1e-3, 1e-6)
"""A step of 1,000 tokens takes 4 milliseconds."""

SLOW = replace(MACHINE, seconds_per_call=0.02, seconds_per_token=2e-4)


def data(num_rows: int, prompt: int, response: int, responses: int = 1) -> Data:
    lengths = [response] * (100 * responses) if response else []
    return Data(range(num_rows), None, "", [prompt] * 100, lengths)


DATA = {"sft": data(5000, 10, 50), "reward": data(4000, 10, 30, 2), "ppo": data(1000, 10, 0)}


def test_rates_fall_with_the_root_of_the_model_s_size() -> None:
    assert learning_rate(3e-6, 10**9) == pytest.approx(3e-6)
    assert learning_rate(3e-6, 10**7) == pytest.approx(3e-5)
    assert learning_rate(2e-5, 4 * 10**9) == pytest.approx(1e-5)
    assert learning_rate(2e-5, 1000) == pytest.approx(2e-3)  # the largest


def test_sizes_fit_the_data() -> None:
    found = propose(MACHINE, DATA, 100, 60).sections

    assert found["sft"]["max_length"] == 64 and found["reward"]["max_length"] == 48
    assert found["ppo"]["response_length"] == found["judge"]["max_new_tokens"] == 32
    assert "max_prompt_length" not in found["ppo"] and found["judge"]["num_prompts"] == 100


def test_a_slower_machine_gets_fewer_updates_in_the_same_time() -> None:
    fast, slow = (propose(machine, DATA, 100, 15) for machine in (MACHINE, SLOW))

    assert fast.sections["ppo"]["total_episodes"] > slow.sections["ppo"]["total_episodes"] >= 20 * 64
    for found in (fast, slow):
        assert sum(found.minutes.values()) <= 15.5
    longer = propose(SLOW, DATA, 100, 60)
    assert longer.sections["ppo"]["total_episodes"] > slow.sections["ppo"]["total_episodes"]


def test_responses_and_batches_are_smaller_where_twenty_updates_would_take_too_long() -> None:
    lengths = [20] * 60 + [199] * 40
    long = DATA | {"reward": replace(DATA["reward"], responses=lengths)}
    assert propose(MACHINE, long, 4, 15).sections["ppo"]["response_length"] == 200
    found = propose(SLOW, long, 4, 3)

    assert found.sections["ppo"]["response_length"] == found.sections["judge"]["max_new_tokens"] == 32
    assert found.sections["ppo"]["total_episodes"] <= 25 * 16
    note = "responses end after 32 tokens, not 200, to save time (--minutes); 40% of those in the data are longer."
    assert found.notes == {note: ["ppo"]}


def test_responses_never_become_shorter_than_most_of_the_data() -> None:
    lengths = [99] * 60 + [331] * 40
    found = propose(SLOW, DATA | {"reward": replace(DATA["reward"], responses=lengths)}, 4, 3)

    assert found.sections["ppo"]["response_length"] == found.sections["judge"]["max_new_tokens"] == 100
    assert found.sections["ppo"]["total_episodes"] == 20 * 16


def test_few_prompts_and_little_memory_make_small_batches() -> None:
    few = propose(MACHINE, DATA | {"ppo": data(20, 10, 0)}, 4, 15).sections["ppo"]
    assert few["per_device_train_batch_size"] * few["gradient_accumulation_steps"] == 16
    full = propose(replace(MACHINE, memory=10**7 * 40 + 2**26), DATA, 4, 15)
    assert full.sections["ppo"]["gradient_accumulation_steps"] > 1 and full.notes == {}
    assert (
        64 == full.sections["ppo"]["gradient_accumulation_steps"] * full.sections["ppo"]["per_device_train_batch_size"]
    )
    (note,) = propose(replace(MACHINE, memory=10**8), DATA, 4, 15).notes
    assert "Use LoRA" in note


def test_what_does_not_fit_into_the_model_is_named() -> None:
    found = propose(MACHINE, {"sft": data(5000, 10, 900), "ppo": data(1000, 400, 0)}, 4, 60)

    ppo = found.sections["ppo"]
    assert ppo["max_prompt_length"] + ppo["response_length"] == 512 == found.sections["sft"]["max_length"]
    assert found.notes == {
        "100% of the rows are longer than 512 tokens and are cut.": ["sft"],
        "100% of the prompts are longer than 256 tokens and are left out.": ["ppo"],
        "responses end after 256 tokens; 100% of those in the data are longer.": ["ppo"],
    }


def spin() -> None:
    start = time.thread_time()
    while time.thread_time() - start < 0.02:
        pass


def other_thread_spins() -> None:
    (thread := Thread(target=spin)).start()
    thread.join()


@pytest.mark.parametrize("function", [lambda: time.sleep(0.02), other_thread_spins])
def test_other_programs_do_not_slow_the_measurement(function: Callable[[], None]) -> None:
    assert seconds_of(function, torch.device("cpu")) < 0.01


@pytest.mark.parametrize(
    "text", ["yes", "a: b", "# c", 'd "e" {f}', "007", "plain/path.jsonl", "\U0001f389: é \x1b", "a: " * 90]
)
def test_every_name_is_read_as_it_was_given(text: str) -> None:
    assert yaml.safe_load(f"x: {scalar(text)}") == {"x": text}


def test_a_missing_option_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[str] = iter(["", "base", "", "", "prompts.jsonl", "", "length"])
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda mark: (asked.append(mark), next(answers))[1])
    init([])

    written = yaml.safe_load(Path("run.yaml").read_text())
    assert written["ppo"]["sft_model_path"] == "base" and written["ppo"]["reward_funcs"] == ["length"]
    assert written["output_dir"] == QUESTIONS["output_dir"][1] and len(asked) == 7  # the model twice: it is needed


def test_the_end_of_the_input_names_the_missing_option(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def ended(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", ended)
    with pytest.raises(SystemExit, match="2"):
        init(["--model", "base", "--prompts", "prompts.jsonl"])

    assert capsys.readouterr().err == "rlhf-ppo init: error: --texts is missing, and the input has ended\n"


def test_who_has_pairs_is_asked_for_others_for_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter(["prompts.jsonl", "", "pairs.jsonl"])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    init("--model base --texts texts.jsonl --preferences pairs.jsonl".split())

    assert yaml.safe_load(Path("run.yaml").read_text())["judge_reward"]["dataset_name"] == "pairs.jsonl"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--prompts c", "--model is missing"),
        ("--model m", "--prompts is missing"),
        ("--model m --prompts c", "PPO has no reward"),
        (f"{ALL} --judge_model j --judge_preferences d", "are two judges"),
        (f"{ALL} --file there.yaml", "file='there.yaml' is there already"),
        (f"{ALL} --output_dir full", "full/data is there already"),
        (f"{ALL} --file there.yaml/run.yaml", "file='there.yaml' cannot be written: "),
        (f"{ALL} --output_dir there.yaml/run", "output_dir='there.yaml/run' cannot be written: "),
        (f"{ALL} --minutes 0", "minutes=0.0 must be positive"),
        (f"{ALL} --fiel x", "unrecognized arguments: --fiel"),
    ],
)
def test_a_wrong_option_writes_nothing(options: str, words: str, capsys: Any) -> None:
    Path("there.yaml").write_text("mine")
    Path("full/data").mkdir(parents=True)
    with pytest.raises(SystemExit) as stopped:
        init(options.split())

    assert stopped.value.code == 2 and words in capsys.readouterr().err
    assert Path("there.yaml").read_text() == "mine" and not Path("run.yaml").exists()


def test_the_problems_of_model_and_data_are_in_one_list(capsys: Any) -> None:
    write_rows("odd.jsonl", [{"chosen": 3, "rejected": 4}])
    options = "--model none --texts gone.jsonl --preferences odd.jsonl --prompts texts.parquet"
    options += " --judge_preferences texts.jsonl"
    with pytest.raises(SystemExit, match="2"):
        init(options.split())

    first, *others = capsys.readouterr().err.splitlines()
    assert first == "rlhf-ppo init: error: 5 problems:"
    expected = [
        "model='none'",
        "texts='gone.jsonl'",
        "`chosen` holds int64",
        "needs `chosen`",
        "prompts='texts.parquet'",
    ]
    for line, words in zip(others, expected, strict=True):
        assert words in line
    assert not Path("run.yaml").exists() and not Path("runs").exists()
    assert load_splits("texts.jsonl")  # the data are as they were
