"""The arguments of `PPOConfig` that say which engine generates, and how its log-probabilities are corrected for."""

import math
from dataclasses import dataclass
from typing import Literal

from rlhf_ppo.config.validation import FLOAT32_LARGEST, LONGEST_WAIT, Interval
from rlhf_ppo.config.validation import option as _option

ENGINE_RANGES: dict[str, Interval] = {
    "generation_batch_size": Interval(1, math.inf),
    "importance_sampling_clip_max": Interval(0, FLOAT32_LARGEST, open_low=True),
    "vllm_server_port": Interval(1, 65535),
    "vllm_group_port": Interval(1, 65535),
    "vllm_server_timeout": Interval(0, LONGEST_WAIT),
    "vllm_gpu_memory_utilization": Interval(0, 1, open_low=True),
    "vllm_max_model_length": Interval(1, math.inf),
    "vllm_tensor_parallel_size": Interval(1, math.inf),
}
"""The values that a number may have."""


def is_vllm_available() -> bool:
    """Tell whether TRL finds a vLLM here that it can run."""
    from trl.import_utils import is_vllm_available

    return is_vllm_available()


@dataclass(repr=False)
class EngineArguments:
    """Arguments of the generation engine; the `vllm_*` fields have the names and meanings of TRL's `GRPOConfig`.

    They are read with `generation_engine="vllm"` only.
    """

    generation_engine: Literal["transformers", "continuous", "vllm"] = _option(
        "transformers",
        "What generates responses: 'transformers', its `generate`; 'continuous', its continuous batching, where a new "
        "prompt takes the place of each response that ends; 'vllm', through TRL.",
    )
    generation_batch_size: int | None = _option(
        None,
        "Rows that are generated from at once, on each process. None: the whole local batch with 'vllm' and, where "
        "its cache fits by the estimate, on a GPU; elsewhere local_rollout_forward_batch_size.",
    )
    importance_sampling_correction: bool = _option(
        True,
        "Weight each token's policy loss by how much likelier the training forward pass makes it than the engine did "
        "(truncated importance sampling); for engines that say their log-probabilities: 'continuous' and 'vllm'.",
    )
    importance_sampling_clip_max: float = _option(
        2.0, "Largest weight of importance_sampling_correction; larger ones are cut to it."
    )
    vllm_mode: Literal["colocate", "server"] = _option(
        "colocate", "'colocate': vLLM runs in the training processes; 'server': a server of its own is asked."
    )
    vllm_server_base_url: str | None = _option(
        None, "URL of the vLLM server, such as http://localhost:8000; instead of vllm_server_host and _port."
    )
    vllm_server_host: str = _option("0.0.0.0", "Host of the vLLM server.")
    vllm_server_port: int = _option(8000, "Port of the vLLM server.")
    vllm_server_timeout: float = _option(
        240.0,
        "How long the vLLM server may leave the question unanswered whether it is up, in seconds: at the start, and "
        "while it generates or takes weights. One request may take ddp_timeout seconds.",
    )
    vllm_group_port: int = _option(51216, "Port through which the vLLM server is sent the policy's weights.")
    vllm_gpu_memory_utilization: float = _option(
        0.3, "Share of the device's memory that a colocated vLLM may take, for weights and cache."
    )
    vllm_max_model_length: int | None = _option(
        None, "Longest prompt with its response in a colocated vLLM, in tokens; None: what the model can place."
    )
    vllm_tensor_parallel_size: int = _option(
        1, "Number of processes over which a colocated vLLM splits the model; must divide their number."
    )
    vllm_enable_sleep_mode: bool = _option(
        False, "Free a colocated vLLM's memory while the models learn; its weights are sent again before each use."
    )
    vllm_model_impl: Literal["auto", "vllm", "transformers"] = _option(
        "vllm", "Whose implementation of the model a colocated vLLM runs."
    )

    def _check_engine(self) -> None:
        """Raise unless the chosen engine can be started here.

        Raises:
            ValueError: vLLM is not installed.
        """
        if self.generation_engine == "vllm" and not is_vllm_available():
            raise ValueError(
                "generation_engine='vllm' needs vLLM, which is not installed; `pip install trl[vllm]`, or set "
                "generation_engine to 'continuous' or 'transformers'"
            )
