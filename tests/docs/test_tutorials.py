"""The tutorials, word by word from an empty directory, with fewer and smaller updates: what they show is printed."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from rlhf_ppo.cli import demo as demo
from rlhf_ppo.cli.demo import DemoSize
from rlhf_ppo.cli.main import main

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
BLOCK = re.compile(r'^```(bash|python|text)(?: title="([\w./]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
SMALL = DemoSize(num_stories=64, num_pairs=32, num_updates=1, num_episodes=8, num_held_out=8)

FEWER = {
    "openings": 96,
    "preference_pairs": 128,
    r"len\(values\) >": 1,
    "num_stories": 64,
    "total_episodes": 16,
    "per_device_train_batch_size": 8,
    "response_length": 12,
    "max_new_tokens": 8,
    "num_sample_generations": 1,
}


def shorter(text: str) -> str:
    """Two updates of eight episodes, short responses, one table of samples."""
    for name, number in FEWER.items():
        text = re.sub(rf"({name}[=( ]+)\d+", rf"\g<1>{number}", text)
    return text


def shape(line: str) -> str:
    """A line without its figures, and without what a model has said, which is quoted."""
    return re.sub(r"\s+", " ", re.sub(r"-?\d[\d.,e:-]*|[KM]iB|'[^']*'", "#", line)).strip()


class Reader:
    """Does what a page says, one block after the other."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.namespace: dict[str, object] = {}

    def follow(self, page: Path) -> None:
        for language, title, text in BLOCK.findall(page.read_text()):
            if title:
                Path(title).write_text(shorter(text))
            elif language == "python":
                exec(compile(shorter(text), str(page), "exec"), self.namespace)
            elif language == "bash":
                for line in text.replace("\\\n", " ").splitlines():
                    self.run(shorter(line))
            else:
                printed = self.capsys.readouterr().out.splitlines()
                missing = {shape(line) for line in text.splitlines()} - {shape(line) for line in printed}
                assert missing == set(), page

    def run(self, command: str) -> None:
        program, *words = shlex.split(command)
        if command == "rlhf-ppo configs .":
            Path("examples").is_dir() or main(words)
            example = Path("examples/first_run.py")
            example.write_text(shorter(example.read_text()))
        elif command == "rlhf-ppo demo":
            Path("demo_output").is_dir() or demo.run_demo(Path("demo_output"), SMALL)
        elif program == "rlhf-ppo":
            main([*words, *(["--dry_run"] if words[0] == "pipeline" else [])])  # its steps are processes
        elif program == "python":
            runpy.run_path(words[0], run_name="__main__")
        else:
            raise AssertionError(command)


@pytest.mark.slow
def test_the_tutorials_give_what_they_say(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["python"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr(demo, "plot_metrics", lambda *_: None)  # all of them, in seconds: the first run's are drawn
    reader = Reader(capsys)

    for name in ("first-run", "own-data", "lora"):
        reader.follow(TUTORIALS / f"{name}.md")

    for run in ("first", "food", "food-and-liked", "lora"):
        assert Path("runs", run, "trainer_state.json").is_file()
