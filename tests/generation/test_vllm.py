"""vLLM through TRL's adapter: its own code up to vLLM, which is not installed here and replaced by a fake."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from rlhf_ppo.config import ppo_config as engine_arguments
from rlhf_ppo.generation.sampling import greedy_config, sampling_config
from rlhf_ppo.generation.vllm import VLLMEngine, start_vllm
from tests.conftest import make_tokenizer, needs_vllm_of_trl, tiny_policy
from tests.generation.test_transformers_engine import prompts
from tests.runs import MakeArgs

pytestmark = needs_vllm_of_trl


@pytest.fixture
def make_vllm_args(make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch) -> MakeArgs:
    """Arguments for vLLM, as if it were installed."""
    monkeypatch.setattr(engine_arguments, "is_vllm_available", lambda: True)
    return lambda **given: make_args(generation_engine="vllm", **given)


# ---- Against TRL's signatures ----


def fake_generation(ids: list[list[int]], logprobs: Any) -> Any:
    """What `VLLMGeneration` is, with the same methods and arguments, giving a fixed answer."""
    fake = create_autospec(VLLMGeneration, instance=True)
    fake.generate.return_value = ([], ids, logprobs, None)
    fake.mode, fake.enable_sleep_mode, fake.tensor_parallel_size = "colocate", False, 1
    fake.generation_kwargs = {"ignore_eos": True}
    return fake


def test_rows_go_in_without_padding_and_come_out_padded(make_vllm_args: MakeArgs) -> None:
    fake = fake_generation([[7, 8, 1], [9]], [[[-0.5], [-1.0], [-2.0]], [[-0.25]]])
    config = sampling_config(make_vllm_args(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1), stop_token_id=1)

    sampled = VLLMEngine(fake).sample(tiny_policy(), prompts([5, 9, 3], [4], fill=99), config)

    fake.generate.assert_called_once_with([[5, 9, 3], [4]], images=None, num_generations=1)
    assert (fake.temperature, fake.top_k, fake.top_p, fake.min_p) == (0.8, 5, 0.9, 0.1)
    assert sampled.ids.tolist() == [[7, 8, 1], [9, 1, 1]] and sampled.ids.dtype == torch.long
    assert sampled.logprobs is not None
    assert sampled.logprobs[0].tolist() == [-0.5, -1.0, -2.0] and sampled.logprobs[1, 0] == -0.25
    assert sampled.lengths is not None and sampled.lengths.tolist() == [3, 1]


def test_ids_that_are_never_sampled_have_a_bias_in_that_call_only(make_vllm_args: MakeArgs) -> None:
    """Of the policy's 32 ids: the reference may have more, which vLLM would refuse."""
    fake = fake_generation([[7]], [[[-0.5]]])
    engine, policy = VLLMEngine(fake), tiny_policy()
    engine.sample(policy, prompts([4]), sampling_config(make_vllm_args(), 1, list(range(30, 40))))
    assert fake.generation_kwargs["logit_bias"] == {30: -100.0, 31: -100.0}
    engine.sample(policy, prompts([4]), sampling_config(make_vllm_args(), 1))
    assert "logit_bias" not in fake.generation_kwargs


def test_greedy_is_temperature_0_for_that_call_only(make_vllm_args: MakeArgs) -> None:
    args = make_vllm_args(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1)
    fake = fake_generation([[7]], [[[-0.5]]])
    engine, policy = VLLMEngine(fake), tiny_policy()
    engine.sample(policy, prompts([4]), greedy_config(args, 1))
    assert (fake.temperature, fake.top_k, fake.top_p, fake.min_p) == (0.0, 0, 1.0, 0.0)
    engine.sample(policy, prompts([4]), sampling_config(args, 1))
    assert (fake.temperature, fake.top_k, fake.top_p, fake.min_p) == (0.8, 5, 0.9, 0.1)


def test_weights_are_sent_before_the_first_response_after_a_change(make_vllm_args: MakeArgs) -> None:
    fake = fake_generation([[7]], [[[-0.5]]])
    engine, policy, config = VLLMEngine(fake), tiny_policy(), sampling_config(make_vllm_args(), 1)

    def calls() -> list[str]:
        engine.sample(policy, prompts([4]), config)
        names = [call[0] for call in fake.method_calls]
        fake.reset_mock(return_value=False)
        return names

    assert calls() == ["sync_weights", "generate"]
    assert calls() == ["generate"]
    engine.policy_changed()
    assert calls() == ["sync_weights", "generate"]
    fake.enable_sleep_mode = True  # it drops its weights after each call
    assert calls() == calls() == ["sync_weights", "generate"]


