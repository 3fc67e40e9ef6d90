"""Generation one update ahead: a worker process or a server samples the next rollout while the models learn.

The worker has a copy of the policy in memory that both processes share. Before an update the trainer copies its
weights there; the rollout after that update is sampled with them. See docs/adr/0024-one-update-ahead.md.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import set_seed
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Responses, forward_in_batches
from rlhf_ppo.generation.continuous import ContinuousEngine
from rlhf_ppo.generation.protocol import GenerationEngine, checked, sample_with
from rlhf_ppo.generation.sampling import NonFiniteLogitsError, StopStrings, join_responses
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from rlhf_ppo.generation.vllm import VLLMEngine
from rlhf_ppo.models.packing import packs_rows
from rlhf_ppo.models.policy_and_value import response_logprobs
from rlhf_ppo.models.unwrapping import backbone, gathered
from rlhf_ppo.processes.signals import STOPPING, raise_if_stopped

SAMPLING_WEIGHTS_NAME = "sampling_policy.safetensors"
"""File of a checkpoint with the weights that sample the next rollout: the trained weights before the last update."""

_SECONDS_BETWEEN_LOOKS = 0.1
_ALIGNMENT = 64
_OF_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("ACCELERATE_", "FSDP_", "PMI_", "OMPI_", "MV2_"),
)
"""Prefixes of environment variables that would make the worker a rank of the launcher."""
_NUMERICS = (
    *("cudnn.deterministic", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
    *("cuda.matmul.fp32_precision", "mkldnn.matmul.fp32_precision"),
    *("cuda.matmul.allow_bf16_reduced_precision_reduction", "cuda.matmul.allow_fp16_reduced_precision_reduction"),
)
"""Settings of `torch.backends` that change the last digits; `full_determinism` and `tf32` set some of them."""
_WRAPPER = "_checkpoint_wrapped_module."  # in names of parameters, where FSDP recomputes activations


class Place(NamedTuple):
    """Location of a tensor in the shared memory.

    Attributes:
        start: Its first byte.
        shape: Its shape.
        dtype: Its type.
        is_parameter: Whether it is a parameter.
    """

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def within(self, memory: Tensor) -> Tensor:
        """Return the tensor, a view of the memory."""
        return memory[self.start : self.end].view(self.dtype).reshape(self.shape)


def _keep_output(*given: Any) -> None:
    """Replacement for a forward hook that a worker does not need."""


def _unneeded_hook() -> Callable[..., None]:
    return _keep_output


class _Pickler(pickle.Pickler):
    """Pickle a model with a `Place` for each tensor, and without the hooks of gradient checkpointing."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.found: dict[int, tuple[Tensor, Place]] = {}
        self.size = 0

    def persistent_id(self, obj: Any) -> Place | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self.found:
            shape = tuple(getattr(obj, "ds_shape", obj.shape))
            place = Place(self.size, shape, obj.dtype, isinstance(obj, nn.Parameter))
            self.found[id(obj)] = obj, place
            self.size += -(-(place.end - place.start) // _ALIGNMENT) * _ALIGNMENT
        return self.found[id(obj)][1]

    def reducer_override(self, obj: Any) -> Any:
        # transformers and PEFT register local functions of these names; without gradients they do nothing.
        is_hook = getattr(obj, "__name__", "") in ("make_inputs_require_grads", "make_inputs_require_grad")
        return (_unneeded_hook, ()) if is_hook else NotImplemented


@dataclass(frozen=True)
class HowToSample:
    """Settings of a worker that stay the same for all rollouts.

    Attributes:
        engine: "transformers" or "continuous".
        device: Device on which it generates.
        dtype: The type of mixed precision, or None.
        temperature: Sampling temperature, for log-probabilities.
        rows_per_pass: Rows of a forward pass that computes log-probabilities.
        stop: The stop token, or None.
        pad: Id of the padding.
        stop_strings: Texts that also end a response, or None.
        num_threads: Threads of PyTorch.
    """

    engine: str
    device: torch.device
    dtype: torch.dtype | None
    temperature: float
    rows_per_pass: int
    stop: int | None
    pad: int
    stop_strings: StopStrings | None
    num_threads: int


@dataclass(frozen=True)
class Job:
    """A rollout to sample.

    Attributes:
        prompts: `B` prompts on the host, without columns.
        config: The sampling distribution and the length limit.
        rows: Rows to generate at once.
        seed: Seeds all random numbers.
        numerics: Settings of PyTorch's arithmetic; see `numerics`.
    """

    prompts: Prompts
    config: GenerationConfig
    rows: int
    seed: int
    numerics: dict[str, Any]

    @classmethod
    def of(cls, prompts: Prompts, config: GenerationConfig, rows: int, seed: int) -> Job:
        """Copy the prompts to the host; the worker computes as this process does now."""
        on_host = Prompts(prompts.input_ids.cpu(), prompts.attention_mask.cpu(), {})
        return cls(on_host, config, rows, seed, numerics())

    def prompts_on(self, device: torch.device) -> Prompts:
        """Return the prompts on a device."""
        return Prompts(self.prompts.input_ids.to(device), self.prompts.attention_mask.to(device), {})

    def is_same(self, other: Job) -> bool:
        """Return whether another job asks for the same rollout."""
        one, two = self.prompts, other.prompts
        same = self.seed == other.seed and torch.equal(one.attention_mask, two.attention_mask)
        return same and torch.equal(one.input_ids, two.input_ids)


class SamplesAhead:
    """Sample rollouts with the weights of `hand_over` while the models learn; every rank makes the same calls.

    Attributes:
        version: Number of updates of these weights; None before the first `hand_over`.
        seconds: Seconds of sampling the latest rollout.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.seconds = 0.0
        self.running: Job | None = None

    def begin(self) -> None:
        """Prepare for a run."""

    def close(self) -> None:
        """Drop the weights and the running rollout."""
        self.running = self.version = None

    def save(self, directory: str) -> None:
        """Write the state of the next rollout into a checkpoint."""

    def load(self, checkpoint: str, policy: nn.Module) -> None:
        """Read the file of `save`, if the checkpoint has it."""

    def hand_over(self, policy: nn.Module, version: int) -> None:
        """Sample the next rollouts with the policy's weights.

        Args:
            policy: The policy, which an engine may have sharded.
            version: Number of updates of its weights.
        """
        raise NotImplementedError

    def start(self, job: Job) -> None:
        """Start sampling a rollout.

        Raises:
            RuntimeError: The worker process has died.
        """
        raise NotImplementedError

    def lag(self, done: int) -> int:
        """Return the number of updates between the weights and a policy with `done` updates."""
        return 0 if self.version is None else done - self.version

    def take(self, job: Job, device: torch.device) -> Responses:
        """Wait for the rollout of `start`; another rollout is sampled now, with the same weights.

        Args:
            job: The rollout.
            device: Device of the result.

        Returns:
            The responses with the log-probabilities of their tokens.

        Raises:
            ConnectionError: The server has died or hangs.
            NonFiniteLogitsError: The policy's logits are NaN or infinite.
            RuntimeError: The worker process has failed, died, or not answered in time.
            Stopped: A signal has arrived.
        """
        if self.running is None or not self.running.is_same(job):
            self.start(job)
        return self._take(job, device)

    def _take(self, job: Job, device: torch.device) -> Responses:
        raise NotImplementedError


class SamplesInWorker(SamplesAhead):
    """Sample rollouts in a worker process.

    Args:
        policy: The policy, before an engine wraps it.
        how: Settings of the worker.
        patience: Seconds to wait for a rollout: `ddp_timeout`, after which other ranks give up too.

    Raises:
        ValueError: The policy cannot be sent to another process.
    """

    def __init__(self, policy: nn.Module, how: HowToSample, patience: float) -> None:
        super().__init__()
        self.patience = patience
        written = io.BytesIO()
        pickler = _Pickler(written)
        try:
            pickler.dump((policy, how))
        except Exception as error:
            raise ValueError(
                "generation_overlap=1 sends a copy of the policy to a worker process, but the model cannot be pickled "
                f"({error}); define its classes, hooks and functions at the top level of a module, or set "
                "generation_overlap=0"
            ) from error
        self._pickled, self.how = written.getvalue(), how
        places = {name: pickler.found[id(value)][1] for name, value in policy.named_parameters()}
        self._places = places
        self._trained = [name for name, value in policy.named_parameters() if value.requires_grad]
        self._others = [found for found in pickler.found.values() if not found[1].is_parameter]
        self._size = pickler.size
        self._memory: Tensor | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    # ---- The worker's life ----

    def begin(self) -> None:
        """Start the worker; it imports its libraries while the caller continues."""
        self.close()
        number, length = _shared_file(self._size + len(self._pickled))
        ours, theirs = socket.socketpair()
        with theirs, os.fdopen(number, "rb"):
            self._memory = _mapped(number, length)
            self._memory[self._size :] = torch.frombuffer(bytearray(self._pickled), dtype=torch.uint8)
            numbers = (theirs.fileno(), number)
            command = f"from rlhf_ppo.generation.overlap import run_worker; run_worker{(*numbers, self._size, length)}"
            own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
            own["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
            self._process = subprocess.Popen(
                [sys.executable, "-c", command], pass_fds=numbers, stdin=subprocess.DEVNULL, env=own
            )
        self._connection = Connection(ours.detach())
        for value, place in self._others:
            place.within(self._memory).copy_(value)

    def close(self) -> None:
        """End the worker, and drop its weights."""
        super().close()
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._memory = self._process = self._connection = None

    # ---- Weights ----

    @torch.no_grad()
    def hand_over(self, policy: nn.Module, version: int) -> None:
        """Copy the policy's weights into the shared memory, once the worker is idle."""
        self._finish()
        for name, value in whole_parameters(policy, self._places if self.version is None else self._trained):
            self._view(name).copy_(value)
        self.version = version

    def save(self, directory: str) -> None:
        """Write the trained weights that sample the next rollout into a checkpoint."""
        if self.version is not None:
            weights = {name: self._view(name).clone() for name in self._trained}
            save_file(weights, Path(directory, SAMPLING_WEIGHTS_NAME), metadata={"version": str(self.version)})

    def load(self, checkpoint: str, policy: nn.Module) -> None:
        """Load a checkpoint's weights for the next rollout, if it has them; frozen weights are the policy's.

        Raises:
            ValueError: The file belongs to another policy, or cannot be read.
        """
        path = Path(checkpoint, SAMPLING_WEIGHTS_NAME)
        if not path.exists():
            return
        self.hand_over(policy, 0)
        try:
            with safe_open(path, "pt") as file:
                for name in self._trained:
                    self._view(name).copy_(file.get_tensor(name))
                self.version = int(file.metadata()["version"])
        except (SafetensorError, RuntimeError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the {SAMPLING_WEIGHTS_NAME} in {checkpoint} has not the weights of this policy: {error!s:.200}"
            ) from error

    def _view(self, name: str) -> Tensor:
        assert self._memory is not None
        return self._places[name].within(self._memory)

    # ---- Rollouts ----

    def start(self, job: Job) -> None:
        """Send a rollout to the worker."""
        self._finish()
        assert self._connection is not None
        try:
            self._connection.send_bytes(pickle.dumps(job))
        except OSError:
            raise self._died() from None
        self.running = job

    def _take(self, job: Job, device: torch.device) -> Responses:
        reply = self._reply()
        if isinstance(reply, Exception):
            raise reply
        *tensors, self.seconds = reply
        *batch, logprobs = (values.to(device) for values in tensors)
        return Responses(*batch, sampling_logprobs=logprobs)

    def _finish(self) -> None:
        """Wait until the worker is idle."""
        if self.running is not None:
            self._reply()

    def _reply(self) -> Any:
        assert self._connection is not None
        deadline = time.monotonic() + self.patience
        while not self._connection.poll(_SECONDS_BETWEEN_LOOKS):
            raise_if_stopped()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "generation_overlap=1: the worker process has not sampled the next rollout within ddp_timeout="
                    f"{self.patience:g} seconds; raise that if it is only slow, or set generation_overlap=0"
                )
        try:
            reply = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._died() from None
        self.running = None
        return reply

    def _died(self) -> RuntimeError:
        assert self._process is not None
        code = self._process.wait()
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return RuntimeError(
            f"generation_overlap=1: the worker process {self._process.pid}, which samples the next rollout, has ended "
            f"({reason}); if it was killed, memory may be short. Continue with resume_from_checkpoint=True, or set "
            "generation_overlap=0"
        )


