"""A separate `vllm serve`, which receives the weights over gloo; the last test kills it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.ports import free_port
from tests.vllm.episodes import check_episodes
from tests.vllm.launching import Server, serving
from tests.vllm.training import (
    NEAR,
    differences,
    first_logs,
    greedy_agreement,
    load_policy,
    make_vllm_trainer,
    policy_of,
    sample_as,
)  # fmt: skip


@pytest.fixture(scope="module")
def server(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(saved, tmp_path_factory.mktemp("server")) as running:
        yield running


def make_served(server: Server, saved: Path, folder: Path, **given: Any) -> Any:
    return make_vllm_trainer(
        saved, folder, vllm_mode="server", vllm_server_base_url=server.url, vllm_group_port=free_port(), **given
    )


def test_a_run(server: Server, saved: Path, tmp_path: Path) -> None:
    trainer = make_served(server, saved, tmp_path)
    trainer.train()
    logs = first_logs(trainer)
    assert len(logs) == 3 and max(log["sampling/sampling_logp_difference/max"] for log in logs) < NEAR
    assert 0 <= trainer.evaluate()["eval_score"] <= 1
    assert greedy_agreement(trainer, policy_of(trainer)) == 1
    assert greedy_agreement(trainer, load_policy(saved)) < 0.9
    for options in ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"suppressed": list(range(24, 32))}):
        sampled, prompts = sample_as(trainer, **options)
        assert differences(trainer, sampled, prompts, **options).max() < NEAR
        assert "suppressed" not in options or sampled.ids.max() < 24
    assert sample_as(trainer)[0].ids.max() >= 24


def test_lora_in_a_second_run_at_the_same_server(server: Server, saved: Path, tmp_path: Path) -> None:
    trainer = make_served(server, saved, tmp_path, peft_config=LoraConfig(r=4, target_modules="all-linear"))
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters() if not weight.requires_grad}
    trainer.train()
    now = dict(trainer.model.named_parameters())
    assert before and all(torch.equal(now[name], weight) for name, weight in before.items())
    assert max(log["sampling/sampling_logp_difference/max"] for log in first_logs(trainer)) < NEAR


def test_episodes_of_several_turns(server: Server, saved: Path, tmp_path: Path) -> None:
    address = {"vllm_server_base_url": server.url, "vllm_group_port": free_port()}
    # The server does not repeat its draws, and update 1 may teach longer turns: its own 32 episodes suffice.
    many: dict[str, Any] = {"per_device_train_batch_size": 16, "total_episodes": 64}
    assert check_episodes(saved, tmp_path, vllm_mode="server", **address, **many)["several"] > 8


def test_a_server_that_dies_while_it_generates(server: Server, saved: Path, tmp_path: Path) -> None:
    trainer = make_served(server, saved, tmp_path, total_episodes=800)
    generate, calls = trainer.sampler.engine.vllm.vllm_client.generate, []

    def generating(*given: Any, **how: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            server.send(signal.SIGKILL)
        return generate(*given, **how)

    trainer.sampler.engine.vllm.vllm_client.generate = generating
    with pytest.raises(ConnectionError, match=f"the vLLM server at {server.url} cannot be used: "):
        trainer.train()
    assert trainer.state.global_step == 1
