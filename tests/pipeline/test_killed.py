"""A pipeline of real steps that is killed while PPO runs, and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_tokenizer, tiny_policy

ROOT = Path(__file__).parents[2]
TEXT = """
output_dir: out
common: {report_to: none, use_cpu: true, bf16: false, disable_tqdm: true, save_steps: 1, logging_steps: 1}
sft: {model_name_or_path: base, dataset_name: texts.jsonl, max_steps: 2, per_device_train_batch_size: 4}
reward: {dataset_name: pairs.jsonl, max_steps: 2, per_device_train_batch_size: 4}
ppo: {dataset_name: prompts.jsonl, response_length: 6, total_episodes: 48, per_device_train_batch_size: 4,
      gradient_accumulation_steps: 1, num_mini_batches: 1, num_sample_generations: 0}
judge: {dataset_name: prompts.jsonl, judge: length, num_prompts: 8, max_new_tokens: 6}
"""


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def start() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "rlhf_ppo", "pipeline", "run.yaml"]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def written(*names: str) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for name in names for path in Path("out", name).rglob("*")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_steps_that_are_finished_stay_and_ppo_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_policy(max_position_embeddings=64).save_pretrained("base")
    make_tokenizer().save_pretrained("base")
    write("texts.jsonl", [{"prompt": f"w{row % 9}", "completion": f" w4 w{row % 7}"} for row in range(8)])
    write("pairs.jsonl", [{"prompt": "w1", "chosen": " w4 w4", "rejected": f" w{6 + row}"} for row in range(8)])
    write("prompts.jsonl", [{"prompt": f"w{row % 20} w{row % 7}"} for row in range(48)])
    Path("run.yaml").write_text(TEXT)

    killed = start()
    until = time.monotonic() + 300
    while not Path("out/ppo/checkpoint-3").exists() and killed.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert list(json.loads(Path("out/pipeline.json").read_text())) == ["sft", "reward"]
    before = written("sft", "reward")

    output, _ = start().communicate(timeout=300)
    assert "sft: finished before" in output and "reward: finished before" in output, output[-3000:]
    assert "--resume_from_checkpoint true" in output and "Model win rate: " in output
    assert written("sft", "reward") == before
    assert list(json.loads(Path("out/pipeline.json").read_text())) == ["sft", "reward", "ppo", "judge"]
    steps = [json.loads(line)["step"] for line in Path("out/ppo/log_history.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 13))
    assert Path("out/ppo/model.safetensors").is_file() and Path("out/judge/judged.parquet").is_file()
