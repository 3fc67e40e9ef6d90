"""The pages for users of other libraries: what stands for their files and commands trains a policy."""

import re
import shlex
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

from rlhf_ppo import PPOConfig
from rlhf_ppo.cli.main import main
from tests.conftest import make_tokenizer, tiny_policy

DOCS = Path(__file__).parents[2] / "docs"
OPTION = re.compile(r"`(?:--)?([a-z]\w+)`")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    policy, tokenizer = tiny_policy(), make_tokenizer()
    config = LlamaConfig(**{**policy.config.to_dict(), "num_labels": 1})
    for name, model in (("sft", policy), ("reward", LlamaForSequenceClassification(config))):
        model.save_pretrained(f"models/{name}")
        tokenizer.save_pretrained(f"models/{name}")
    Path("prompts.jsonl").write_text("".join(f'{{"prompt": "w{index % 20} w4"}}\n' for index in range(40)))


@pytest.mark.slow
def test_the_file_and_the_command_train_an_adapter(workshop) -> None:
    [file] = blocks("from-llama-factory.md", "yaml")
    Path("ppo.yaml").write_text(file)
    theirs, ours = (command.replace("\\\n", " ") for command in blocks("from-ms-swift.md", "bash"))
    assert shlex.split(theirs)[:2] == ["swift", "rlhf"]

    main(["train", "--config", "ppo.yaml"])
    main(shlex.split(ours)[1:])

    for directory in ("runs/ppo", "runs/swift"):
        assert Path(directory, "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("page", ["from-old-trl.md", "from-llama-factory.md", "from-ms-swift.md"])
def test_the_defaults_that_the_tables_give_are_ours(page) -> None:
    """Where the last column is a number or a switch, it is that of the one option that the third names."""
    rows = [line.strip("| ").split(" | ") for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]
    fields = PPOConfig.__dataclass_fields__
    checked = 0
    for row in rows:
        ours, default = (row[2], row[3]) if len(row) == 4 else ("", "")
        names = [name for name in OPTION.findall(ours) if name in fields]
        if len(names) == 1 and re.fullmatch(r"[\d.e-]+|[Tt]rue|[Ff]alse", default):
            assert str(fields[names[0]].default).lower() == str(_value(default)).lower(), row
            checked += 1
    assert checked >= 4


def _value(text: str) -> object:
    return text if text.lower() in ("true", "false") else type(0 if text.isdigit() else 0.0)(text)