class SamplesOnServer(SamplesAhead):
    """Sample rollouts on a vLLM server.

    Checkpoints hold no state of it, because a server's samples cannot be repeated: a resumed run samples its first
    rollout with the weights of the checkpoint.

    Args:
        engine: Calls the server.
        policy: The policy.
        stop: The stop token, or None.
        pad: Id of the padding.
        stop_strings: Texts that also end a response, or None.
    """

    def __init__(
        self, engine: VLLMEngine, policy: nn.Module, stop: int | None, pad: int, stop_strings: StopStrings | None
    ) -> None:
        super().__init__()
        self.engine, self.policy = engine, policy
        self.stop, self.pad, self.stop_strings = stop, pad, stop_strings

    def hand_over(self, policy: nn.Module, version: int) -> None:
        """Send the policy's weights to the server, unless an evaluation has sent them."""
        self.engine.send_weights(policy)
        self.version = version

    def start(self, job: Job) -> None:
        """Send a rollout to the server."""
        self.running, self._answer = job, self.engine.ask(self.policy, job.prompts, job.config)

    def _take(self, job: Job, device: torch.device) -> Responses:
        self.running = None
        sampled, self.seconds = self._answer()
        ids, logprobs, _ = checked(self.engine, sampled, job.prompts, job.config, self.stop_strings)
        ids, logprobs = ids.to(device), None if logprobs is None else logprobs.to(device)
        return join_responses(job.prompts_on(device), ids, self.stop, self.pad, self.stop_strings, logprobs)


