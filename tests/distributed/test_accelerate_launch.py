"""`accelerate launch --config_file <each shipped file> examples/ppo.py` on two CPU processes, with a real model."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
QUICK = """--response_length 4 --bf16 False --gradient_checkpointing False --report_to none --save_strategy no
    --num_sample_generations 0"""

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def local(shared_data, tmp_path_factory):
    """The story model, a reward model of its shape, and openings."""
    folder = tmp_path_factory.mktemp("local")
    stories = shared_data / "stories260K"
    torch.manual_seed(0)
    reward_model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(stories, num_labels=1))
    reward_model.save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(stories).save_pretrained(folder / "reward")
    (folder / "data").mkdir()
    Dataset.from_dict({"prompt": [f"Once upon a time, {i} birds" for i in range(64)]}).to_json(
        folder / "data" / "prompts.jsonl"
    )
    return folder, stories


def options(local, output_dir):
    folder, stories = local
    return f"""--dataset_name {folder}/data --sft_model_path {stories} --model_name_or_path {stories}
        --reward_model_path {folder}/reward --output_dir {output_dir} --missing_eos_penalty 1.0
        --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --disable_tqdm True {QUICK}"""


def start(config, script, notes, rank=0, num_machines=1, port=0):
    """Start what one machine starts; two processes in all."""
    launch = ["--num_processes", "2", "--num_machines", str(num_machines)]
    launch += ["--machine_rank", str(rank), "--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    yaml = f"accelerate_configs/{config}.yaml"
    command = ["accelerate.commands.launch", "--config_file", yaml, "--mixed_precision", "no", *launch]
    words = [*command, "examples/ppo.py", *script.split(), "--ddp_backend", "gloo"]
    paths = [str(ROOT / "tests" / "distributed" / "on_cpu"), str(ROOT)]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "NOTES": str(notes), "ACCELERATE_USE_CPU": str(config == "multi_gpu").lower(),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def outputs_of(*launchers):
    """Wait until they have ended well."""
    outputs = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    assert not any(launcher.returncode for launcher in launchers), "\n".join(output[-6000:] for output in outputs)
    return outputs


def test_the_example_trains_on_two_machines(local, tmp_path):
    """ZeRO-2 on one has a test in `tests/examples/test_documented_commands.py`."""
    port = free_port()
    script = f"{options(local, tmp_path)} --total_episodes 8"
    outputs_of(*(start("multi_node", script, tmp_path, rank, 2, port) for rank in range(2)))
    seen = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("[0-9].json"))]
    assert seen == [{"num_processes": 2, "distributed_type": "DEEPSPEED", "zero_stage": 3}] * 2
    trained, before = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path, local[1]))
    assert trained.keys() == before.keys()
    assert any(not torch.equal(trained[name], before[name]) for name in before)


@pytest.fixture
def long_run(local, tmp_path):
    """A launcher of two processes that train for long and have come to their second update."""
    script = f"{options(local, tmp_path)} --total_episodes 4000 --logging_steps 1"
    launcher = start("multi_gpu", script, tmp_path, port=free_port())
    try:
        assert any(re.search(r"update +1/", line) for line in launcher.stdout)
        yield launcher
    finally:
        launcher.terminate()  # a launcher that is killed leaves its processes behind
        launcher.wait(60)


def test_sigterm_to_the_launcher_ends_all_ranks_with_a_checkpoint(long_run, tmp_path):
    """The launcher passes the signal on, waits for its processes, and then ends with an error of its own.

    As under a scheduler that signals every process of a job, the ranks have had the signal before.
    """
    for rank in range(2):
        os.kill(_process_of_rank(long_run.pid, rank), signal.SIGTERM)
    long_run.terminate()
    output, _ = long_run.communicate(timeout=120)
    assert long_run.returncode == 1 and "SignalException" in output
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert (checkpoint / "trainer_state.json").is_file()
    assert output.count(f"with the checkpoint {checkpoint}; resume_from_checkpoint=True") == 1
    assert not (tmp_path / "model.safetensors").exists(), "no final model"


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
