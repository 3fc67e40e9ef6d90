"""Sample tables: their columns, the terminal, and what the experiment trackers' files hold afterwards."""

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from rlhf_ppo.reporting.evaluation import is_due, print_table, report_table, table_of

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


def make_trainer(*trackers: str, callbacks: list[Any] | None = None) -> Any:
    return SimpleNamespace(
        args=SimpleNamespace(report_to=list(trackers)),
        state=SimpleNamespace(global_step=7, is_world_process_zero=True, is_hyper_param_search=False),
        callback_handler=SimpleNamespace(callbacks=callbacks or []),
    )


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


def test_the_terminal_shows_texts_as_they_are(
    table: pd.DataFrame, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    print_table(table)
    printed = capsys.readouterr().out
    for text in ("[/INST]", "[bold]", "1.250", "-0.500", "not scored", "brevity"):
        assert text in printed


def test_as_many_tables_are_due_as_are_asked_for_evenly_over_any_run() -> None:
    for num_updates in range(1, 50):
        for num_tables in range(60):
            due = [update for update in range(1, num_updates + 1) if is_due(update, num_updates, num_tables)]
            assert len(due) == min(num_tables, num_updates), (num_updates, num_tables)
            assert not due or due[-1] == num_updates
            if len(due) > 1:
                gaps = [after - before for before, after in itertools.pairwise(due)]
                assert due[0] == 1 and max(gaps) - min(gaps) <= 1, (num_updates, num_tables, due)


def test_the_terminal_shows_the_first_rows(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"query{index}" for index in range(9)]
    table = samples(names, ["r"] * 9, [0.0] * 9)
    print_table(table)
    printed = capsys.readouterr().out
    assert [name for name in names if name in printed] == names[:2]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_terminal_cuts_texts_to_three_lines(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(samples(["short"], ["word " * 100], [0.5]))

    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert len(printed.splitlines()) == 7 and "..." in printed and "short" in printed


@pytest.mark.parametrize(("width", "shown"), [(60, []), (80, ["reward_model"]), (140, ["reward_model", "brevity"])])
def test_a_narrow_terminal_shows_fewer_rewards(
    width: int, shown: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(samples(["word " * 9], ["word " * 9], [0.5], reward_model=[1.0], brevity=[2.0]))

    printed = capsys.readouterr().out
    assert "0.500" in printed and [name for name in ("reward_model", "brevity") if name in printed] == shown
    assert "word word word word" in printed


def test_comet_gets_the_table_when_a_run_is_active(table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the signatures of comet_ml 3.58; the other trackers are tried in test_trackers.py."""
    calls: list[Any] = []
    active: list[Any] = [None]

    class Experiment:
        step: Any = None

        def set_step(self, step: int | None) -> None:
            self.step = step

        def log_table(self, filename: str, tabular_data: Any = None, headers: Any = False, **to_csv: Any) -> None:
            calls.append((self.step, filename, pd.DataFrame(tabular_data).to_csv(**to_csv)))

    comet: Any = ModuleType("comet_ml")
    comet.get_running_experiment = lambda: active[0]
    monkeypatch.setitem(sys.modules, "comet_ml", comet)

    report_table(table, make_trainer("wandb", "trackio", "tensorboard", "comet_ml"))
    assert calls == []
    active[0] = Experiment()
    report_table(table, make_trainer("comet_ml"))
    assert calls == [(7, "completions.csv", table.to_csv())]


def test_other_trackers_are_left_alone(table: pd.DataFrame) -> None:
    report_table(table, make_trainer("mlflow", "clearml"))
    report_table(table, SimpleNamespace(args=SimpleNamespace(report_to=None)))  # pyright: ignore[reportArgumentType]
