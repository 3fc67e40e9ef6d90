"""The notebook runs from its first cell to its last, smaller, and prints what it shows."""

import json
from pathlib import Path

import pytest

from tests.docs.test_tutorials import shape, shorter

NOTEBOOK = Path(__file__).parents[2] / "examples" / "lora.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("COLUMNS", "110")
    namespace: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile(shorter("".join(cell["source"])), str(NOTEBOOK), "exec"), namespace)
            printed = {shape(line) for line in capsys.readouterr().out.splitlines()}
            shown = {shape(line) for output in cell["outputs"] for line in output["text"] if " -> " not in line}
            assert shown <= printed

    assert Path("merged/model.safetensors").is_file()


def test_its_outputs_are_text_and_few() -> None:
    outputs = [output for cell in json.loads(NOTEBOOK.read_text())["cells"] for output in cell.get("outputs", [])]

    assert {output["output_type"] for output in outputs} == {"stream"}
    assert NOTEBOOK.stat().st_size < 20_000
