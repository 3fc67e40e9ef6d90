"""Models whose parameters an engine has taken apart, and those that it leaves alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.models.frozen import Offload
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.sharded import gathered
from rlhf_ppo.processes.engines import is_fsdp, product_dtype, zero_stage

T = TypeVar("T")


def set_up_engine(accelerator: Accelerator, model: nn.Module) -> None:
    """Tell the engine what PPO needs of it: exact sums and results, weights of one type, and whole models when saved.

    Args:
        accelerator: Has prepared nothing yet.
        model: Policy and value model.
    """
    _keep_sums_in_float32(accelerator)
    if zero_stage(accelerator) == 3:  # or save_model could not write what from_pretrained reads
        zero = cast(Any, accelerator.state).deepspeed_plugin.deepspeed_config["zero_optimization"]
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        _give_trained_one_type(model, accelerator)


def _keep_sums_in_float32(accelerator: Accelerator) -> None:
    """Let the engine add gradients up in float32, and give results of the models as they are.

    In 16 bits DeepSpeed would add the gradients of micro-batches and of ranks up in the weights' type, and FSDP2 the
    ranks'; FSDP2 would also round float32 log-probabilities and values on their way out of each module. A type that
    DeepSpeed's own configuration file names stays.
    """
    state: Any = accelerator.state
    if zero_stage(accelerator) is not None:
        config = state.deepspeed_plugin.deepspeed_config
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        config.setdefault("communication_data_type", "fp32")
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is not None and isinstance(policy := plugin.mixed_precision_policy, MixedPrecisionPolicy):
        plugin.mixed_precision_policy = replace(policy, output_dtype=None, reduce_dtype=torch.float32)


def _give_trained_one_type(model: nn.Module, accelerator: Accelerator) -> None:
    """In 16 bits, put what is trained and not yet taken apart into the engine's type.

    ZeRO-3 keeps all that it trains in buffers of one type, beside which its optimizer has weights in float32. PEFT
    makes adapters in float32 over models that were loaded in 16 bits.
    """
    if (dtype := product_dtype(accelerator)) is None:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)


def on_whole_policy(model: nn.Module, accelerator: Accelerator, gather: bool, function: Callable[[nn.Module], T]) -> T:
    """Call a function with the policy in a form that `generate` can run.

    Under ZeRO-3 the policy's parameters, not the value model's, are gathered once for the whole call; under FSDP2 a
    layer stays unsharded from its first use on. Elsewhere the policy is whole anyway.

    Args:
        model: The prepared `PolicyAndValue`, or the placed `FrozenPolicy`.
        accelerator: Prepared it.
        gather: With ZeRO-3, False leaves the parameters sharded, and each layer is gathered at each token.
        function: Takes the policy.

    Returns:
        What the function returned.
    """
    policy = cast(PolicyAndValue, accelerator.unwrap_model(model, keep_torch_compile=False)).policy
    is_prepared = not isinstance(model, PolicyAndValue)
    # Small parameters may all be whole after a step; the hooks would still take them apart, on each rank at its pace.
    if zero_stage(accelerator) == 3 and gather and is_prepared:
        return _with_gathered(model, policy, function)
    if isinstance(model, FSDPModule):
        return _with_unsharded(model, function)
    return function(policy)


def _with_gathered(model: nn.Module, policy: nn.Module, function: Callable[[nn.Module], T]) -> T:
    from trl.models.utils import add_hooks, remove_hooks

    engine = cast(Any, model)
    with gathered(policy.parameters()):
        remove_hooks(engine)
        try:
            return function(policy)
        finally:
            add_hooks(engine)


def _with_unsharded(model: nn.Module, function: Callable[[nn.Module], T]) -> T:
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    register_fsdp_forward_method(model, "on_policy")
    for shard in shards:
        shard.set_reshard_after_forward(False, recurse=False)
    try:
        return cast(Any, model).on_policy(function)
    finally:
        for shard in shards:
            shard.set_reshard_after_forward(True, recurse=False)
            shard.reshard()


def check_keeps_models_whole(args: PPOConfig) -> None:
    """Check that no engine takes the weights apart that an argument wants to share or to move.

    Raises:
        ValueError: DeepSpeed ZeRO-3 or FSDP does.
    """
    uses_fsdp = bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    engine = "DeepSpeed ZeRO-3" if is_deepspeed_zero3_enabled() else "FSDP" if uses_fsdp else None
    for name in ("share_base_model", "offload_frozen"):
        if engine is not None and getattr(args, name):
            raise ValueError(
                f"{name}=True, but {engine} spreads the weights of each model over the processes: leave it False (the "
                "engine's own configuration can offload), or launch with DDP or a lower ZeRO stage"
            )


def place_frozen(model: nn.Module, accelerator: Accelerator, offload: bool = False) -> nn.Module:
    """Put a frozen model where it runs: sharded like the policy under ZeRO-3 and FSDP2, else on this rank's device.

    Under DeepSpeed it computes in the type that the trained models compute in.

    Args:
        model: A module whose forward pass is all that is called, with `config` and `_no_split_modules`.
        accelerator: Knows the engine.
        offload: Keep the weights of a model that is not sharded on the CPU; `at_work` brings them to the device.

    Returns:
        The module to call.
    """
    if zero_stage(accelerator) == 3:
        from trl.models.utils import prepare_deepspeed

        return prepare_deepspeed(model, accelerator)
    if is_fsdp(accelerator):
        from trl.models.utils import prepare_fsdp

        model.to(accelerator.device)
        for block in [part for part in model.modules() if type(part).__name__ in cast(Any, model)._no_split_modules]:
            prepare_fsdp(block, accelerator)
        return cast(nn.Module, prepare_fsdp(model, accelerator))
    if zero_stage(accelerator) is not None and (dtype := product_dtype(accelerator)) is not None:
        for parameter in model.parameters():  # DeepSpeed leaves buffers as they are: rotary frequencies stay exact
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    if offload and accelerator.device.type != "cpu":
        cast(Any, model).offload = Offload(model, accelerator.device)
        return model
    return model.to(accelerator.device)
