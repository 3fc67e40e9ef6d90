"""vLLM through TRL's adapter: its own code up to vLLM, which is not installed here and replaced by a fake."""

from __future__ import annotations

import inspect
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from rlhf_ppo import PPOConfig
from rlhf_ppo.config import engines as engine_arguments
from rlhf_ppo.generation.transformers_engine import greedy_config, sampling_config
from rlhf_ppo.generation.vllm import VLLMEngine, start_vllm
from rlhf_ppo.models.adapters import base_kept
from rlhf_ppo.processes.signals import EndsOnSignals, Stopped
from tests.conftest import make_tokenizer, needs_vllm_of_trl, tiny_policy
from tests.generation.test_transformers_engine import prompts

pytestmark = needs_vllm_of_trl

MakeArgs = Callable[..., PPOConfig]


@pytest.fixture
def make_vllm_args(make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch) -> MakeArgs:
    """Arguments for vLLM, as if it were installed."""
    monkeypatch.setattr(engine_arguments, "is_vllm_available", lambda: True)
    return lambda **given: make_args(generation_engine="vllm", **given)


def test_without_vllm_it_is_an_error_at_once(make_args: MakeArgs) -> None:
    with pytest.raises(ValueError, match=r"generation_engine='vllm' needs vLLM.*`pip install trl\[vllm\]`, or set"):
        make_args(generation_engine="vllm")


# ---- Against TRL's signatures ----


def fake_generation(ids: list[list[int]], logprobs: Any) -> Any:
    """What `VLLMGeneration` is, with the same methods and arguments, giving a fixed answer."""
    fake = create_autospec(VLLMGeneration, instance=True)
    fake.generate.return_value = ([], ids, logprobs, None)
    fake.mode, fake.enable_sleep_mode, fake.tensor_parallel_size = "colocate", False, 1
    return fake


def test_rows_go_in_without_padding_and_come_out_padded(make_vllm_args: MakeArgs) -> None:
    fake = fake_generation([[7, 8, 1], [9]], [[[-0.5], [-1.0], [-2.0]], [[-0.25]]])
    config = sampling_config(make_vllm_args(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1), stop_token_id=1)

    sampled = VLLMEngine(fake).sample(tiny_policy(), prompts([5, 9, 3], [4], fill=99), config)

    fake.generate.assert_called_once_with([[5, 9, 3], [4]], images=None, num_generations=1)
    assert (fake.temperature, fake.top_k, fake.top_p, fake.min_p) == (0.8, 5, 0.9, 0.1)
    assert sampled.ids.tolist() == [[7, 8, 1], [9, 1, 1]] and sampled.ids.dtype == torch.long
    assert sampled.logprobs is not None
    assert sampled.logprobs.tolist() == [[-0.5, -1.0, -2.0], [-0.25, 0.0, 0.0]]


def test_ids_that_are_never_sampled_are_not_allowed(make_vllm_args: MakeArgs) -> None:
    fake = fake_generation([[7]], [[[-0.5]]])
    fake.generation_kwargs = {"ignore_eos": True}
    VLLMEngine(fake).sample(tiny_policy(), prompts([4]), sampling_config(make_vllm_args(), 1, list(range(9, 32))))
    assert fake.generation_kwargs == {"ignore_eos": True, "allowed_token_ids": list(range(9))}


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


