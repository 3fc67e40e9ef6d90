"""Models, KL controller and scorer for the trainer's constructor, placed where an engine runs them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from rlhf_ppo.algorithm.advantages import AdaptiveKLController, FixedKLController, KLController, check_coefficient
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.checks import check_critic_alone, check_optimization, check_output_dir, check_ptx, parse_weights
from rlhf_ppo.config.ppo_config import Sizes, output_directory
from rlhf_ppo.data.images import ImageChats
from rlhf_ppo.data.prompts import NoPrompts, num_rows
from rlhf_ppo.data.rollout import PositionLimit, smallest
from rlhf_ppo.generation.engine_factory import BaselineCompletions, make_engine
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.generation.sampler import Sampler
from rlhf_ppo.generation.sampling import SpecialTokens, special_tokens
from rlhf_ppo.models import adapters, capabilities, heads, loading
from rlhf_ppo.models import frozen as frozen_models
from rlhf_ppo.models import reference as references
from rlhf_ppo.models.unwrapping import drop_ignored_generation_settings, is_peft_model, settle_special_tokens
from rlhf_ppo.ranks import processes
from rlhf_ppo.rewards.functions import RewardFunction
from rlhf_ppo.rewards.judges import opponent_of
from rlhf_ppo.rewards.resolve import resolve_rewards
from rlhf_ppo.rewards.reward_model import LoadedRewardModel, RewardModel, load_reward_models
from rlhf_ppo.rewards.scorer import RewardSource, Scorer, is_reward_source
from rlhf_ppo.run.datasets import PromptPreparation, image_chats, load_data, policy_tokenizer
from rlhf_ppo.run.episodes import EpisodeRollouts
from rlhf_ppo.run.external import ExternalScores
from rlhf_ppo.run.learning import CriticOnly
from rlhf_ppo.run.optimization import Optimizers
from rlhf_ppo.run.ptx import LanguageModeling
from rlhf_ppo.run.rollouts import Play
from rlhf_ppo.run.run_state import RunState, StatefulParts

logger = processes.get_logger(__name__)


def set_up_engine(accelerator: Accelerator, model: nn.Module) -> None:
    """Configure the engine for PPO: exact sums and outputs, weights of one type, and unsharded saved models.

    Args:
        accelerator: Has prepared nothing yet.
        model: Policy and value model.
    """
    _keep_sums_in_float32(accelerator)
    processes.warn_of_missing_fsdp(accelerator)
    if processes.zero_stage(accelerator) == 3:  # save_model writes unsharded weights
        zero = cast(Any, accelerator.state).deepspeed_plugin.deepspeed_config["zero_optimization"]
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        processes.give_trained_one_type(model, accelerator)


def start_afresh(run: RunState, policy: nn.Module, engine: GenerationEngine) -> None:
    """Seed the random numbers and drop what an earlier run has left, at the start of a run."""
    set_seed(run.args.seed, device_specific=True)
    run.streams.seed(run.args.seed)
    settle_special_tokens(policy)
    drop_ignored_generation_settings(policy)
    engine.policy_changed()
    run.accelerator.free_memory()


def early_accelerator(trainer: Trainer, args: PPOConfig) -> Accelerator | None:
    """Create the accelerator before Trainer's constructor if FSDP is to shard reward models as they are loaded.

    Args:
        trainer: The trainer, whose constructor has not been called.
        args: Its arguments.
    """
    if not _uses_fsdp(args) or not torch.distributed.is_initialized():
        return None
    vars(trainer).update(args=args, model=None)  # which this method reads
    trainer.create_accelerator_and_postprocess()
    _keep_sums_in_float32(trainer.accelerator)
    return trainer.accelerator


def _keep_sums_in_float32(accelerator: Accelerator) -> None:
    """Make the engine sum gradients in float32, and keep the type of model outputs.

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
    """Check that no engine shards weights that an argument shares or moves.

    Raises:
        ValueError: DeepSpeed ZeRO-3 or FSDP does.
    """
    engine = "DeepSpeed ZeRO-3" if is_deepspeed_zero3_enabled() else "FSDP" if _uses_fsdp(args) else None
    for name in ("share_base_model", "offload_frozen"):
        if engine is not None and getattr(args, name):
            raise ValueError(
                f"{name}=True, but {engine} spreads the weights of each model over the processes: leave it False (the "
                "engine's own configuration can offload), or launch with DDP or a lower ZeRO stage"
            )


