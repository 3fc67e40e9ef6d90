"""Rollouts: sampled responses, log-probabilities and values, metrics, evaluations and sample tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from rlhf_ppo.algorithm.advantages import FixedKLController, KLController
from rlhf_ppo.algorithm.masked import ScoreMoments
from rlhf_ppo.data.prompts import PositionLimit, Prompts
from rlhf_ppo.data.rollout import Responses, Rollout, forward_in_batches
from rlhf_ppo.generation.engine_factory import BaselineCompletions
from rlhf_ppo.generation.sampling import join_responses, naming_the_model
from rlhf_ppo.generation.transformers_engine import sampling_config
from rlhf_ppo.models.policy_and_value import PolicyAndValue, PolicyAndValueOutput
from rlhf_ppo.models.reference import Reference
from rlhf_ppo.models.unwrapping import as_module, gathered
from rlhf_ppo.processes.distributed import isolated_rng, raise_on_all_ranks, zero_stage
from rlhf_ppo.reporting import critic_audit as audits
from rlhf_ppo.reporting import metrics
from rlhf_ppo.reporting.completion_files import KeptCompletions
from rlhf_ppo.reporting.evaluation import runnable, sample_rows
from rlhf_ppo.rewards.scorer import Scores, scores_in_reward_unit
from rlhf_ppo.training.learning import valued_tokens
from rlhf_ppo.training.run_state import RunState

if TYPE_CHECKING:
    from transformers import GenerationConfig


T = TypeVar("T")

Generate = Callable[..., Responses]
"""`PPOTrainer.generate_responses`: takes a language model, prompts and a `GenerationConfig`."""

Play = Callable[[nn.Module, Prompts, "GenerationConfig"], tuple[Responses, Prompts]]
"""Takes the same, and returns the prompts too, which the episodes have changed."""


class Sampler:
    """Sample responses of the policy, and of the baselines that reward functions compare with.

    Args:
        run: The run.
        generate: Samples from a language model: `PPOTrainer.generate_responses`.
        reads_sharded: Whether the engine reads sharded weights.
        baselines: Baselines of the reward functions.
        reference: The reference policy, or None.
        play: Plays episodes of several turns instead of single responses, or None.
        longest_sequence: Longest prompt plus response that models and engine support; None without a limit.
    """

    def __init__(
        self,
        run: RunState,
        generate: Generate,
        reads_sharded: bool,
        baselines: BaselineCompletions,
        reference: Reference | None,
        play: Play | None,
        longest_sequence: PositionLimit | None,
    ) -> None:
        self.run, self.generate, self.reads_sharded = run, generate, reads_sharded
        self.baselines, self.reference, self.play = baselines, reference, play
        self.longest_sequence = longest_sequence

    def respond(
        self, model: nn.Module, prompts: Prompts, config: GenerationConfig | None = None
    ) -> tuple[Responses, Prompts]:
        """Sample the policy's responses, then the baselines'.

        Args:
            model: The prepared `PolicyAndValue`.
            prompts: `B` prompts.
            config: Sampling settings of the policy; None uses those of training.

        Returns:
            The responses, and the prompts with the baselines' responses as columns.
        """
        if self.play is not None:
            return self._on_policy(model, prompts, self._playing, config)

        def respond_as(kind: str) -> Responses:
            if kind == "self" or self.reference is None:
                return self.sample(model, prompts)
            with self.reference.generating(model, self.run.unwrapped(model).policy) as generating:
                return self.sample(generating, prompts)

        responses = self.sample(model, prompts, config)
        return responses, self.baselines.respond(prompts, respond_as) if self.baselines.kinds else prompts

    def sample(self, model: nn.Module, prompts: Prompts, config: GenerationConfig | None = None) -> Responses:
        """Sample a response of one model to each prompt; arguments as in `respond`."""
        return self._on_policy(model, prompts, self.generate, config)

    def _on_policy(
        self, model: nn.Module, prompts: Prompts, function: Callable[..., T], config: GenerationConfig | None
    ) -> T:
        """Call a function with the policy in the form that the engine reads, prompts and settings."""
        run = self.run
        config = config or sampling_config(run.args, run.tokens.stop, run.vocabulary.never_sampled)
        if self.reads_sharded:
            return function(run.unwrapped(model).policy, prompts, config)
        gather = run.args.ds3_gather_for_generation
        return on_whole_policy(model, run.accelerator, gather, lambda whole: function(whole, prompts, config))

    def _playing(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> tuple[Responses, Prompts]:
        assert self.play is not None
        with self.sampling(policy, "policy"):
            return self.play(policy, prompts, config)

    @contextmanager
    def sampling(self, policy: nn.Module, role: str) -> Iterator[None]:
        """Sample under autocast; raise an error of one rank on all ranks, with the model's name.

        Args:
            policy: The sampled language model.
            role: Its name in errors.
        """
        run = self.run
        naming = naming_the_model(policy, role, run.moment())
        with raise_on_all_ranks(run.accelerator), naming, run.accelerator.autocast():
            yield


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


def policy_and_value_outputs(run: RunState, model: nn.Module, responses: Responses) -> PolicyAndValueOutput:
    """Compute log-probabilities and values of responses, without entropies."""

    def forward(*batch: Tensor, places: Any) -> tuple[Tensor, ...]:
        return model(*batch, with_entropy=False, places=places)

    return PolicyAndValueOutput(*_forward(run, responses, forward, run.unwrapped(model).packs_rows))


def reference_logprobs(
    run: RunState, model: nn.Module, reference: Reference | None, responses: Responses, logprobs: Tensor
) -> Tensor | None:
    """Compute the reference's log-probabilities, `(B, T)`; None if there is no reference.

    Args:
        run: The run.
        model: The prepared `PolicyAndValue`.
        reference: The reference, or None.
        responses: `B` responses.
        logprobs: The policy's, which are the reference's too where the reference is the policy.
    """
    if reference is None:
        return None
    models = run.unwrapped(model)
    if reference.is_policy(models.policy):
        return logprobs
    with reference.forward(model, models.policy) as forward:
        return _forward(run, responses, forward, models.packs_rows)[0]


def rollout_of(
    responses: Responses,
    ended: Tensor,
    output: PolicyAndValueOutput,
    ref_logprobs: Tensor | None,
    scores: Scores,
) -> Rollout:
    """Combine responses, model outputs and scores.

    Args:
        responses: `B` responses.
        ended: Whether each ended by itself, bool `(B,)`.
        output: Log-probabilities and values.
        ref_logprobs: Of the reference, `(B, T)`, or None.
        scores: Of the responses.
    """
    return Rollout(
        query_responses=responses.query_responses,
        attention_mask=responses.attention_mask,
        response_mask=responses.response_mask,
        sampling_logprobs=responses.sampling_logprobs,
        on_host=responses.on_host,
        ended=ended,
        logprobs=output.logprobs,
        ref_logprobs=ref_logprobs,
        values=output.values,
        final_values=output.final_values,
        scores=scores.final,
        token_scores=scores.per_token,
        scores_by_source=scores.by_source,
    )


def _forward(
    run: RunState, responses: Responses, forward: Callable[..., tuple[Tensor, ...]], packs_rows: bool
) -> tuple[Tensor, ...]:
    def evaluate(part: Responses) -> tuple[Tensor, ...]:
        with run.accelerator.autocast():
            return forward(*part.batch, places=part.places)

    return forward_in_batches(responses, evaluate, run.args.local_rollout_forward_batch_size, packs_rows)


class RolloutMetrics:
    """Metrics, counts and first responses of the current update's rollout.

    Attributes:
        completions: Responses of the latest update.
        num_response_tokens: Tokens of the responses of all ranks.
    """

    def __init__(self, run: RunState) -> None:
        self.run, self.num_response_tokens = run, 0
        self.completions = KeptCompletions(run.args, run.tokenizer, run.accelerator.num_processes)

    def record(
        self,
        rollout: Rollout,
        kl_controller: KLController,
        score_unit: ScoreMoments | None,
        of_tokens: tuple[Tensor, Tensor, Tensor],
        weights: Tensor | None,
    ) -> Tensor:
        """Compute the metrics of a rollout, keep its first responses and count its tokens.

        Args:
            rollout: This rank's rollout.
            kl_controller: Gives the coefficient of the KL penalty.
            score_unit: Moments that scale scores; None without scaling.
            of_tokens: Rewards before whitening, returns, and whitened advantages, `(B, T)` each.
            weights: Importance weights, `(B, T)`, or None.

        Returns:
            Total reward of each of this rank's responses, float32 `(B,)`, NaN without a score.
        """
        run, args, logged = self.run, self.run.args, self.run.logged.columns
        rewards, returns, advantages = of_tokens
        own = metrics.rollout_columns(rollout, args, kl_controller.coef, score_unit, rewards)
        columns = metrics.gather_columns(own, run.gather)
        valued = valued_tokens(rollout.loss_mask, args)
        metrics.warn_of_unscored(columns["scores"])
        unique = metrics.unique_fraction(rollout, run.gather)
        run.metrics |= metrics.rollout_metrics(columns) | {"response/unique_frac": unique} | run.logged.drain()
        run.metrics |= metrics.critic_metrics(rollout.values, returns, valued, run.sum_over_ranks, run.gather)
        run.metrics |= metrics.sampling_metrics(rollout, weights, run.sum_over_ranks, run.gather)
        if not isinstance(kl_controller, FixedKLController):
            run.metrics["objective/kl_coef"] = float(kl_controller.coef)
        self.num_response_tokens = int(columns["length"].sum())
        self._count_input_tokens(rollout.attention_mask)
        self.completions.note(run.state.global_step + 1, rollout, advantages, rewards, own, logged)
        return own["scores"]

    def _count_input_tokens(self, attention_mask: Tensor) -> None:
        run, counted = self.run, self.run.args.include_num_input_tokens_seen
        if counted != "no":
            tokens = attention_mask.sum() if counted == "non_padding" else torch.tensor(attention_mask.numel())
            run.state.num_input_tokens_seen += int(run.sum_over_ranks(tokens.to(run.args.device)))

    def kept_completions(self, step: int) -> list[dict[str, Any]]:
        """Return this rank's kept responses of an update."""
        return self.completions.rows(step)