def whole_parameters(policy: nn.Module, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and unsharded values of parameters under ZeRO-3 and FSDP2; every rank reads all of them.

    Args:
        policy: The policy.
        names: The parameters to yield. A value is valid until the next one is requested.
    """
    for name, parameter in policy.named_parameters():
        if (name := name.replace(_WRAPPER, "")) in names:
            with gathered([parameter]):
                yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def numerics() -> dict[str, Any]:
    """Return this process's settings that change the last digits: determinism and precision of products."""
    values = {name: attrgetter(name)(torch.backends) for name in _NUMERICS}
    return {"deterministic": torch.get_deterministic_debug_mode(), **values}


def set_numerics(values: dict[str, Any]) -> None:
    """Compute like the process in which `numerics` returned these values."""
    torch.set_deterministic_debug_mode(values["deterministic"])
    for name in _NUMERICS:
        owner, _, attribute = name.rpartition(".")
        setattr(attrgetter(owner)(torch.backends), attribute, values[name])


# ---- Shared memory ----


def _shared_file(length: int) -> tuple[int, int]:
    """Return the descriptor of an unnamed file in memory, and its length, which is above 0."""
    length = max(length, 1)
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("rlhf_ppo")
    else:
        with tempfile.TemporaryFile() as file:
            number = os.dup(file.fileno())
    os.ftruncate(number, length)
    return number, length


def _mapped(number: int, length: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(number, length), dtype=torch.uint8)


# ---- The worker process ----


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, memory: Tensor) -> None:
        super().__init__(file)
        self.memory, self.found = memory, dict[Place, Tensor]()

    def persistent_load(self, pid: Place) -> Tensor:
        if pid not in self.found:
            view = pid.within(self.memory)
            self.found[pid] = nn.Parameter(view, requires_grad=False) if pid.is_parameter else view
        return self.found[pid]


