"""The first tutorial shows the example that is shipped, which runs."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "examples" / "first_run.py").read_text()


def test_the_tutorial_shows_the_example_that_is_shipped_in_twenty_lines() -> None:
    page = (ROOT / "docs" / "tutorials" / "first-run.md").read_text()

    assert f'```python title="examples/first_run.py"\n{EXAMPLE}```\n' in page
    assert sum(bool(line.strip()) for line in EXAMPLE.splitlines()) <= 20


@pytest.mark.thorough
def test_the_example_runs_for_two_updates(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shorter = EXAMPLE.replace("total_episodes=1280", "total_episodes=64")
    assert shorter != EXAMPLE

    exec(compile(shorter, "first_run.py", "exec"), {"__name__": "__main__"})

    logs = [json.loads(line) for line in Path("runs/first/log_history.jsonl").read_text().splitlines()]
    assert [entry["objective/scores"] > 0 for entry in logs if "objective/scores" in entry] == [True, True]
    assert Path("runs/first/model.safetensors").is_file()
