"""What a rollout is made of: responses of the policy and of those it is compared with, and what the models say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.passes import in_passes
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Responses, Rollout
from rlhf_ppo.generation.nonfinite import naming_the_model
from rlhf_ppo.generation.opponents import Opponents
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.generation.transformers_engine import greedy_config, sampling_config
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.reference import Reference
from rlhf_ppo.models.vocabulary import Vocabulary
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.processes.signals import give_up_if_stopped
from rlhf_ppo.reporting.timing import PhaseTimer, noting_out_of_memory
from rlhf_ppo.rewards.scorer import Scores
from rlhf_ppo.training.sharding import on_whole_policy
from rlhf_ppo.training.special_tokens import SpecialTokens

if TYPE_CHECKING:
    from transformers import GenerationConfig


class SamplingTrainer(Protocol):
    """What rollouts ask of their trainer."""

    accelerator: Accelerator
    args: PPOConfig
    reference: Reference | None
    tokens: SpecialTokens
    _engine: GenerationEngine
    _timer: PhaseTimer
    _vocabulary: Vocabulary

    def generate_responses(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Responses:
        """See `PPOTrainer`."""
        ...

    def score_responses(self, responses: Responses, prompts: Prompts) -> Scores:
        """See `PPOTrainer`."""
        ...

    def _moment(self) -> str: ...
    def _unwrapped(self, model: nn.Module) -> PolicyAndValue: ...


class Rollouts:
    """Runs the models for the steps `generate_responses` and `score_responses` of a trainer.

    Args:
        run: The trainer.
        opponents: Whose responses the reward functions compare with.
    """

    def __init__(self, run: SamplingTrainer, opponents: Opponents) -> None:
        self.run, self.opponents = run, opponents

    def generate(
        self, model: nn.Module, prompts: Prompts, config: GenerationConfig | None = None
    ) -> tuple[Responses, Prompts]:
        """Let the policy respond, and then the opponents that reward functions compare with.

        Args:
            model: The prepared `PolicyAndValue`.
            prompts: `B` prompts.
            config: How the policy's tokens are chosen; None: as in training.

        Returns:
            The responses, and the prompts with those of the opponents as columns.
        """
        sampling = sampling_config(self.run.args, self.run.tokens.stop, self.run._vocabulary.never_sampled)
        responses = self._responses(model, prompts, config or sampling)
        reference, policy = self.run.reference, self.run._unwrapped(model).policy

        def of_opponent(kind: str) -> Responses:
            if kind == "self" or reference is None:
                return self._responses(model, prompts, sampling)
            with reference.generating(model, policy) as generating:
                return self._responses(generating, prompts, sampling)

        return responses, self.opponents.respond(prompts, of_opponent)

    @contextmanager
    def sampling(self, policy: nn.Module, role: str) -> Iterator[None]:
        """Sample in autocast; an error of one rank is raised on all, and names the model.

        Args:
            policy: The language model that is sampled from.
            role: What it is called.
        """
        run = self.run
        naming = naming_the_model(policy, role, run._moment())
        with failing_together(run.accelerator), naming, run.accelerator.autocast():
            yield
            give_up_if_stopped()

    def _responses(self, model: nn.Module, prompts: Prompts, config: GenerationConfig) -> Responses:
        run = self.run
        if run._engine.reads_sharded:
            return run.generate_responses(run._unwrapped(model).policy, prompts, config)
        return on_whole_policy(
            model,
            run.accelerator,
            run.args.ds3_gather_for_generation,
            lambda policy: run.generate_responses(policy, prompts, config),
        )

    def greedy(self, model: nn.Module, prompts: Prompts) -> tuple[Prompts, Responses, Scores]:
        """Respond with the likeliest tokens, let the opponents respond, and score the responses, for a table."""
        config = greedy_config(self.run.args, self.run.tokens.stop, self.run._vocabulary.never_sampled)
        with noting_out_of_memory("generate"):
            responses, prompts = self.generate(model, prompts, config)
        with noting_out_of_memory("score"):
            return prompts, responses, self.run.score_responses(responses, prompts)

    def evaluated(
        self, model: nn.Module, responses: Responses, stopped: Tensor, score: Callable[[], Scores]
    ) -> Rollout:
        """Evaluate policy, value model and reference, if there is one, on responses, then take their scores.

        Args:
            model: The prepared `PolicyAndValue`.
            responses: `B` responses.
            stopped: Which of them ended by themselves, bool `(B,)`.
            score: Gives their scores.
        """
        packs_rows = self.run._unwrapped(model).packs_rows
        with self.run._timer.phase("evaluate"):
            output = self._in_passes(responses, partial(model, with_entropy=False), packs_rows)
            ref_logprobs = self._ref_logprobs(model, responses, output[0])
        with self.run._timer.phase("score"):
            scores = score()
        return Rollout(
            query_responses=responses.query_responses,
            attention_mask=responses.attention_mask,
            response_mask=responses.response_mask,
            sampling_logprobs=responses.sampling_logprobs,
            on_host=responses.on_host,
            stopped=stopped,
            logprobs=output[0],
            ref_logprobs=ref_logprobs,
            values=output[2],
            final_values=output[3],
            scores=scores.final,
            token_scores=scores.per_token,
            scores_by_source=scores.by_source,
        )

    def _ref_logprobs(self, model: nn.Module, responses: Responses, logprobs: Tensor) -> Tensor | None:
        """Return the reference's log-probabilities; None if there is no reference."""
        models, reference = self.run._unwrapped(model), self.run.reference
        if reference is None or reference.is_policy(models.policy):
            return None if reference is None else logprobs
        with reference.forward(model, models.policy) as forward:
            return self._in_passes(responses, forward, models.packs_rows)[0]

    @torch.no_grad()
    def of_given(self, model: nn.Module, responses: Responses, scores: Scores) -> Rollout:
        """Make the rollout of responses that were sampled and scored elsewhere."""
        model.eval()
        return self.evaluated(model, responses, self.run.tokens.ended(responses), lambda: scores)

    def _in_passes(
        self, responses: Responses, forward: Callable[..., tuple[Tensor, ...]], is_packed: bool
    ) -> tuple[Tensor, ...]:
        accelerator = self.run.accelerator

        def evaluate(part: Responses) -> tuple[Tensor, ...]:
            if accelerator.num_processes == 1:
                give_up_if_stopped()
            with accelerator.autocast():
                return forward(*part.batch, places=part.places)

        return in_passes(responses, evaluate, self.run.args.local_rollout_forward_batch_size, is_packed)
