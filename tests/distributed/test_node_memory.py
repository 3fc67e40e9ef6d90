"""Processes of a node hold one copy of the weights that they load, copy and make; measured with two processes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import PartialState
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from rlhf_ppo import PPOConfig
from rlhf_ppo.models import loading, unwrapping
from tests import conftest
from tests.distributed import processes
from tests.distributed.scenarios import make_trainer
from tests.gpu.conftest import small_config

SHAPE = {"vocab_size": 12000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}


def anonymous() -> int:
    """Bytes of this process that are no mapping of a file or of shared memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@contextmanager
def peak_of(bytes_of: Any) -> Iterator[list[int]]:
    """Yield a list that then holds how much a number of bytes rose at most in the context."""
    start, found, is_done = bytes_of(), [0], threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            found[0] = max(found[0], bytes_of() - start)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        is_done.set()
        thread.join()


def construct(folder: str, models: str, bf16: bool, **frozen: Any) -> dict[str, Any]:
    """Load a policy and perhaps a reward model from 16-bit files, make the others, and shard the frozen."""
    make_trainer(f"{folder}/warm", models, bf16=bf16)  # what is imported at first use
    with peak_of(anonymous) as most:
        trainer = make_trainer(
            f"{folder}/run", models, given={"model": f"{folder}/policy", "value_model": None, **frozen}, bf16=bf16
        )
    trained = [*trainer.policy_model.parameters(), *trainer.value_model.parameters()]
    return {
        "most": most[0],
        "bytes": 4 * sum(value.numel() for value in trainer.policy_model.parameters()),
        "dtypes": {str(value.dtype) for value in trained},
        "sums": [value.double().sum().item() for value in trainer.policy_model.parameters()],
        "drawn": torch.rand(4).tolist(),
    }


def whole_after_loads(folder: str, models: str) -> list[int]:
    """Load two reward models, policy and reference; count the whole models in memory after each."""
    counts: list[int] = []
    load = loading.load_pretrained

    def counting(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) in (LlamaForCausalLM, LlamaForSequenceClassification)]
        counts.append(sum(all(map(is_whole, model.parameters())) for model in found))
        return loaded

    reward = f"{models}/reward_model"
    given = {"reward_model": [reward, reward], "ref_model": f"{models}/policy", "value_model": None}
    with patch.object(loading, "load_pretrained", counting):
        trainer = make_trainer(f"{folder}/run", models, given=given)
    assert trainer.accelerator.num_processes == 2
    return counts


def is_whole(parameter: torch.Tensor) -> bool:
    """FSDP2 makes a parameter a `DTensor`; ZeRO-3 leaves it empty; the estimate's copies have no storage."""
    return type(parameter) is torch.nn.Parameter and parameter.numel() > 0


def write(folder: str) -> list[float]:
    """Write into a shared tensor in the second process; return what each process then has."""
    PPOConfig(folder, ddp_backend="gloo", bf16=False, use_cpu=True)
    state = PartialState()
    (held,) = unwrapping.hold_once([torch.full((4,), 3.0 if state.is_main_process else 0.0)])
    state.wait_for_everyone()
    if not state.is_main_process:
        held[1] = 7.0
    state.wait_for_everyone()
    return held.tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    for name, kind in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        torch.manual_seed(2)
        config = small_config(**SHAPE)
        config.num_labels = 1
        model: Any = kind(config)
        model.to(torch.bfloat16).save_pretrained(folder / name)
        conftest.make_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize(
    ("config", "num_frozen", "bf16"),
    [("fsdp2", 1, False), ("fsdp2", 2, False), ("multi_gpu", 2, False), ("multi_gpu", 2, True)],
)
def test_two_processes_hold_one_copy_while_models_are_loaded(
    config: str, num_frozen: int, bf16: bool, folder: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process has its shards of the frozen models, and one block; under DDP it has nothing of its own.

    The value model is made from the policy, or from the second frozen model. With bf16 frozen weights are converted.
    """
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # freed tensors go back to the system at once
    arguments = {"reward_model": str(folder / "reward")} if num_frozen == 2 else {}
    run: dict[str, Any] = {"folder": str(folder), "models": str(models), "bf16": bf16, **arguments}
    first, second = processes.run(config, f"{__name__}.construct", **run, timeout=300)
    whole = first["bytes"]
    shards = num_frozen * whole / 2 if config == "fsdp2" else 0
    assert second["most"] < shards + 0.35 * whole
    assert first["most"] < shards + 1.1 * whole  # that converts each
    assert first["dtypes"] == second["dtypes"] == {"torch.float32"}
    assert first["sums"] == second["sums"] and first["drawn"] == second["drawn"]


@pytest.mark.distributed  # the oldest transformers does not load a classifier under ZeRO-3
@pytest.mark.parametrize(("config", "counts"), [("fsdp2", [1, 2, 2, 3]), ("deepspeed_zero3", [0, 0, 0, 0])])
def test_a_reward_model_is_sharded_before_the_next_model_is_loaded(
    config: str, counts: list[int], models: Path, tmp_path: Path
) -> None:
    """The value model, a copy of the first, is there from the second load on, the policy from the third."""
    run = {"folder": str(tmp_path), "models": str(models)}
    assert processes.run(config, f"{__name__}.whole_after_loads", **run) == [counts, counts]


def test_what_a_process_writes_is_its_own(models: Path) -> None:
    first, second = processes.run("multi_gpu", f"{__name__}.write", folder=str(models))
    assert (first, second) == ([3.0] * 4, [3.0, 7.0, 3.0, 3.0])
