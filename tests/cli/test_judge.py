"""`rlhf-ppo judge`."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset, DatasetDict

from rlhf_ppo.cli import judge as module
from rlhf_ppo.cli.judge import judge as evaluate
from rlhf_ppo.rewards.scorer import Answer
from tests.conftest import (
    THINKING,
    WORDS,
    make_tokenizer,
    needs_continuous,
    save_models,
    save_thinking_run,
    tiny_policy,
    tiny_scorer,
    write_rows,
)

ROWS = Dataset.from_list([{"prompt": f"w{index}", "answer": str(index)} for index in range(4)])


@pytest.fixture
def places(empty_place):
    save_models(one=tiny_policy(max_position_embeddings=256), two=tiny_policy(1, max_position_embeddings=256))
    ROWS.add_column("chosen", ["w4"] * 4).to_json("prompts.jsonl")


SHORT = ["--dataset_name", "prompts.jsonl", "--max-new-tokens", "8", "--batch-size", "3"]


@pytest.mark.parametrize("model", ["one", "one/checkpoint-2"])
@pytest.mark.parametrize(("recorded", "words", "last"), THINKING)
def test_both_models_get_the_chat_template_of_the_run(recorded, words, last, model, places, monkeypatch):
    save_thinking_run("one", recorded)
    save_thinking_run("two", None)
    shutil.copytree("one", "one/checkpoint-2", ignore=shutil.ignore_patterns("ppo_settings.json"))
    Dataset.from_list([{"prompt": [{"role": "user", "content": "w3"}]}] * 2).to_json("prompts.jsonl")
    asked, shown = [], []

    def noted(judge: Any, rows: Any, *sides: Sequence[Answer]) -> Any:
        shown.extend(answer.settings.get("enable_thinking", True) for side in sides for answer in side)
        asked.extend(answer.prompt_ids for side in sides for answer in side)
        return compare_answers(judge, rows, *sides)

    compare_answers = module.compare
    monkeypatch.setattr(module, "compare", noted)
    evaluate(["--model", model, "--opponent", "two", "--judge", "length", *words, *SHORT])
    assert asked == [make_tokenizer()(f"w3 {last}")["input_ids"]] * 4
    assert shown == [last == "w7"] * 4  # to a reward model as judge


def test_both_models_stop_at_the_stop_strings_of_the_run(places):
    Path("one/ppo_settings.json").write_text(json.dumps({"arguments": {"stop_strings": ["w"]}}))
    evaluate(["--model", "one", "--opponent", "two", "--judge", "length", *SHORT])
    answers = pd.read_parquet("judged/judged.parquet")[["model", "opponent"]].to_numpy().ravel()
    assert {len(str(answer).split()) for answer in answers} == {1}


def test_the_opponent_stops_at_the_stop_token_of_the_run_too(places):
    compared = ["--model", "one", "--opponent", "two", "--judge", "length", *SHORT]
    evaluate(compared)
    words = str(pd.read_parquet("judged/judged.parquet")["opponent"][0]).split()
    stop = make_tokenizer().convert_tokens_to_ids(words[1])
    Path("one/ppo_settings.json").write_text(json.dumps({"arguments": {"stop_token_id": stop}}))
    evaluate(compared)
    stopped = str(pd.read_parquet("judged/judged-2.parquet")["opponent"][0]).split()
    assert stopped == words[: words.index(words[1]) + 1] != words


def test_an_opponent_with_other_ids_stops_at_the_same_token(places):
    """Its id of the run's stop token is another token's in the run: that one does not end a response."""
    compared = ["--model", "one", "--opponent", "two", "--judge", "length", *SHORT]
    make_tokenizer(words=WORDS[::-1]).save_pretrained("two")
    evaluate(compared)
    words = str(pd.read_parquet("judged/judged.parquet")["opponent"][0]).split()
    stop = make_tokenizer().convert_tokens_to_ids(words[1])
    assert stop != make_tokenizer(words=WORDS[::-1]).convert_tokens_to_ids(words[1])
    Path("one/ppo_settings.json").write_text(json.dumps({"arguments": {"stop_token_id": stop}}))
    evaluate(compared)
    stopped = str(pd.read_parquet("judged/judged-2.parquet")["opponent"][0]).split()
    assert stopped == words[: words.index(words[1]) + 1] != words


def test_an_opponent_that_is_not_there_is_said_before_the_model_answers(places, capsys, monkeypatch):
    monkeypatch.setattr(module, "respond", lambda *_: pytest.fail("it has answered"))
    with pytest.raises(SystemExit, match="2"):
        evaluate(["--model", "one", "--opponent", "none", "--judge", "length", *SHORT])

    assert "none" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--opponent", "two", "--dataset_name", "absent.jsonl"], "absent.jsonl"),
        (["--opponent_column", "theirs"], "has no column 'theirs'"),
        (["--opponent", "absent"], "opponent='absent'"),
        ([], None),
    ],
)
def test_a_dry_run_reads_data_and_tokenizers(change, words, places, capsys):
    command = ["--model", "one", "--judge", "length", *SHORT, "--dry_run", *(change or ["--opponent", "two"])]
    if words is None:
        evaluate(command)
        assert "no problems found" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit, match="2"):
            evaluate(command)
        assert words in capsys.readouterr().err
    assert not Path("judged").exists()


@pytest.mark.parametrize(
    ("positions", "recorded", "longest"), [((64, 32, 16), None, 8), ((16, 32, 32), None, 8), ((64, 64, 64), 5, 5)]
)
def test_prompts_without_room_in_any_model_or_that_training_dropped_are_dropped_for_all(
    positions, recorded, longest, places, capsys
):
    """The policy, the opponent and the judge have these positions; a response has 8 tokens."""
    one, two, judge = positions
    models = {"one": tiny_policy(max_position_embeddings=one), "two": tiny_policy(1, max_position_embeddings=two)}
    save_models(**models, judge=tiny_scorer(max_position_embeddings=judge))
    Path("one/ppo_settings.json").write_text(json.dumps({"arguments": {"max_prompt_length": recorded}}))
    write_rows("prompts.jsonl", [{"prompt": " ".join(["w5"] * length)} for length in (3, longest, longest + 1, 30)])
    found = evaluate(["--model", "one", "--opponent", "two", "--judge_model", "judge", *SHORT])

    assert (found.judged, found.failed) == (2, 0)
    assert f"dropped 2 of 4 prompts, longer than {longest} tokens" in capsys.readouterr().out


def test_an_answer_that_is_too_long_for_the_judge_has_no_verdict(places, caplog):
    save_models(judge=tiny_scorer(max_position_embeddings=16))
    write_rows("rows.jsonl", [{"prompt": "w4", "a": " w5" * length, "b": " w6"} for length in (3, 30)])
    columns = ["--model_column", "a", "--opponent_column", "b"]
    found = evaluate(["--dataset_name", "rows.jsonl", *columns, "--judge_model", "judge"])

    assert (found.judged, found.failed) == (1, 1) and "1 of 4 answers are not scored" in caplog.text


CHARACTERS = """
def more(completions, **_):
    return [len(text) for text in completions]

