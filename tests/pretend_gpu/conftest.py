"""These tests run on the pretend GPU of `device/`, by `make test-pretend-gpu`; elsewhere they are not collected."""

import os
from pathlib import Path

import pytest

from tests.distributed.conftest import models  # noqa: F401

collect_ignore_glob = [] if os.environ.get("PRETEND_CUDA") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def on_the_device() -> None:
    """A test of this folder that computes on the CPU would show nothing."""
    import torch

    assert torch.cuda.get_device_name() == "Pretended GPU"
    assert Path(torch.cuda.get_device_name.__code__.co_filename).name == "pretend.py"