def run_worker(socket_number: int, memory_number: int, size: int, length: int) -> None:
    """Sample rollouts until the connection ends, at the latest with the trainer's process.

    Args:
        socket_number: Descriptor of the connection.
        memory_number: Descriptor of the shared memory.
        size: Bytes of the tensors; the pickled policy follows them.
        length: Bytes of the memory.
    """
    for number in STOPPING:  # a terminal sends them to this process too
        signal.signal(number, signal.SIG_IGN)
    connection, jobs = Connection(socket_number), queue.SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(connection, jobs), daemon=True).start()
    memory, sample = _mapped(memory_number, length), None
    while True:
        job: Job = pickle.loads(jobs.get())
        try:
            sample = sample or _sampler(memory, size)
            reply: Any = sample(job)
        except Exception as error:
            traceback.print_exc()
            reply = RuntimeError(f"generation_overlap=1: the worker failed: {type(error).__name__}: {error}")
            if isinstance(error, NonFiniteLogitsError):
                reply = NonFiniteLogitsError(str(error))
        connection.send_bytes(pickle.dumps(reply))


def _read(connection: Connection, jobs: queue.SimpleQueue[bytes]) -> None:
    """Queue messages; end the process when the other side has ended, even during sampling."""
    try:
        while True:
            jobs.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _sampler(memory: Tensor, size: int) -> Callable[[Job], Any]:
    """Build the policy over the shared memory; return a function that samples a rollout."""
    policy, how = _Unpickler(io.BytesIO(memory[size:].numpy().tobytes()), memory).load()
    torch.set_num_threads(how.num_threads)
    shared: Iterable[Tensor] = [value.data for value in policy.parameters()]
    policy.to(how.device).eval()

    @torch.no_grad()
    def sample(job: Job) -> Any:
        start = time.monotonic()
        set_numerics(job.numerics)
        if how.device.type != "cpu":
            for value, current in zip(policy.parameters(), shared, strict=True):
                value.copy_(current)
        with torch.autocast(how.device.type, how.dtype, enabled=how.dtype is not None):
            responses = _respond(policy, how, job)
        tensors = (*responses.batch, responses.sampling_logprobs)
        return (*(value.cpu() for value in tensors if value is not None), time.monotonic() - start)

    return sample


def _respond(policy: nn.Module, how: HowToSample, job: Job) -> Responses:
    """Sample responses, with the engine's log-probabilities or those of a forward pass."""
    set_seed(job.seed)
    prompts = job.prompts_on(how.device)
    if how.engine == "transformers":
        engine: GenerationEngine = TransformersEngine(lambda: job.rows, how.stop_strings)
    else:
        engine = ContinuousEngine(lambda: job.rows, how.dtype)
    ids, logprobs, _ = sample_with(engine, policy, prompts, job.config, how.stop_strings)
    responses = join_responses(prompts, ids, how.stop, how.pad, how.stop_strings, logprobs)
    if logprobs is not None:
        return responses

    def forward(part: Responses) -> tuple[Tensor]:
        found = response_logprobs(policy, *part.batch, how.temperature, with_entropy=False, places=part.places)
        return (found.logprobs,)

    (logprobs,) = forward_in_batches(responses, forward, how.rows_per_pass, packs_rows(backbone(policy)))
    return replace(responses, sampling_logprobs=logprobs)
