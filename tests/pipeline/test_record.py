"""`pipeline.json`: every shape that is not its own is a sentence with the file, the key and the fix."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_ppo.cli.main import pipeline as command
from rlhf_ppo.cli.pipeline import planned, run_pipeline
from rlhf_ppo.cli.steps import named_files, read_pipeline, read_record
from tests.pipeline.stand_ins import TEXT, Steps, prepare

RECORD = Path("out/pipeline.json")
SHAPES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The record of a finished pipeline."""
    monkeypatch.chdir(tmp_path)
    prepare()
    Path("run.yaml").write_text(TEXT)
    run_pipeline(read_pipeline("run.yaml"), Steps())
    return json.loads(RECORD.read_text())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is cut off or no JSON; restore it, or rename it"),
        (b"{", "is cut off or no JSON; restore it, or rename it"),
        (b'{"sft": \xff}', "is cut off or no JSON; restore it"),
        (b"[" * 100_000, "is cut off or no JSON; restore it"),
        (b"9" * 10_000, "is cut off or no JSON; restore it"),
        (b"[1]", r"holds \[1\], not an object; restore it"),
        (b"null", "holds null, not an object; restore it"),
        (b'{"sft": 3}', "the entry 'sft' is 3, not an object; .* take the entry out to run that step again"),
        (b'{"sft": {}}', "the entry 'sft' lacks 'files'"),
        (b'{"sft": {"lr": 1}}', "the entry 'sft' lacks 'files'"),
        (b'{"sft": {"options": [], "files": {}, "inputs": {}, "output": null}}', r"the entry 'sft' has options=\[\]"),
        (b'{"a": {"options": {}, "files": {"x": 1}, "inputs": {}, "output": null}}', "'a' has files={\"x\": 1}"),
        (b'{"a": {"options": {}, "files": {}, "inputs": null, "output": {}}}', "'a' has inputs=null"),
        (b'{"a": {"options": {}, "files": {}, "inputs": {}, "output": {"m": null}}}', "'a' has output="),
    ],
)
def test_a_damaged_record_is_named(
    content: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    RECORD.parent.mkdir()
    RECORD.write_bytes(content)
    with pytest.raises(ValueError, match=f"^out/pipeline.json.*{words}"):
        read_record(RECORD.parent)
    Path("run.yaml").write_text(TEXT)
    with pytest.raises(SystemExit) as stopped:
        command(["run.yaml"])
    (sentence,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and sentence.startswith("rlhf-ppo pipeline: error: out/pipeline.json")


def places(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return where each value of a record is: the record itself, its entries, and what these hold."""
    inner = value.items() if isinstance(value, dict) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_anywhere_is_a_plan_or_a_sentence(data: st.DataObject, whole: dict[str, Any]) -> None:
    """A value is replaced, taken out or added, or the text is cut."""
    record = copy.deepcopy(whole)
    *path, last = ("record", *data.draw(st.sampled_from(places(whole))))
    holder: Any = {"record": record}
    outer = holder
    for key in path:
        holder = holder[key]
    what = data.draw(st.sampled_from(["replace", "take out", "add", "cut"]))
    if what == "replace":
        holder[last] = data.draw(SHAPES)
    elif what == "take out" and path:
        del holder[last]
    elif what == "add" and isinstance(holder[last], dict):
        holder[last][data.draw(st.text(max_size=5) | st.sampled_from(["ppo", "ppo-seed1"]))] = data.draw(SHAPES)
    text = json.dumps(outer["record"])
    text = text[: data.draw(st.integers(0, len(text)))] if what == "cut" else text
    try:
        RECORD.write_text(text)
        planned(read_pipeline("run.yaml"))
    except ValueError as error:
        assert "out/pipeline.json" in str(error) or "other options or data" in str(error)
    finally:
        RECORD.write_text(json.dumps(whole))


def test_a_record_that_is_no_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    RECORD.mkdir(parents=True)
    Path("run.yaml").write_text(TEXT)
    with pytest.raises(SystemExit):
        command(["run.yaml"])
    assert "error: out/pipeline.json is not a regular file; restore it" in capsys.readouterr().err


def test_without_a_record_steps_continue_from_what_is_there(whole: dict[str, Any]) -> None:
    RECORD.rename("elsewhere.json")
    steps = Steps()
    run_pipeline(read_pipeline("run.yaml"), steps)

    assert [resumed for _, resumed in steps.started] == [True] * 4 + [False] * 2
    assert json.loads(RECORD.read_text()) == whole


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("environment", "code.py:Maze"),
        ("environment", ["maze=code.py:Maze", "shop=other.py:Shop"]),
        ("tools", ["code.py:search"]),
        ("reward_funcs", "code.py:score(marks='a:b')"),
    ],
)
def test_the_code_that_options_name_is_read(name: str, value: Any, empty_place: Path) -> None:
    Path("code.py").touch()
    assert len(named_files({name: value}, [])) == 1


@pytest.mark.parametrize(
    ("path", "found"),
    [("base/config.json", True), ("base/README.md", False), ("texts.jsonl", True), ("f.py", True), ("x.txt", False)],
)
def test_data_code_and_models_that_changed_are_noticed(path: str, found: bool, whole: dict[str, Any]) -> None:
    text = TEXT.replace("{dataset_name: prompts.jsonl", "{dataset_name: prompts.jsonl, reward_funcs: 'f.py:g'")
    Path("again.yaml").write_text(text.replace("output_dir: out", "output_dir: again"))
    Path("f.py").touch()
    Path("base/config.json").touch()
    run_pipeline(read_pipeline("again.yaml"), Steps())
    Path(path).write_text("other")

    if found:
        with pytest.raises(ValueError, match=f"{'base' if 'base' in path else path}.* has other content now"):
            planned(read_pipeline("again.yaml"))
    else:
        assert {plan.action for plan in planned(read_pipeline("again.yaml")).values()} == {"keep"}
