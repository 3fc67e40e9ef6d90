"""Settings of the backend; what they do is tested in `tests/distributed`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_ppo.run.placing import set_up_backend
from tests.conftest import tiny_policy


@pytest.mark.parametrize(("of_file", "used"), [({}, 0.25), ({"gradient_clipping": 0.5}, 0.5)], ids=["none", "other"])
def test_deepspeed_clips_at_max_grad_norm_unless_its_file_says_otherwise(of_file: dict[str, Any], used: float):
    """DeepSpeed alone clips: without a value in its file it would at 1."""
    plugin = SimpleNamespace(zero_stage=2, deepspeed_config=dict(of_file))
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))

    set_up_backend(accelerator, tiny_policy(), max_grad_norm=0.25)

    assert plugin.deepspeed_config["gradient_clipping"] == used
