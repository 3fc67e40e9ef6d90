"""A vLLM server behind TRL's client, with time limits: a server that dies or hangs is one clear error on all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urldefrag

import torch

from rlhf_ppo.config.redaction import secrets_of, shown_address, shown_addresses, without
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.processes.signals import end_despite_threads

if TYPE_CHECKING:
    from rlhf_ppo.config import PPOConfig

SECONDS_BETWEEN_LOOKS = 1.0
"""How often a server that works on a request is asked whether it is up."""

REFUSALS = 3
"""Looks in a row at which a server that refuses connections, or reports that its engine is dead, counts as dead."""


def served_generation(args: PPOConfig) -> Any:
    """Return TRL's `VLLMGeneration` with a client that has time limits, to be made with the same arguments.

    Args:
        args: Gives the server's address, `vllm_server_timeout` and `ddp_timeout`.
    """
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    address = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"

    class Client(_WatchedClient, VLLMClient):
        watch = _Watch(address, args.vllm_server_timeout, args.ddp_timeout)

    class Generation(VLLMGeneration):
        vllm_client: Client

        def _init_vllm(self) -> None:
            with failing_together(self.accelerator):
                if self.accelerator.is_main_process:
                    limit = self.server_timeout
                    self.vllm_client = Client(address, group_port=self.group_port, connection_timeout=limit)
                    self.vllm_client.init_communicator(device=self.accelerator.device)

    return Generation


class _Job:
    """A call in a thread of its own, which can be left when it never returns.

    Attributes:
        is_done: Set when the call has returned or failed.
        result: What it returned.
        error: What it raised, or None.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self.is_done, self.result, self.error = threading.Event(), None, None
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        threading.Thread(target=self._run, args=(call,), name="rlhf_ppo-vllm", daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # each thread has its own
            with torch.no_grad():
                self.result = call()
        except Exception as error:
            self.error: Exception | None = error
        self.is_done.set()


class _Watch:
    """Waits for a server's answers, and looks meanwhile whether it is up.

    Args:
        address: The server's URL.
        seconds_unheard: Seconds that the server may leave `/health` unanswered: `vllm_server_timeout`.
        seconds: Seconds that one request may take: `ddp_timeout`, after which other ranks give up too.
    """

    def __init__(self, address: str, seconds_unheard: float, seconds: float) -> None:
        self.address, self.seconds_unheard, self.seconds = address, seconds_unheard, seconds
        self._health = f"{urldefrag(address)[0].partition('?')[0]}/health"

    def result(self, doing: str, call: Callable[[], Any]) -> Any:
        """Return what a call returns that talks to the server.

        Args:
            doing: What the server is to do, for error messages.
            call: The call.

        Raises:
            ConnectionError: The call failed, the server has died or hangs, or the call took too long.
        """
        job, look = _Job(call), self.looking(doing)
        while not job.is_done.wait(SECONDS_BETWEEN_LOOKS):
            look()
        if job.error is not None:
            raise self.error(doing, job.error) from None
        return job.result

    def looking(self, doing: str) -> Callable[[], None]:
        """Return a function that raises a `ConnectionError` if the server has died or hangs, or if time is up."""
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
                end_despite_threads(1)
                raise self.error(doing, reason)

        return look

    def health(self) -> int | None:
        """Return the status with which the server says how it is; 0: it refuses connections; None: no answer."""
        import requests

        try:
            return requests.get(self._health, timeout=min(5.0, max(self.seconds_unheard, 0.1))).status_code
        except requests.Timeout:
            return None
        except requests.RequestException:
            return 0

    def error(self, doing: str, reason: str | Exception) -> ConnectionError:
        """Return the error of a request; the user, password and query of the address are left out of it."""
        if isinstance(reason, Exception):
            text = " ".join(str(reason).split())  # a server's own page may have many lines
            reason = shown_addresses(without(text[:1000], secrets_of(self.address)))
        return ConnectionError(
            f"the vLLM server at {shown_address(self.address)} cannot be used: it was to {doing}, but {reason}. Look "
            "at its log, start it again, and continue with resume_from_checkpoint=True"
        )


class _WatchedClient:
    """Put before TRL's `VLLMClient`: each call has a time limit, and none that a run makes raises by itself.

    The other ranks are in TRL's collectives meanwhile, which an error would leave them in; `raise_failure` is called
    when all are through.

    Attributes:
        watch: Looks after the server.
        failure: The first error since the last call of `raise_failure`, or None.
    """

    watch: _Watch
    failure: ConnectionError | None = None
    session: Any
    base_url: str

    def raise_failure(self) -> None:
        """Raise the error of a call since this was last called, if there was one."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server is up; TRL's client calls this when it is made.

        Requests get a time limit here, and are not sent again once the server has read them: it may have died of them,
        and nobody may wait for them any more.

        Raises:
            ConnectionError: It is not up after `total_timeout` seconds.
        """
        adapter = self.session.get_adapter(self.base_url)
        adapter.max_retries = adapter.max_retries.new(read=0)
        send, limit = adapter.send, self.watch.seconds + 60  # until then `watch` tells what is wrong
        adapter.send = lambda request, **how: send(request, **{**how, "timeout": limit})
        start = time.monotonic()
        while self.watch.health() != 200:
            if time.monotonic() - start >= total_timeout:
                raise self.watch.error("start", f"it is not up after vllm_server_timeout={total_timeout:g} seconds")
            time.sleep(min(retry_interval, total_timeout))

    def init_communicator(self, device: Any = 0) -> None:
        """Make the group through which weights are sent."""
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
        """Have the server forget the keys and values of earlier weights."""
        parent: Any = super()
        if self.failure is None:
            try:
                self.watch.result("forget its cache", lambda: parent.reset_prefix_cache())
            except ConnectionError as error:
                self.failure = error

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send weights; they are read to the end if that fails, as other ranks take part in reading them.

        A thread sends, this one reads: a broadcast to a server that has died may never return.
        """
        parent: Any = super()
        doing, items, handed = "take the policy's weights", iter(named_params), _Handed()
        job, look = _Job(lambda: parent.update_named_params(metadata, iter(handed))), self.watch.looking(doing)
        item: Any = ...
        while item is not None and self._waits(handed.is_asked.acquire, job, look, doing):
            item = next(items, None)
            handed.give(item)
        for _ in items:
            pass
        self._waits(job.is_done.wait, job, look, doing)

    def _waits(self, wait: Callable[..., bool], job: _Job, look: Callable[[], None], doing: str) -> bool:
        """Wait for something of the job; return False once the job has ended or failed."""
        while self.failure is None and not job.is_done.is_set() and not wait(timeout=SECONDS_BETWEEN_LOOKS):
            try:
                look()
            except ConnectionError as error:
                self.failure = error
        if job.error is not None and self.failure is None:
            self.failure = self.watch.error(doing, job.error)
        return self.failure is None and not job.is_done.is_set()


class _Handed:
    """Items that one thread reads one by one, and another thread uses: the next is read when it is asked for."""

    def __init__(self) -> None:
        self.is_asked, self._is_given = threading.Semaphore(0), threading.Semaphore(0)
        self._item: Any = None

    def give(self, item: Any) -> None:
        """Hand over what was asked for; None ends the items."""
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