def test_the_ranks_of_a_group_draw_alike_and_go_on_with_numbers_of_their_own(
    make_vllm_args: MakeArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank of a tensor-parallel group samples all of its rows: other numbers would be other tokens."""
    given: list[int] = []

    def gather(seeds: list[Any], own: int, group: Any) -> None:
        """Rank 0 of the group is the first to come."""
        assert len(seeds) == 2 and group == "the group"
        given.append(own)
        seeds[:] = [given[0], own]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    drawn, after = [], []
    for rank in range(2):
        fake = fake_generation([], None)
        fake.tensor_parallel_size, fake.tp_group = 2, "the group"
        fake.generate.side_effect = lambda *_, **__: ([], [torch.randint(99, (8,)).tolist()], [[[0.0]] * 8], None)
        engine, policy, config = VLLMEngine(fake), tiny_policy(), sampling_config(make_vllm_args(), 1)
        set_seed(rank)  # as Trainer seeds each process after vLLM has started
        drawn.append(engine.sample(policy, prompts([4]), config).ids.tolist())
        after.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[1]
    assert given[0] != given[1] and after[0] != after[1]


def test_each_call_of_a_group_draws_other_numbers(make_vllm_args: MakeArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(seeds: list[Any], own: int, group: Any) -> None:
        seeds[:] = [own, own]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    fake = fake_generation([], None)
    fake.tensor_parallel_size, fake.tp_group = 2, "the group"
    fake.generate.side_effect = lambda *_, **__: ([], [torch.randint(99, (8,)).tolist()], [[[0.0]] * 8], None)
    engine, policy, config = VLLMEngine(fake), tiny_policy(), sampling_config(make_vllm_args(), 1)
    first, second = (engine.sample(policy, prompts([4]), config).ids.tolist() for _ in range(2))
    assert first != second


class SleepingVLLM(VLLMGeneration):
    """What `VLLMGeneration` does about weights when it sleeps: its `sync_weights`, and a line of its `generate`."""

    mode, enable_sleep_mode, tensor_parallel_size = "colocate", True, 1
    _llm_weights_sleeping = True

    def __init__(self, policy: Any) -> None:
        self.model, self.accelerator = policy, Accelerator(cpu=True)
        from trl.distributed import DistributedBackend

        self._dist = DistributedBackend(self.accelerator)
        self.llm, self.num_sent = MagicMock(), 0
        self.llm.wake_up.side_effect = lambda tags: setattr(self, "num_sent", self.num_sent + 1)
        self.generation_kwargs: dict[str, Any] = {}

    def generate(self, rows: Any, images: Any, num_generations: int) -> Any:
        if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:
            self.sync_weights()
        self._llm_weights_sleeping = True
        return [], [[7] for _ in rows], [[[-0.5]] for _ in rows], None


def test_the_line_of_trl_that_sends_weights_after_a_sleep_is_the_one_above() -> None:
    line = 'if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:'
    for generate in (VLLMGeneration.generate, SleepingVLLM.generate):
        lines = [text.strip() for text in inspect.getsource(generate).splitlines()]
        assert lines[lines.index(line) + 1] == "self.sync_weights()"


def test_a_base_under_an_adapter_stays_bit_for_bit_when_vllm_sleeps(
    make_vllm_args: MakeArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two evaluations between two updates: the weights are sent again before every call."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(vllm_generation, "empty_cache", lambda: None)
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, lora_alpha=32)
    policy = peft.get_peft_model(tiny_policy().bfloat16(), lora)
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    vllm = SleepingVLLM(policy)
    engine = VLLMEngine(vllm)
    for _ in range(3):
        engine.sample(policy, prompts([4]), sampling_config(make_vllm_args(), 1))
    assert vllm.num_sent == 3, "once a call"
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_parameters())


class MadeWithoutADevice(TorchDispatchMode):
    """Notes what is made where its source is: on a GPU it would take the GPU's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_new = isinstance(made, Tensor) and all(made is not given for given in args)
        if is_new and not func.is_view and (kwargs or {}).get("device") != torch.device("cpu"):
            self.sizes.append(made.numel())
        return made


def test_a_base_is_kept_in_the_host_s_memory() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, lora_alpha=32)
    policy = peft.get_peft_model(tiny_policy().bfloat16(), lora)
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    with MadeWithoutADevice() as mode:
        with base_kept(policy):
            assert not mode.sizes
            with torch.no_grad():
                for name, weight in policy.named_parameters():
                    weight += ".base_layer." in name
            mode.sizes.clear()
        assert not mode.sizes
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_parameters())


