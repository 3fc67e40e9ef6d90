"""One hostile text as response, prompt, column, name, path, judge's answer and server's error: shown, never obeyed."""

from __future__ import annotations

import contextlib
import functools
import html.parser
import io
import json
import logging
import re
import runpy
import sys
import warnings
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
import yaml
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.cli.init import init
from rlhf_ppo.cli.judge import judge
from rlhf_ppo.cli.main import main, plot, report
from rlhf_ppo.reporting.evaluation import report_table
from rlhf_ppo.reporting.judgements import Judgement
from rlhf_ppo.reporting.model_card import model_card
from rlhf_ppo.reporting.report import SCRIPTS
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.rewards.functions import finished
from rlhf_ppo.rewards.judges import ChatJudge
from rlhf_ppo.terminal import visible
from tests.agents.chat import ScriptedEngine, chat_model, chat_tokenizer, turn_text
from tests.conftest import QUIET, save_models, tiny_policy, tiny_scorer, write_rows
from tests.rewards.local_server import says
from tests.runs import QUICK

MARKUP = "|# heading<script>alert(1)</script><img src=x onerror=alert(1)>$x$`code`[a](http://evil)*b* [red]"
TEXT = f'=HYPERLINK("http://evil")\x1b[2J\x1b]0;title\x07\x9b31m\rforged\u202e\x00{MARKUP}\n# heading\n| a | b |'
NAME = "=\x1b[2J\x9b31m\r\u202e|# $x$`b`<b>[a](c)"
UNKNOWN = NAME.translate({ord("\x1b"): None, ord("\r"): None})
"""A tool's name that a call in JSON can have."""
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
FORMULA = tuple("=+-@\t\n\r")
NUMBER = re.compile(r"-?[\d.]+(e-?\d+)?")


