"""The notebook runs in a kernel from its first cell to its last, smaller, and prints what it shows."""

from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_tutorials import shape, shorter

nbformat: Any = pytest.importorskip("nbformat", reason="nbformat, nbclient and ipykernel are not installed")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "lora.ipynb"


def texts(cell: Any) -> list[str]:
    return ["".join(output.text) for output in cell.get("outputs", []) if output.output_type == "stream"]


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("COLUMNS", "110")
    shown = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    for cell in run.cells:
        cell.source, cell.outputs = shorter(cell.source).replace("openings(96, seed=1)", "openings(8, seed=1)"), []
    client.NotebookClient(run, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for before, after in zip(shown.cells, run.cells, strict=True):
        printed = {shape(line) for text in texts(after) for line in text.splitlines()}
        assert {shape(line) for text in texts(before) for line in text.splitlines() if " -> " not in line} <= printed
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_its_outputs_are_text_and_few() -> None:
    outputs = [output for cell in nbformat.read(NOTEBOOK, as_version=4).cells for output in cell.get("outputs", [])]

    assert {output.output_type for output in outputs} == {"stream"}
    assert NOTEBOOK.stat().st_size < 20_000