@contextmanager
def apart_from_training(run: RunState, model: Any) -> Iterator[nn.Module]:
    """Yield the model to evaluate, with the same separate random numbers in every call.

    Args:
        run: The run.
        model: The prepared `PolicyAndValue`, or the plain one before training.
    """
    args = run.args
    run.is_evaluating, run.num_apart = True, 0
    try:
        with (
            isolated_rng(args.seed),
            run.streams.rewards.reseeded(args.seed, args.process_index),
            runnable(as_module(model), args.device) as runs,
        ):
            yield runs
    finally:
        run.is_evaluating = False


def metrics_of_evaluation(
    run: RunState, columns: dict[str, Tensor], prefix: str, score_unit: ScoreMoments | None
) -> dict[str, float]:
    """Return the metrics of an evaluation, with the values that reward functions have logged.

    Args:
        run: The run.
        columns: Columns of the episodes of all ranks; `scores` is shaped here.
        prefix: Prefix of each key.
        score_unit: Moments that scale scores in training, or None.
    """
    columns["scores"] = scores_in_reward_unit(
        columns["scores"], columns.pop("token_scores"), columns["ended"].bool(), run.args, score_unit
    )
    run.timer.drain()
    extra = {f"{prefix}_{name}": value for name, value in run.logged.drain().items()}
    return metrics.evaluation_metrics(columns, prefix) | extra


