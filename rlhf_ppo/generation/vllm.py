"""Generation with vLLM, in the training process (colocated) or on a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any
from urllib.parse import urldefrag

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.prompts import PositionLimit, Prompts
from rlhf_ppo.generation.protocol import Sampled, length_and_filling, prompt_rows, stack_rows, stop_tokens
from rlhf_ppo.models.adapters import preserve_base
from rlhf_ppo.models.unwrapping import multiplied_dtype, text_config
from rlhf_ppo.processes.distributed import (
    get_logger,
    isolated_rng,
    raise_on_all_ranks,
)
from rlhf_ppo.processes.waiting import in_daemon_thread
from rlhf_ppo.terminal import hide_secrets, redact_url, redact_urls, secrets_of

SECONDS_BETWEEN_LOOKS = 1.0
"""Seconds between health checks during a request."""


REFUSALS = 3
"""Failed health checks in a row after which a server counts as dead."""


def served_generation(args: PPOConfig) -> Any:
    """Return a subclass of TRL's `VLLMGeneration` whose client has time limits.

    Args:
        args: Gives the server's address, `vllm_server_timeout` and `ddp_timeout`.
    """
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    address = _address(args)

    class Client(_WatchedClient, VLLMClient):
        watch = _Watch(address, args.vllm_server_timeout, args.ddp_timeout)

    class Generation(VLLMGeneration):
        vllm_client: Client

        def _init_vllm(self) -> None:
            with raise_on_all_ranks(self.accelerator):
                if self.accelerator.is_main_process:
                    limit = self.server_timeout
                    self.vllm_client = Client(address, group_port=self.group_port, connection_timeout=limit)
                    self.vllm_client.init_communicator(device=self.accelerator.device)

    return Generation


class _Watch:
    """Wait for a server's answers, and check its health meanwhile.

    Args:
        address: The server's URL.
        seconds_unheard: Maximum seconds without an answer of `/health`: `vllm_server_timeout`.
        seconds: Maximum seconds of a request: `ddp_timeout`, the time limit of the other ranks.
    """

    def __init__(self, address: str, seconds_unheard: float, seconds: float) -> None:
        self.address, self.seconds_unheard, self.seconds = address, seconds_unheard, seconds
        self._health = f"{urldefrag(address)[0].partition('?')[0]}/health"

    def result(self, doing: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call to the server.

        Args:
            doing: The server's task, for error messages.
            call: The call.

        Raises:
            ConnectionError: The call failed or took too long, or the server has died or hangs.
        """
        job, look = in_daemon_thread(call), self.looking(doing)
        while not wait([job], SECONDS_BETWEEN_LOOKS).done:
            look()
        if (error := job.exception()) is not None:
            raise self.error(doing, error) from None
        return job.result()

    def looking(self, doing: str) -> Callable[[], None]:
        """Return a function that raises a `ConnectionError` if the server has died or hangs, or time is up."""
        start = heard = time.monotonic()
        refusals = 0

        def look() -> None:
            nonlocal heard, refusals
            status = self.health()
            now = time.monotonic()
            heard = heard if status is None else now
            refusals = refusals + 1 if status not in (None, 200) else 0
            reason = None
            if refusals >= REFUSALS:
                reason = "it refuses connections" if status == 0 else f"/health answers {status}"
            elif now - heard > self.seconds_unheard:
                reason = f"it has not answered for vllm_server_timeout={self.seconds_unheard:g} seconds"
            elif now - start > self.seconds:
                reason = f"it took longer than ddp_timeout={self.seconds:g} seconds; raise that if it is only slow"
            if reason is not None:
                raise self.error(doing, reason)

        return look

    def health(self) -> int | None:
        """Return the status of `/health`; 0: connection refused; None: no answer."""
        import requests

        try:
            return requests.get(self._health, timeout=min(5.0, max(self.seconds_unheard, 0.1))).status_code
        except requests.Timeout:
            return None
        except requests.RequestException:
            return 0

    def error(self, doing: str, reason: str | BaseException) -> ConnectionError:
        """Return the error of a request, without the user, password and query of the address."""
        if isinstance(reason, BaseException):
            text = " ".join(str(reason).split())  # a server's own page may have many lines
            reason = redact_urls(hide_secrets(text[:1000], secrets_of(self.address)))
        return ConnectionError(
            f"the vLLM server at {redact_url(self.address)} cannot be used: it was to {doing}, but {reason}. Look "
            "at its log, start it again, and continue with resume_from_checkpoint=True"
        )