@pytest.mark.parametrize("logprobs", [[[[-0.5], [None]]], [[[-0.5]]], [[[-0.5], [float("nan")]]], None])
def test_a_logprob_that_is_missing_is_an_error(make_vllm_args: MakeArgs, logprobs: Any) -> None:
    engine = VLLMEngine(fake_generation([[7, 8]], logprobs))
    with pytest.raises(RuntimeError, match="'vllm' gave no finite log-probability for each token of row 0"):
        engine.sample(tiny_policy(), prompts([4]), sampling_config(make_vllm_args(), 1))


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
    monkeypatch.setattr(vllm_generation, "VLLMGeneration", made)
    args = make_vllm_args(response_length=9, **given)
    policy, accelerator, tokenizer = tiny_policy(), Accelerator(cpu=True), make_tokenizer()
    policy.name_or_path = "somewhere"

    start_vllm(args, policy, accelerator, tokenizer, stop_token_id=5, rows=16)

    passed = made.call_args.kwargs
    assert {f"vllm_{name}": value for name, value in passed.items() if f"vllm_{name}" in given} == given
    assert passed["mode"] == "colocate" and passed["model"] is policy and passed["processing_class"] is tokenizer
    assert passed["max_num_seqs"] == 32 and passed["max_completion_length"] == 9 and passed["logprobs"] == 0
    assert passed["generation_kwargs"] == {"ignore_eos": True, "stop_token_ids": [5]}
    start_vllm(args, policy, accelerator, tokenizer, stop_token_id=None, rows=16)
    assert made.call_args.kwargs["generation_kwargs"] == {"ignore_eos": True, "stop_token_ids": []}


def test_a_policy_made_in_memory_cannot_be_colocated(make_vllm_args: MakeArgs) -> None:
    with pytest.raises(ValueError, match=r"vllm_mode='colocate' loads the model from .*; save_pretrained it"):
        start_vllm(make_vllm_args(), tiny_policy(), Accelerator(cpu=True), make_tokenizer(), 1, 2)


# ---- Server mode: TRL's own adapter and client, over HTTP ----


class FakeServer(BaseHTTPRequestHandler):
    """The endpoints of `vllm serve` that TRL's client calls; answers the prompt's last token plus one, plus two."""

    received: list[tuple[str, Any]]
    logprobs_mode = "processed_logprobs"

    def do_GET(self) -> None:
        self._send(
            {
                "/health": {},
                "/v1/models": {"data": [{"id": "policy"}]},
                "/server_info": {"vllm_config": {"model_config": {"logprobs_mode": self.logprobs_mode}}},
            }[self.path.partition("?")[0]]
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = json.loads(body) if body else None
        self.received.append((self.path, request))
        choices = []
        for prompt in request["prompt"] if request else []:
            ids = [prompt[-1] + 1, prompt[-1] + 2]
            names, values = [f"token_id:{token}" for token in ids], [-0.5, -0.25]
            tops = [{name: value} for name, value in zip(names, values, strict=True)]
            logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
            choices.append({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs})
        self._send({"choices": choices})

    def _send(self, answer: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[FakeServer]]]:
    """A server, its URL, and what it received; the NCCL group through which weights would go is not made."""
    handler = type("Server", (FakeServer,), {"received": []})

    def receive(self: Any, metadata: list[Any], named_params: Iterator[tuple[str, Tensor]]) -> None:
        weights = {name: tensor.clone() for name, tensor in named_params}
        assert [name for name, _, _ in metadata] == list(weights)
        handler.received.append(("weights", weights))

    for module in (vllm_generation, vllm_client):
        monkeypatch.setattr(module, "is_vllm_available", lambda: True)
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", receive)
    monkeypatch.setattr(vllm_client, "_HAS_RESET_PREFIX_CACHE_SUCCESS", False, raising=False)
    serving = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}", handler
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_a_server_gets_the_weights_then_the_prompts(make_vllm_args: MakeArgs, server: Any) -> None:
    url, handler = server
    args = make_vllm_args(
        vllm_mode="server", vllm_server_base_url=url, temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, response_length=6
    )
    policy = tiny_policy()
    engine = start_vllm(args, policy, Accelerator(cpu=True), make_tokenizer(), stop_token_id=1, rows=2)

    sampled = engine.sample(policy, prompts([5, 9, 3], [20]), sampling_config(args, 1))

    assert sampled.ids.tolist() == [[4, 5], [21, 22]]
    assert sampled.logprobs is not None and sampled.logprobs.tolist() == [[-0.5, -0.25]] * 2
    assert [path for path, _ in handler.received] == ["weights", "/reset_prefix_cache", "/v1/completions"]
    (_, weights), _, (_, request) = handler.received
    assert weights.keys() == dict(policy.named_parameters()).keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in policy.named_parameters())
    expected = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "max_tokens": 6, "n": 1, "logprobs": 0}
    expected |= {"prompt": [[5, 9, 3], [20]], "ignore_eos": True, "stop_token_ids": [1], "repetition_penalty": 1.0}
    assert request.items() >= expected.items()


