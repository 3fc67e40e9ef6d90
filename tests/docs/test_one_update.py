"""The page *One update, file by file* names the files that a plain update runs through, and no others: at most 22."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

from tests.conftest import count_w4, prompt_rows

ROOT = Path(__file__).parents[2]


class ProfileOfUpdate(TrainerCallback):
    """Collects the files of the second update's calls: the first one fills caches."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def note(self, frame: FrameType, *_: Any) -> None:
        self.files.add(frame.f_code.co_filename)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 1:
            sys.setprofile(self.note)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        sys.setprofile(None)


def test_the_page_names_the_files_of_an_update(make_trainer):
    profile = ProfileOfUpdate()
    trainer = make_trainer(
        reward_funcs=count_w4, reward_model=None, train_dataset=Dataset.from_list(prompt_rows(8)), callbacks=[profile],
        per_device_train_batch_size=4, gradient_accumulation_steps=1, total_episodes=8, response_length=4,
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
    package = ROOT / "rlhf_ppo"
    ran = {Path(name).relative_to(package).as_posix() for name in profile.files if name.startswith(f"{package}/")}

    named = re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / "docs" / "one-update.md").read_text(), re.MULTILINE)

    assert sorted(named) == sorted(ran)
    assert len(ran) <= 22