class _WatchedClient:
    """Base before TRL's `VLLMClient` that gives each call a time limit and postpones errors during a run.

    The other ranks wait in TRL's collectives during a call, and an error would leave them there. `raise_failure`
    raises it when all ranks have left.

    Attributes:
        watch: Waits for the server.
        failure: The first error since the last call of `raise_failure`, or None.
    """

    watch: _Watch
    failure: ConnectionError | None = None
    session: Any
    base_url: str

    def raise_failure(self) -> None:
        """Raise the first error since the last call of this method, if there was one."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server is up; TRL's client calls this in its constructor.

        This also sets a time limit for requests, and disables sending a request again that the server has read: the
        request may have crashed the server, or its caller may have stopped waiting.

        Raises:
            ConnectionError: It is not up after `total_timeout` seconds.
        """
        adapter = self.session.get_adapter(self.base_url)
        adapter.max_retries = adapter.max_retries.new(read=0)
        send, limit = adapter.send, self.watch.seconds + 60  # `watch` fails earlier, with a reason
        adapter.send = lambda request, **how: send(request, **{**how, "timeout": limit})
        start = time.monotonic()
        while self.watch.health() != 200:
            if time.monotonic() - start >= total_timeout:
                raise self.watch.error("start", f"it is not up after vllm_server_timeout={total_timeout:g} seconds")
            time.sleep(min(retry_interval, total_timeout))

    def init_communicator(self, device: Any = 0) -> None:
        """Create the process group that sends weights."""
        parent: Any = super()
        self.watch.result("join the group for the policy's weights", lambda: parent.init_communicator(device))

    def server_info(self) -> dict[str, Any]:
        """Return the server's configuration of its model."""
        parent: Any = super()
        return self.watch.result("describe its model", lambda: parent.get_server_info()["model_config"])

    def generate(self, *given: Any, **how: Any) -> dict[str, Any]:
        """Generate, or return no rows if that fails."""
        parent: Any = super()
        try:
            return self.watch.result("generate", lambda: parent.generate(*given, **how))
        except ConnectionError as error:
            self.failure = self.failure or error
            return {"prompt_ids": [], "completion_ids": [], "logprobs": None}

    def reset_prefix_cache(self) -> None:
        """Clear the server's cache of keys and values of earlier weights."""
        parent: Any = super()
        if self.failure is None:
            try:
                self.watch.result("forget its cache", lambda: parent.reset_prefix_cache())
            except ConnectionError as error:
                self.failure = error

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send weights; after a failure read the rest, because all ranks read together.

        This thread reads and another thread sends: a broadcast to a dead server may never return.
        """
        parent: Any = super()
        doing, items, handed = "take the policy's weights", iter(named_params), _Handed()
        job = in_daemon_thread(lambda: parent.update_named_params(metadata, iter(handed)))
        look, item = self.watch.looking(doing), ...
        while item is not None and self._waits(handed.is_asked.acquire, job, look, doing):
            item = next(items, None)
            handed.give(item)
        for _ in items:
            pass
        self._waits(lambda timeout: bool(wait([job], timeout).done), job, look, doing)

    def _waits(self, step: Callable[..., bool], job: Future[Any], look: Callable[[], None], doing: str) -> bool:
        """Wait for a step of the job; return False once the job has ended or failed."""
        while self.failure is None and not job.done() and not step(timeout=SECONDS_BETWEEN_LOOKS):
            try:
                look()
            except ConnectionError as error:
                self.failure = error
        if self.failure is None and job.done() and (error := job.exception()) is not None:
            self.failure = self.watch.error(doing, error)
        return self.failure is None and not job.done()


class _Handed:
    """Items that one thread reads on request of another thread."""

    def __init__(self) -> None:
        self.is_asked, self._is_given = threading.Semaphore(0), threading.Semaphore(0)
        self._item: Any = None

    def give(self, item: Any) -> None:
        """Hand over the requested item; None ends the iteration."""
        if item is not None and item[1].is_cuda:
            torch.cuda.current_stream(item[1].device).synchronize()  # it is used in another stream
        self._item = item
        self._is_given.release()

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.is_asked.release()
            self._is_given.acquire()
            item, self._item = self._item, None
            if item is None:
                return
            if item[1].is_cuda:
                item[1].record_stream(torch.cuda.current_stream(item[1].device))
            yield item
            del item


# ---- The engine ----

logger = get_logger(__name__)

OPTIONS = (
    *("mode", "server_base_url", "server_host", "server_port", "server_timeout", "group_port"),
    *("tensor_parallel_size", "gpu_memory_utilization", "max_model_length", "enable_sleep_mode", "model_impl"),
)
"""Arguments of TRL's `VLLMGeneration` that have the option `vllm_` with their name."""

