"""The four models: loaded, made from each other where one is missing, checked, and frozen where they do not train."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.checks import check_critic_alone
from rlhf_ppo.data.rollout import PositionLimit, smallest
from rlhf_ppo.models import adapters, capabilities, heads, loading
from rlhf_ppo.models.frozen import FrozenScorer
from rlhf_ppo.models.packing import share_prefixes
from rlhf_ppo.models.policy_and_value import Reference
from rlhf_ppo.models.reference import make_reference
from rlhf_ppo.models.unwrapping import is_peft_model, output_layer
from rlhf_ppo.ranks.processes import get_logger
from rlhf_ppo.rewards.reward_model import LoadedRewardModel
from rlhf_ppo.run.inputs import TrainerInputs
from rlhf_ppo.run.placing import check_keeps_models_whole, place_frozen

if TYPE_CHECKING:
    from peft import PeftConfig

logger = get_logger(__name__)


@dataclass(frozen=True)
class Models:
    """The four models, checked and prepared.

    Attributes:
        policy: The trained language model.
        value_model: The trained value model.
        reference: The reference of the KL penalty, or None.
        rewards: The frozen reward models.
        head_directory: The directory of the value head that the run starts from, or None.
    """

    policy: nn.Module
    value_model: nn.Module
    reference: Reference | None
    rewards: Sequence[LoadedRewardModel]
    head_directory: str | None = None

    @property
    def starts(self) -> dict[str, str]:
        """The directories that the models were loaded from; see `loading.starts_of`."""
        head = {self.head_directory: "the value head that the run starts from"} if self.head_directory else {}
        return head | loading.starts_of(self.reading_prompts.values())

    @property
    def reading_policy_tokens(self) -> dict[str, nn.Module]:
        """All models that read the policy's tokens, by their names in errors."""
        rewards = {reward.argument: reward.model for reward in self.rewards if reward.tokenizer is None}
        critic = {} if isinstance(self.value_model, heads.ValueHead) else {"value_model": self.value_model}
        return {"model": self.policy, **critic, **rewards}

    @property
    def reading_prompts(self) -> dict[str, nn.Module]:
        """All models that read prompts, by their arguments."""
        reference = None if self.reference is None else self.reference.separate_policy
        rewards = {reward.argument: reward.model for reward in self.rewards}
        models = {"model": self.policy, "ref_model": reference, **rewards, "value_model": self.value_model}
        return {argument: model for argument, model in models.items() if model is not None}

    @property
    def frozen_reference(self) -> nn.Module | None:
        """The reference, if it is a separate model."""
        return None if self.reference is None else self.reference.model

    @property
    def longest_sequence(self) -> PositionLimit | None:
        """The longest sequence that every model supports; None without a limit."""
        models = [*self.reading_policy_tokens.values(), self.frozen_reference]
        return smallest(capabilities.position_limit(model) for model in models if model is not None)


def assemble_models(
    inputs: TrainerInputs,
    loaded_rewards: Iterable[LoadedRewardModel],
    *,
    needs_reference: bool,
    accelerator: Accelerator | None,
) -> Models:
    """Load models given by path, make missing models, freeze untrained ones.

    The value model starts from the first reward model that reads the policy's tokens, else from the policy. A missing
    reference is made only if it is needed.

    Args:
        inputs: The trainer's arguments.
        loaded_rewards: The reward models; the iterator loads them.
        needs_reference: Whether the run needs a reference that `inputs` lacks.
        accelerator: Shards each reward model before other models are loaded; None: not yet.

    Raises:
        ValueError: Two arguments are the same object, or a model does not fit its role.
    """
    args, peft_config, value_peft_config = inputs.args, inputs.peft_config, inputs.value_peft_config
    check_keeps_models_whole(args)
    needs_critic = inputs.value_model is None and not args.share_base_model
    rewards, copied = _load_rewards_and_critic(loaded_rewards, needs_critic, accelerator)
    set_seed(args.seed)  # for new adapters and heads; Trainer's constructor sets it later
    policy, reference_model, critic = _load_models(inputs, rewards)
    if args.share_base_model:
        policy = _with_adapter(args, policy, peft_config, base_serves_others=True)
        if critic is not None:
            loading.check_value_model(critic)
        critic = adapters.value_model_over(policy, critic, value_peft_config)
        _share_base_with_rewards(policy, rewards)
    else:
        critic = _separate_critic(policy, critic, copied, value_peft_config)
        policy = _with_adapter(args, policy, peft_config, needs_reference and reference_model is None)
    if not isinstance(critic, heads.ValueHead):
        capabilities.check_consistent(critic, "value_model")
    reference = None
    if needs_reference or reference_model is not None:
        reference = make_reference(
            policy, reference_model, args.ref_adapter_name, peft_config is not None, args.temperature
        )
    separate_reference = None if reference is None else reference.separate_policy
    for language_model in filter(None, (policy, separate_reference)):
        heads.multiply_in_float32(output_layer(language_model), args.lm_head_float32)
    critic_rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
    _warn_of_low_precision("policy", policy, args.learning_rate)
    _warn_of_low_precision("value model", critic, critic_rate)
    shares = args.device.type == "cpu" if args.share_prefixes is None else args.share_prefixes
    shares = shares and not args.torch_compile  # each prefix tree would recompile a model
    share_prefixes(shares, policy, critic, separate_reference, *(reward.model for reward in rewards))
    loading.prepare_trainable(policy, critic)
    rates = {"vf_coef": args.vf_coef, "critic_learning_rate": args.critic_learning_rate}
    check_critic_alone(args.critic_warmup_steps, rates, policy, critic)
    loads_head = isinstance(critic, heads.ValueHead) and inputs.value_model != "policy"
    head_directory = os.fspath(cast(Any, inputs.value_model)) if loads_head else None
    # Before Trainer moves weights that they share with the policy.
    rewards = [replace(reward, scorer=reward.scorer or FrozenScorer(reward.model)) for reward in rewards]
    return Models(policy, critic, reference, rewards, head_directory)


