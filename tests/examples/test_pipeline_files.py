"""The files for `rlhf-ppo pipeline` under `examples/`: they are read as they are, and run at the size of a toy."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset, DatasetDict
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from rlhf_ppo.cli.arguments import parse
from rlhf_ppo.cli.commands import OPTIONS
from rlhf_ppo.cli.main import configs, main
from rlhf_ppo.cli.options import JudgeArguments
from rlhf_ppo.cli.pipeline import COMMANDS, check_steps, read_pipeline, run_pipeline
from rlhf_ppo.reporting.run_log import read_log

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))
"""What the paper's steps see at a time, on its 8 GPUs."""

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
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
def test_every_option_is_known(name: str, place: Path) -> None:
    for step in read_pipeline(f"examples/{name}").steps:
        if step.kind != "report":
            parse(OPTIONS.get(COMMANDS[step.kind], JudgeArguments), step.kind, step.argv())


def toy(name: str, judge: str | None = None) -> list[str]:
    """Run a file with little of everything, each step in this process; return the names of its steps."""
    said = yaml.safe_load(Path("examples", name).read_text())
    del said["launch"]
    said["seeds"] = [0]
    for section, options in TOY.items():
        if section in said:
            said[section] |= options
    if judge is not None:
        del said["judge"]["judge_model"]
        said["judge"]["judge"] = judge
    Path("toy.yaml").write_text(yaml.safe_dump(said))
    read = read_pipeline("toy.yaml")
    check_steps(read.steps)
    assert run_pipeline(read, in_this_process) == 0
    assert json.loads((read.output_dir / "verdict.json").read_text())["seeds"] == [0]
    return list(json.loads((read.output_dir / "pipeline.json").read_text()))


def in_this_process(words: Sequence[str]) -> int:
    main(list(words[2:]))
    return 0


def save(model: Any, folder: str, data: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(data / "tokenizer_neox20b/tokenizer.json"),
        eos_token="<|endoftext|>",
        chat_template="{% for turn in messages %}{{ turn.content }}\n{% endfor %}",
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
def test_the_paper_s_experiment_runs_at_the_size_of_a_toy(place: Path, shared_data: Path) -> None:
    name = "tldr_1b.yaml"  # the others differ from it in models and sizes
    with (shared_data / "tldr_openai_ppo_samples/oai1b.csv").open(newline="") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(24), strict=False)]
    asked = [{"prompt": row["query"], "completion": row["reference_responses"]} for row in rows]
    pairs = [
        {"prompt": row["query"], "chosen": row["reference_responses"], "rejected": row["postprocessed_response"]}
        for row in rows
    ]
    parts = {"train": Dataset.from_list(asked[:16]), "validation": Dataset.from_list(asked[16:])}
    DatasetDict(parts).save_to_disk("trl-lib/tldr")
    DatasetDict({"train": Dataset.from_list(pairs)}).save_to_disk("trl-lib/tldr-preference")
    config = GPTNeoXConfig(vocab_size=50277, max_position_embeddings=1024, eos_token_id=0, bos_token_id=0, **TINY)
    run = Path(name).stem
    save(GPTNeoXForCausalLM(config), f"EleutherAI/pythia-{run.removeprefix('tldr_')}-deduped", shared_data)

    assert toy(name, judge="length") == ["sft", "reward", "ppo", "judge", "report"]
    log = read_log(f"runs/{run}/ppo")
    assert any(line["objective/scores"] == -1.0 for line in log if "objective/scores" in line)  # none has ended
    assert Path(f"runs/{run}/report.html").stat().st_size > 10_000
