"""Seats: where an environment, or the standalone tools, run.

A `ThreadSeat` calls them in threads of this process. A `ProcessSeat` has a process of its own, which a fork server
makes: the server imports the modules of factories and tools once, and each process begins with them. A process is
killed if a call takes too long; the pool then makes another one.

The processes get pickles and answer in JSON, so that code that the policy writes cannot make this process unpickle
anything. They share files and network with this process: see docs/adr/0023-tool-isolation.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import operator
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhf_ppo.environments.tools import Host, Reply, named_text_of

LARGEST_REPLY = 2**30
"""Bytes of a reply; a process that announces more is killed."""

_PR_SET_PDEATHSIG = 1
_MEGABYTE = 2**20


class TimeUpError(Exception):
    """A call did not return within its time limit; its seat cannot be used again."""


class ProcessDiedError(Exception):
    """The process of a seat ended during a call."""


class GivenUpError(Exception):
    """A signal ended the wait for a call; its seat cannot be used again."""


class ThreadSeat:
    """Runs a host's calls in threads of this process.

    Args:
        factory: Makes the environment; None for standalone tools.
        tools: The standalone tools.
        longest: Characters that an answer keeps; None keeps all.

    Attributes:
        lost: Whether a call was left running, so that the seat cannot be used again.
    """

    def __init__(
        self, factory: Callable[[], Any] | None, tools: Sequence[Callable[..., Any]], longest: int | None
    ) -> None:
        self.host = Host(factory, tools, longest, self._run)
        self.lost = False
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._outcome: Future[Reply] | None = None
        self._coroutine: Future[Any] | None = None

    @property
    def environment(self) -> Any:
        """The environment for reward functions: the object itself."""
        return self.host.environment

    def class_of(self, description: Reply) -> type[Any]:
        """Return the environment's class."""
        return type(self.host.environment)

    def ask(self, seconds: float | None, request: str, *arguments: Any) -> Reply:
        """Carry out a request of `Host` and wait for its reply.

        Args:
            seconds: Time limit; None waits for any time.
            request: Name of the request.
            *arguments: Its arguments.

        Raises:
            TimeUpError: The time was up.
            GivenUpError: `give_up` was called meanwhile.
        """
        from rlhf_ppo.processes.waiting import in_daemon_thread

        self._outcome = outcome = Future[Reply]()
        in_daemon_thread(self._perform, outcome, request, arguments)
        if not wait([outcome], seconds).done:
            self.give_up()
            raise TimeUpError
        return outcome.result()

    def _perform(self, outcome: Future[Reply], request: str, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            self._thread = threading.get_ident()
        process = os.getpid()
        try:
            with _keeping_outputs():
                reply = self.host.perform(request, *arguments)
        finally:
            if os.getpid() != process:  # the tool forked: this is the copy
                os._exit(0)
            with self._lock:
                self._thread = None
        with contextlib.suppress(InvalidStateError):  # given up
            outcome.set_result(reply)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        from rlhf_ppo.processes.waiting import run_on_event_loop

        self._coroutine = run_on_event_loop(coroutine)
        try:
            return self._coroutine.result()
        finally:
            self._coroutine = None

    def give_up(self) -> None:
        """End the running call as far as a thread can be ended, and wake the thread that waits for it."""
        from rlhf_ppo.processes.waiting import abandon_blocked_event_loop, end_thread

        self.lost = True
        if (coroutine := self._coroutine) is not None:
            coroutine.cancel()
            abandon_blocked_event_loop()
        with self._lock:
            thread, self._thread = self._thread, None  # once: another thread may get the number of one that has ended
            if thread is not None:
                end_thread(thread)
        if self._outcome is not None:
            with contextlib.suppress(InvalidStateError):
                self._outcome.set_exception(GivenUpError())

    close = give_up


@contextlib.contextmanager
def _keeping_outputs() -> Iterator[None]:
    """Open stdout and stderr again if the block closes them."""
    copies: dict[int, int] = {}
    for output in (1, 2):
        with contextlib.suppress(OSError):
            copies[output] = os.dup(output)
    try:
        yield
    finally:
        for output, copied in copies.items():
            try:
                os.fstat(output)
            except OSError:
                os.dup2(copied, output)
            os.close(copied)


class ProcessSeat:
    """Runs a host's calls in a process of its own, which starts with the first request.

    Args:
        server: Makes the process.
        kind: Index of the environment's factory; None for standalone tools.

    Attributes:
        lost: Whether the process was killed or died, so that the seat cannot be used again.
    """

    def __init__(self, server: ForkServer, kind: int | None) -> None:
        self.server, self.kind = server, kind
        self.lost = False
        self.environment = StandIn(self)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._pid: int | None = None

    def ask(self, seconds: float | None, request: str, *arguments: Any) -> Reply:
        """Carry out a request of `Host` in the process and wait for its reply.

        Args:
            seconds: Time limit; None waits for any time.
            request: Name of the request.
            *arguments: Its arguments.

        Raises:
            TimeUpError: The time was up; the process was killed.
            ProcessDiedError: The process ended.
        """
        message = pickle.dumps((request, arguments))
        with self._lock:
            if self.lost:
                raise ProcessDiedError
            if self._connection is None:
                self._pid, self._connection = self.server.fork(self.kind)
            connection = self._connection
            if self.lost:  # closed meanwhile
                self.close()
                raise ProcessDiedError
            expired = threading.Event()
            timer = threading.Timer(seconds or 0.0, lambda: (expired.set(), self.give_up()))
            timer.daemon = True
            if seconds is not None:
                timer.start()
            try:
                connection.send_bytes(message)
                return json.loads(connection.recv_bytes(LARGEST_REPLY))
            except (EOFError, OSError, ValueError):
                self.give_up()
                raise (TimeUpError if expired.is_set() else ProcessDiedError) from None
            finally:
                timer.cancel()

    def class_of(self, description: Reply) -> type[Any]:
        """Return the environment's class.

        Raises:
            ValueError: It is not at the top level of a module.
        """
        module, found = description["module"].replace("__mp_main__", "__main__"), None
        with contextlib.suppress(ImportError, AttributeError):
            found = operator.attrgetter(description["qualname"])(importlib.import_module(module))
        if not isinstance(found, type):
            raise ValueError(
                f"tool_isolation='process' needs the class {description['qualname']} at the top level of {module}; "
                "move it there, or set tool_isolation='thread'"
            )
        return found

    def give_up(self) -> None:
        """Kill the process and all that it started, and wake the thread that waits for it."""
        self.lost = True
        pid, self._pid = self._pid, None
        if pid is not None:
            for kill in (os.killpg, os.kill):  # before its first instruction it leads no group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        if (connection := self._connection) is not None:  # a process that the tool started may keep its end open
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as pipe:
                pipe.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Kill the process."""
        self.give_up()
        self._connection = None  # closes when no thread reads or writes: the system gives its number out again


Seat = ThreadSeat | ProcessSeat


class StandIn:
    """Stands for an environment that runs in another process: attributes and methods are asked over the pipe.

    Values are numbers, texts, lists and dicts. Async methods are awaited in the process and return a coroutine here.

    Args:
        seat: The environment's seat.
    """

    def __init__(self, seat: ProcessSeat) -> None:
        self.__dict__["_seat"] = seat

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = _value(self._seat, "attribute", name)
        if "data" in value:
            return value["data"]

        def method(*arguments: Any, **keywords: Any) -> Any:
            return _value(self._seat, "method", name, arguments, keywords)

        async def async_method(*arguments: Any, **keywords: Any) -> Any:
            return await asyncio.to_thread(method, *arguments, **keywords)

        return async_method if value["is_async"] else method

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} cannot be set: the environment runs in another process (tool_isolation)")


def _value(seat: ProcessSeat, request: str, *arguments: Any) -> Any:
    try:
        reply = seat.ask(seat.server.seconds, request, *arguments)
    except (TimeUpError, ProcessDiedError):
        raise RuntimeError("the process of the environment was killed or died during the episode") from None
    if "raised" in reply:
        kind = AttributeError if reply["raised"].startswith("AttributeError") else RuntimeError
        raise kind(f"in the environment's process: {reply['raised']}")
    return reply["value"]


class ForkServer:
    """A process that imports the modules of factories and tools, and forks a process for each seat.

    Args:
        factories: Factories of environments.
        tools: Standalone tools.
        longest: Characters that an answer keeps; None keeps all.
        megabytes: Memory that each process may take on top of what it has at its start; None: any.
        seconds: Time limit of what reward functions ask of stand-ins.

    Raises:
        ValueError: A factory or tool cannot be imported in another process.
    """

    def __init__(
        self,
        factories: Sequence[Callable[[], Any]],
        tools: Sequence[Callable[..., Any]],
        longest: int | None,
        megabytes: float | None,
        seconds: float | None,
    ) -> None:
        if _in_server:
            raise RuntimeError(
                "tool_isolation='process' imports the script again in another process: put the script's calls under "
                'if __name__ == "__main__":'
            )
        self.seconds = seconds
        hosted, modules = _pickled((list(factories), list(tools)))
        ours, theirs = socket.socketpair()
        command = "import sys; from rlhf_ppo.environments.isolation import run_server; run_server(int(sys.argv[1]))"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            )
        self._socket, self._lock = ours, threading.Lock()
        self.close = weakref.finalize(self, _end_server, ours, self._process, os.getpid())
        files = {name: path for name in modules if (path := _file_of(name)) is not None}
        main = _main_script() if "__main__" in modules else None
        start = {"path": sys.path, "main": main, "files": files, "hosted": hosted, "longest": longest}
        self._connection = Connection(os.dup(ours.fileno()))
        try:
            self._connection.send_bytes(pickle.dumps(start | {"megabytes": megabytes}))
            problem = self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            problem = "the process ended; its error is above"
        finally:
            self._connection.close()
        if problem:
            self.close()
            raise ValueError(
                f"tool_isolation='process': another process cannot import the environments and tools: {problem}; "
                "define them at the top level of a module or script whose calls stand under if __name__ == "
                "\"__main__\":, or set tool_isolation='thread'"
            )

    def fork(self, kind: int | None) -> tuple[int, Connection]:
        """Start a process.

        Args:
            kind: Index of its factory; None for standalone tools.

        Returns:
            Its id, and the connection to it.

        Raises:
            ProcessDiedError: The fork server has ended.
        """
        ours, theirs = socket.socketpair()
        try:
            with self._lock, theirs:
                socket.send_fds(self._socket, [json.dumps(kind).encode()], [theirs.fileno()])
                pid = self._socket.recv(64)
        except OSError:
            pid = b""
        if not pid:
            ours.close()
            raise ProcessDiedError
        return int(pid), Connection(ours.detach())


def _end_server(connection: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    """End the fork server, whose death kills the processes that it made."""
    connection.close()
    if os.getpid() != owner:  # in a fork of the program, which does not own the server
        return
    process.kill()
    process.wait()


def _pickled(hosted: Any) -> tuple[bytes, set[str]]:
    """Pickle factories and tools; return the pickle and the modules of all functions and classes in it."""
    modules: set[str] = set()

    class Pickler(pickle.Pickler):
        def reducer_override(self, found: Any) -> Any:
            modules.add(getattr(found, "__module__", None) or "builtins")
            return NotImplemented

    written = io.BytesIO()
    try:
        Pickler(written).dump(hosted)
    except Exception as error:
        raise ValueError(
            f"tool_isolation='process' runs environments and tools in other processes, but {error}; define factories "
            "and tools at the top level of a module (no lambda, no function within a function), or set "
            "tool_isolation='thread'"
        ) from error
    return written.getvalue(), modules


def _main_script() -> dict[str, Any]:
    """Return what `spawn.prepare` needs to import the program's main module."""
    data = spawn.get_preparation_data("environments")
    return {key: data[key] for key in ("init_main_from_name", "init_main_from_path", "sys_argv") if key in data}


def _file_of(module: str) -> str | None:
    """Return the file of a module that was loaded from a path and cannot be imported by its name."""
    if module == "__main__" or (loaded := sys.modules.get(module)) is None:
        return None
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        # `importlib.util.find_spec` asks `sys.modules` first, the finders do not.
        first, finders = module.partition(".")[0], [each for each in sys.meta_path if hasattr(each, "find_spec")]
        is_found = any(finder.find_spec(first, None) is not None for finder in finders)
        if is_found and importlib.util.find_spec(module) is not None:
            return None
    return getattr(loaded, "__file__", None)


# In the fork server, and in the processes that it makes

_in_server = False


def run_server(descriptor: int) -> None:
    """Import what is hosted, then fork a process for each request, until this end of the socket closes.

    Args:
        descriptor: The socket.
    """
    global _in_server
    _in_server = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the socket's end ends this process
    pipe = socket.socket(fileno=descriptor)
    connection = Connection(os.dup(descriptor))
    with contextlib.closing(connection):
        start = pickle.loads(connection.recv_bytes())
        try:
            factories, tools = _import_hosted(start)
            connection.send_bytes(b"")
        except BaseException as error:
            connection.send_bytes(named_text_of(error).encode())
            return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps
    while True:
        request, descriptors, _, _ = socket.recv_fds(pipe, 64, 1)
        if not request:
            os._exit(0)
        if (pid := os.fork()) == 0:
            try:
                pipe.close()
                kind = json.loads(request)
                factory = None if kind is None else factories[kind]
                _limit_process(start["megabytes"])
                _serve(Connection(descriptors[0]), factory, [] if factory else tools, start["longest"])
            finally:
                os._exit(1)
        os.close(descriptors[0])
        pipe.sendall(str(pid).encode())


def _import_hosted(start: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    sys.path[:] = start["path"]
    if start["main"] is not None:
        spawn.prepare(start["main"])
    for name, path in start["files"].items():
        if (found := importlib.util.spec_from_file_location(name, Path(path))) and found.loader:
            sys.modules[name] = module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
    hosted = pickle.loads(start["hosted"])
    gc.freeze()  # the processes share these pages
    return hosted


def _limit_process(megabytes: float | None) -> None:
    """Give the process a group of its own, the end of its parent, and a limit of memory."""
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if megabytes is not None:
            pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
            limit = pages * resource.getpagesize() + int(megabytes * _MEGABYTE)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _serve(
    connection: Connection, factory: Callable[[], Any] | None, tools: Sequence[Callable[..., Any]], longest: int | None
) -> None:
    loop = asyncio.new_event_loop()
    host = Host(factory, tools, longest, loop.run_until_complete)
    process = os.getpid()
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        try:
            request, arguments = pickle.loads(message)
            with _keeping_outputs():  # a later episode's tools may print
                reply = json.dumps(host.perform(request, *arguments)).encode()
        except BaseException as error:
            reply = json.dumps({"raised": named_text_of(error), "trace": ""}).encode()
        if os.getpid() != process:  # the tool forked: this is the copy
            os._exit(0)
        connection.send_bytes(reply)