def rows_of_samples(
    run: RunState,
    batches: Iterable[Prompts],
    respond: Callable[[Prompts], tuple[Prompts, Responses, Scores]],
    gather: Callable[..., Any],
) -> list[dict[str, Any]]:
    """Respond to prompts and return the rows of a table, of all ranks.

    Args:
        run: The run.
        batches: This rank's prompts.
        respond: Takes prompts; returns them with the baselines' responses, the policy's responses and their scores.
        gather: Concatenates the lists of all ranks.
    """
    rows: list[dict[str, Any]] = []
    for batch in batches:
        prompts, responses, scores = respond(batch)
        extra = run.logged.drain_columns()
        rows += gather(sample_rows(run.tokenizer, prompts, responses, scores, extra))
    run.logged.drain()
    return rows


def audit_columns(
    run: RunState,
    sampler: Sampler,
    model: nn.Module,
    evaluate: Callable[[nn.Module, Responses, Prompts], tuple[Rollout, Tensor]],
    prompts: Prompts,
    num_prefixes: int,
    num_continuations: int,
    generator: np.random.Generator,
) -> Tensor:
    """Sample responses, and continuations of their prefixes, for a critic audit.

    Args:
        run: The run.
        sampler: Samples responses.
        model: The `PolicyAndValue`.
        evaluate: Scores responses; returns their rollout and Monte Carlo returns, `(B, T)`.
        prompts: `B` prompts.
        num_prefixes: `K`, prefixes of each response.
        num_continuations: `M`, continuations of each prefix.
        generator: Draws the prefixes.

    Returns:
        The result of `columns_of`, `(B, K, 3 + M)`.
    """
    args, tokens = run.args, run.tokens
    responses, prompts = sampler.respond(model, prompts)
    rollout, _ = evaluate(model, responses, prompts)

    def returns_of(batch: Sequence[audits.Continuation]) -> Tensor:
        config = sampling_config(args, tokens.stop, run.vocabulary.never_sampled)
        config.max_new_tokens = args.response_length - batch[0].cut
        sampled = sampler.sample(model, audits.prefix_prompts(rollout, batch), config).responses
        of_rows = prompts.take([each.row for each in batch])
        ids = audits.joined(rollout, batch, sampled, args.response_length, tokens.pad)
        joined = join_responses(of_rows, ids, tokens.stop, tokens.pad, tokens.stop_strings)
        return evaluate(model, joined, of_rows)[1]

    cuts = audits.draw_cuts(responses.masks.response.sum(axis=1), num_prefixes, generator)
    width, longest = responses.context_length + args.response_length, sampler.longest_sequence
    slack = math.inf if longest is None else longest.tokens - width
    starts = np.concatenate((np.zeros_like(cuts[:, :1]), cuts), axis=1)  # the prompt alone, and the prefixes
    batches = audits.batches_of(starts, num_continuations, args.eval_batch_size, slack)
    num_batches = int(run.gather(torch.tensor([len(batches)], device=args.device)).max())  # as many on every rank
    returns = np.full((*starts.shape, num_continuations), np.nan)
    for index in range(num_batches):
        batch = batches[min(index, len(batches) - 1)]
        for each, of_tokens in zip(batch, returns_of(batch).cpu().numpy(), strict=True):
            returns[each.place] = of_tokens[each.cut]
    return audits.columns_of(rollout, cuts, returns)
