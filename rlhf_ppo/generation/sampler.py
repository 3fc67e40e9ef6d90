"""Sampling: the engine, the sampling settings, the gathering of sharded weights, and the checks of responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import GenerationConfig

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.rollout import PositionLimit, Prompts, Responses, check_lengths, sent
from rlhf_ppo.generation.protocol import GenerationEngine, Sampled
from rlhf_ppo.generation.sampling import (
    SpecialTokens,
    StopStrings,
    join_responses,
    length_and_filling,
    naming_the_model,
    stop_tokens,
)
from rlhf_ppo.generation.transformers_engine import greedy_config, sampling_config
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import gathered
from rlhf_ppo.ranks.processes import zero_stage


class Sampler:
    """Samples responses of the policy, or of another model.

    Args:
        engine: Generates the tokens.
        args: The arguments.
        accelerator: Prepared the models.
        tokens: Padding and stop tokens.
        never_sampled: Ids that not all models embed, or None.
        longest_sequence: Longest prompt plus response that models and engine support; None without a limit.
        when: Returns the position of the run, for errors.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        args: PPOConfig,
        accelerator: Accelerator,
        tokens: SpecialTokens,
        never_sampled: list[int] | None,
        longest_sequence: PositionLimit | None,
        when: Callable[[], str],
    ) -> None:
        self.engine, self.args, self.accelerator, self.tokens = engine, args, accelerator, tokens
        self.never_sampled, self.longest_sequence, self.when = never_sampled, longest_sequence, when

    def settings(self, greedy: bool = False) -> GenerationConfig:
        """Return the sampling settings of training, or those of sample tables."""
        return (greedy_config if greedy else sampling_config)(self.args, self.tokens.stops, self.never_sampled)

    def sample(self, model: nn.Module, prompts: Prompts, config: GenerationConfig | None = None) -> Responses:
        """Sample a response to each prompt, and truncate it after the stop token or stop string.

        Args:
            model: The prepared `PolicyAndValue`, or the placed `FrozenPolicy` of the reference.
            prompts: `B` prompts.
            config: Sampling settings; None takes those of training.
        """
        settings, tokens = config or self.settings(), self.tokens
        check_lengths(prompts.input_ids.shape[1], length_and_filling(settings)[0], self.longest_sequence)
        with self.policy_of(model) as policy:
            sampled = self.engine.sample(policy, prompts, settings)
            sampled = checked(self.engine, sampled, prompts, settings, tokens.stop_strings)
        return join_responses(prompts, sampled.ids, tokens.stops, tokens.pad, tokens.stop_strings, sampled.logprobs)

    @contextmanager
    def policy_of(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the language model in the form that the engine reads, under autocast.

        An error of one rank is not exchanged: the other ranks may wait for it in a pass of a sharded model.

        Args:
            model: As for `sample`.
        """
        plain: Any = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        role = "policy" if isinstance(plain, PolicyAndValue) else "reference"
        whole = whole_policy(model, self.accelerator, self.args.ds3_gather_for_generation)
        with nullcontext(plain.policy) if self.engine.reads_sharded else whole as policy:
            naming = naming_the_model(policy, role, self.when())
            with naming, self.accelerator.autocast():
                yield policy


@contextmanager
def whole_policy(model: nn.Module, accelerator: Accelerator, gathers: bool) -> Iterator[nn.Module]:
    """Yield the policy in a form that `generate` can run.

    Under ZeRO-3 the policy's parameters, not the value model's, are gathered once. Under FSDP2 a layer stays unsharded
    after its first use.

    Args:
        model: The prepared `PolicyAndValue`, or the placed `FrozenPolicy`.
        accelerator: Prepared it.
        gathers: With ZeRO-3, False gathers each layer at each token instead.
    """
    plain: Any = accelerator.unwrap_model(model, keep_torch_compile=False)
    is_prepared = not isinstance(model, PolicyAndValue)
    # After a step all small parameters may be gathered; hooks would reshard them, at a different time on each rank.
    if zero_stage(accelerator) == 3 and gathers and is_prepared:
        with _gathered(model, plain.policy):
            yield plain.policy
    elif isinstance(model, FSDPModule):
        with _unsharded(model, accelerator.state):
            yield plain.policy
    else:
        yield plain.policy


@contextmanager
def _gathered(model: Any, policy: nn.Module) -> Iterator[None]:
    from trl.models.utils import add_hooks, remove_hooks

    with gathered(policy.parameters()):
        remove_hooks(model)
        try:
            yield
        finally:
            add_hooks(model)


@contextmanager
def _unsharded(model: Any, state: Any) -> Iterator[None]:
    """Keep blocks gathered after their first use.

    Afterwards they are resharded after each pass as configured. Parameters outside of blocks, the first shard, are
    gathered for the whole context.
    """
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    register_fsdp_forward_method(model, "on_policy")
    model.on_policy(lambda policy: None)  # the first forward method that runs tells FSDP2 the root
    model.unshard()
    for shard in shards[1:]:
        shard.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for shard in shards[1:]:
            shard.set_reshard_after_forward(state.fsdp_plugin.reshard_after_forward, recurse=False)
        for shard in shards:
            shard.reshard()


# ---- Checks of responses ----


def sample_with(
    engine: GenerationEngine,
    policy: nn.Module,
    prompts: Prompts,
    config: GenerationConfig,
    stop_strings: StopStrings | None = None,
) -> Sampled:
    """Sample responses with an engine, and check them; arguments as for `checked`, and the policy."""
    return checked(engine, engine.sample(policy, prompts, config), prompts, config, stop_strings)


def checked(
    engine: GenerationEngine,
    answer: Sampled,
    prompts: Prompts,
    config: GenerationConfig,
    stop_strings: StopStrings | None = None,
) -> Sampled:
    """Check every token that the policy will learn from.

    Args:
        engine: The engine, for errors.
        answer: Its responses.
        prompts: `B` left-padded prompts.
        config: The sampling distribution, the stop token (or several) and the length limit.
        stop_strings: Texts that also end a row, or None.

    Returns:
        The engine's responses.

    Raises:
        RuntimeError: A row ends before the limit without a stop token or string, holds a suppressed id, or lacks the
            log-probability of a token.
        ValueError: The result has another type or shape.
    """
    answer = _of_right_shape(engine, answer, len(prompts.input_ids), config)
    ids = answer.ids
    width, (most, _) = ids.shape[1], length_and_filling(config)
    lengths = torch.full_like(ids[:, 0], width) if answer.lengths is None else answer.lengths.to(ids.device)
    stops = sent(torch.tensor(stop_tokens(config), dtype=ids.dtype), ids.device)
    sampled = torch.arange(width, device=ids.device) < lengths[:, None]
    is_stop = torch.isin(ids, stops) & sampled
    is_real = sampled & (is_stop.cumsum(dim=1) - is_stop.long() == 0)
    is_cut = ~is_stop.any(dim=1) & (lengths < most)
    suppressed = sent(torch.tensor(config.suppress_tokens or [], dtype=ids.dtype), ids.device)
    is_forbidden = is_real & ((ids < 0) | torch.isin(ids, suppressed))
    values = torch.zeros_like(ids) if answer.logprobs is None else answer.logprobs
    is_unknown = is_real & ~values.isfinite()
    if bool(is_cut.any() | is_forbidden.any() | is_unknown.any()):  # one wait for the device
        _refuse_cut_rows(engine, answer, is_cut, lengths, prompts, most, stop_strings)
        _refuse_tokens(engine, answer, is_forbidden, is_unknown)
    return answer


def _of_right_shape(engine: GenerationEngine, answer: Sampled, num_rows: int, config: GenerationConfig) -> Sampled:
    answer = Sampled(*answer)
    ids, logprobs, _ = answer
    most, _ = length_and_filling(config)
    expected = (num_rows, min(ids.shape[-1], most))
    if ids.dtype != torch.long or ids.shape != expected or (logprobs is not None and logprobs.shape != expected):
        raise ValueError(
            f"{called(engine)} gave ids {ids.dtype} {tuple(ids.shape)} and log-probabilities of "
            f"{None if logprobs is None else tuple(logprobs.shape)}; sample() must return Sampled(ids, logprobs) of "
            f"({num_rows}, T) with T <= {most}, ids torch.int64"
        )
    return answer


def called(engine: GenerationEngine) -> str:
    """Return an engine's name in error messages: its argument and value."""
    return getattr(engine, "called", f"engine={type(engine).__name__}")


def _refuse_cut_rows(
    engine: GenerationEngine,
    answer: Sampled,
    is_cut: Tensor,
    lengths: Tensor,
    prompts: Prompts,
    most: int,
    stop_strings: StopStrings | None,
) -> None:
    for row in is_cut.nonzero().flatten().tolist():
        length, prompt = int(lengths[row]), int(prompts.attention_mask[row].sum())
        if stop_strings is not None and stop_strings.is_in(answer.ids[row, :length].tolist()):
            continue
        fix = getattr(engine, "cut_rows_advice", "give a row's stop token, or that many tokens")
        raise RuntimeError(
            f"{called(engine)} cut the response to row {row} of the batch: {length} tokens after a prompt of "
            f"{prompt}, where {most} were asked for, and no stop token at its end; {fix}"
        )


def _refuse_tokens(engine: GenerationEngine, answer: Sampled, is_forbidden: Tensor, is_unknown: Tensor) -> None:
    for row, place in is_unknown.nonzero().tolist():
        raise RuntimeError(
            f"{called(engine)} gave no finite log-probability for token {place} of row {row} of the batch: it must "
            "give one for each token, or logprobs=None; if it does, the policy's logits are NaN or infinite"
        )
    for row, place in is_forbidden.nonzero().tolist():
        raise RuntimeError(
            f"{called(engine)} sampled the id {int(answer.ids[row, place])} in row {row} of the batch, which not all "
            "models have; it must respect suppress_tokens of the GenerationConfig"
        )
