"""The commands of TRL's and AITraining's documentation, word for word, in a directory that holds nothing else.

Models and data lie in folders that are called as on the hub. Nothing of the commands is changed; a run ends after its
first update because of `one_update/sitecustomize.py`, and the file that a user would edit says that two processes
stand for eight GPUs. Nobody is logged in anywhere, and nobody can answer a question.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.conftest import tiny_policy
from tests.examples.test_ppo_example import PYTHIA, REWARD, SFT, prompts, pythia, save, save_splits

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TLDR = r"""
accelerate launch --config_file accelerate_configs/deepspeed_zero2.yaml \
    examples/ppo_tldr.py \
    --output_dir models/minimal/ppo_tldr \
    --learning_rate 3e-6 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 4 \
    --total_episodes 1000000 \
    --model_name_or_path EleutherAI/pythia-1b-deduped \
    --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
    --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \
    --local_rollout_forward_batch_size 16 \
    --missing_eos_penalty 1.0 \
    --stop_token eos
"""
REWARD_MODEL = r"""
rlhf-ppo llm --train --model google/gemma-3-270m --data-path ./preferences.jsonl --project-name reward-model \
    --trainer reward --prompt-text-column prompt --text-column chosen --rejected-text-column rejected
"""
TUNED = r"""
rlhf-ppo llm --train --model google/gemma-3-270m --data-path ./prompts.jsonl --project-name ppo-model \
    --trainer ppo --rl-reward-model-path ./reward-model --rl-kl-coef 0.1 --rl-clip-range 0.2
"""
PROMPTS = ["What is machine learning?", "Explain quantum computing.", "Write a haiku about coding."]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with what `rlhf-ppo configs .` writes."""
    folder = tmp_path_factory.mktemp("place")
    assert "Try, in " in shell("rlhf-ppo configs .", folder)
    return folder


def shell(command: str, folder: Path, **variables: str) -> str:
    """Run commands as a new user types them; return what they print, and fail where one does."""
    hidden = ("WANDB", "HF_", "ACCELERATE", "NETRC")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    (folder / "home").mkdir(exist_ok=True)
    environment |= {
        "HOME": str(folder / "home"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "examples" / "one_update"), str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NOTES": str(folder),
        **variables,
    }
    ended = subprocess.run(
        ["bash", "-e", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=600,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:]
    return ended.stdout


def updates(folder: Path) -> int:
    return json.loads((folder / "trainer_state.json").read_text())["global_step"]


@pytest.mark.distributed
def test_trls_command_for_zero2(place):
    pytest.importorskip("deepspeed")
    for name in (PYTHIA, SFT):
        save(pythia(), place / name)
    save(AutoModelForSequenceClassification.from_config(pythia(num_labels=1).config), place / REWARD)
    save_splits(place / "trl-lib/tldr", train=prompts(150), validation=prompts(9))
    configuration = place / "accelerate_configs" / "deepspeed_zero2.yaml"
    text = configuration.read_text()
    configuration.write_text(text.replace("num_processes: 8", "num_processes: 2").replace(": bf16", ": 'no'"))

    printed = shell(TLDR, place)

    seen = [json.loads(path.read_text()) for path in sorted(place.glob("[01].json"))]
    assert seen == [{"num_processes": 2, "distributed_type": "DEEPSPEED", "zero_stage": 2}] * 2
    assert updates(place / "models/minimal/ppo_tldr") == 1
    AutoModelForCausalLM.from_pretrained(place / "models/minimal/ppo_tldr")
    assert "model response" in printed


def test_aitrainings_commands_and_python(place):
    save(tiny_policy(max_position_embeddings=512), place / "google/gemma-3-270m")
    pairs = [{"prompt": prompt, "chosen": " w4 w4", "rejected": " w6"} for prompt in PROMPTS * 8]
    for name, rows in (("preferences", pairs), ("prompts", [{"text": prompt} for prompt in PROMPTS])):
        Dataset.from_list(rows).to_json(place / f"{name}.jsonl")

    printed = shell(REWARD_MODEL, place)
    assert AutoModelForSequenceClassification.from_pretrained(place / "reward-model").config.num_labels == 1
    assert len(re.findall("nobody is logged in to W&B", printed)) == 1

    printed = shell(TUNED, place)
    assert updates(place / "ppo-model") == 1
    assert len(re.findall("nobody is logged in to W&B", printed)) == 1
    assert len(re.findall("There are 3 prompts, but 8 episodes in an update", printed)) == 1
    assert "model response" in printed