def test_a_signal_breaks_off_a_request(make_vllm_args: MakeArgs, server: Any) -> None:
    url, handler = server
    given_up = threading.Event()

    def never(self: Any) -> None:
        self.received.append((self.path, None))
        if self.path == "/v1/completions":
            threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
            given_up.wait(20)

    handler.do_POST = never
    args = make_vllm_args(vllm_mode="server", vllm_server_base_url=url)
    engine = start_vllm(args, tiny_policy(), Accelerator(cpu=True), make_tokenizer(), stop_token_id=1, rows=2)
    engine.vllm.sync_weights = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    before = time.monotonic()
    with EndsOnSignals(lambda flags: flags, awaited=lambda: "it ends").listening(), pytest.raises(Stopped):
        engine.sample(tiny_policy(), prompts([4]), sampling_config(args, 1))
    given_up.set()
    assert time.monotonic() - before < 5 and handler.received[-1][0] == "/v1/completions"


def test_an_adapter_is_sent_merged_and_the_base_stays_bit_for_bit(make_vllm_args: MakeArgs, server: Any) -> None:
    """TRL's adapter merges into the base and subtracts again, which in bfloat16 does not give the base back."""
    peft = pytest.importorskip("peft")
    url, handler = server
    args = make_vllm_args(vllm_mode="server", vllm_server_base_url=url)
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, lora_alpha=32)
    policy = peft.get_peft_model(tiny_policy().bfloat16(), lora)
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    engine = start_vllm(args, policy, Accelerator(cpu=True), make_tokenizer(), stop_token_id=1, rows=2)

    for _ in range(3):
        engine.sample(policy, prompts([4]), sampling_config(args, 1))
        engine.policy_changed()

    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_parameters())
    sent = [weights for path, weights in handler.received if path == "weights"]
    assert len(sent) == 3
    base = {name: weight.clone() for name, weight in policy.get_base_model().named_parameters()}
    merged = dict(policy.merge_and_unload().named_parameters())
    changes = [
        (weight - base[name.replace("q_proj", "q_proj.base_layer")]).abs().max() for name, weight in merged.items()
    ]
    assert max(changes) > 0.1
    for weights in sent:
        torch.testing.assert_close(weights, merged, rtol=2**-7, atol=2**-8)


def test_a_server_whose_logprobs_cannot_be_corrected_for(make_vllm_args: MakeArgs, server: Any) -> None:
    url, handler = server
    handler.logprobs_mode = "raw_logprobs"
    args = make_vllm_args(vllm_mode="server", vllm_server_base_url=url)
    start = (tiny_policy(), Accelerator(cpu=True), make_tokenizer(), 1, 2)
    with pytest.raises(ValueError, match=r"--logprobs-mode raw_logprobs.*importance_sampling_correction=False"):
        start_vllm(args, *start)
    args.importance_sampling_correction = False
    start_vllm(args, *start)
