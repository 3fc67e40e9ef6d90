"""Pairs whose prompt stands in both responses, read by the reward step, PPO and the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.cli.arguments import PPOScriptArguments, train_and_eval_rows
from rlhf_ppo.cli.judge import load_rows
from rlhf_ppo.cli.judge_arguments import JudgeArguments

HH = "\n\nHuman: Sky?\n\nAssistant:"
ASKED, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in [("user", "Sky?"), ("assistant", "Blue."), ("assistant", "Black.")]
)
FORMATS: Any = {
    "hh-rlhf": ({"chosen": f"{HH} Blue.", "rejected": f"{HH} Black."}, (HH, " Blue.", " Black.")),
    "conversations": ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, ([ASKED], [GOOD], [BAD])),
    "explicit": ({"prompt": "Sky?", "chosen": " Blue.", "rejected": " Bad."}, ("Sky?", " Blue.", " Bad.")),
    "no pair": ({"prompt": "Sky?", "chosen": " Blue."}, ("Sky?", " Blue.", None)),
}


@pytest.mark.parametrize(
    ("reader", "streaming"), [("reward", False), ("reward", True), ("train", False), ("train", True), ("judge", False)]
)
@pytest.mark.parametrize("name", FORMATS)
def test_every_reader_separates_the_prompt(name: str, reader: str, streaming: bool, tmp_path: Path) -> None:
    row, expected = FORMATS[name]
    path = tmp_path / "pairs.jsonl"
    path.write_text((json.dumps(row) + "\n") * 120)
    given = PPOScriptArguments(dataset_name=str(path), dataset_streaming=streaming)
    if reader == "judge":
        found = load_rows(JudgeArguments(dataset_name=str(path), opponent_column="chosen", model="m", judge="length"))
    else:
        found, held_out = train_and_eval_rows(given, reader)
        assert (held_out is None) == (reader == "reward")
    first = next(iter(found))
    assert tuple(first.get(key) for key in ("prompt", "chosen", "rejected")) == expected
