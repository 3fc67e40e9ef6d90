"""The command `rlhf-ppo generate`."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.cli.main import main
from rlhf_ppo.generation.transformers_engine import sample_responses
from tests.conftest import (
    THINKING,
    WORDS,
    make_tokenizer,
    save_models,
    save_thinking_run,
    tiny_policy,
    tiny_scorer,
    write_rows,
)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    save_models(tmp_path, policy=tiny_policy(), critic=tiny_scorer())
    write_rows(tmp_path / "prompts.jsonl", ({"prompt": f"w{row} w5"} for row in range(3)))
    files = {"model": "policy", "critic": "critic", "dataset_name": "prompts.jsonl", "output": "out.jsonl"}
    return [word for name, file in files.items() for word in (f"--{name}", str(tmp_path / file))]


@pytest.mark.parametrize("how", [["--n", "4"], ["--n", "4", "--weighted"], ["--width", "2", "--block", "3"]])
def test_it_writes_a_response_and_its_value_for_each_prompt(words: list[str], how: list[str], capsys: Any) -> None:
    main(["generate", *words, "--max_new_tokens", "6", "--num_prompts", "2", *how])
    rows = [json.loads(line) for line in Path(words[-1]).read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["w0 w5", "w1 w5"]
    assert all(isinstance(row["response"], str) and isinstance(row["value"], float) for row in rows)
    assert "2 responses are in" in capsys.readouterr().out
    first = Path(words[-1]).read_text()
    with pytest.raises(SystemExit):
        main(["generate", *words, "--n", "1"])
    assert "out.jsonl' exists already: add --overwrite to replace" in capsys.readouterr().err
    main(["generate", *words, "--max_new_tokens", "6", "--num_prompts", "2", *how, "--overwrite"])
    assert Path(words[-1]).read_text() == first, "a seed gives the same responses"


def test_token_ids_are_read_and_any_token_may_end_a_response(words: list[str]) -> None:
    """Greedy responses (`top_k=1`): the second token, named as the stop token, ends the first response."""
    given = dict(zip(words[::2], words[1::2], strict=True))
    rows = [
        {"input_ids": [0, 5, 8], "attention_mask": [0, 1, 1], "prompt": "w2 w5"},
        {"input_ids": [6, 8, 9], "attention_mask": [1, 1, 1], "prompt": "w3 w5 w6"},
    ]
    write_rows(Path(given["--dataset_name"]), rows)
    main(["generate", *words, "--max_new_tokens", "6", "--top_k", "1", "--n", "1"])
    first = [json.loads(line) for line in Path(words[-1]).read_text().splitlines()]
    assert [{name: row[name] for name in rows[0]} for row in first] == rows
    tokens = first[0]["response"].split()
    stop = WORDS.index(tokens[1]) + 3
    again = ["--stop_token_id", str(stop), "--overwrite"]
    main(["generate", *words, "--max_new_tokens", "6", "--top_k", "1", "--n", "1", *again])
    stopped = json.loads(Path(words[-1]).read_text().splitlines()[0])["response"].split()
    assert stopped == tokens[: tokens.index(tokens[1]) + 1]


@pytest.mark.parametrize(("recorded", "options", "last"), THINKING)
def test_prompts_get_the_chat_template_of_the_run(
    recorded: Any, options: list[str], last: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, asked = dict(zip(words[::2], words[1::2], strict=True)), []
    save_thinking_run(given["--model"], recorded)
    write_rows(Path(given["--dataset_name"]), [{"prompt": [{"role": "user", "content": "w3"}]}])

    def noted(policy: Any, prompts: Any, *others: Any) -> Any:
        asked.extend(prompts.input_ids.tolist())
        return sample_responses(policy, prompts, *others)

    monkeypatch.setattr("rlhf_ppo.decoding.sample_responses", noted)
    main(["generate", *words, "--max_new_tokens", "2", "--n", "1", *options])
    assert asked == [make_tokenizer()(f"w3 {last}")["input_ids"]]


def test_the_best_of_more_is_worth_more(words: list[str]) -> None:
    values = []
    for n in ("1", "16"):
        main(["generate", *words, "--max_new_tokens", "6", "--n", n, "--overwrite"])
        values.append(sum(json.loads(line)["value"] for line in Path(words[-1]).read_text().splitlines()))
    assert values[1] > values[0]


def test_its_directory_is_made_before_responses_are(words: list[str], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "new (1)/out.jsonl"
    main(["generate", *words[:-1], str(path), "--max_new_tokens", "2", "--n", "1"])
    assert len(path.read_text().splitlines()) == 3
    assert f"rlhf-ppo judge --dataset_name {shlex.quote(str(path))} " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["generate", *words[:-1], str(path.parent), "--dataset_name", "nowhere.jsonl"])
    assert "new (1)' is a directory; name a file in it" in capsys.readouterr().err


def test_a_directory_that_is_not_writable_is_an_error_before_responses_are_made(
    words: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr("rlhf_ppo.cli.commands.decode", lambda *_: pytest.fail("a model answered"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "kept")
    with pytest.raises(SystemExit) as stopped:
        main(["generate", *words[:-1], str(tmp_path / "kept/out.jsonl")])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "output=" in error and "is not writable" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"critic": ""}, "critic is not given"),
        ({"n": "0"}, "n=0"),
        ({"critic": "policy"}, "critic"),
        ({"dataset_name": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"width": "2", "block": "0"}, "block=0"),
        ({"stop_token_id": "999"}, "stop_token_id=999 would never be sampled"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs='{' is not JSON"),
        ({"width": "2", "weighted": "true"}, "weighted=True is for best of n, but width=2"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], change: dict[str, str], message: str, capsys: Any) -> None:
    given = dict(zip(words[::2], words[1::2], strict=True)) | {f"--{name}": value for name, value in change.items()}
    if change.get("critic"):
        given["--critic"] = given["--model"]
    with pytest.raises(SystemExit) as error:
        main(["generate", *[word for pair in given.items() for word in pair]])
    assert error.value.code == 2 and message in capsys.readouterr().err
