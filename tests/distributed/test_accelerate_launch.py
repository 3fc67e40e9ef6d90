"""`accelerate launch --config_file <each shipped file> examples/ppo.py` on two CPU processes, with a real model."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).parents[2]
LAUNCHED = {  # what each configuration must be seen as from inside, with two processes
    "single_gpu": ("NO", None),
    "multi_gpu": ("MULTI_CPU", None),
    "deepspeed_zero1": ("DEEPSPEED", 1),
    "deepspeed_zero2": ("DEEPSPEED", 2),
    "deepspeed_zero3": ("DEEPSPEED", 3),
    "deepspeed_zero3_offload": ("DEEPSPEED", 3),
    "fsdp2": ("FSDP", None),
    "multi_node": ("DEEPSPEED", 3),
}
DOCUMENTED_FOR_ZERO3 = """--num_ppo_epochs 1 --num_mini_batches 1 --per_device_train_batch_size 1
    --gradient_accumulation_steps 16 --local_rollout_forward_batch_size 1"""

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]


def test_every_configuration_is_launched():
    assert {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")} == LAUNCHED.keys()


@pytest.fixture(scope="module")
def local(shared_data, tmp_path_factory):
    """The story model, a reward model of its shape, and openings."""
    folder = tmp_path_factory.mktemp("local")
    stories = shared_data / "stories260K"
    torch.manual_seed(0)
    reward_model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(stories, num_labels=1))
    reward_model.save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(stories).save_pretrained(folder / "reward")
    Dataset.from_dict({"prompt": [f"Once upon a time, {i} birds" for i in range(64)]}).to_json(
        folder / "prompts.jsonl"
    )
    return folder, stories


def start(config, local, output_dir, options, rank=0, num_machines=1, port=0):
    """Start what one machine starts; two processes in all."""
    folder, stories = local
    launch = ["--num_processes", "1" if config == "single_gpu" else "2", "--num_machines", str(num_machines)]
    launch += ["--machine_rank", str(rank), "--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    launch += ["--offload_optimizer_device", "none"] if "offload" in config else []  # else it compiles for a minute
    script = f"""--dataset_name {folder}/prompts.jsonl --sft_model_path {stories} --model_name_or_path {stories}
        --reward_model_path {folder}/reward --output_dir {output_dir} --missing_eos_penalty 1.0 --response_length 8
        --bf16 False --gradient_checkpointing False --report_to none --num_sample_generations 0
        {"" if config == "single_gpu" else "--ddp_backend gloo"} {options}"""
    paths = [str(ROOT / "tests" / "distributed" / "on_cpu"), str(ROOT)]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "NOTES": str(output_dir), "ACCELERATE_USE_CPU": str(config in ("single_gpu", "multi_gpu")).lower(),
    }  # fmt: skip
    yaml = str(ROOT / "accelerate_configs" / f"{config}.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", yaml, "--mixed_precision", "no"]
    return subprocess.Popen(
        [*command, *launch, str(ROOT / "examples" / "ppo.py"), *script.split()],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.mark.parametrize("config", LAUNCHED)
def test_the_example_trains_under(config, local, tmp_path):
    options = "--total_episodes 8 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --save_strategy no"
    if config == "deepspeed_zero3":
        options = f"--total_episodes 32 --save_strategy no {DOCUMENTED_FOR_ZERO3}"
    machines = 2 if config == "multi_node" else 1
    port = free_port()
    launchers = [start(config, local, tmp_path, options, rank, machines, port) for rank in range(machines)]
    for launcher in launchers:
        output, _ = launcher.communicate(timeout=300)
        assert launcher.returncode == 0, output[-6000:]

    notes = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("[0-9].json"))]
    kind, stage = LAUNCHED[config]
    num_processes = 1 if config == "single_gpu" else 2
    assert notes == [{"num_processes": num_processes, "distributed_type": kind, "zero_stage": stage}] * num_processes
    trained = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    before = AutoModelForCausalLM.from_pretrained(local[1]).state_dict()
    assert trained.keys() == before.keys()
    assert any(not torch.equal(trained[name], before[name]) for name in before)


def test_a_rank_that_dies_stops_all_of_them(local, tmp_path):
    """Rank 1 is killed in its second update; the launcher ends the other one, and says who failed and how."""
    launcher = start(
        "multi_gpu",
        local,
        tmp_path,
        "--total_episodes 4000 --per_device_train_batch_size 2 --logging_steps 1",
        port=free_port(),
    )
    victim = None
    for line in launcher.stdout:
        if re.search(r"'loss'|objective/kl", line):
            victim = _process_of_rank(launcher.pid, 1)
            os.kill(victim, 9)
            break
    assert victim is not None
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert "exitcode  : -9" in output and f"pid: {victim}" in output


def _process_of_rank(parent, rank):
    for folder in Path("/proc").iterdir():
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            status = (folder / "status").read_text()
        except (OSError, NotADirectoryError):
            continue
        if f"PPid:\t{parent}\n" in status and f"RANK={rank}".encode() in environment:
            return int(folder.name)
    return None
