"""Run a function in several CPU processes under one of the shipped accelerate configurations.

The heavy imports happen once, in a fork server. Each process gets the environment that `accelerate launch
--config_file` would give it, with the number of processes overridden and mixed precision off.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRELOAD = ["torch", "transformers.trainer", "transformers.generation.utils", "trl.trainer.utils", "peft", "datasets",
           "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "accelerate",
           "deepspeed", "deepspeed.runtime.engine", "torch.distributed.fsdp", "rlhf_ppo"]  # fmt: skip


def launch_environment(config: str, world: int, mixed_precision: str = "no") -> dict[str, str]:
    """Return what `accelerate launch --config_file accelerate_configs/<config>.yaml` would set."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    path = str(ROOT / "accelerate_configs" / f"{config}.yaml")
    argv = ["--config_file", path, "--num_processes", str(world), "--num_machines", "1", "--main_process_port", "0"]
    args = launch_command_parser().parse_args([*argv, "--mixed_precision", mixed_precision, "script.py"])
    args, defaults, mixed_precision_flag = _validate_launch_command(args)
    if args.use_deepspeed:
        names = list(defaults.deepspeed_config) + (["mixed_precision"] if mixed_precision_flag else [])
        args.deepspeed_fields_from_accelerate_config = ",".join(names)
        environment = prepare_deepspeed_cmd_env(args)[1]
    else:
        environment = prepare_multi_gpu_env(args)
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}


def run(config: str, scenario: str, world: int = 2, timeout: float = 180, **arguments: Any) -> list[Any]:
    """Call `scenarios.<scenario>(**arguments)` in `world` processes; return what each returned."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    environment = launch_environment(config, world) | {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_worker, args=(rank, environment, scenario, arguments, folder))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            if any(process.exitcode for process in processes):
                end = min(end, time.monotonic() + 5)
            time.sleep(0.02)
        for process in processes:
            process.kill()
            process.join()
        outputs = [Path(folder, f"{rank}.log").read_text() for rank in range(world)]
        results = [Path(folder, f"{rank}.pickle") for rank in range(world)]
        if not all(result.exists() for result in results):
            raise RuntimeError("\n".join(f"--- rank {rank}\n{output[-6000:]}" for rank, output in enumerate(outputs)))
        return [pickle.loads(result.read_bytes()) for result in results]


def _worker(rank: int, environment: dict[str, str], scenario: str, arguments: dict[str, Any], folder: str) -> None:
    log = os.open(f"{folder}/{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        pretend_accelerators()
        from tests.distributed import scenarios

        result = getattr(scenarios, scenario)(**arguments)
        Path(folder, f"{rank}.partial").write_bytes(pickle.dumps(result))
        os.rename(f"{folder}/{rank}.partial", f"{folder}/{rank}.pickle")
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def pretend_accelerators() -> None:
    """Let accelerate run DeepSpeed and FSDP2 over gloo on CPUs; without this DeepSpeed is silently DDP."""
    import torch
    import transformers.training_args
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    torch.set_num_threads(1)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    if "true" in (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("ACCELERATE_USE_DEEPSPEED")):
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            os.environ["DS_ACCELERATOR"] = "cpu"
            import deepspeed.ops

            deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # plain gloo, nothing to compile

        def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
            return "gloo", DistributedType.MULTI_GPU

        PartialState._prepare_backend = prepare_backend
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"