def place_frozen(model: nn.Module, accelerator: Accelerator, offload: bool = False) -> nn.Module:
    """Place a frozen model: sharded like the policy under ZeRO-3 and FSDP2, else on this rank's device.

    Under DeepSpeed it computes in the type of the trained models.

    Args:
        model: A module with `config` and `_no_split_modules`; only its forward pass is called.
        accelerator: Gives the engine.
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
    dtype = None if processes.zero_stage(accelerator) is None else processes.mixed_precision_dtype(accelerator)
    if dtype is not None:
        # Not buffers: rotary frequencies stay exact.
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    if offload and accelerator.device.type != "cpu":
        cast(Any, model).offload = frozen_models.Offload(model, accelerator.device)
        return model
    return model.to(accelerator.device)


ModelOrPath = nn.Module | str | os.PathLike[str]
"""A model, a directory or a hub name."""


@dataclass(frozen=True)
class Models:
    """The four models, checked and prepared.

    Attributes:
        policy: The trained language model.
        value_model: The trained value model.
        reference: The reference of the KL penalty, or None.
        rewards: The frozen reward models.
    """

    policy: nn.Module
    value_model: nn.Module
    reference: references.Reference | None
    rewards: Sequence[LoadedRewardModel]

    @property
    def reading_policy_tokens(self) -> dict[str, nn.Module]:
        """All models that read the policy's tokens, by their names in errors."""
        rewards = {reward.argument: reward.model for reward in self.rewards if reward.tokenizer is None}
        critic = {} if isinstance(self.value_model, heads.ValueHead) else {"value_model": self.value_model}
        return {"model": self.policy, **critic, **rewards}

    @property
    def frozen_reference(self) -> nn.Module | None:
        """The reference, if it is a separate model."""
        return None if self.reference is None else self.reference.model

    @property
    def longest_sequence(self) -> PositionLimit | None:
        """The longest sequence that every model supports; None without a limit."""
        given = [*self.reading_policy_tokens.values(), self.frozen_reference]
        return smallest(capabilities.position_limit(model) for model in given if model is not None)


@dataclass(frozen=True)
class Prepared:
    """What a trainer is made of before Trainer's constructor.

    Attributes:
        tokenizer: The policy's tokenizer.
        processor: The policy's processor of images and text, which is saved with it, or None.
        tokens: Padding and stop tokens.
        functions: The reward functions, with those of environments.
        reward_funcs: The same as given.
        models: The four models.
        preparation: Tokenizes and checks prompts.
        train_dataset: The training prompts, tokenized.
        eval_dataset: The held-out prompts, tokenized, or None.
        sizes: Sizes derived from the arguments, the processes and the data.
        episodes: Rollouts of several turns, or None.
        is_stepped: Whether the trainer is for `step`, which receives responses and scores.
    """

    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None
    tokens: SpecialTokens
    functions: Sequence[Callable[..., Any]]
    reward_funcs: Any
    models: Models
    preparation: PromptPreparation
    train_dataset: Any
    eval_dataset: Any
    sizes: Sizes
    episodes: EpisodeRollouts | None
    is_stepped: bool


