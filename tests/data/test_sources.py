"""Data sets from files, directories and the hub, and the rows held out of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from rlhf_ppo.data.sources import hold_out, load_splits
from tests.conftest import write_rows

ROWS = [{"prompt": f"prompt {index}", "topic": index % 3} for index in range(5)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(folder: Path, kind: str) -> Path:
    """Write ROWS in one of the forms that `--dataset_name` takes; return what to pass."""
    rows, path = Dataset.from_list(ROWS), folder / f"prompts.{kind}"
    match kind:
        case "jsonl" | "json":
            rows.to_json(path)
        case "csv":
            rows.to_csv(path)
        case "parquet":
            rows.to_parquet(path)
        case "directory of jsonl":
            path = folder / "prompts"
            path.mkdir()
            rows.to_json(path / "train.jsonl")
        case "save_to_disk":
            rows.save_to_disk(path)
        case "save_to_disk of splits":
            DatasetDict({"train": rows, "dev": rows.select([0])}).save_to_disk(path)
    return path


@pytest.mark.parametrize(
    "kind", ["jsonl", "json", "csv", "parquet", "directory of jsonl", "save_to_disk", "save_to_disk of splits"]
)
@pytest.mark.parametrize("streaming", [False, True])
def test_every_form_gives_the_same_rows(tmp_path, kind, streaming):
    splits = load_splits(str(write(tmp_path, kind)), streaming=streaming)

    assert list(splits["train"]) == ROWS
    assert isinstance(splits["train"], IterableDataset if streaming else Dataset)
    assert set(splits) == ({"train", "dev"} if kind.endswith("splits") else {"train"})


@pytest.mark.parametrize(
    ("rows", "expected"), [(5000, 100), (1000, 100), (999, 99), (60, 6), (10, 1), (9, 0)], ids=str
)
def test_the_last_rows_are_held_out_but_never_more_than_a_tenth(rows, expected):
    train, held_out = hold_out(Dataset.from_dict({"row": list(range(rows))}), num_rows=100)

    assert train["row"][:] == list(range(rows - expected))
    assert (held_out["row"][:] if held_out else []) == list(range(rows - expected, rows))


def test_a_stream_gives_its_first_rows():
    stream = Dataset.from_dict({"row": list(range(7))}).to_iterable_dataset()

    train, held_out = hold_out(stream, num_rows=2)

    assert [row["row"] for row in held_out] == [0, 1]
    assert [row["row"] for row in train] == [2, 3, 4, 5, 6]


def test_a_data_set_with_several_configurations_names_them_and_says_what_to_do(tmp_path: Path) -> None:
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("main", "socratic"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for name in ("main", "socratic"):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    with pytest.raises(
        ValueError, match=r"available configs: \['main', 'socratic'\]; set dataset_config, or save one"
    ):
        load_splits(str(tmp_path))
    assert load_splits(str(tmp_path), "socratic")["train"][0] == {"prompt": "socratic"}


def test_dates_that_json_makes_times_of_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "days.jsonl"
    path.write_text("".join(f'{{"prompt": "w{day}", "answer": "2021-03-0{day}"}}\n' for day in range(1, 5)))
    with caplog.at_level("WARNING", logger="rlhf_ppo"):
        load_splits(str(path))
        load_splits(str(write(tmp_path, "jsonl")))
    (told,) = [record.getMessage() for record in caplog.records]
    assert "the texts of ['answer'] were read as times" in told