def _load_rewards_and_critic(
    loaded: Iterable[LoadedRewardModel], needs_critic: bool, accelerator: Accelerator | None
) -> tuple[list[LoadedRewardModel], nn.Module | None]:
    """Check each reward model, and shard it with `accelerator`, before the next one is loaded.

    Returns:
        The reward models, and the value model that was made from the first one that reads the policy's tokens.
    """
    rewards: list[LoadedRewardModel] = []
    critic = None
    for reward in loaded:
        adapters.check_adapter(reward.model, reward.argument)
        if needs_critic and reward.tokenizer is None:
            needs_critic = False
            critic = loading.make_value_model(reward.model) if heads.reads_last_token(reward.model) else None
        if accelerator is not None:
            scorer = FrozenScorer(reward.model)
            reward = replace(reward, scorer=place_frozen(scorer, accelerator))
        rewards.append(reward)
    return rewards, critic


def _load_models(
    inputs: TrainerInputs, rewards: Sequence[LoadedRewardModel]
) -> tuple[nn.Module, nn.Module | None, nn.Module | None]:
    """Load the policy, and reference and value model if any; check them before other models are made from them."""
    model, ref_model, value_model = inputs.model, inputs.ref_model, inputs.value_model
    scorers = {reward.argument: reward.model for reward in rewards}
    _check_distinct({"model": model, "ref_model": ref_model, **scorers, "value_model": value_model})
    policy: nn.Module = loading.load_policy(model, "model", inputs.args.model_adapter_name)
    reference = critic = None
    if ref_model is not None:
        reference = loading.load_policy(ref_model, "ref_model")
    if heads.is_head_of_policy(value_model):
        head = heads.ValueHead(policy)
        critic = head if value_model == "policy" else head.load(cast(Any, value_model))
    elif value_model is not None:
        merges = not inputs.args.share_base_model
        critic = loading.load_classifier(value_model, "value_model", merges, is_value_model=True)
    for argument, language_model in (("model", policy), ("ref_model", reference)):
        if language_model is not None:
            adapters.check_adapter(language_model, argument)
            capabilities.check_consistent(language_model, argument)
    if critic is not None:
        adapters.check_adapter(critic, "value_model")
    return policy, reference, critic


def _separate_critic(
    policy: nn.Module, critic: nn.Module | None, copied: nn.Module | None, peft_config: PeftConfig | None
) -> nn.Module:
    """Return the given value model, the reward model's copy, or one made from the policy; add its adapter."""
    if critic is not None:
        loading.check_value_model(critic)
    critic = critic or copied or loading.make_value_model(policy)
    return critic if peft_config is None else adapters.add_value_adapter(critic, peft_config)


def _warn_of_low_precision(role: str, model: nn.Module, learning_rate: float) -> None:
    if low := loading.low_precision_parameters(model):
        logger.warning(
            f"{len(low)} trainable tensors of the {role} are stored in 16 bits (the first is {low[0]}), where most of "
            f"an update at a learning rate of {learning_rate} is rounded away; load the {role} with "
            "dtype=torch.float32, and set bf16=True for 16-bit arithmetic."
        )


def _with_adapter(
    args: PPOConfig, policy: nn.Module, peft_config: PeftConfig | None, base_serves_others: bool
) -> nn.Module:
    """Add the given adapter, or activate the adapter to train."""
    if peft_config is not None:
        return adapters.add_adapter(policy, peft_config, args.model_adapter_name, base_serves_others)
    if is_peft_model(policy):
        adapters.activate_adapter(policy, args.model_adapter_name)
    elif args.model_adapter_name is not None:
        raise ValueError(
            f"model_adapter_name={args.model_adapter_name!r}, but model is not a PeftModel; pass peft_config"
        )
    return policy


def _share_base_with_rewards(policy: nn.Module, rewards: Sequence[LoadedRewardModel]) -> None:
    for reward in rewards:
        if is_peft_model(reward.model) and (difference := adapters.share_base(reward.model, policy)) is not None:
            logger.warning(
                f"{reward.argument} is an adapter over a different base from the policy's, and keeps it: {difference}."
            )


def _check_distinct(models: Mapping[str, object]) -> None:
    modules = [(name, model) for name, model in models.items() if isinstance(model, nn.Module)]
    for (name, model), (other_name, other) in itertools.combinations(modules, 2):
        if model is other:
            raise ValueError(
                f"{name} and {other_name} are the same object, so training one would change the other; load the model "
                f"twice, or pass {other_name}=None to have a copy made"
            )
