"""Loaded by the Python of a documented command: a run ends after an update, engines run on CPUs."""

import os
import runpy
import sys
from pathlib import Path

SCRIPT = Path(getattr(sys, "orig_argv", [""])[1]).name
LAUNCHED = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys()

if LAUNCHED:
    runpy.run_path(str(Path(__file__).parents[2] / "distributed" / "on_cpu" / "sitecustomize.py"))
if LAUNCHED or SCRIPT in ("ppo.py", "rlhf-ppo"):
    from transformers import TrainerCallback

    from rlhf_ppo import PPOTrainer

    class StopAfterOneUpdate(TrainerCallback):
        """As Ctrl-C would, had a run no end."""

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    train = PPOTrainer.train

    def train_once(self, *args, **kwargs):
        self.add_callback(StopAfterOneUpdate)
        return train(self, *args, **kwargs)

    PPOTrainer.train = train_once
