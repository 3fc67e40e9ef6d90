"""The files for `rlhf-ppo pipeline` under `examples/`: they are read as they are, and run at the size of a toy."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset, DatasetDict

from rlhf_ppo.cli.arguments import parse
from rlhf_ppo.cli.judge_arguments import JudgeArguments
from rlhf_ppo.cli.main import configs, main
from rlhf_ppo.cli.pipeline import COMMANDS, check_steps, read_pipeline, run_pipeline
from rlhf_ppo.cli.training_commands import OPTIONS
from rlhf_ppo.rewards.resolve import resolve_rewards
from tests.examples.test_ppo_example import pythia, save

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))
TOY: dict[str, dict[str, Any]] = {
    "common": {"use_cpu": True, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False},
    "sft": {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
    "reward": {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
    "ppo": {"total_episodes": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
            "num_mini_batches": 1, "eval_steps": 1, "response_length": 8, "num_generations": 2},
    "judge": {"num_prompts": 4, "max_new_tokens": 8, "num_shown": 0},
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what `rlhf-ppo configs .` writes."""
    monkeypatch.chdir(tmp_path)
    configs([str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_every_option_reward_and_judge_is_known(name: str, place: Path) -> None:
    for step in read_pipeline(f"examples/{name}").steps:
        if step.kind != "report":
            for part in parse(OPTIONS.get(COMMANDS[step.kind], (JudgeArguments,)), step.kind, step.argv()):
                resolve_rewards(getattr(part, "reward_funcs", None))
                resolve_rewards(getattr(part, "judge", None))


def in_this_process(words: Sequence[str]) -> int:
    main(list(words[2:]))
    return 0


@pytest.mark.slow
def test_the_paper_s_experiment_runs_at_the_size_of_a_toy(place: Path) -> None:
    """Each step in this process; the other files differ from it in models and sizes."""
    pairs = [{"prompt": f"w{row}", "chosen": " w4 w4", "rejected": " w6"} for row in range(24)]
    answers = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]
    parts = {"train": Dataset.from_list(answers[:16]), "validation": Dataset.from_list(answers[16:])}
    DatasetDict(parts).save_to_disk("trl-lib/tldr")
    DatasetDict({"train": Dataset.from_list(pairs)}).save_to_disk("trl-lib/tldr-preference")
    save(pythia(), "EleutherAI/pythia-1b-deduped")
    options = yaml.safe_load(Path("examples/tldr_1b.yaml").read_text())
    del options["launch"], options["judge"]["judge_model"]
    options["seeds"], options["judge"]["judge"] = [0], "length"
    for section, of_toy in TOY.items():
        options[section] |= of_toy
    Path("toy.yaml").write_text(yaml.safe_dump(options))
    read = read_pipeline("toy.yaml")
    check_steps(read.steps)

    assert run_pipeline(read, in_this_process) == 0
    assert json.loads(Path("runs/tldr_1b/verdict.json").read_text())["seeds"] == [0]
    steps = json.loads(Path("runs/tldr_1b/pipeline.json").read_text())
    assert list(steps) == ["sft", "reward", "ppo", "judge", "report"]
    assert Path("runs/tldr_1b/report.html").stat().st_size > 10_000


def test_pairs_without_prompts_and_too_few_pairs_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for row, words in (({}, "line 1 of pairs.jsonl has no 'prompt'"), ({"prompt": "a"}, "num_held_out=512, but")):
        Path("pairs.jsonl").write_text(json.dumps({"chosen": "b", "rejected": "c"} | row))
        monkeypatch.setattr("sys.argv", ["human_text.py", "pairs.jsonl", "out"])
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(EXAMPLES / "human_text.py"), run_name="__main__")
        assert words in capsys.readouterr().err and not Path("out").exists()
