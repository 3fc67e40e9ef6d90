"""Sample tables: their columns, the terminal, and what the experiment trackers' files hold afterwards."""

import itertools
from typing import Any

import pandas as pd
import pytest

from rlhf_ppo.reporting.report import report_data
from rlhf_ppo.reporting.run_log import read_runs
from rlhf_ppo.reporting.sample_tables import is_due, print_table, show_table, table_of

NAN = float("nan")
QUERIES = ["[INST] Tell me | a story [/INST]", "<b>Hi</b>"]
RESPONSES = ["Once upon\na *time*</s>", "[bold]Hello[/bold] | _a_ `b` [c](d) #e \\|"]


def samples(queries: list[str], responses: list[str], scores: list[float], **by_source: list[float]) -> pd.DataFrame:
    rows = [
        {"query": query, "response": response, "score": score, "extra": {}}
        | {"by_source": {name: values[row] for name, values in by_source.items()}}
        for row, (query, response, score) in enumerate(zip(queries, responses, scores, strict=True))
    ]
    return table_of(rows, list(by_source))


@pytest.fixture
def table() -> pd.DataFrame:
    return samples(QUERIES, RESPONSES, [1.25, -0.5], reward_model=[1.25, 0.5], brevity=[NAN, -1.0])


@pytest.mark.parametrize("width", [80, 140])
def test_texts_are_readable_beside_many_figures_and_prompts_end_with_what_is_asked(
    width: int, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    prompts = [f"\n\nHuman: {'old words ' * 60}\n\nHuman: the question\n\nAssistant:"]
    many = {f"a_long_name_{number}": [1.0] for number in range(6)}
    print_table(samples(prompts, ["several words " * 40 + "the end"], [1.25], **many))

    lines = capsys.readouterr().out.splitlines()
    body = lines[3:-1]
    query, response, scores = (
        "\n".join(parts) for parts in zip(*(line[1:-1].split("│") for line in body), strict=True)
    )
    assert query.split()[-3:] == ["the", "question", "Assistant:"] and query.strip().startswith("...")
    assert response.strip().endswith("...") and "a_long_name_5: 1.000" in scores
    assert max(map(len, lines)) <= width and min(map(len, (query.split("\n")[0], response.split("\n")[0]))) >= 20
    assert len(lines) <= 30


def test_blank_lines_do_not_fill_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(samples(["a\n\n\n\nb"], ["c" + "\n" * 50 + "d"], [1.0]))
    assert len(capsys.readouterr().out.splitlines()) == 7


def test_the_lines_with_which_all_prompts_begin_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    default = "system\nYou are helpful.\nuser\n"
    table = samples([f"{default}Tell\nme", f"{default}Think"], ["d", "e"], [1.0, 2.0])
    print_table(table)
    shown = capsys.readouterr().out
    assert "...Tell" in shown and "...Think" in shown and "helpful" not in shown
    print_table(table, num_rows=1)
    assert "helpful" in capsys.readouterr().out and table["query"][1] == f"{default}Think"


def test_the_report_shows_the_texts_of_the_files(make_trained: Any) -> None:
    texts = ["007", "1e3", "a\rb", "NA", 'c\r\nd,"e"']
    written = samples(texts, texts, [1.0, NAN, 0.5, 2.0, 3.0])
    trainer = make_trained()
    show_table(written, trainer, held_out=True)
    (run,) = read_runs([str(trainer.args.output_dir)])
    shown = report_data([run])["runs"][0]["samples"][-1]["rows"]
    assert [(row["prompt"], row["response"]) for row in shown] == [(text.replace("\r", r"\r"),) * 2 for text in texts]
    assert [row["score"] for row in shown] == [1.0, None, 0.5, 2.0, 3.0]


def test_columns_with_one_and_with_several_rewards(table: pd.DataFrame) -> None:
    assert list(table.columns) == ["query", "model response", "score", "reward_model", "brevity"]
    assert table["query"].tolist() == QUERIES and table["model response"].tolist() == RESPONSES
    assert table["score"].tolist() == [1.25, -0.5] and table["reward_model"].tolist() == [1.25, 0.5]
    assert table["brevity"].isna().tolist() == [True, False]
    alone = samples(["q"], ["r"], [1.0], reward_model=[1.0])
    assert list(alone.columns) == ["query", "model response", "score"]
    like_columns = samples(["q"], ["r"], [3.0], score=[1.0], query=[2.0])
    assert list(like_columns.columns) == ["query", "model response", "score", "score reward", "query reward"]
    assert like_columns.iloc[0].tolist() == ["q", "r", 3.0, 1.0, 2.0]


def test_as_many_tables_are_due_as_are_asked_for_evenly_over_any_run() -> None:
    for num_updates in range(1, 50):
        for num_tables in range(60):
            due = [update for update in range(num_updates + 1) if is_due(update, num_updates, num_tables)]
            assert len(due) == min(num_tables, num_updates + 1), (num_updates, num_tables)
            assert not due or due[-1] == num_updates
            if len(due) > 1:
                gaps = [after - before for before, after in itertools.pairwise(due)]
                assert due[0] == 0 and max(gaps) - min(gaps) <= 1, (num_updates, num_tables, due)
