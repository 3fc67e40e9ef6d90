"""What follow_read.py finds in answers, by hand."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest


@pytest.mark.parametrize(
    ("asked", "answer", "expected"),
    [
        ("Describe trains.", "Trains are fast and loud.<|im_end|>", set()),
        ("Describe trains. Commas are forbidden.", "Trains have no commas.", {"talks"}),
        ("Tell me about letters. Use no upper case.", "letters carry news.", set()),
        ("Describe trains. Mention the word 'golden'.", "The word golden.", {"talks", "misses"}),
        ("Describe trains.", "Trains trains run.", {"repeats"}),
        ("Describe trains.", "Trains and trains and all trains.", {"repeats"}),
        ("Why do people like honey?", "It is sweet.", {"misses"}),
    ],
)
def test_the_faults_of_an_answer(asked: str, answer: str, expected: set[str]) -> None:
    from follow_read import faults

    assert faults(f"system\nAnswer in one short sentence.\nuser\n{asked}\nassistant\n", answer) == expected


def test_the_table_counts_the_answers_of_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import follow_read

    query = "system\nx\nuser\nDescribe trains.\nassistant\n"
    rows = pd.DataFrame({"query": [query] * 3, "model response": ["Trains run.", "A comma.", "Trains trains."]})
    rows.to_json(tmp_path / "run-1-20.jsonl", orient="records", lines=True)
    monkeypatch.setattr("sys.argv", ["follow_read.py", str(tmp_path / "run-1-20.jsonl")])
    follow_read.main()
    assert capsys.readouterr().out.splitlines()[-1] == "| run-1-20 | 3 | 1 | 1 | 1 |"
