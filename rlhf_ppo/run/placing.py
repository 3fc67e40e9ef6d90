"""Where models live: settings of the backend (DDP, DeepSpeed, FSDP), and the places of frozen models."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.models.frozen import Offload
from rlhf_ppo.ranks import processes


def set_up_backend(accelerator: Accelerator, model: nn.Module, max_grad_norm: float) -> None:
    """Configure the backend for PPO: exact sums and outputs, weights of one type, and unsharded saved models.

    Args:
        accelerator: Has prepared nothing yet.
        model: Policy and value model.
        max_grad_norm: Norm to which DeepSpeed clips gradients, unless its configuration file gives one.

    Raises:
        ValueError: The launcher asks several processes to share a row.
    """
    parallelism = accelerator.parallelism_config
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise ValueError(
            f"the launcher's tp_size={parallelism.tp_size}, cp_size={parallelism.cp_size}, "
            f"sp_size={parallelism.sp_size} must be 1: rows are split over all processes; use deepspeed or fsdp to "
            "shard the model"
        )
    _keep_sums_in_float32(accelerator)
    processes.warn_of_missing_fsdp(accelerator)
    stage = processes.zero_stage(accelerator)
    if stage is None:
        return
    config = cast(Any, accelerator.state).deepspeed_plugin.deepspeed_config
    config.setdefault("gradient_clipping", max_grad_norm)  # DeepSpeed's default is 1
    if stage == 3:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True  # for save_model
        processes.give_trained_one_type(model, accelerator)


def early_accelerator(trainer: Trainer, args: PPOConfig) -> Accelerator | None:
    """Create the accelerator before Trainer's constructor if FSDP is to shard reward models as they are loaded.

    Args:
        trainer: The trainer, whose constructor has not been called.
        args: Its arguments.

    Raises:
        ValueError: It is FSDP's version 1.
    """
    if not _uses_fsdp(args) or not torch.distributed.is_initialized():
        return None
    vars(trainer).update(args=args, model=None)  # which this method reads
    trainer.create_accelerator_and_postprocess()
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 1:
        raise ValueError(
            "fsdp_version=1 is not supported: set fsdp_version: 2 in the launcher's configuration (--fsdp_version 2) "
            "or in fsdp_config"
        )
    _keep_sums_in_float32(trainer.accelerator)
    return trainer.accelerator


def _keep_sums_in_float32(accelerator: Accelerator) -> None:
    """Make the backend sum gradients in float32, and keep the type of model outputs.

    In 16 bits DeepSpeed would sum the gradients of micro-batches and ranks in the weights' type, and FSDP2 those of
    ranks; FSDP2 would also round float32 log-probabilities and values at the output of each module. A type in
    DeepSpeed's own configuration file is kept.
    """
    state: Any = accelerator.state
    if processes.zero_stage(accelerator) is not None:
        config = state.deepspeed_plugin.deepspeed_config
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        config.setdefault("communication_data_type", "fp32")
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is not None and isinstance(policy := plugin.mixed_precision_policy, MixedPrecisionPolicy):
        plugin.mixed_precision_policy = replace(policy, output_dtype=None, reduce_dtype=torch.float32)


def _uses_fsdp(args: PPOConfig) -> bool:
    """Return whether FSDP will shard the models, before there is an accelerator."""
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_keeps_models_whole(args: PPOConfig) -> None:
    """Check that no backend shards weights that an argument shares or moves.

    Raises:
        ValueError: DeepSpeed ZeRO-3 or FSDP does.
    """
    backend = "DeepSpeed ZeRO-3" if is_deepspeed_zero3_enabled() else "FSDP" if _uses_fsdp(args) else None
    for name in ("share_base_model", "offload_frozen"):
        if backend is not None and getattr(args, name):
            raise ValueError(
                f"{name}=True, but {backend} spreads the weights of each model over the processes: leave it False "
                "(the backend's own configuration can offload), or launch with DDP or a lower ZeRO stage"
            )


def place_frozen(model: nn.Module, accelerator: Accelerator, offload: bool = False) -> nn.Module:
    """Place a frozen model: sharded like the policy under ZeRO-3 and FSDP2, else on this rank's device.

    Under DeepSpeed it computes in the type of the trained models.

    Args:
        model: A module with `config` and `_no_split_modules`; only its forward pass is called.
        accelerator: Gives the backend.
        offload: Keep unsharded weights on the CPU between uses.

    Returns:
        The module to call.
    """
    if processes.zero_stage(accelerator) == 3:
        from trl.models.utils import prepare_deepspeed

        return prepare_deepspeed(model, accelerator)
    if processes.is_fsdp(accelerator):
        from trl.models.utils import prepare_fsdp

        # Each call moves the module to the device: one block at a time.
        for block in [part for part in model.modules() if type(part).__name__ in cast(Any, model)._no_split_modules]:
            prepare_fsdp(block, accelerator)
        return cast(nn.Module, prepare_fsdp(model, accelerator))
    dtype = processes.deepspeed_dtype(accelerator)
    if dtype is not None:
        # Not buffers: rotary frequencies stay exact.
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    if offload and accelerator.device.type != "cpu":
        cast(Any, model).offload = Offload(model, accelerator.device)
        return model
    return model.to(accelerator.device)