def prepare(
    trainer: Trainer,
    args: PPOConfig,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
    model: ModelOrPath,
    ref_model: ModelOrPath | None,
    reward_model: Any,
    value_model: ModelOrPath | None,
    train_dataset: Any,
    eval_dataset: Any,
    peft_config: Any,
    value_peft_config: Any,
    reward_funcs: Any,
    reward_processing_classes: Any,
    kl_controller: KLController | None,
    ptx_dataset: Any,
    optimizers: Optimizers,
    tools: Any,
    rollout_func: Any,
    environment_factory: Any,
) -> Prepared:
    """Check the arguments, load the models, and tokenize the prompts; the arguments are those of `PPOTrainer`."""
    # What needs no weights.
    if not isinstance(args, PPOConfig):
        raise TypeError(f"args must be a PPOConfig, got {type(args).__name__}")
    check_output_dir(args.output_dir)
    episodes = EpisodeRollouts.of(args, tools, environment_factory, rollout_func)
    is_stepped = all(given is None for given in (episodes, reward_funcs, reward_model, train_dataset, eval_dataset))
    functions = reward_functions(reward_funcs, reward_model, episodes, is_stepped)
    tokenizer = policy_tokenizer(processing_class, model)
    train_dataset = NoPrompts() if is_stepped else train_dataset
    train_dataset, eval_dataset = load_data(args, tokenizer, train_dataset, eval_dataset, episodes)
    check_ptx(args.ptx_coef, ptx_dataset)
    if kl_controller is not None:
        check_coefficient(kl_controller)
    tokens = special_tokens(args, tokenizer)
    check_optimization(args.critic_learning_rate, optimizers)
    args.count_sizes(processes.num_processes(args), num_rows(train_dataset))  # checks them
    # The models.
    models = assemble_models(
        args,
        model,
        ref_model,
        load_reward_models(args, reward_model, reward_processing_classes, tokenizer),
        value_model,
        peft_config,
        value_peft_config,
        needs_reference=needs_reference(args, functions, kl_controller),
        accelerator=early_accelerator(trainer, args),
    )
    loading.check_start_elsewhere((models.policy, models.value_model), output_directory(args))
    tokens = tokens.with_those_of(models.policy, args)
    # The prompts that all of them can read.
    processor = loading.load_processor(processing_class, models.policy, tokenizer)
    given = models.policy, models.value_model, models.reference, models.rewards
    chats = image_chats(args, processor, given, episodes, (train_dataset, eval_dataset))
    preparation = replace(prompt_preparation(args, tokenizer, tokens, models, functions, episodes), chats=chats)
    train_dataset, eval_dataset = preparation.both(train_dataset, eval_dataset)  # drops long prompts
    sizes = args.fill_derived(processes.num_processes(args), num_rows(train_dataset))
    return Prepared(
        tokenizer=tokenizer,
        processor=processor,
        tokens=tokens,
        functions=functions,
        reward_funcs=reward_funcs,
        models=models,
        preparation=preparation,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        sizes=sizes,
        episodes=episodes,
        is_stepped=is_stepped,
    )


def assemble_models(
    args: PPOConfig,
    model: ModelOrPath,
    ref_model: ModelOrPath | None,
    given_rewards: Iterable[LoadedRewardModel],
    value_model: ModelOrPath | None,
    peft_config: Any,
    value_peft_config: Any = None,
    needs_reference: bool = True,
    accelerator: Accelerator | None = None,
) -> Models:
    """Load models given by path, make missing models, freeze untrained ones.

    The value model starts from the first reward model that reads the policy's tokens, else from the policy. A missing
    reference is made only if it is needed. With `accelerator` each reward model is sharded before other models are
    loaded; the iterator loads them.

    Raises:
        ValueError: Two arguments are the same object, or a model does not fit its role.
    """
    check_keeps_models_whole(args)
    needs_critic = value_model is None and not args.share_base_model
    rewards, copied = _prepare_rewards(given_rewards, needs_critic, accelerator)
    set_seed(args.seed)  # for new adapters and heads; Trainer's constructor sets it later
    policy, given_reference, critic = _load_given(args, rewards, model, ref_model, value_model)
    if args.share_base_model:
        policy = _with_adapter(args, policy, peft_config, base_serves_others=True)
        if critic is not None:
            loading.check_value_model(critic)
        critic = adapters.value_model_over(policy, critic, value_peft_config)
        _share_with_rewards(policy, rewards)
    else:
        critic = _separate_critic(policy, critic, copied, value_peft_config)
        policy = _with_adapter(args, policy, peft_config, needs_reference and given_reference is None)
    if not isinstance(critic, heads.ValueHead):
        capabilities.check_consistent(critic, "value_model")
    reference = None
    if needs_reference or given_reference is not None:
        reference = references.make_reference(
            policy, given_reference, args.ref_adapter_name, peft_config is not None, args.temperature
        )
    _set_up_language_models(args, policy, reference)
    references.set_up_sharing(args, policy, critic, reference, [reward.model for reward in rewards])
    loading.prepare_trainable(policy, critic)
    rates = {"vf_coef": args.vf_coef, "critic_learning_rate": args.critic_learning_rate}
    check_critic_alone(args.critic_warmup_steps, rates, policy, critic)
    return Models(policy, critic, reference, _frozen_rewards(args, rewards, policy))


