"""W&B without an account."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.cli.test_commands import SOURCES

CASES = {
    "nobody": ({}, "offline", True),
    "switched off": ({"WANDB_MODE": "disabled"}, "disabled", False),
    "a key": ({"WANDB_API_KEY": "0" * 40}, "online", False),
}
"""Environment, W&B's mode then, and whether the user is told."""

RUN = """
import faulthandler, json, os, sys
from transformers import TrainingArguments
from rlhf_ppo.cli.arguments import prepare_trackers

def run():
    args = TrainingArguments(report_to="wandb", output_dir="out", use_cpu=True)
    prepare_trackers(args)
    prepare_trackers(args)
    import wandb
    run = wandb.init(project="here") if wandb.setup().settings.mode != "online" else None
    print("offline" if run is not None and run.offline else wandb.setup().settings.mode, flush=True)
    wandb.finish()

for case, environment in json.loads(sys.argv[1]).items():
    if os.fork() == 0:  # the libraries are imported once
        os.mkdir(case)
        os.chdir(case)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), descriptor)
        faulthandler.dump_traceback_later(90, exit=True)  # a process that hangs says where
        os.environ.update(environment, HOME=os.getcwd())
        run()
        sys.exit()
    assert os.wait()[1] == 0, (case, open(case + "/stderr").read())
"""


@pytest.mark.slow
def test_where_nobody_is_logged_in_the_run_is_recorded_here(tmp_path):
    environment = {name: value for name, value in SOURCES.items() if not name.startswith(("WANDB", "NETRC"))}
    environment |= {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", RUN, json.dumps({case: settings for case, (settings, _, _) in CASES.items()})]
    ended = subprocess.run(
        command, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )

    assert ended.returncode == 0, ended.stderr
    for case, (_, mode, is_told) in CASES.items():
        place = tmp_path / case
        said, warned = (place / "stdout").read_text(), (place / "stderr").read_text()
        assert mode in said.splitlines(), (case, said, warned)
        assert warned.count("nobody is logged in to W&B: the run") == is_told, case
        assert (place / "wandb").exists() is (mode == "offline"), case
