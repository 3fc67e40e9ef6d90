"""The constructor's work: from the user's arguments to models, prompts, engine, sampler and scorer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from accelerate.utils import set_seed
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer

from rlhf_ppo.algorithm.advantages import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    ScoreMoments,
    check_coefficient,
)
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.checks import check_optimization, check_output_dir, check_ptx
from rlhf_ppo.config.ppo_config import Sizes
from rlhf_ppo.data.images import ImageChats
from rlhf_ppo.data.prompts import NoPrompts, num_rows
from rlhf_ppo.generation.engine_factory import BaselineCompletions, make_engine
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.generation.sampling import Sampler, SpecialTokens, special_tokens
from rlhf_ppo.models import capabilities, loading
from rlhf_ppo.models.adapters import shares_parameters
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.reference import asks_for_reference
from rlhf_ppo.models.unwrapping import drop_ignored_generation_settings, settle_special_tokens
from rlhf_ppo.ranks import processes
from rlhf_ppo.ranks.random_streams import RngStreams, set_up_callbacks
from rlhf_ppo.ranks.signals import StopOnSignal
from rlhf_ppo.reporting.health import add_console_and_health
from rlhf_ppo.rewards.functions import LoggedByFunctions, RewardFunction
from rlhf_ppo.rewards.judges import opponent_of
from rlhf_ppo.rewards.resolve import resolve_rewards
from rlhf_ppo.rewards.reward_model import LoadedRewardModel, RewardModel, load_reward_models
from rlhf_ppo.rewards.scorer import RewardSource, Scorer, is_reward_source
from rlhf_ppo.run.assembly import Models, assemble_models
from rlhf_ppo.run.datasets import PromptPreparation, image_chats, load_data, policy_tokenizer
from rlhf_ppo.run.episodes import EpisodeRollouts
from rlhf_ppo.run.external import ExternalScores
from rlhf_ppo.run.inputs import TrainerInputs
from rlhf_ppo.run.learning import CriticOnly, PolicyLossFunction, resolve_policy_loss
from rlhf_ppo.run.placing import early_accelerator, place_frozen, set_up_backend
from rlhf_ppo.run.ptx import LanguageModeling
from rlhf_ppo.run.rollouts import Play
from rlhf_ppo.run.run_state import HoldsState, RunState, StatefulParts

logger = processes.get_logger(__name__)

RewardFunc = Callable[..., Any]
"""A reward function, or a `RewardSource`."""


def start_afresh(run: RunState, engine: GenerationEngine, seeds: bool) -> None:
    """Drop what an earlier run has left, at the start of a run.

    Args:
        run: The run.
        engine: Generates.
        seeds: Whether to seed the generators that a user's code shares; an own loop has drawn from them.
    """
    policy = run.models.policy
    if seeds:
        set_seed(run.args.seed, device_specific=True)
    run.streams.seed(run.args.seed)
    settle_special_tokens(policy, run.models.given_eos)
    drop_ignored_generation_settings(policy)
    engine.policy_changed()
    run.accelerator.free_memory()


@dataclass(frozen=True)
class LoadedInputs:
    """What a trainer is made of before Trainer's constructor.

    Attributes:
        tokenizer: The policy's tokenizer.
        processor: The policy's processor of images and text, which is saved with it, or None.
        tokens: Padding and stop tokens.
        functions: The reward functions, with those of environments.
        policy_loss: The policy loss; None for PPO's.
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
    functions: Sequence[RewardFunc]
    policy_loss: PolicyLossFunction | None
    models: Models
    preparation: PromptPreparation
    train_dataset: Any
    eval_dataset: Any
    sizes: Sizes
    episodes: EpisodeRollouts | None
    is_stepped: bool


