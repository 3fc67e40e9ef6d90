"""W&B without an account."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cli.test_commands import SOURCES

RUN = """
from transformers import TrainingArguments
from rlhf_ppo.cli.trackers import settle_trackers
args = TrainingArguments(report_to="wandb", output_dir="out", use_cpu=True)
settle_trackers(args)
settle_trackers(args)
import wandb
run = wandb.init(project="here") if wandb.setup().settings.mode != "online" else None
print("offline" if run is not None and run.offline else wandb.setup().settings.mode)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "mode", "says"),
    [({}, "offline", 1), ({"WANDB_MODE": "disabled"}, "disabled", 0), ({"WANDB_API_KEY": "0" * 40}, "online", 0)],
    ids=["nobody", "switched off", "a key"],
)
def test_where_nobody_is_logged_in_the_run_is_recorded_here(settings, mode, says, tmp_path):
    environment = {name: value for name, value in SOURCES.items() if not name.startswith(("WANDB", "NETRC"))}
    environment |= {"HOME": str(tmp_path), "PATH": os.environ["PATH"], **settings}
    ended = subprocess.run(
        [sys.executable, "-c", RUN], env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    assert mode in ended.stdout.splitlines()
    assert ended.stderr.count("nobody is logged in to W&B here") == says
    assert (tmp_path / "wandb").exists() is (mode == "offline")