def fewer(completions, **_):
    return [-len(text) for text in completions]
"""


def test_what_was_judged_is_kept_and_can_be_judged_again(places, monkeypatch):
    """By another judge, from the file: no model answers, and the first file stays."""
    Path("characters.py").write_text(CHARACTERS)
    models = ["--model", "one", "--opponent", "two", *SHORT]
    first = evaluate([*models, "--judge", "characters.py:more", "--output_dir", "kept"])
    kept = Path("kept/judged.parquet").read_bytes()
    monkeypatch.setattr(module, "respond", lambda *_: pytest.fail("a model answered"))
    columns = ["--model_column", "model", "--opponent_column", "opponent", "--output_dir", "kept"]
    again = evaluate(["--dataset_name", "kept/judged.parquet", *columns, "--judge", "characters.py:fewer"])

    assert (again.wins, again.losses) == (first.losses, first.wins) and first.wins + first.losses > 0
    assert Path("kept/judged.parquet").read_bytes() == kept and Path("kept/judged-2.parquet").is_file()
    assert json.loads(Path("kept/win_rate-2.json").read_text())["wins"] == again.wins


def test_the_win_rate_of_a_run_is_on_its_card(places, capsys):
    card = Path("one/README.md")
    card.write_text("# A card\n")
    Path("one/ppo_settings.json").write_text("{}")
    before, columns = card.read_text(), ["--model_column", "model", "--opponent_column", "opponent"]
    models = ["--model", "one", "--opponent", "two", "--judge", "length", *SHORT]
    found = evaluate(models)
    assert card.read_text() == before and "model card" not in capsys.readouterr().out  # kept elsewhere

    evaluate([*models, "--output_dir", "one/judged"])
    assert f"- Win rate {found.rate:.2%} (95% interval" in card.read_text()
    assert "The win rate is on the model card one/README.md" in capsys.readouterr().out
    again = "--dataset_name one/judged/judged.parquet --judge length --output_dir one/judged"
    evaluate([*again.split(), *columns])
    assert card.read_text().count("- Win rate") == 2 and not list(Path("one").glob("*.tmp"))

    card.write_text(f"{card.read_text()}\n## License\n\nMIT\n")
    evaluate([*again.split(), *columns])
    assert card.read_text().count("- Win rate") == 3 and card.read_text().endswith("`length`\n\n## License\n\nMIT\n")


@pytest.mark.parametrize("folder", ["judged", "."])
def test_the_readme_of_a_directory_that_is_no_run_stays(folder, places):
    text = "# A project\n\n## Judged\n\nBy people.\n"
    Path("README.md").write_text(text)
    evaluate(["--model", "one", "--opponent", "two", "--judge", "length", "--output_dir", folder, *SHORT])
    assert Path("README.md").read_text() == text


@pytest.mark.parametrize("output", [(), ("--output_dir", "one/judged"), ("--output_dir", "elsewhere/judged")])
def test_the_verdict_is_on_the_run_that_is_named(output, places, capsys):
    logs = [{"loss": 0.1, "objective/scores": 0.0, "objective/kl": 9.0, "step": step} for step in (1, 60)]
    Path("one/trainer_state.json").write_text(json.dumps({"log_history": logs}))
    Path("one/ppo_settings.json").write_text(json.dumps({"arguments": {"seed": 7}}))
    evaluate(["--model", "one", "--opponent", "two", "--judge", "length", *output, *SHORT])

    verdict = json.loads(Path(output[1] if output else "judged", "verdict.json").read_text())
    assert verdict["seeds"] == [7] and "the policy wins" in verdict["sentence"]
    assert "The score has not risen" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("sampling", ["--temperature=0", "--top_p=1e-6"])
@pytest.mark.parametrize("engine", ["transformers", pytest.param("continuous", marks=needs_continuous)])
def test_the_likeliest_tokens_are_taken_with_any_engine(engine, sampling, places):
    options = [sampling, "--opponent_column", "chosen", "--judge", "length", *SHORT]
    evaluate(["--model", "one", "--generation_engine", engine, *options])

    model, tokenizer = tiny_policy(seed=0).eval(), make_tokenizer()
    for row in pd.read_parquet("judged/judged.parquet").to_dict("records"):
        asked = tokenizer(row["prompt"], return_tensors="pt")
        ids = model.generate(**asked, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        expected = tokenizer.decode(ids[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        assert row["model"] == expected


def chat(verdict: Callable[[str], str]) -> Any:
    """A chat API's reply to the question."""

    def reply(request: Any) -> None:
        (message,) = request.body["messages"]
        text = verdict(message["content"])
        request.answer(json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}))

    return reply


