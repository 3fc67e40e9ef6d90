"""Loaded by the Python processes of a launch test: engines run on CPUs, each rank notes what it was launched as."""

import atexit
import gc
import json
import os
import sys
from pathlib import Path

# The launchers, accelerate's and torchrun, set these for what they start.
if {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
    gc.disable()  # imports leave little to collect, and much to walk through
    from tests.distributed.processes import pretend_accelerators

    pretend_accelerators()

    from rlhf_ppo import PPOTrainer

    gc.freeze()  # as in tests/preload.py
    gc.enable()

    train = PPOTrainer.train

    def noting_train(self, *args, **kwargs):
        plugin = self.accelerator.state.deepspeed_plugin
        seen = {
            "num_processes": self.accelerator.num_processes,
            "distributed_type": self.accelerator.distributed_type.value,
            "zero_stage": None if plugin is None else plugin.zero_stage,
        }
        Path(os.environ["NOTES"], f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))
        return train(self, *args, **kwargs)

    PPOTrainer.train = noting_train

    def exit_at_once():
        """On a CPU some processes abort while the interpreter shuts down, their work long done."""
        if getattr(sys, "last_value", None) is None:
            sys.stdout.flush()
            os._exit(0)

    atexit.register(exit_at_once)
