"""Sampling: the engine, the sampling settings, and the gathering of sharded weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import GenerationConfig

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.prompts import PositionLimit, Prompts, check_lengths
from rlhf_ppo.data.rollout import Responses
from rlhf_ppo.generation.protocol import GenerationEngine, length_and_filling, sample_with
from rlhf_ppo.generation.sampling import SpecialTokens, join_responses, naming_the_model
from rlhf_ppo.generation.transformers_engine import greedy_config, sampling_config
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import gathered
from rlhf_ppo.run.distributed import raise_on_all_ranks, zero_stage

T = TypeVar("T")


class Sampler:
    """Samples responses of the policy, or of another model.

    Args:
        engine: Generates the tokens.
        args: The arguments.
        accelerator: Prepared the models.
        tokens: Padding and stop tokens.
        never_sampled: Ids that not all models embed, or None.
        longest_sequence: Longest prompt plus response that models and engine support; None without a limit.
        moment: Returns the position of the run, for errors.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        args: PPOConfig,
        accelerator: Accelerator,
        tokens: SpecialTokens,
        never_sampled: list[int] | None,
        longest_sequence: PositionLimit | None,
        moment: Callable[[], str],
    ) -> None:
        self.engine, self.args, self.accelerator, self.tokens = engine, args, accelerator, tokens
        self.never_sampled, self.longest_sequence, self.moment = never_sampled, longest_sequence, moment

    def settings(self, greedy: bool = False) -> GenerationConfig:
        """Return the sampling settings of training, or those of sample tables."""
        return (greedy_config if greedy else sampling_config)(self.args, self.tokens.stop, self.never_sampled)

    def sample(self, model: nn.Module, prompts: Prompts, config: GenerationConfig | None = None) -> Responses:
        """Sample a response to each prompt, and truncate it after the stop token or stop string.

        Args:
            model: The prepared `PolicyAndValue`, or the placed `FrozenPolicy` of the reference.
            prompts: `B` prompts.
            config: Sampling settings; None takes those of training.
        """
        settings, tokens = config or self.settings(), self.tokens
        check_lengths(prompts.input_ids.shape[1], length_and_filling(settings)[0], self.longest_sequence)
        sampled = self.on_policy(
            model, lambda policy: sample_with(self.engine, policy, prompts, settings, tokens.stop_strings)
        )
        return join_responses(prompts, sampled.ids, tokens.stop, tokens.pad, tokens.stop_strings, sampled.logprobs)

    def on_policy(self, model: nn.Module, function: Callable[[nn.Module], T]) -> T:
        """Call a function with the language model in the form that the engine reads, under autocast.

        An error of one rank is raised on all ranks, with the model's name.

        Args:
            model: As for `sample`.
            function: Takes the language model.
        """
        plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        role = "policy" if isinstance(plain, PolicyAndValue) else "reference"

        def called(policy: nn.Module) -> T:
            naming = naming_the_model(policy, role, self.moment())
            with raise_on_all_ranks(self.accelerator), naming, self.accelerator.autocast():
                return function(policy)

        if self.engine.reads_sharded:
            return called(cast(PolicyAndValue, plain).policy)
        return on_whole_policy(model, self.accelerator, self.args.ds3_gather_for_generation, called)


def on_whole_policy(model: nn.Module, accelerator: Accelerator, gather: bool, function: Callable[[nn.Module], T]) -> T:
    """Call a function with the policy in a form that `generate` can run.

    Under ZeRO-3 the policy's parameters, not the value model's, are gathered once for the whole call. Under FSDP2 a
    layer stays unsharded after its first use.

    Args:
        model: The prepared `PolicyAndValue`, or the placed `FrozenPolicy`.
        accelerator: Prepared it.
        gather: With ZeRO-3, False gathers each layer at each token instead.
        function: Takes the policy.

    Returns:
        The result of the function.
    """
    policy = cast(PolicyAndValue, accelerator.unwrap_model(model, keep_torch_compile=False)).policy
    is_prepared = not isinstance(model, PolicyAndValue)
    # After a step all small parameters may be gathered; hooks would still reshard them, on each rank at another time.
    if zero_stage(accelerator) == 3 and gather and is_prepared:
        return _with_gathered(model, policy, function)
    if isinstance(model, FSDPModule):
        return _with_unsharded(model, accelerator.state, function)
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


def _with_unsharded(model: Any, state: Any, function: Callable[[nn.Module], T]) -> T:
    """Keep blocks gathered while a function runs.

    Afterwards they are resharded after each pass as configured. Parameters outside of blocks, the first shard, stay
    gathered between a forward and a backward pass.
    """
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    register_fsdp_forward_method(model, "on_policy")
    for shard in shards[1:]:
        shard.set_reshard_after_forward(False, recurse=False)
    try:
        return model.on_policy(function)
    finally:
        for shard in shards[1:]:
            shard.set_reshard_after_forward(state.fsdp_plugin.reshard_after_forward, recurse=False)
        for shard in shards:
            shard.reshard()