def load(trainer: Trainer, inputs: TrainerInputs) -> LoadedInputs:
    """Check the arguments, load the models, and tokenize the prompts."""
    args = inputs.args
    # What needs no weights.
    if not isinstance(args, PPOConfig):
        raise TypeError(f"args must be a PPOConfig, got {type(args).__name__}")
    check_output_dir(args.output_dir)
    episodes = EpisodeRollouts.of(args, inputs.tools, inputs.environment_factory, inputs.rollout_func)
    sources = inputs.reward_funcs, inputs.reward_model, inputs.train_dataset, inputs.eval_dataset
    is_stepped = episodes is None and all(source is None for source in sources)
    functions = [ExternalScores()] if is_stepped else reward_functions(inputs, episodes)
    tokenizer = policy_tokenizer(inputs.processing_class, inputs.model)
    train_dataset = NoPrompts() if is_stepped else inputs.train_dataset
    train_dataset, eval_dataset = load_data(args, tokenizer, train_dataset, inputs.eval_dataset, episodes)
    check_ptx(args.ptx_coef, inputs.ptx_dataset)
    if inputs.kl_controller is not None:
        check_coefficient(inputs.kl_controller)
    tokens = special_tokens(args, tokenizer, is_stepped=is_stepped)
    check_optimization(args.critic_learning_rate, inputs.optimizers)
    policy_loss = resolve_policy_loss(args.policy_loss if inputs.policy_loss is None else inputs.policy_loss)
    args.count_sizes(processes.num_processes(args), num_rows(train_dataset))  # checks them
    # The models.
    models = assemble_models(
        inputs,
        load_reward_models(args, inputs.reward_model, inputs.reward_processing_classes, tokenizer),
        needs_reference=needs_reference(args, functions, inputs.kl_controller),
        accelerator=early_accelerator(trainer, args),
    )
    loading.check_start_elsewhere(models.starts, str(args.output_dir))
    tokens = tokens.with_those_of(models.policy, args)
    # The prompts that all of them can read.
    processor = loading.load_processor(inputs.processing_class, models.policy, tokenizer)
    chats = image_chats(
        args,
        processor,
        models.reading_prompts,
        models.rewards,
        is_episodic=episodes is not None,
        prompt_sets=(train_dataset, eval_dataset),
    )
    preparation = replace(prompt_preparation(args, tokenizer, tokens, models, functions, episodes), chats=chats)
    train_dataset = preparation.prepared(train_dataset, "train_dataset")  # drops long prompts
    eval_dataset = None if eval_dataset is None else preparation.prepared(eval_dataset, "eval_dataset")
    sizes = args.fill_derived(processes.num_processes(args), num_rows(train_dataset))
    return LoadedInputs(
        tokenizer=tokenizer,
        processor=processor,
        tokens=tokens,
        functions=functions,
        policy_loss=policy_loss,
        models=models,
        preparation=preparation,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        sizes=sizes,
        episodes=episodes,
        is_stepped=is_stepped,
    )


def reward_functions(inputs: TrainerInputs, episodes: EpisodeRollouts | None) -> list[RewardFunc]:
    """Return the reward functions, with the environments' rewards.

    Raises:
        TypeError: A value, or the object that it names, cannot be called.
        ValueError: A name is unknown, or nothing scores the episodes.
    """
    functions = resolve_rewards(inputs.reward_funcs) + ([] if episodes is None else episodes.rewards)
    if not (functions or inputs.reward_model):
        raise ValueError("no reward: pass reward_funcs, a reward_model, or an environment with get_reward")
    return functions


def needs_reference(args: PPOConfig, functions: Sequence[RewardFunc], kl_controller: object) -> bool:
    """Return whether a run needs a reference: for the KL, or for rewards that compare with it."""
    asked = [opponent_of(function) for function in functions]
    return asks_for_reference(args) or kl_controller is not None or "reference" in asked


def make_kl_controller(run: RunState, controller: KLController | None) -> KLController:
    """Return the user's controller, or the one for the arguments; checkpoints save it unless it is constant.

    Raises:
        ValueError: There is a controller, and the arguments ask for one.
    """
    args = run.args
    if controller is not None and args.kl_target is not None:
        raise ValueError(f"kl_controller and kl_target={args.kl_target} both set the KL coefficient; leave one None")
    if args.kl_estimator == "k3" and args.kl_coef > 0:
        logger.warning_once(
            "kl_estimator='k3' does not optimise the KL-regularised reward, and can end below the untrained "
            "policy; 'k1' does"
        )
    if controller is None:
        if args.kl_target is None:
            return FixedKLController(args)
        controller = AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
    run.stateful.register("kl_controller", controller)
    return controller


