"""Run a function in several CPU processes under one of the shipped accelerate configurations.

The heavy imports happen once, in a fork server. Each process gets the environment that `accelerate launch
--config_file` would give it, with the number of processes overridden and mixed precision off.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
LAUNCHERS = {  # distributed type and ZeRO stage that two processes under a configuration see from inside
    "multi_gpu": ("MULTI_CPU", None),
    "deepspeed_zero1": ("DEEPSPEED", 1),
    "deepspeed_zero2": ("DEEPSPEED", 2),
    "deepspeed_zero3": ("DEEPSPEED", 3),
    "fsdp2": ("FSDP", None),
}
Call = tuple[str, dict[str, Any]]
"""A scenario's name, with its module's where that is not `scenarios` here, and its arguments."""


def launch_environment(config: str, world: int, options: Sequence[str] = ()) -> dict[str, str]:
    """Return what `accelerate launch --config_file accelerate_configs/<config>.yaml <options>` would set."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    path = str(ROOT / "accelerate_configs" / f"{config}.yaml")
    argv = ["--config_file", path, "--num_processes", str(world), "--num_machines", "1", "--main_process_port", "0"]
    args = launch_command_parser().parse_args([*argv, "--mixed_precision", "no", *options, "script.py"])
    args, defaults, mixed_precision_flag = _validate_launch_command(args)
    if args.use_deepspeed:
        names = list(defaults.deepspeed_config) + (["mixed_precision"] if mixed_precision_flag else [])
        args.deepspeed_fields_from_accelerate_config = ",".join(names)
        environment = prepare_deepspeed_cmd_env(args)[1]
    else:
        environment = prepare_multi_gpu_env(args)
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}


def run(
    config: str, scenario: str, world: int = 2, timeout: float = 180, options: Sequence[str] = (), **arguments: Any
) -> list[Any]:
    """Call `scenarios.<scenario>(**arguments)` in `world` processes; return what each returned."""
    return run_all(config, [(scenario, arguments)], world, timeout, options=options)[0]


def run_all(
    config: str,
    calls: list[Call],
    world: int = 2,
    timeout: float = 180,
    last_is_killed: bool = False,
    options: Sequence[str] = (),
) -> list[list[Any]]:
    """Make several calls, one after the other, in the same `world` processes.

    Args:
        config: A file in `accelerate_configs/`, without its ending.
        calls: What each process calls.
        world: Number of processes.
        timeout: Seconds after which all are killed.
        last_is_killed: Whether the last call must end with SIGKILL instead of returning.
        options: Of `accelerate launch`, beside the file.

    Returns:
        For each call that ended, what each process returned.

    Raises:
        RuntimeError: A process failed, or was not killed although it should have been.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = started(config, calls, folder, world, options)
        _wait_for(processes, timeout)
        returned = [
            [Path(folder, f"{rank}-{index}.pickle") for rank in range(world)]
            for index in range(len(calls) - last_is_killed)
        ]
        killed = last_is_killed and any(process.exitcode == -signal.SIGKILL for process in processes)
        if not all(path.exists() for paths in returned for path in paths) or killed != last_is_killed:
            outputs = [Path(folder, f"{rank}.log").read_text() for rank in range(world)]
            raise RuntimeError("\n".join(f"--- rank {rank}\n{output[-6000:]}" for rank, output in enumerate(outputs)))
        return [[pickle.loads(path.read_bytes()) for path in paths] for paths in returned]


def started(
    config: str, calls: list[Call], folder: str, world: int = 2, options: Sequence[str] = ()
) -> list[multiprocessing.Process]:
    """Start the processes that make calls; what they return and print goes into `folder`."""
    environment = launch_environment(config, world, options) | {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    processes = [context.Process(target=_worker, args=(rank, environment, calls, folder)) for rank in range(world)]
    for process in processes:
        process.start()
    return cast(Any, processes)


def _wait_for(processes: list[Any], timeout: float) -> None:
    """Wait until all have ended; five seconds after one has failed, or at the timeout, end the others."""
    end = time.monotonic() + timeout
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + 5)
        time.sleep(0.02)
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)  # where it stands goes into its log
            process.join(0.5)
            process.terminate()  # not SIGKILL, which is what `last_is_killed` looks for
            process.join(1)
            process.kill()
        process.join()


def scenario_named(scenario: str) -> Callable[..., Any]:
    """Find the function of a `Call`."""
    module, _, name = scenario.rpartition(".")
    return getattr(importlib.import_module(module or "tests.distributed.scenarios"), name)


def _worker(rank: int, environment: dict[str, str], calls: list[Call], folder: str) -> None:
    log = os.open(f"{folder}/{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        pretend_accelerators()
        for index, (scenario, arguments) in enumerate(calls):
            result = scenario_named(scenario)(**arguments)
            Path(folder, f"{rank}.partial").write_bytes(pickle.dumps(result))
            os.rename(f"{folder}/{rank}.partial", f"{folder}/{rank}-{index}.pickle")
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
    """Let accelerate run DeepSpeed and FSDP2 over gloo on CPUs; without this DeepSpeed is silently DDP.

    Nothing is compiled: to decorate a function that is never called DeepSpeed would import the compiler for seconds.
    On the pretend GPU, which has all that they need, only the process group is replaced.
    """
    import torch

    torch.set_num_threads(1)
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)
    if os.environ.get("PRETEND_CUDA") == "1":
        import world_of_one  # pyright: ignore[reportMissingImports]

        return world_of_one.install()
    import transformers.training_args
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

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