def _prepare_rewards(
    given: Iterable[LoadedRewardModel], needs_critic: bool, accelerator: Accelerator | None
) -> tuple[list[LoadedRewardModel], nn.Module | None]:
    """Check each reward model, and shard it with `accelerator`, before the next one is loaded.

    Returns:
        The reward models, and the value model that was made from the first one that reads the policy's tokens.
    """
    rewards: list[LoadedRewardModel] = []
    critic = None
    for reward in given:
        _check_loaded({reward.argument: reward.model})
        if needs_critic and reward.tokenizer is None:
            needs_critic = False
            critic = loading.make_value_model(reward.model) if heads.reads_last_token(reward.model) else None
        if accelerator is not None:
            scorer = frozen_models.FrozenScorer(reward.model)
            reward = replace(reward, scorer=place_frozen(scorer, accelerator))
        rewards.append(reward)
    return rewards, critic


def _load_given(
    args: PPOConfig, rewards: Sequence[LoadedRewardModel], model: Any, ref_model: Any, value_model: Any
) -> tuple[nn.Module, nn.Module | None, nn.Module | None]:
    """Load the given policy, reference and value model, and check them before other models are made from them."""
    scorers = {reward.argument: reward.model for reward in rewards}
    _check_distinct({"model": model, "ref_model": ref_model, **scorers, "value_model": value_model})
    policy: nn.Module = loading.load_policy(model, "model")
    reference = critic = None
    if ref_model is not None:
        reference = loading.load_policy(ref_model, "ref_model")
    if heads.is_head_of_policy(value_model):
        head = heads.ValueHead(policy)
        critic = head if value_model == "policy" else head.load(cast(Any, value_model))
    elif value_model is not None:
        critic = loading.load_value_model(value_model, "value_model", merges_adapter=not args.share_base_model)
    _check_loaded({"model": policy, "ref_model": reference, "value_model": critic})
    return policy, reference, critic


def _separate_critic(
    policy: nn.Module, critic: nn.Module | None, copied: nn.Module | None, peft_config: Any
) -> nn.Module:
    """Return the given value model, the reward model's copy, or one made from the policy; add its adapter."""
    if critic is not None:
        loading.check_value_model(critic)
    critic = critic or copied or loading.make_value_model(policy)
    return critic if peft_config is None else adapters.add_value_adapter(critic, peft_config)


def _frozen_rewards(
    args: PPOConfig, rewards: Sequence[LoadedRewardModel], policy: nn.Module
) -> list[LoadedRewardModel]:
    """Wrap the reward models before Trainer moves weights that they share with the policy."""
    return [
        replace(
            reward,
            scorer=reward.scorer or frozen_models.FrozenScorer(reward.model),
            offloads=args.offload_frozen and not adapters.shares_parameters(reward.model, policy),
        )
        for reward in rewards
    ]


def _set_up_language_models(args: PPOConfig, policy: nn.Module, reference: references.Reference | None) -> None:
    own_reference = None if reference is None else reference.own_policy
    for language_model in filter(None, (policy, own_reference)):
        heads.multiply_head_in_float32(language_model, args.lm_head_float32)
    _warn_of_low_precision(policy, args.learning_rate)


def _check_loaded(loaded: Mapping[str, nn.Module | None]) -> None:
    """Check each loaded model, by its argument's name, before other models are made from it."""
    for name, module in loaded.items():
        if module is not None:
            adapters.check_adapter(module, name)
            if name in ("model", "ref_model"):
                capabilities.check_consistent(module, name)


