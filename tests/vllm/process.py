"""A separate process with real vLLM: FOLDER WHAT [ARGUMENTS]; writes what it saw into FOLDER/RANK.json."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from tests.runs import At
from tests.vllm.episodes import check_episodes
from tests.vllm.training import first_logs, make_vllm_trainer, record_ids


def straight(folder: Path, saved: Path) -> dict[str, Any]:
    """Four updates."""
    return _run(folder / "straight", saved)


def dies(folder: Path, saved: Path) -> dict[str, Any]:
    """The same, killed at the end of the third."""

    return _run(folder / "resumed", saved, At("on_step_end", 3, lambda _: os.kill(os.getpid(), signal.SIGKILL)))


def resumes(folder: Path, saved: Path) -> dict[str, Any]:
    """The rest of it."""
    return _run(folder / "resumed", saved, resume=True)


def _run(output_dir: Path, saved: Path, *callbacks: Any, resume: bool = False) -> dict[str, Any]:
    trainer = make_vllm_trainer(saved, output_dir, save_strategy="steps", save_steps=1, total_episodes=32)
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume or None)
    weights = [weight.double().sum().item() for weight in trainer.model.parameters()]
    names = ("step", "objective/scores", "objective/kl", "policy/loss")
    return {"weights": weights, "log": [[entry.get(name) for name in names] for entry in first_logs(trainer)]}


def two(folder: Path, saved: Path, tensor_parallel: str) -> dict[str, Any]:
    """Two updates of two processes, each with its own vLLM or both with one."""
    trainer = make_vllm_trainer(
        saved, folder / "run", vllm_tensor_parallel_size=int(tensor_parallel), ddp_backend="gloo", total_episodes=32
    )
    ids = record_ids(trainer)
    trainer.train()
    largest = max(log["sampling/sampling_logp_difference/max"] for log in first_logs(trainer) or [{}])
    trainer.evaluate()
    return {"sampled": ids, "next": torch.rand(4).tolist(), "largest": largest}


def episodes(folder: Path, saved: Path) -> dict[str, Any]:
    """Two updates of episodes of two processes with one vLLM; rank 0's have one turn."""
    turns = 1 if os.environ["RANK"] == "0" else 4
    return check_episodes(
        saved, folder / "run", turns, vllm_tensor_parallel_size=2, ddp_backend="gloo", total_episodes=32
    )


def judge(folder: Path, saved: Path, prompt: str, *options: str) -> dict[str, Any]:
    """`rlhf-ppo judge` with both models' answers from vLLM."""
    from rlhf_ppo.cli.judge import judge

    rows = [{"prompt": " ".join(f"w{row + number}" for number in range(int(prompt)))} for row in range(6)]
    Dataset.from_list(rows).to_json(folder / "prompts.jsonl")
    found = judge(
        ["--model", str(saved), "--opponent", str(saved), "--dataset_name", str(folder / "prompts.jsonl"),
         "--judge", "length", "--generation_engine", "vllm", "--output_dir", str(folder / "judged"), *options]
    )  # fmt: skip
    return {"judged": found.judged, "rate": found.rate}


def main() -> None:
    """Do what is asked for, write the report, and exit at once."""
    from vllm_on_cpu import patch_trl  # pyright: ignore[reportMissingImports]

    patch_trl()
    folder, what, *arguments = sys.argv[1:]
    report = globals()[what](Path(folder), Path(arguments[0]), *arguments[1:])
    Path(folder, f"{what}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