def longer(question: str) -> str:
    first, second = re.findall(r"<response . \w+>\n(.*?)\n</response", question, re.DOTALL)
    return "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"


def test_a_chat_model_judges(places, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of OpenAI")
    monkeypatch.setenv("RLHF_PPO_JUDGE_TOKEN", "secret")
    Path("characters.py").write_text(CHARACTERS)
    server.replies = [chat(longer)] * 20
    address = f"http://127.0.0.1:{server.server_port}/v1/"
    options = ["--model", "one", "--opponent", "two", *SHORT]
    found = evaluate([*options, "--judge_model", "gpt-4o-mini", "--judge_url", address])

    assert found == evaluate([*options, "--judge", "characters.py:more"]) and found.wins + found.losses > 0
    headers, body = server.requests[-1]
    assert headers["Authorization"] == "Bearer secret" and body["model"] == "gpt-4o-mini"
    assert (body["temperature"], body["max_tokens"]) == (0, 16)
    table = pd.read_parquet("judged/judged.parquet")
    assert found.agreement == 1.0 and list(table["verdict_first"]) == list(table["verdict_second"])
    assert table["verdict_first"].abs().max() == 1.0
    assert len(server.requests) == 1 + 2 * 4  # the first try, and both orders


@pytest.mark.parametrize(("given", "missing"), [("answer", "prompt"), ("none", "none")])
def test_a_missing_column_is_named_with_the_data_set(given, missing, empty_place):
    Dataset.from_list([{"answer": "w1"}]).to_json("rows.jsonl")
    args = module.JudgeArguments("rows.jsonl", model_column=given, opponent_column="answer", judge_model="m")
    with pytest.raises(ValueError, match=f"dataset_name='rows.jsonl' has no column '{missing}', but \\['answer'\\]"):
        module.load_rows(args)


def test_a_judge_that_prefers_a_place_shows(places, server, capsys):
    """It says A to each but one pair."""
    server.replies = [chat(lambda _: "A")] * 5 + [chat(lambda _: "B")] + [chat(lambda _: "A")] * 9
    address = f"http://127.0.0.1:{server.server_port}/v1"
    rows = ROWS.add_column("one", ["a"] * 4).add_column("two", ["b"] * 4)
    rows.to_parquet("rows.parquet")
    columns = ["--dataset_name", "rows.parquet", "--model_column", "one", "--opponent_column", "two"]
    found = evaluate([*columns, "--judge_model", "m", "--judge_url", address])

    assert found.agreement == 1 / 4 and found.wins + found.losses == 1 and found.ties == 3
    assert "Both orders agree on 25.0% of the judged pairs" in capsys.readouterr().out
    assert json.loads(Path("judged/win_rate.json").read_text())["agreement"] == 1 / 4


def test_the_script_of_tldr_judges_against_people(places, server, capsys):
    """TRL's command line; the judge prefers the longer text."""
    DatasetDict({"validation": ROWS.add_column("completion", ["w4"] * 4)}).save_to_disk("trl-lib/tldr")
    server.replies = [chat(longer)] * 20
    argv = ["judge_tldr.py", "--model_name_or_path", "one", "--judge_model", "gpt-4o-mini", "--num_examples", "3"]
    script = Path(__file__).parents[2] / "examples" / "judge_tldr.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OPENAI_API_KEY", raising=False)
        patch.setattr("sys.argv", argv)
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(script), run_name="__main__")
        assert "judge_tldr.py: error: OPENAI_API_KEY is not set" in capsys.readouterr().err
        patch.setattr("sys.argv", [*argv, "--judge_url", f"http://127.0.0.1:{server.server_port}/v1"])
        runpy.run_path(str(script), run_name="__main__")

    table = pd.read_parquet("judged/judged.parquet")
    assert list(table["opponent"]) == ["w4"] * 3
    assert [verdict > 0 for verdict in table["verdict"]] == [len(text) > 2 for text in table["model"]]