def _warn_of_low_precision(policy: nn.Module, learning_rate: float) -> None:
    if low := loading.low_precision_parameters(policy):
        logger.warning(
            f"{len(low)} trainable tensors of the policy are stored in 16 bits (the first is {low[0]}), where most of "
            f"an update at learning_rate={learning_rate} is rounded away; load the policy in float32 and set "
            "bf16=True for 16-bit arithmetic."
        )


def _with_adapter(args: PPOConfig, policy: nn.Module, peft_config: Any, base_serves_others: bool) -> nn.Module:
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


def _share_with_rewards(policy: nn.Module, rewards: Sequence[LoadedRewardModel]) -> None:
    for reward in rewards:
        if is_peft_model(reward.model) and (difference := adapters.share_base(reward.model, policy)) is not None:
            logger.warning(
                f"{reward.argument} is an adapter over another base than the policy's, and keeps its own: "
                f"{difference}."
            )


def _check_distinct(models: Mapping[str, Any]) -> None:
    given = [(name, model) for name, model in models.items() if isinstance(model, nn.Module)]
    for (name, model), (other_name, other) in itertools.combinations(given, 2):
        if model is other:
            raise ValueError(
                f"{name} and {other_name} are the same object, so training one would change the other; load the model "
                f"twice, or pass {other_name}=None to have a copy made"
            )


def reward_functions(
    reward_funcs: Any, reward_model: Any, episodes: EpisodeRollouts | None, is_stepped: bool
) -> list[Callable[..., Any]]:
    """Return the reward functions, with the environments' rewards; a placeholder for a trainer that is given scores.

    Raises:
        TypeError: A value, or the object that it names, cannot be called.
        ValueError: A name is unknown, or nothing scores the episodes.
    """
    functions = [ExternalScores()] if is_stepped else resolve_rewards(reward_funcs)
    own = [] if episodes is None else episodes.rewards
    if not (functions or reward_model or own):
        raise ValueError("no reward: pass reward_funcs, a reward_model, or an environment with get_reward")
    return functions + own


def needs_reference(args: PPOConfig, functions: Sequence[Callable[..., Any]], kl_controller: Any) -> bool:
    """Return whether a run needs a reference that was not given: for the KL, or for rewards that compare with it."""
    asked = [opponent_of(function) for function in functions]
    return references.asks_for_reference(args) or kl_controller is not None or "reference" in asked


def make_kl_controller(args: PPOConfig, given: KLController | None, stateful: StatefulParts) -> KLController:
    """Return the given controller, or the one for the arguments; register it in `stateful` unless it is constant.

    Raises:
        ValueError: A controller is given, and the arguments ask for one.
    """
    if given is not None and args.kl_target is not None:
        raise ValueError(f"kl_controller and kl_target={args.kl_target} both set the KL coefficient; leave one None")
    if args.kl_estimator == "k3" and args.kl_coef > 0:
        logger.warning_once(
            "kl_estimator='k3' does not optimise the KL-regularised reward, and can end below the untrained "
            "policy; 'k1' does"
        )
    if given is None and args.kl_target is None:
        return FixedKLController(args)
    controller = given or AdaptiveKLController(args.kl_coef, cast(float, args.kl_target), args.kl_horizon)
    stateful.register("kl_controller", controller)
    return controller


def prompt_preparation(
    args: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    tokens: SpecialTokens,
    models: Models,
    functions: Sequence[Callable[..., Any]],
    episodes: EpisodeRollouts | None,
) -> PromptPreparation:
    """Return the tokenization of prompts that all models can read.

    Raises:
        ValueError: A model cannot embed ids that another one produces.
    """
    reading, special = models.reading_policy_tokens, (tokens.pad, tokens.stop)
    return PromptPreparation(
        tokenizer,
        args,
        capabilities.shared_vocabulary(reading, models.frozen_reference, tokenizer, *special),
        models.longest_sequence,
        columns_are_read=bool(functions or episodes),
        encoder=None if episodes is None else episodes.encoder,
        stops=tokens.stops,
        rewards=models.rewards,
    )