def prompt_preparation(
    args: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    tokens: SpecialTokens,
    models: Models,
    functions: Sequence[RewardFunc],
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
        kl_controller: Sets the KL coefficient.
        score_moments: Mean and spread of the scores so far, for `score_scaling`.
        signals: The callback that ends a run at a signal.
    """

    sampler: Sampler
    scorer: Scorer
    preparation: PromptPreparation
    baselines: BaselineCompletions
    play: Play | None
    ptx: LanguageModeling | None
    kl_controller: KLController
    score_moments: ScoreMoments
    signals: StopOnSignal


def make_run(trainer: HoldsState, models: PolicyAndValue, loaded: LoadedInputs) -> RunState:
    """Return the state that the parts of a trainer share.

    Args:
        trainer: The trainer, after Trainer's constructor.
        models: Policy and value model.
        loaded: What `load` made of the user's arguments.
    """
    args = trainer.args
    return RunState(
        trainer=trainer,
        args=args,
        models=models,
        starts=loaded.models.starts,
        tokenizer=loaded.tokenizer,
        tokens=loaded.tokens,
        processor=loaded.processor,
        template_kwargs=args.template_kwargs,
        accelerator=trainer.accelerator,
        callbacks=trainer.callback_handler,
        streams=RngStreams(args.process_index, args.seed),
        logged=LoggedByFunctions(),
        stateful=StatefulParts(),
    )


def make_parts(
    trainer: Trainer, run: RunState, inputs: TrainerInputs, loaded: LoadedInputs, critic_only: CriticOnly
) -> Parts:
    """Set up the backend, place the frozen models, make engine, sampler and scorer, and add the callbacks.

    Args:
        trainer: The trainer, after Trainer's constructor.
        run: Its run.
        inputs: The user's arguments.
        loaded: What `load` made of them.
        critic_only: Critic warm-up.
    """
    args, tokens, accelerator, models = run.args, run.tokens, run.accelerator, loaded.models
    set_up_backend(accelerator, run.models, args.max_grad_norm)
    kl_controller, score_moments = make_kl_controller(run, inputs.kl_controller), ScoreMoments()
    if args.score_scaling:
        run.stateful.register("score_moments", score_moments)
    if models.reference is not None and models.reference.model is not None:
        models.reference.model = place_frozen(models.reference.model, accelerator, args.offload_frozen)
    baselines = BaselineCompletions.of(loaded.functions, run.tokenizer, tokens)
    engine, chats = inputs.engine, loaded.preparation.chats
    if engine is None:
        engine = make_engine(
            args,
            models.policy,
            accelerator,
            run.tokenizer if chats is None else chats.processor,
            tokens.stop_strings,
            baselines.kinds,
            local_batch_size=loaded.sizes.local_batch_size,
        )
    limit, episodes = loaded.preparation.limit, loaded.episodes
    preparation = loaded.preparation.within(engine, trainer.train_dataset, trainer.eval_dataset)
    never_sampled, longest = preparation.never_sampled, preparation.longest_sequence
    sampler = Sampler(engine, args, accelerator, tokens, never_sampled, longest, run.position)
    vocabulary = preparation.vocabulary
    play = None if episodes is None else episodes.player(run, sampler, limit, vocabulary, baselines.kinds)
    scorer = make_scorer(run, models.rewards, loaded.functions, chats)
    set_up_callbacks(run.callbacks, run.streams.callbacks, run.models.policy)  # with random numbers of their own
    reward_models = [reward.model for reward in models.rewards]
    add_console_and_health(trainer, args, loaded.sizes, reward_models, scorer.weights)
    trainer.add_callback(signals := StopOnSignal(run.sum_over_ranks, accelerator.num_processes))
    texts = inputs.ptx_dataset
    ptx = None if texts is None else LanguageModeling(run, loaded.sizes, critic_only, longest, texts)
    if ptx is not None:
        run.stateful.register("ptx", ptx)
    set_seed(args.seed, device_specific=True)  # for an own loop; `train` seeds again
    return Parts(sampler, scorer, preparation, baselines, play, ptx, kl_controller, score_moments, signals)


def make_scorer(
    run: RunState, rewards: Sequence[LoadedRewardModel], functions: Sequence[RewardFunc], chats: ImageChats | None
) -> Scorer:
    """Combine reward models and reward functions in one scorer, models first; place the models.

    Raises:
        ValueError: `reward_weights` does not fit, or two comparisons have the same name.
    """
    args, accelerator, logged = run.args, run.accelerator, run.logged
    together = partial(processes.raise_on_all_ranks, accelerator)
    models = [
        RewardModel(
            place_frozen(
                cast(nn.Module, reward.scorer),
                accelerator,
                args.offload_frozen and not shares_parameters(reward.model, run.models.policy),
            ),
            args.local_rollout_forward_batch_size,
            lambda: accelerator.autocast(),
            reward.tokenizer,
            capabilities.positions(reward.model),
            together,
            chats and chats.of_model(reward.processor, accelerator.num_processes),
            reward.template,
        )
        for reward in rewards
    ]
    compared = [function.__name__ for function in functions if opponent_of(function) is not None]
    if twice := {name for name in compared if compared.count(name) > 1}:
        raise ValueError(
            f"reward_funcs has two comparisons called {min(twice)!r}, and so their metrics: give each a name="
        )
    sources: list[RewardSource] = [
        function
        if is_reward_source(function)
        else RewardFunction(function, partial(getattr, run, "state"), logged.log_metric, log_extra=logged.log_extra)
        for function in functions
    ]
    weights: Any = args.reward_weights  # a list or a dict, after `PPOConfig.validate`
    # Rewards of environments have weight 1 by default.
    of_environments = [source.name for source in sources if getattr(source, "is_of_environment", False)]
    if isinstance(weights, dict):
        weights = dict.fromkeys(of_environments, 1.0) | weights
    elif weights is not None and len(weights) == len(models) + len(sources) - len(of_environments):
        weights = [*weights, *[1.0] * len(of_environments)]
    return Scorer([*models, *sources], weights, together)
