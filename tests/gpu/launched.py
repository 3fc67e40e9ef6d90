"""One process of a launch; writes what it saw into FOLDER/RANK.json: DEVICE FOLDER WHAT [MODEL]."""

import json
import os
import sys
from pathlib import Path
from typing import Any

if sys.argv[1] == "cpu":
    from tests.distributed.processes import pretend_accelerators

    pretend_accelerators()

import torch

from tests.distributed import scenarios
from tests.runs import train_and_record
from tests.vllm.training import record_ids


def first_update(folder: str, device: str) -> dict[str, Any]:
    """One update in bf16; what it started from."""
    trainer = scenarios.make_trainer(
        folder, folder, bf16=True, max_steps=1, num_ppo_epochs=1, num_mini_batches=1,
        ddp_backend="gloo" if device == "cpu" else None,
    )  # fmt: skip
    rollouts = train_and_record(trainer)
    first = trainer.state.log_history[0]
    return {
        **scenarios.launched_as(trainer),
        "device": trainer.args.device.type,
        "dtypes": [str(getattr(rollouts[0], name).dtype) for name in ("logprobs", "ref_logprobs", "values")],
        "kl": first["objective/kl"],
        "ratio": first["val/ratio"],
        "gradient_norm": first["grad_norm"],
    }


def sampled_in_a_group(folder: str, device: str, model: str) -> dict[str, Any]:
    """One update with a vLLM over both processes; all ids that this process sampled for the group."""
    trainer = scenarios.make_trainer(
        folder, folder, given={"model": model}, bf16=True, max_steps=1, num_ppo_epochs=1, num_mini_batches=1,
        generation_engine="vllm", vllm_tensor_parallel_size=2, vllm_gpu_memory_utilization=0.2,
        vllm_max_model_length=64, ddp_backend=None,
    )  # fmt: skip
    ids = record_ids(trainer)
    trainer.train()
    return {"of_group": ids, "after": torch.rand(4).tolist()}


def main() -> None:
    """Do what is asked for and write the report; exit at once, as tests/distributed/processes.py does."""
    device, folder, what, *others = sys.argv[1:]
    report = globals()[what](folder, device, *others)
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
