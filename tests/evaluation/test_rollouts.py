"""Sample tables: their columns, the terminal, and what the experiment trackers' files hold afterwards."""

import html
import itertools
import sys
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from transformers import TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback

from rlhf_ppo.evaluation.rollouts import is_due, print_table, report_table, table_of

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


def test_the_terminal_shows_texts_as_they_are(table: pd.DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
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
    for shown, options in ((2, {}), (5, {"num_rows": 5}), (9, {"num_rows": 20})):
        print_table(table, **options)
        printed = capsys.readouterr().out
        assert [name for name in names if name in printed] == names[:shown]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_terminal_cuts_texts_to_three_lines(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(samples(["short"], ["word " * 100], [0.5]))

    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert len(printed.splitlines()) == 7 and "..." in printed and "short" in printed


def test_tensorboard_file_holds_the_table(
    table: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    callback = TensorBoardCallback()
    trainer = make_trainer("tensorboard", callbacks=[object(), callback])
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    report_table(table, trainer)  # training has not begun: passed over
    callback.on_train_begin(arguments, trainer.state, None)
    report_table(table, trainer)
    callback.on_train_end(arguments, trainer.state, None)
    report_table(table, trainer)
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    [event] = events.Tensors("completions/text_summary")
    assert event.step == 7
    shown = markdown_to_safe_html(event.tensor_proto.string_val[0])
    texts = [cell.split("</t")[0].strip() for cell in shown.replace("<th>", "<td>").split("<td>")[1:]]
    cells = [html.unescape(text.replace("<br>", "\n")) for text in texts]
    assert cells[:5] == list(table.columns)
    assert cells[5:10] == [*table.iloc[0, :2], "1.250", "1.250", "not scored"]
    assert cells[10:] == [*table.iloc[1, :2], "-0.500", "0.500", "-1.000"]


def test_trackio_and_comet_get_the_table_when_a_run_is_active(
    table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins with the signatures of trackio 0.43 and comet_ml 3.58; the real ones are tried in test_trackers.py."""
    calls: list[Any] = []
    active: ContextVar[Any] = ContextVar("current_run", default=None)

    class Experiment:
        step: Any = None

        def set_step(self, step: int | None) -> None:
            self.step = step

        def log_table(self, filename: str, tabular_data: Any = None, headers: Any = False, **to_csv: Any) -> None:
            calls.append((self.step, filename, pd.DataFrame(tabular_data).to_csv(**to_csv)))

    def log(metrics: dict[str, Any], step: int | None = None) -> None:
        if active.get() is None:
            raise RuntimeError("Call trackio.init() before trackio.log().")
        calls.append(metrics)

    trackio: Any = ModuleType("trackio")
    trackio.log, trackio.Table = log, lambda dataframe: dataframe
    trackio.context_vars = SimpleNamespace(current_run=active)
    comet: Any = ModuleType("comet_ml")
    comet.get_running_experiment = active.get
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "comet_ml", comet)

    report_table(table, make_trainer("wandb", "trackio", "comet_ml"))
    assert calls == []
    active.set(Experiment())
    report_table(table, make_trainer("trackio", "comet_ml"))
    shown = calls[0]["completions"]  # Trackio shows texts as Markdown
    assert [html.unescape(text.replace("<br>", "\n")) for text in shown["model response"]] == list(
        table["model response"]
    )
    assert (
        not shown["model response"].str.replace("<br>", "").str.contains("[<>|*`]").any()
        and calls[0]["train/global_step"] == 7
    )
    assert calls[1] == (7, "completions.csv", table.to_csv())


def test_other_trackers_are_left_alone(table: pd.DataFrame) -> None:
    report_table(table, make_trainer("mlflow", "clearml"))
    report_table(table, SimpleNamespace(args=SimpleNamespace(report_to=None)))  # pyright: ignore[reportArgumentType]
