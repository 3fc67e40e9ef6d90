"""`rlhf-ppo init` measures the model on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_ppo.cli.init import init
from tests.conftest import make_tokenizer, tiny_policy


@pytest.mark.parametrize("largest", [None, 0])
def test_the_file_is_for_the_device(
    largest: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With `LARGE` 0 times come from the device's rates, as for large models."""
    monkeypatch.chdir(tmp_path)
    if largest is not None:
        monkeypatch.setattr("rlhf_ppo.cli.measuring.LARGE", largest)
    tiny_policy().save_pretrained("base")
    make_tokenizer().save_pretrained("base")
    rows = [{"prompt": f"w{4 + row % 20} w{4 + row // 20}"} for row in range(200)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    init("--model base --prompts prompts.jsonl --reward_funcs length".split())

    printed = capsys.readouterr().out
    assert "on cuda" in printed and " cores" not in printed
    written = Path("run.yaml").read_text()
    assert f"bf16: {str(torch.cuda.is_bf16_supported()).lower()}\n" in written
    assert yaml.safe_load(written)["ppo"]["sft_model_path"] == "base"