def test_the_ranks_of_a_group_draw_alike_and_go_on_with_numbers_of_their_own(
    make_vllm_args: MakeArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank of a tensor-parallel group samples all of its rows: other numbers would be other tokens."""
    given: list[int] = []

    def gather(seeds: list[Any], own: int, group: Any) -> None:
        """Rank 0 of the group is the first to come, with two calls."""
        assert len(seeds) == 2 and group == "the group"
        given.append(own)
        seeds[:] = [given[(len(given) - 1) % 2], own]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    drawn, after = [], []
    for rank in range(2):
        fake = fake_generation([], None)
        fake.tensor_parallel_size, fake.tp_group = 2, "the group"
        fake.generate.side_effect = lambda *_, **__: ([], [torch.randint(99, (8,)).tolist()], [[[0.0]] * 8], None)
        engine, policy, config = VLLMEngine(fake), tiny_policy(), sampling_config(make_vllm_args(), 1)
        set_seed(rank)  # as Trainer seeds each process after vLLM has started
        drawn.append([engine.sample(policy, prompts([4]), config).ids.tolist() for _ in range(2)])
        after.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]
    assert given[0] != given[2] and after[0] != after[1]


def with_model_config(**values: Any) -> Any:
    """A colocated `LLM` with this configuration."""
    return SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(**values)))
    )


def test_every_argument_is_passed_on(make_vllm_args: MakeArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_max_model_length": 77,
        "vllm_tensor_parallel_size": 2,
        "vllm_enable_sleep_mode": True,
        "vllm_model_impl": "transformers",
        "vllm_server_base_url": "http://there:1",
        "vllm_server_host": "there",
        "vllm_server_port": 1234,
        "vllm_server_timeout": 5.0,
        "vllm_group_port": 4321,
    }
    made = create_autospec(VLLMGeneration)
    made.return_value.llm = with_model_config(dtype=torch.float32, max_model_len=77)
    monkeypatch.setattr(vllm_generation, "VLLMGeneration", made)
    args = make_vllm_args(response_length=9, **given)
    policy, accelerator, tokenizer = tiny_policy(), Accelerator(cpu=True), make_tokenizer()
    policy.name_or_path = "somewhere"

    start_vllm(args, policy, accelerator, tokenizer, rows=16)

    passed = made.call_args.kwargs
    assert {f"vllm_{name}": value for name, value in passed.items() if f"vllm_{name}" in given} == given
    assert passed["mode"] == "colocate" and passed["model"] is policy and passed["processing_class"] is tokenizer
    assert passed["max_num_seqs"] == 32 and passed["max_completion_length"] == 9 and passed["logprobs"] == 0


@pytest.mark.parametrize("option", ["target_modules", "modules_to_save"])
def test_an_adapter_that_unties_the_embeddings_is_refused(make_vllm_args: MakeArgs, option: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], option: ["lm_head"]})
    policy = peft.get_peft_model(tiny_policy(tie_word_embeddings=True), config)
    with pytest.raises(
        ValueError, match=r"one matrix .* take lm_head and embed_tokens out of target_modules and modu"
    ):
        start_vllm(make_vllm_args(), policy, Accelerator(cpu=True), make_tokenizer(), rows=16)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"modules_to_save": ["lm_head"]}, "not called 'default'"),
        ({"trainable_token_indices": [3]}, "nor trainable_token_indices"),
        (None, "round a quantized base anew"),
    ],
    ids=["modules", "tokens", "quantized"],
)
def test_an_adapter_that_cannot_be_merged_and_sent_is_refused(
    make_vllm_args: MakeArgs, settings: dict[str, Any] | None, fault: str
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], **settings or {})
    policy = peft.get_peft_model(tiny_policy(tie_word_embeddings=False), config, adapter_name="other")
    policy.get_base_model().is_quantized = settings is None
    with pytest.raises(ValueError, match=fault):
        start_vllm(make_vllm_args(), policy, Accelerator(cpu=True), make_tokenizer(), rows=16)


def test_an_adapter_of_a_kind_that_cannot_be_merged_is_refused(make_vllm_args: MakeArgs) -> None:
    peft = pytest.importorskip("peft")
    config = peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
    policy = peft.get_peft_model(tiny_policy(), config)
    with pytest.raises(ValueError, match="cannot merge this kind of adapter: take LoRA, or set generation_engine"):
        start_vllm(make_vllm_args(), policy, Accelerator(cpu=True), make_tokenizer(), rows=16)


# ---- Server mode: TRL's own client, over HTTP; tests/vllm has a real server ----


class FakeServer(BaseHTTPRequestHandler):
    """What `vllm serve` says of itself."""

    model_config: dict[str, Any]

    def do_GET(self) -> None:
        answers = {"/health": {}, "/server_info": {"vllm_config": {"model_config": self.model_config}}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answers.get(self.path.partition("?")[0], {"data": [{"id": "policy"}]})).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[FakeServer]]]:
    """A server, and its URL; the NCCL group through which weights would go is not made."""
    model_config = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "max_model_len": 64}
    handler = type("Server", (FakeServer,), {"model_config": model_config})
    for module in (vllm_generation, vllm_client):
        monkeypatch.setattr(module, "is_vllm_available", lambda: True)
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    serving = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}", handler
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_a_server_whose_logprobs_cannot_be_corrected_for(make_vllm_args: MakeArgs, server: Any) -> None:
    url, handler = server
    handler.model_config["logprobs_mode"] = "raw_logprobs"
    args = make_vllm_args(vllm_mode="server", vllm_server_base_url=url)
    start = (tiny_policy(), Accelerator(cpu=True), make_tokenizer(), 2)
    with pytest.raises(ValueError, match=r"--logprobs-mode raw_logprobs.*importance_sampling_correction=False"):
        start_vllm(args, *start)
    args.importance_sampling_correction = False
    start_vllm(args, *start)