@dataclass(frozen=True)
class Parts:
    """What samples and scores responses, made with Trainer's accelerator.

    Attributes:
        sampler: Samples responses.
        scorer: Scores them.
        preparation: Tokenizes and checks prompts, with the engine's limit.
        baselines: Responses that reward functions compare with.
        play: Plays episodes of several turns instead, or None.
        ptx: The loss on `ptx_dataset`, or None.
    """

    sampler: Sampler
    scorer: Scorer
    preparation: PromptPreparation
    baselines: BaselineCompletions
    play: Play | None
    ptx: LanguageModeling | None


def make_parts(
    trainer: Trainer,
    run: RunState,
    prepared: Prepared,
    engine: GenerationEngine | None,
    critic_only: CriticOnly,
    ptx_dataset: Any,
) -> Parts:
    """Place the frozen models, and make engine, sampler and scorer.

    Args:
        trainer: The trainer, after Trainer's constructor.
        run: Its run.
        prepared: What `prepare` returned.
        engine: The engine to use; None makes that of the arguments.
        critic_only: Critic warm-up.
        ptx_dataset: Texts of an added loss, or None.
    """
    args, tokens, accelerator, models = run.args, run.tokens, run.accelerator, prepared.models
    if models.reference is not None and models.reference.model is not None:
        models.reference.model = place_frozen(models.reference.model, accelerator, args.offload_frozen)
    baselines = BaselineCompletions.of(prepared.functions, run.tokenizer, tokens)
    if engine is None:
        engine = make_engine(
            args,
            models.policy,
            accelerator,
            run.tokenizer if prepared.preparation.chats is None else prepared.preparation.chats.processor,
            tokens.stop_strings,
            baselines.kinds,
            local_batch_size=prepared.sizes.local_batch_size,
        )
    longest, episodes = prepared.preparation.limit, prepared.episodes
    play = None if episodes is None else episodes.player(trainer, run, engine, longest, baselines.kinds)
    preparation = prepared.preparation.within(engine, trainer.train_dataset, trainer.eval_dataset)
    never_sampled, longest = preparation.never_sampled, preparation.longest_sequence
    sampler = Sampler(engine, args, accelerator, tokens, never_sampled, longest, run.moment)
    scorer = make_scorer(run, models.rewards, prepared.functions, preparation.chats)
    ptx = None if ptx_dataset is None else LanguageModeling(run, prepared.sizes, critic_only, longest, ptx_dataset)
    return Parts(sampler, scorer, preparation, baselines, play, ptx)


def make_scorer(
    run: RunState, rewards: Sequence[LoadedRewardModel], functions: Sequence[Any], chats: ImageChats | None
) -> Scorer:
    """Combine reward models and reward functions in one scorer, models first; place the models.

    Raises:
        ValueError: `reward_weights` does not fit.
    """
    args, accelerator, logged = run.args, run.accelerator, run.logged
    together = partial(processes.raise_on_all_ranks, accelerator)
    models = [
        RewardModel(
            place_frozen(cast(nn.Module, reward.scorer), accelerator, reward.offloads),
            args.local_rollout_forward_batch_size,
            lambda: accelerator.autocast(),
            (run.tokenizer, reward.tokenizer),
            capabilities.positions(reward.model),
            together,
            chats and chats.of_model(reward.processor, accelerator.num_processes),
            reward.template,
        )
        for reward in rewards
    ]
    sources: list[RewardSource] = [
        function
        if is_reward_source(function)
        else RewardFunction(
            function, run.tokenizer, partial(getattr, run, "state"), logged.log_metric, log_extra=logged.log_extra
        )
        for function in functions
    ]
    weights = parse_weights("reward_weights", args.reward_weights)
    own = [source.name for source in sources if getattr(source, "is_of_environment", False)]  # weight 1 if not given
    if isinstance(weights, dict):
        weights = dict.fromkeys(own, 1.0) | weights
    elif weights is not None and len(weights) == len(models) + len(sources) - len(own):
        weights = [*weights, *[1.0] * len(own)]
    return Scorer([*models, *sources], weights, together)
