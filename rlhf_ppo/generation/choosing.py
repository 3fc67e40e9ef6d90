"""Which generation engine runs, and whether it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_ppo.distributed import gather_over_ranks, is_fsdp, zero_stage
from rlhf_ppo.generation.continuous import ContinuousEngine
from rlhf_ppo.generation.engine import TransformersEngine
from rlhf_ppo.generation.opponents import Opponents
from rlhf_ppo.generation.sampled import GenerationEngine
from rlhf_ppo.generation.stopping import StopStrings
from rlhf_ppo.generation.trying import generation_needs
from rlhf_ppo.generation.vllm import start_vllm
from rlhf_ppo.models.inputs import is_sharded

if TYPE_CHECKING:
    from rlhf_ppo.config import PPOConfig


def make_engine(
    args: PPOConfig,
    policy: nn.Module,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_id: int | None,
    stop_strings: StopStrings | None,
    opponents: Opponents,
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

    Raises:
        ValueError: The engine cannot run with what shards the policy, vLLM cannot start or cannot be an opponent, or
            the policy does not generate from the distributions of its forward pass.
    """
    rows = args.local_rollout_forward_batch_size
    if args.generation_engine == "vllm":
        if others := [kind for kind in opponents.kinds if kind != "self"]:
            raise ValueError(
                f"generation_engine='vllm' has the policy's weights only, but reward_funcs compare with {others}; "
                "set generation_engine to 'continuous' or 'transformers'"
            )
        return start_vllm(args, policy, accelerator, tokenizer, stop_token_id)
    if args.generation_engine == "transformers":
        if not is_sharded(policy):  # else its first call finds out
            generation_needs(policy)
        return TransformersEngine(rows, stop_strings, gather_over_ranks(accelerator))
    _check_whole(args, accelerator)
    return ContinuousEngine(rows)


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
