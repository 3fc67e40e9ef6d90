"""A pretend GPU: import this before torch, and `torch.device("cuda")` computes on the CPU.

Tensors have the device "cuda:0" and CUDA's dispatch, autocast and autograd keys. Mixing devices raises the error that
CUDA raises, memory is counted, and `watching()` counts the places where the host would wait for the device.

It cannot show: the order of collectives, deadlocks, sums over several ranks, races between streams, kernels that are
missing or not deterministic, a GPU's rounding, flash attention, Triton, NCCL.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("pretend.cpp")
BUILD = Path(sys.prefix, "pretended-gpu", hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12])
LIBRARY = BUILD / "pretend_cuda.so"
os.environ["TORCH_EXTENSIONS_DIR"] = str(BUILD.parent)  # of DeepSpeed's optimizer on the host, which it compiles too
if str(Path(sys.prefix, "bin")) not in os.environ["PATH"].split(os.pathsep):  # ninja
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.prefix, "bin")), os.environ["PATH"]])
TOTAL = int(os.environ.get("PRETEND_GIB", "80")) * 2**30
"""Bytes of memory that the device says it has."""


def build() -> None:
    """Compile the extension into the environment, in about a minute, unless it is there."""
    if LIBRARY.exists():
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = {"extra_cflags": ["-O0", "-g0", "-w"], "build_directory": str(BUILD)}
    code = f"from torch.utils.cpp_extension import load; load('pretend_cuda', [{str(SOURCE)!r}], **{flags!r})"
    environment = {name: value for name, value in os.environ.items() if name != "PRETEND_CUDA"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment | {"MAX_JOBS": "1"})


if "torch" in sys.modules:
    raise ImportError("import pretend before torch, which looks for CUDA's hooks once")
build()
_found = importlib.util.find_spec("torch")
assert _found is not None and _found.submodule_search_locations
for _name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
    ctypes.CDLL(os.path.join(_found.submodule_search_locations[0], "lib", _name), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(LIBRARY), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402

_spec = importlib.util.spec_from_file_location("pretend_cuda", LIBRARY)
assert _spec is not None and _spec.loader is not None
native: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)

import torch._dynamo  # noqa: E402  (read before torch says that CUDA is there)
import torch._inductor  # noqa: E402
import torch.cuda.nvtx  # noqa: E402
import torch.storage  # noqa: E402

_GENERATOR = native.default_generator()
_debug_mode = 0
_watchers: list[Callable[[str], None]] = []


def _waited(operation: str) -> None:
    for watcher in _watchers:
        watcher(operation)
    message = f"called a synchronizing CUDA operation ({operation})"
    if _debug_mode == 1:
        warnings.warn(message, stacklevel=2)
    elif _debug_mode == 2:
        raise RuntimeError(message)


native.set_hook(_waited)


@contextlib.contextmanager
def watching(watcher: Callable[[str], None]) -> Iterator[None]:
    """Call `watcher` with the operation's name wherever the host would wait for the device."""
    _watchers.append(watcher)
    native.watch(True)
    try:
        yield
    finally:
        _watchers.remove(watcher)
        native.watch(bool(_watchers) or _debug_mode > 0)


