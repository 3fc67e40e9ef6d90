"""Which generation engine runs, and whether it can."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import compare_versions
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.modeling_flash_attention_utils import is_flash_attn_available
from transformers.utils.import_utils import is_kernels_available

from rlhf_ppo.generation.continuous import ContinuousEngine
from rlhf_ppo.generation.opponents import Opponents
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.generation.stopping import StopStrings
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from rlhf_ppo.generation.trying import generation_needs
from rlhf_ppo.generation.vllm import start_vllm
from rlhf_ppo.models.sharded import is_sharded
from rlhf_ppo.processes.collectives import gather_over_ranks
from rlhf_ppo.processes.engines import is_fsdp, product_dtype, zero_stage

if TYPE_CHECKING:
    from rlhf_ppo.config import PPOConfig

ENGINE_NEEDS: dict[str, tuple[str, str]] = {
    "continuous": ("transformers", "5.11"),  # the first that can be told how many rows run at a time
    "vllm": ("trl", "1.16"),  # the one that was run; 1.11 and older have no `get_server_info`
}
"""The library that an engine builds on and its lowest version, where that is above the package's own."""


def make_engine(
    args: PPOConfig,
    policy: nn.Module,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_id: int | None,
    stop_strings: StopStrings | None,
    opponents: Opponents,
    rows: Callable[[], int] | None = None,
    local_batch_size: int | None = None,
) -> GenerationEngine:
    """Make the engine that `args.generation_engine` names.

    Args:
        args: The arguments.
        policy: The policy that is trained.
        accelerator: Knows the processes, and what shards the policy.
        tokenizer: The policy's tokenizer.
        stop_token_id: Where a row ends, or None.
        stop_strings: Texts that end a row too, or None. Only transformers' `generate` stops at these; the others'
            responses are cut there afterwards, which gives the same responses for more work.
        opponents: Whose responses the reward functions compare with.
        rows: Tells, once something is generated, from how many rows at once; None: from
            `args.local_rollout_forward_batch_size`.
        local_batch_size: Rows of an update on this process; vLLM takes all of them at once, where
            `args.generation_batch_size` does not say how many.

    Raises:
        ValueError: The engine cannot run with what shards the policy, in float32 on a GPU or with the same bits at
            every run there, vLLM cannot start or cannot be an opponent, or the policy does not generate from the
            distributions of its forward pass.
    """
    _check_version(args.generation_engine)
    rows = rows or (lambda: args.local_rollout_forward_batch_size)
    if args.generation_engine == "vllm":
        if others := [kind for kind in opponents.kinds if kind != "self"]:
            raise ValueError(
                f"generation_engine='vllm' has the policy's weights only, but reward_funcs compare with {others}; "
                "set generation_engine to 'continuous' or 'transformers'"
            )
        at_once = args.generation_batch_size or local_batch_size or args.local_rollout_forward_batch_size
        return start_vllm(args, policy, accelerator, tokenizer, stop_token_id, at_once)
    if args.generation_engine == "transformers":
        if not is_sharded(policy):  # else its first call finds out
            generation_needs(policy)
        return TransformersEngine(rows, stop_strings, gather_over_ranks(accelerator))
    _check_whole(args, accelerator)
    dtype = product_dtype(accelerator)
    _check_nucleus(args, accelerator.device)
    if not is_sharded(policy):
        _check_attention(policy, dtype, accelerator.device)
    return ContinuousEngine(rows, dtype)


def _check_nucleus(args: PPOConfig, device: torch.device) -> None:
    """Raise where transformers' own `top_p` would add floats up on a GPU that is to do the same at every run."""
    if args.full_determinism and args.top_p < 1 and device.type == "cuda":
        raise ValueError(
            f"generation_engine='continuous' has no top_p={args.top_p} that is the same at every run on a GPU, which "
            "full_determinism asks for; set generation_engine='transformers' or top_p=1.0"
        )


def _check_attention(policy: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
    """Raise where flash attention, which a GPU needs for rows of many lengths, would be given float32.

    Without it each token would be compared with all rows' tokens, under a mask of as many columns.
    """
    if device.type != "cuda":
        return
    computed = dtype or next(weight.dtype for weight in policy.parameters() if weight.is_floating_point())
    if computed == torch.float32:
        raise ValueError(
            "generation_engine='continuous' needs flash attention on a GPU, which does not compute in float32; set "
            "bf16=True, or generation_engine='transformers'"
        )
    if not has_flash_attention():
        raise ValueError(
            "generation_engine='continuous' needs flash attention on a GPU, or each token is compared with the tokens "
            "of all rows; `pip install flash-attn` or `pip install kernels`, or set generation_engine='transformers'"
        )


def has_flash_attention() -> bool:
    """Tell whether transformers finds flash attention here, or `kernels`, which it then fetches it with."""
    return is_flash_attn_available() or is_kernels_available()


def is_recent_enough(engine: str) -> bool:
    """Tell whether the library that an engine builds on is as new as `ENGINE_NEEDS` says."""
    name, lowest = ENGINE_NEEDS.get(engine, ("transformers", "0"))
    return compare_versions(name, ">=", lowest)


def _check_version(engine: str) -> None:
    if not is_recent_enough(engine):
        name, lowest = ENGINE_NEEDS[engine]
        raise ValueError(
            f"generation_engine={engine!r} needs {name} {lowest} or newer, and here is {version(name)}; "
            f"`pip install -U {name}`, or set generation_engine='transformers'"
        )


def _check_whole(args: PPOConfig, accelerator: Accelerator) -> None:
    """Raise where the policy would be taken apart layer by layer, each rank at its own pace."""
    if is_fsdp(accelerator):
        raise ValueError(
            "generation_engine='continuous' cannot run under FSDP, whose layers are gathered by all ranks in step; "
            "set generation_engine='transformers' or 'vllm'"
        )
    if zero_stage(accelerator) == 3 and not args.ds3_gather_for_generation:
        raise ValueError(
            "generation_engine='continuous' with ZeRO-3 needs the whole policy, but ds3_gather_for_generation=False; "
            "set it to True, or generation_engine='transformers'"
        )