def tokenizer() -> PreTrainedTokenizerFast:
    """Of which nearly every token is the text."""
    words = ["<pad>", "<eos>", "<bos>", *(f"{TEXT}{index}" for index in range(29))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[3]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def named(name: str) -> Callable[..., Any]:
    def reward(completions: list[str], log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
        log_metric(TEXT, 1.0)
        log_extra(TEXT, [TEXT] * len(completions))
        return [float(index) for index in range(len(completions))]

    reward.__name__ = name
    return reward


@contextlib.contextmanager
def printed() -> Iterator[io.StringIO]:
    """Collect what is written to stdout and stderr, and all log messages of the package."""
    found = io.StringIO(newline="")
    handler, logger = logging.StreamHandler(found), logging.getLogger("rlhf_ppo")
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(found), contextlib.redirect_stderr(found):
            yield found
    finally:
        logger.removeHandler(handler)


def says_it(question: str) -> str:
    """A tool that answers with the text.

    Args:
        question: Anything.
    """
    return TEXT


def raises_it() -> str:
    """A tool that fails with the text."""
    raise ValueError(TEXT)


class Says:
    """An environment of which each word is the text."""

    turn_rewards: ClassVar[list[float]] = []

    def reset(self, **columns: Any) -> str:
        return TEXT

    def get_reward(self) -> float:
        return 1.0


def episodes() -> dict[str, Any]:
    """Arguments of a trainer that talks with tools and an environment, and calls a tool that there is not."""
    tokenizer = chat_tokenizer()
    calls = [("says_it", {"question": TEXT}), ("raises_it", {}), (UNKNOWN, {TEXT: TEXT}), ("says_it", {TEXT: TEXT})]
    turns = [*(turn_text(tokenizer, "qwen3", call) for call in calls), turn_text(tokenizer, "qwen3", content=TEXT)]
    rows = [{"prompt": [{"role": "user", "content": TEXT}], NAME: TEXT}] * 4

    def script(context: str, number: int) -> str:
        return turns[context.count("<tool_response>")]

    return {
        **{"processing_class": tokenizer, "model": chat_model(tokenizer), "tools": [says_it, raises_it]},
        **{"environment_factory": type(NAME, (Says,), {}), "engine": ScriptedEngine(tokenizer, script)},
        **{"train_dataset": rows, "eval_dataset": {NAME: rows[:2]}},
    }


def responses() -> dict[str, Any]:
    """Arguments of a trainer whose tokens, and prompts, are the text."""
    rows = Dataset.from_list([{"input_ids": [3 + index, 4], "prompt": TEXT, NAME: TEXT} for index in range(4)])
    return {
        **{"processing_class": tokenizer(), "model": tiny_policy(), "value_model": tiny_scorer(seed=2)},
        **{"train_dataset": rows, "eval_dataset": {NAME: rows.select(range(2))}},
    }


@pytest.fixture(scope="module", params=[responses, episodes], ids=lambda given: given.__name__)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train for two updates in a directory with a hostile name; return it and what was printed."""
    folder = tmp_path_factory.mktemp("hostile") / NAME
    settings = {
        **QUIET, **QUICK, "output_dir": str(folder), "total_episodes": 4, "num_sample_generations": 2,
        "logging_steps": 1, "report_to": ["tensorboard"], "eval_strategy": "steps",
        "eval_steps": 1, "log_console": "line", "disable_tqdm": True, "stop_token": "eos",
    }  # fmt: skip
    if request.param is episodes:
        settings |= {"response_length": 3000}
    with printed() as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf_ppo.reporting.model_card._draw", lambda log, path: path.touch())
        trainer = PPOTrainer(
            args=PPOConfig(**settings), reward_funcs=[named(TEXT), named(f"{TEXT}2")], **request.param()
        )  # fmt: skip
        trainer.train()
        trainer.generate_completions()
        trainer.create_model_card(model_name=TEXT, dataset_name=TEXT, tags=[TEXT])
        metrics = sorted({key for entry in trainer.state.log_history for key in entry if "evil" in key})
        plot([str(folder), "--output", str(folder / "curves.svg"), "--metrics", *metrics[:2]])
        report([str(folder), "--output", str(folder / "report.html")])
    return folder, found.getvalue()


def assert_shown(text: str) -> None:
    """Say which characters a terminal would obey."""
    assert not (found := OBEYED.search(text)), text[max(0, found.start() - 40) : found.end() + 40].encode()


def test_the_terminal_shows_everything_and_obeys_nothing(run: tuple[Path, str]) -> None:
    _, said = run

    assert_shown(said)
    assert r"\x1b[2J" in said and "[red]" in said  # what a table of rich takes for markup
    assert not re.search("^# heading|^forged", said, re.MULTILINE)


def test_every_text_file_of_a_run_is_shown_as_it_is(run: tuple[Path, str]) -> None:
    folder, _ = run
    files = [path for path in folder.rglob("*") if path.suffix in (".csv", ".json", ".jsonl", ".md", ".html", ".svg")]

    assert {path.suffix for path in files} == {".csv", ".json", ".jsonl", ".md", ".html", ".svg"}
    for path in files:
        assert_shown(path.read_bytes().decode("utf-8"))


def test_the_texts_were_there(run: tuple[Path, str], request: pytest.FixtureRequest) -> None:
    """Tables of responses are data, and unchanged."""
    tables = [pd.read_parquet(path) for path in run[0].glob("completions/*.parquet")]
    said = "".join(text for table in tables for text in table["completion"])

    assert TEXT in said
    if "episodes" in request.node.name:
        assert said.count(TEXT) >= 8 and said.count("{'error': ") == 3 * said.count('"raises_it"')


def test_no_cell_of_a_sample_table_is_a_formula(run: tuple[Path, str]) -> None:
    tables = [pd.read_csv(path, header=None, dtype=str) for path in (run[0] / "_samples").glob("*.csv")]
    cells = [cell for table in tables for column in table for cell in table[column].dropna()]

    assert any(cell.startswith("'=HYPERLINK") for cell in cells)
    assert [cell for cell in cells if cell.startswith(FORMULA) and not NUMBER.fullmatch(cell)] == []


class Elements(html.parser.HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_report_has_no_element_of_the_texts(run: tuple[Path, str]) -> None:
    found = Elements((run[0] / "report.html").read_text(encoding="utf-8")).found

    assert not any(tag in ("img", "b") or any(name.startswith("on") for name in attrs) for tag, attrs in found)
    assert len([tag for tag, _ in found if tag == "script"]) == 1 + len(SCRIPTS)


def headings_of(card: str) -> list[str]:
    return [line for line in card.splitlines() if line.startswith("#")]


def test_a_model_card_has_the_headings_tables_and_elements_of_every_card(run: tuple[Path, str]) -> None:
    card = (run[0] / "README.md").read_text(encoding="utf-8")
    _, front, text = card.split("---\n", 2)

    assert yaml.safe_load(front)["model_name"] == visible(TEXT, one_line=True)
    assert len(headings_of(text)) == 7 and headings_of(text)[1:] == [
        "## Rewards", "## Final metrics", "## Curves", "## Hyper-parameters", "## Versions", "## Citations",
    ]  # fmt: skip
    assert Elements(text).found == [] and "](http://evil" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows and all(row.count("|") == 3 for row in rows)


def test_a_judgement_on_a_card_is_one_line() -> None:
    judgements = [Judgement(0.5, (0.4, 0.6), 10, TEXT, NAME)]
    nothing: Any = {name: {} for name in ("hyperparameters", "metrics", "versions")}
    text = model_card(
        model_name="m", base_model=TEXT, dataset=NAME, reward_sources=[TEXT], judgements=judgements, **nothing
    ).text

    assert_shown(text)
    assert Elements(text).found == [] and len([line for line in text.splitlines() if "Win rate" in line]) == 1
    assert len(headings_of(text)) == 7


def test_a_plot_is_made_of_its_texts(run: tuple[Path, str]) -> None:
    """The text of a label is beside its outlines; `$x$` as a formula has another comment for each character."""
    root = xml.etree.ElementTree.parse(run[0] / "curves.svg").getroot()
    picture = (run[0] / "curves.svg").read_text(encoding="utf-8")

    assert root.tag.endswith("svg") and not list(root.iter("{http://www.w3.org/2000/svg}script"))
    assert "$x$" in picture


def test_trackers_get_texts_that_are_no_markup(run: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType, SimpleNamespace

    logged: dict[str, pd.DataFrame] = {}
    wandb, trackio, comet = (ModuleType(name) for name in ("wandb", "trackio", "comet_ml"))
    wandb.run, wandb.Table = True, lambda dataframe: dataframe  # pyright: ignore
    wandb.log = lambda row: logged.update(wandb=row["completions"])  # pyright: ignore
    trackio.context_vars = SimpleNamespace(current_run=SimpleNamespace(get=lambda: True))  # pyright: ignore
    trackio.Table, trackio.log = lambda dataframe: dataframe, lambda row: logged.update(trackio=row["completions"])  # pyright: ignore
    experiment = SimpleNamespace(
        set_step=lambda _: None, log_table=lambda _, tabular_data: logged.update(comet_ml=tabular_data)
    )
    comet.get_running_experiment = lambda: experiment  # pyright: ignore
    for module in (wandb, trackio, comet):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(report_to=["wandb", "trackio", "comet_ml"]), state=SimpleNamespace(global_step=1)
    )
    report_table(pd.DataFrame({"query": [TEXT], TEXT: [TEXT], "score": [-1.0]}), trainer)

    for name, table in logged.items():
        assert table["score"].tolist() == [-1.0], name
        for text in [*table.columns, *table.iloc[0, :2]]:
            assert_shown(text)
    assert logged.keys() == {"wandb", "trackio", "comet_ml"}
    assert not re.search("[<>|*`$]", logged["trackio"].iloc[0, 0].replace("<br>", ""))
    assert logged["comet_ml"].iloc[0, 0].startswith("'=") and logged["comet_ml"].columns[1].startswith("'=")


def completion(text: str) -> str:
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


@pytest.mark.parametrize("answer", [completion(f"{TEXT}\ud800"), json.dumps({"error": TEXT}), TEXT])
@pytest.mark.parametrize("status", [200, 400])
def test_what_a_judges_server_says_is_one_visible_line(
    server: Any, answer: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_ppo.cli.judge.ChatJudge", functools.partial(ChatJudge, backoff=0.001))
    pd.DataFrame({"prompt": [TEXT] * 3, "a": [TEXT, "x", "z"], "b": ["y", TEXT, "w"]}).to_parquet(
        tmp_path / "r.parquet"
    )
    server.replies = [says(answer, status)] * 7
    url = f"http://127.0.0.1:{server.server_port}/v1"
    command = ["--dataset_name", str(tmp_path / "r.parquet"), "--model_column", "a", "--opponent_column", "b"]
    with printed() as found, contextlib.suppress(SystemExit):
        judge([*command, "--judge_model", NAME, "--judge_url", url, "--output_dir", str(tmp_path / "judged")])
    said = found.getvalue()

    assert_shown(said)
    assert "judge" in said and not re.search("^# heading|^forged|^\\| a", said, re.MULTILINE)


@pytest.mark.parametrize("status", [200, 400])
def test_an_exception_about_a_server_is_one_visible_line(server: Any, status: int) -> None:
    server.replies = [says(TEXT, status), says(json.dumps({"error": TEXT}), status), says(TEXT, status)]
    base = f"http://127.0.0.1:{server.server_port}"
    endpoint = RewardEndpoint(f"{base}/score", retries=0)
    for _ in range(2):
        with pytest.raises((ConnectionError, ValueError)) as error:
            finished(endpoint(["p"], ["c"], [[1]]))
        assert_shown(str(error.value))
        assert "\n" not in str(error.value) and endpoint.display_url in str(error.value)
    with pytest.raises(ConnectionError) as error:
        finished(ChatJudge(NAME, f"{base}/v1", retries=0)(["p"], [["a", "b"]]))
    assert_shown(str(error.value))


def test_init_writes_a_file_that_holds_what_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, model, prompts = "run\n\x1b[2J.yaml", "base", "prompts.jsonl"
    save_models(base=tiny_policy())
    write_rows(prompts, ({"prompt": f"w{number}"} for number in range(4, 14)))
    with printed() as found:
        named = ["--file", file, "--model", model, "--prompts", prompts, "--output_dir", NAME]
        init([*named, "--reward_funcs", "length"])
    written = (tmp_path / file).read_text(encoding="utf-8")

    assert_shown(found.getvalue())
    assert_shown(written)
    read = yaml.safe_load(written)
    assert read["ppo"]["sft_model_path"] == model and read["output_dir"] == NAME
    assert read["ppo"]["dataset_name"] == f"{NAME}/data/prompts.jsonl"


@pytest.mark.parametrize(
    "command",
    [
        [*"llm --train --trainer ppo --dry-run --rl-reward-model-path".split(), NAME, "--project-name", NAME],
        ["train", "--sft_model_path", NAME, "--dataset_name", NAME, "--output_dir", NAME],
        ["report", NAME],
        ["plot", NAME, "--metrics", TEXT],
        ["judge", "--dataset_name", NAME, "--model", TEXT, "--opponent", NAME, "--judge", TEXT],
        ["train", f"--{NAME[1:]}"],
        [NAME],
        ["pipeline", "run.yaml", "--dry-run"],
        ["pipeline", NAME],
    ],
    ids=lambda words: words[0] if words[0] != NAME else "no command",
)
def test_a_command_shows_its_words(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"prompt": ["p"]}).to_json("rows.jsonl", orient="records", lines=True)
    steps = {"ppo": {"sft_model_path": NAME, "dataset_name": "rows.jsonl", "reward_funcs": ["length"]}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"output_dir": NAME, **steps}))
    with printed() as found, contextlib.suppress(SystemExit):
        main(command)

    assert_shown(found.getvalue())
    assert r"\x1b[2J" in found.getvalue()


def test_messages_of_libraries_are_visible_in_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rlhf-ppo", "configs"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with printed():
        main()
    record = logging.LogRecord("transformers", logging.WARNING, "", 1, "it is %s", (TEXT,), None)
    shown = warnings.formatwarning(TEXT, UserWarning, "", 1)
    handlers = [*logging.getLogger("transformers").handlers, logging.lastResort]

    assert handlers[0] is not None and all(handler.filter(record) for handler in handlers if handler)
    assert_shown(record.getMessage())
    assert_shown(shown)
    assert r"\x1b[2J" in record.getMessage() and r"\x1b[2J" in shown


def test_a_traceback_of_a_command_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rlhf-ppo", "--version"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with printed() as found:
        runpy.run_module("rlhf_ppo", run_name="__main__")
        try:
            raise ValueError(TEXT)
        except ValueError:
            sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]

    assert_shown(found.getvalue())
    assert "Traceback (most recent call last)" in found.getvalue() and r"\x1b[2J" in found.getvalue()
