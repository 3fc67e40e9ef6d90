"""Stand-ins for steps, which take no time: each writes a text that names all its inputs, through one checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

TEXT = """
output_dir: out
sft: {model_name_or_path: base, dataset_name: texts.jsonl}
reward: {dataset_name: pairs.jsonl}
judge_reward: {dataset_name: others.jsonl}
ppo: {dataset_name: prompts.jsonl}
judge: {dataset_name: held_out.jsonl}
report: {}
"""
NAMES = ["sft", "reward", "judge_reward", "ppo", "judge", "report"]


class Killed(BaseException):
    """The pipeline's process and its step have ended here."""


class Steps:
    """Runs the steps, and notes which.

    Args:
        strike: Called with the step's name and each moment of it: "begins", "saved" after its checkpoint, "ends" in
            the middle of its last file.
    """

    def __init__(self, strike: Callable[[str, str], None] = lambda *_: None) -> None:
        self.strike, self.words = strike, list[list[str]]()

    def __call__(self, words: Sequence[str]) -> int:
        self.words.append(list(words))
        command, *rest = words[words.index("rlhf_ppo") + 1 :]
        if command == "report":
            self.strike("report", "begins")
            Path(rest[rest.index("--output") + 1]).write_text(" ".join(rest))
            return 0
        options = {rest[i].removeprefix("--"): rest[i + 1] for i in range(0, len(rest), 2)}
        try:
            (self.judge if command == "judge" else self.train)(options)
        except OSError:
            return 2
        return 0

    def train(self, options: dict[str, str]) -> None:
        folder, resumed = Path(options.pop("output_dir")), options.pop("resume_from_checkpoint", None)
        folder.mkdir(parents=True, exist_ok=True)
        self.strike(folder.name, "begins")
        made_of, checkpoint = ingredients(options), folder / "checkpoint-1"
        if resumed is None:
            save(checkpoint, made_of)
        self.strike(folder.name, "saved")
        before = (checkpoint / "made_of").read_text()
        self.strike(folder.name, "ends")
        (folder / "model.safetensors").write_text(before if before == made_of else before + made_of)

    def judge(self, options: dict[str, str]) -> None:
        folder = Path(options.pop("output_dir"))
        folder.mkdir(parents=True, exist_ok=True)
        assert not (folder / "judged.parquet").exists(), "the judge would write beside it"
        (folder / "judged.parquet").write_text(ingredients(options))
        self.strike("judge" + folder.parent.name.removeprefix("ppo"), "ends")
        (folder / "win_rate.json").write_text('{"win_rate": 0.75, "interval": [0.5, 1.0]}')

    @property
    def started(self) -> dict[str, bool]:
        """The steps that were run, and whether each continued from a checkpoint."""
        return {name_of(words): "--resume_from_checkpoint" in words for words in self.words}


def save(checkpoint: Path, made_of: str) -> None:
    """Write a checkpoint that passes for complete."""
    checkpoint.mkdir()
    (checkpoint / "made_of").write_text(made_of)
    (checkpoint / "trainer_state.json").write_text('{"log_history": []}')


def name_of(words: Sequence[str]) -> str:
    if "--output_dir" not in words:
        return "report"
    folder = Path(words[words.index("--output_dir") + 1])
    return "judge" + folder.parent.name.removeprefix("ppo") if folder.name == "judged" else folder.name


def ingredients(options: dict[str, str]) -> str:
    """Return a text of options and of the content of each model that they name."""
    made_of = {}
    for name, value in sorted(options.items()):
        path = Path(value, "model.safetensors")
        made_of[name] = [value, path.read_text() if path.is_file() else None]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()


def outputs() -> Iterator[tuple[str, str]]:
    """Yield the files that count, with their texts."""
    for pattern in ("*/model.safetensors", "*/judged/*", "report.html"):
        yield from ((str(path), path.read_text()) for path in sorted(Path("out").glob(pattern)))