def caller(package: str = "rlhf_ppo") -> str:
    """Return file and line of the innermost frame in `package`, and of the library that it called, if any."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).name != Path(__file__).name]
    inside = f"{os.sep}{package}{os.sep}"
    ours = [frame for frame in frames if inside in frame.filename and "site-packages" not in frame.filename]
    if not ours:
        return "elsewhere"
    place = f"{ours[-1].filename.rpartition(inside)[2]}:{ours[-1].name}"
    libraries = [frame.filename for frame in frames[frames.index(ours[-1]) :] if "site-packages" in frame.filename]
    return place + (
        f" via {libraries[0].rpartition('site-packages' + os.sep)[2].split(os.sep)[0]}" if libraries else ""
    )


def _set_sync_debug_mode(mode: int | str) -> None:
    global _debug_mode
    _debug_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)  # type: ignore
    native.watch(bool(_watchers) or _debug_mode > 0)


class _Event:
    def __init__(self, *given: Any, **options: Any) -> None: ...
    def record(self, *given: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *given: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _Stream:
    cuda_stream = stream_id = device_index = priority = 0
    device_type = 1
    device = torch.device("cuda", 0)

    def __init__(self, *given: Any, **options: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *raised: Any) -> None: ...


class _Device:
    def __init__(self, *given: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *raised: Any) -> None: ...


_PROPERTIES = types.SimpleNamespace(
    name="Pretended GPU", total_memory=TOTAL, major=9, minor=0, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448,
    gcnArchName="", L2_cache_size=50 * 2**20, uuid="0", is_integrated=0,
)  # fmt: skip


def _memory_stats(device: Any = None) -> dict[str, int]:
    counted = {"allocated_bytes.all.current": native.allocated(), "allocated_bytes.all.peak": native.peak()}
    return counted | {"num_alloc_retries": 0, "num_ooms": 0}


def _nothing() -> Callable[..., None]:
    """Return a function that does nothing, a new one at each call: torch.compile lists functions by identity."""
    return lambda *given, **options: None


def _seed(seed: int) -> None:
    _GENERATOR.manual_seed(int(seed))


def _set_state(state: torch.Tensor, device: Any = "cuda") -> None:
    _GENERATOR.set_state(state.cpu() if state.is_cuda else state)


_PATCHES: dict[str, Any] = {
    "is_available": lambda: True, "_is_compiled": lambda: True, "is_initialized": lambda: True, "init": _nothing(),
    "_lazy_init": _nothing(), "_lazy_call": lambda call, **options: call(), "device_count": lambda: 1,
    "_device_count_nvml": lambda: 1, "current_device": lambda: 0, "set_device": _nothing(), "synchronize": _nothing(),
    "get_device_name": lambda device=None: "Pretended GPU", "get_device_properties": lambda device=None: _PROPERTIES,
    "get_device_capability": lambda device=None: (9, 0), "get_arch_list": lambda: ["sm_90"],
    "is_bf16_supported": lambda including_emulation=True: True, "memory_stats": _memory_stats,
    "memory_allocated": lambda device=None: native.allocated(),
    "memory_reserved": lambda device=None: native.allocated(),
    "max_memory_allocated": lambda device=None: native.peak(),
    "max_memory_reserved": lambda device=None: native.peak(),
    "reset_peak_memory_stats": lambda device=None: native.reset_peak(),
    "reset_max_memory_allocated": lambda device=None: native.reset_peak(), "empty_cache": _nothing(),
    "mem_get_info": lambda device=None: (TOTAL - native.allocated(), TOTAL), "ipc_collect": _nothing(),
    "manual_seed": _seed, "manual_seed_all": lambda seed: _seed(seed),
    "seed": _GENERATOR.seed, "initial_seed": _GENERATOR.initial_seed,
    "get_rng_state": lambda device="cuda": _GENERATOR.get_state(), "set_rng_state": _set_state,
    "get_rng_state_all": lambda: [_GENERATOR.get_state()], "set_rng_state_all": lambda states: _set_state(states[0]),
    "current_stream": lambda device=None: _Stream(), "default_stream": lambda device=None: _Stream(),
    "stream": lambda stream: contextlib.nullcontext(), "Stream": _Stream, "Event": _Event, "device": _Device,
    "device_of": _Device, "set_sync_debug_mode": _set_sync_debug_mode, "get_sync_debug_mode": lambda: _debug_mode,
    "_sleep": _nothing(), "default_generators": (_GENERATOR,), "is_current_stream_capturing": lambda: False,
    "utilization": lambda device=None: 0,
}  # fmt: skip
for _name, _value in _PATCHES.items():
    setattr(torch.cuda, _name, _value)
    for _module in ("torch.cuda.memory", "torch.cuda.random"):
        if hasattr(sys.modules[_module], _name):
            setattr(sys.modules[_module], _name, _value)
for _name in ("_cuda_setDevice", "_cuda_synchronize", "_cuda_emptyCache"):
    if not hasattr(torch._C, _name):
        setattr(torch._C, _name, _nothing())
for _name, _value in {"_cuda_getDevice": lambda: 0, "_cuda_isCurrentStreamCapturing": lambda: False}.items():
    if not hasattr(torch._C, _name):
        setattr(torch._C, _name, _value)
for _name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
    setattr(torch.cuda.nvtx, _name, lambda *given, **options: 0)
torch.Tensor.record_stream = _nothing()  # type: ignore


def _product(one: torch.Tensor, other: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return torch.mm(one.to(out_dtype), other.to(out_dtype))


def _product_into(one: Any, other: Any, out_dtype: torch.dtype, *, out: torch.Tensor) -> torch.Tensor:
    assert out.dtype == out_dtype and one.dtype == other.dtype and one.is_cuda and other.is_cuda and out.is_cuda
    return out.copy_(_product(one, other, out_dtype))


def _sum_into(
    added: Any, one: Any, other: Any, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: torch.Tensor
) -> torch.Tensor:
    assert out.dtype == out_dtype == added.dtype and one.dtype == other.dtype, (added.dtype, one.dtype, out.dtype)
    return out.copy_(_product(one, other, out_dtype) * alpha + (added * beta if beta else 0))


_library = torch.library.Library("aten", "IMPL", "CUDA")
_library.impl("mm.dtype", _product)
_library.impl("mm.dtype_out", _product_into)
_library.impl("addmm.dtype_out", _sum_into)


def _empty_storage(size: int, device: Any) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()


_to_elsewhere, _clone, _resize = torch.storage._to, torch.storage._StorageBase.clone, torch.UntypedStorage.resize_


def _storage_to(self: Any, device: Any, non_blocking: bool = False) -> Any:
    device = torch.device(device)
    if device.type != "cuda":
        return _to_elsewhere(self, device, non_blocking)
    return self if self.device.type == "cuda" else _empty_storage(self.size(), device).copy_(self, non_blocking)


def _storage_clone(self: Any) -> Any:
    if self.device.type != "cuda":
        return _clone(self)
    return _empty_storage(self.nbytes(), self.device).copy_(self)


def _storage_resize(self: Any, size: int) -> Any:
    if self.device.type != "cuda":
        return _resize(self, size)
    native.resize_storage(self, int(size))
    return self


torch.storage._to = _storage_to
torch.storage._StorageBase.clone = _storage_clone
torch.UntypedStorage.resize_ = _storage_resize