MAX_BIASED_IDS = 1024
"""Largest number of suppressed ids of a request: `MAX_NUM_LOGIT_BIAS_TOKENS` of vLLM's runner for GPUs."""


class VLLMEngine:
    """vLLM with a copy of the policy's weights, which are sent before the first response after each change.

    Args:
        vllm: TRL's `VLLMGeneration`.
        longest_sequence: Longest prompt plus response that this vLLM accepts, or None if unknown.
    """

    reads_sharded = True
    called = "generation_engine='vllm'"
    cut_rows_advice = (
        "raise vllm_max_model_length, or the server's --max-model-len, to the sum of both, or lower response_length"
    )

    def __init__(self, vllm: Any, longest_sequence: PositionLimit | None = None) -> None:
        self.vllm, self.longest_sequence = vllm, longest_sequence
        self._is_current = False
        self._asked: Future[tuple[dict[str, Any], float]] | None = None

    def sample(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Sampled:
        """Generate a response to each prompt; every rank makes the same calls.

        Args:
            policy: The policy that the engine was made for; its weights are read by TRL's adapter.
            prompts: `B` left-padded prompts; ids under the mask are ignored.
            config: The sampling distribution, the stop token (or several) and the length limit.

        Returns:
            The responses and their log-probabilities.

        Raises:
            ConnectionError: The server has died or hangs; on all ranks.
        """
        self.send_weights(policy)
        self._set_sampling(policy, config)
        with self._failing_together(), self._same_random_numbers():
            _, ids, logprobs, _ = self.vllm.generate(prompt_rows(prompts), images=None, num_generations=1)
        return _stacked(ids, logprobs, prompts, config)

    def send_weights(self, policy: nn.Module) -> None:
        """Send the policy's weights if they have changed, after the answer to `ask`; every rank calls this."""
        if self._is_current and not self._sleeps:
            return
        with self._failing_together(), preserve_base(policy):  # TRL's adapter merges, sends and unmerges
            self._wait()
            self.vllm.sync_weights()
        self._is_current = True

    def ask(
        self, policy: nn.Module, prompts: Prompts, config: GenerationConfig
    ) -> Callable[[], tuple[Sampled, float]]:
        """Start sampling on a server, with its current weights; every rank calls this.

        Args:
            policy: As for `sample`.
            prompts: `B` prompts.
            config: The sampling distribution.

        Returns:
            A function that every rank calls once. It waits, and returns the responses and the server's seconds; it
            raises the errors of `sample`.
        """
        self._set_sampling(policy, config)
        vllm, rows = self.vllm, gather_object(prompt_rows(prompts))
        how = {name: getattr(vllm, name) for name in ("repetition_penalty", "temperature", "top_p", "top_k", "min_p")}
        how |= {"max_tokens": vllm.max_completion_length, "logprobs": vllm.logprobs}
        how |= {"generation_kwargs": dict(vllm.generation_kwargs)}

        def call() -> tuple[dict[str, Any], float]:
            start = time.monotonic()
            return vllm.vllm_client.generate(rows, n=1, **how), time.monotonic() - start

        def answer() -> tuple[Sampled, float]:
            given: list[Any] = [None]
            with self._failing_together():
                self._wait()
                if self._asked is not None:
                    found, seconds = self._asked.result()
                    given, self._asked = [(found["completion_ids"], found["logprobs"], seconds)], None
            ids, logprobs, seconds = broadcast_object_list(given)[0]
            first = vllm.accelerator.process_index * len(prompts.input_ids)
            own = slice(first, first + len(prompts.input_ids))
            return _stacked(ids[own], logprobs and logprobs[own], prompts, config), seconds

        self._asked = in_daemon_thread(call) if vllm.accelerator.is_main_process else None
        return answer

    def _wait(self) -> None:
        """Wait until the server has answered the request of `ask`."""
        if self._asked is not None:
            wait([self._asked])

    def _set_sampling(self, policy: nn.Module, config: GenerationConfig) -> None:
        """Set the sampling distribution in TRL's adapter, which reads it at each call."""
        for name, value in _distribution(config).items():
            setattr(self.vllm, name, value)
        # Only these tokens end a row, not the EOS that vLLM would add.
        self.vllm.max_completion_length, _ = length_and_filling(config)
        self.vllm.generation_kwargs |= {"ignore_eos": True, "stop_token_ids": stop_tokens(config)}
        self._suppress([token for token in config.suppress_tokens or [] if token < text_config(policy).vocab_size])

    def _suppress(self, ids: list[int]) -> None:
        """Suppress these ids, and no others, in the next calls."""
        self.vllm.generation_kwargs.pop("logit_bias", None)
        if len(ids) > MAX_BIASED_IDS:
            raise ValueError(
                f"generation_engine='vllm' can keep {MAX_BIASED_IDS} ids from being sampled, but {len(ids)} of the "
                "policy's ids are unknown to another model; set generation_engine to 'continuous' or 'transformers'"
            )
        if ids:
            self.vllm.generation_kwargs["logit_bias"] = dict.fromkeys(ids, -100.0)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Raise an error of the server, which only the main process calls, on all ranks."""
        if self.vllm.mode != "server":
            yield
            return
        accelerator = self.vllm.accelerator
        with raise_on_all_ranks(accelerator):
            yield
            if accelerator.is_main_process:
                self.vllm.vllm_client.raise_failure()

    @property
    def _sleeps(self) -> bool:
        """Whether vLLM drops its weights after each call."""
        return self.vllm.mode == "colocate" and self.vllm.enable_sleep_mode

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Use the same random numbers on all ranks of a vLLM instance inside a context.

        Each rank samples all rows of the group with its own generators, whose states are restored afterwards.
        """
        if self.vllm.mode != "colocate" or self.vllm.tensor_parallel_size == 1:
            yield
            return
        seeds: list[Any] = [None] * self.vllm.tensor_parallel_size
        torch.distributed.all_gather_object(seeds, int(torch.randint(2**31, ())), group=self.vllm.tp_group)
        with isolated_rng(seeds[0], device_specific=False):
            yield

    def policy_changed(self) -> None:
        """Send the weights before the next response."""
        self._is_current = False


def _stacked(ids: Any, logprobs: Any, prompts: Prompts, config: GenerationConfig) -> Sampled:
    """Return vLLM's rows as tensors."""
    values = [[_number(token) for token in row] for row in logprobs or [()] * len(ids)]
    return stack_rows(ids, values, length_and_filling(config)[1], prompts.input_ids.device)


def _number(values: Any) -> float:
    """Return the log-probability of the sampled token; NaN if it is missing."""
    return float("nan") if not values or values[0] is None else values[0]


def _distribution(config: GenerationConfig) -> dict[str, float]:
    """Return the sampling arguments of TRL's adapter; temperature 0 is greedy."""
    if not config.do_sample:
        return {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": 0.0 if config.min_p is None else config.min_p,
    }


def start_vllm(
    args: PPOConfig,
    policy: nn.Module,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    rows: int,
) -> VLLMEngine:
    """Start a colocated vLLM, or connect to a server.

    Args:
        args: Gives the `vllm_*` arguments, and `response_length`.
        policy: The policy that is trained.
        accelerator: Gives the processes.
        tokenizer: The policy's tokenizer.
        rows: Number of rows to generate at once.

    Raises:
        ConnectionError: There is no such server, or it cannot be used; on all ranks.
        ValueError: The policy cannot be colocated, or the server's log-probabilities cannot be corrected for.
    """
    from trl.generation.vllm_generation import VLLMGeneration

    is_server = args.vllm_mode == "server"
    if not is_server and not getattr(policy, "name_or_path", ""):
        raise ValueError(
            "vllm_mode='colocate' loads the model from a directory or the hub, but the policy was made in memory; "
            "save_pretrained it and load it from there"
        )
    make: Any = served_generation(args) if is_server else VLLMGeneration
    vllm: Any = make(
        model=policy,
        accelerator=accelerator,
        processing_class=tokenizer,
        max_num_seqs=rows * args.vllm_tensor_parallel_size,
        max_completion_length=args.response_length,
        logprobs=0,  # of the sampled token alone
        **{name: getattr(args, f"vllm_{name}") for name in OPTIONS},
    )
    if is_server:
        dtype, most = _model_of_server(args, vllm)
        limit = PositionLimit(
            most,
            f"the vLLM server at {redact_url(_address(args))} runs with --max-model-len {most}",
            "restart the server with a larger --max-model-len",
        )
    else:
        model = vllm.llm.llm_engine.vllm_config.model_config
        dtype, limit = model.dtype, longest_colocated(args, model.max_model_len)
    _say_precision(args, policy, accelerator, str(dtype).removeprefix("torch."))
    return VLLMEngine(vllm, limit)


def longest_colocated(args: PPOConfig, served: int | None = None) -> PositionLimit | None:
    """Return the longest prompt plus response that a colocated vLLM accepts, or None if unknown.

    Args:
        args: Gives `vllm_mode` and `vllm_max_model_length`.
        served: Longest sequence of the started vLLM's model, or None.
    """
    if args.vllm_mode != "colocate":
        return None
    if args.vllm_max_model_length is not None:
        reason = f"vllm_max_model_length={args.vllm_max_model_length}"
        return PositionLimit(args.vllm_max_model_length, reason, "raise vllm_max_model_length")
    if served is None:
        return None
    return PositionLimit(served, f"vLLM has room for {served}", "set vllm_max_model_length if the model has more")


def _address(args: PPOConfig) -> str:
    return args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"


def _model_of_server(args: PPOConfig, vllm: Any) -> tuple[str, int]:
    """Return the type and longest sequence of a server's model, on all ranks.

    Raises:
        ConnectionError: It does not answer.
        ValueError: Its log-probabilities cannot be corrected for.
    """
    accelerator = vllm.accelerator
    model_of_server: list[Any] = [None]
    with raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            model = vllm.vllm_client.server_info()
            mode = model["logprobs_mode"]
            if args.importance_sampling_correction and mode != "processed_logprobs":
                raise ValueError(
                    f"importance_sampling_correction=True, but the vLLM server runs with --logprobs-mode {mode}, "
                    "before temperature; restart it with --logprobs-mode processed_logprobs, or set "
                    "importance_sampling_correction=False"
                )
            model_of_server = [(model["dtype"], int(model["max_model_len"]))]
    return broadcast_object_list(model_of_server)[0]


def _say_precision(args: PPOConfig, policy: nn.Module, accelerator: Accelerator, sampled: str) -> None:
    """Warn if vLLM computes in another precision than the policy."""
    corrected = (
        f"importance_sampling_correction={args.importance_sampling_correction}"
        f"{' corrects' if args.importance_sampling_correction else ' does not correct'} for the difference"
    )
    if args.lm_head_float32:
        logger.warning(
            "lm_head_float32=True is in the log-probabilities and in learning, but not in vLLM, which samples with a "
            f"head in {sampled}; {corrected}."
        )
    if (computed := str(multiplied_dtype(accelerator, policy)).removeprefix("torch.")) != sampled:
        logger.warning(f"vLLM samples in {sampled}, but the policy is trained in {computed}; {corrected}.")
