"""The seconds of an update's phases; an error of too little memory that names its phase; clocks that stand still."""

from __future__ import annotations

import pytest
import torch

from rlhf_ppo.cli.trainers import running
from rlhf_ppo.reporting.metrics import PhaseTimer, note_on_memory
from tests.runs import QUICK, MakeTrainer

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory")
LOWERED = {
    "generate": ("in generation: lower local_rollout_forward_batch_size", "response_length"),
    "score": ("in the rewards: ", "offload_frozen=True"),
    "evaluate": ("local_rollout_forward_batch_size", "response_length"),
    "learn": ("in learning: lower per_device_train_batch_size and raise gradient_accumulation_steps",),
}


@pytest.mark.parametrize("error", [CUDA, CPU, MemoryError(), RuntimeError("CUDA error: out of memory")])
@pytest.mark.parametrize("phase", LOWERED)
def test_an_error_of_too_little_memory_names_its_phase_and_what_to_lower(phase: str, error: Exception) -> None:
    error = type(error)(*error.args)
    with pytest.raises(type(error)) as raised, PhaseTimer().phase(phase):
        raise error
    (note,) = raised.value.__notes__
    assert raised.value is error and note == note_on_memory(error)
    assert note.startswith("Out of memory in ") and all(words in note for words in LOWERED[phase])


def test_at_a_command_line_it_is_a_sentence(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(**QUICK)
    with pytest.raises(SystemExit) as ended, running("rlhf-ppo train", trainer), PhaseTimer().phase("learn"):
        raise torch.OutOfMemoryError(*CUDA.args)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "rlhf-ppo train: error: Out of memory in learning: lower per_device_train_batch_size" in said
    assert "Tried to allocate 2.00 GiB" in said and "Traceback" not in said


# ---- Clocks ----
