"""PPOTrainer: proximal policy optimization of a language model against a reward, as a `transformers.Trainer`.

The algorithm from top to bottom: the loop and its four stages. What runs around the updates is in `trainer_base.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.trainer_utils import TrainOutput

from rlhf_ppo.algorithm.advantages import KLController, check_coefficient, masked_whiten, token_rewards, zero_outside
from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss, clipped_policy_loss, clipped_value_loss
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.rollout import Experience, Prompts, Responses, Rollout
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.ranks.processes import raise_on_all_ranks
from rlhf_ppo.ranks.random_streams import minibatch_generator
from rlhf_ppo.reporting.metrics import UpdateStatistics, named_apart
from rlhf_ppo.rewards.resolve import RewardSpec
from rlhf_ppo.rewards.scorer import PendingScores, Scores, ScoringBatch, scaling_scores, shape_scores
from rlhf_ppo.run import learning
from rlhf_ppo.run.external import ExternalRows
from rlhf_ppo.run.inputs import ModelOrPath, TrainerInputs
from rlhf_ppo.run.learning import Losses, PolicyLossFunction
from rlhf_ppo.run.optimization import Optimizers
from rlhf_ppo.run.rollouts import policy_and_value_outputs, reference_logprobs
from rlhf_ppo.trainer_base import TrainerBase

if TYPE_CHECKING:
    from peft import PeftConfig


class PPOTrainer(TrainerBase):
    """Train a language model with PPO (Schulman et al., arXiv 1707.06347) against a reward, under a KL penalty.

    One Trainer step is one PPO update: each rank generates and scores `per_device_train_batch_size *
    gradient_accumulation_steps` responses, then takes `num_ppo_epochs * num_mini_batches` optimizer steps on them.

    Args:
        args: The training arguments.
        processing_class: The policy's tokenizer or processor; None loads it from the directory or hub name of `model`.
        model: The policy: a causal language model, a `PeftModel`, a directory or a hub name.
        ref_model: The reference of the KL penalty. None: the initial policy, or no reference with `args.kl_coef=0`.
        reward_model: A sequence-classification model with one label, or a list; None if only `reward_funcs` score.
        train_dataset: Rows with `prompt` (text, or conversation and `images`), `text` or `input_ids`; a path or name.
        value_model: A sequence-classification model with one label, trained with the policy. None starts from the
            reward model (not with `share_base_model`), or from the policy with a zero head. "policy": two layers on
            the policy's own last hidden states, detached; there is no second model.
        data_collator: Makes batches with `input_ids` and `attention_mask`, padded on either side.
        eval_dataset: Rows for `evaluate` and `generate_completions`, a path or hub name, or a dict of these.
        optimizers: An optimizer over all trainable parameters of both models, and a scheduler that counts PPO updates.
            Either may be a function: of the `(name, parameter)` pairs, or of the optimizer and the number of updates.
        callbacks: Trainer callbacks.
        peft_config: Adds an adapter to the policy. The reference is then the policy without the adapter.
        reward_funcs: One or several functions with `GRPOTrainer`'s signature, sync or async, their names (see
            `resolve_reward`), or objects that score the token ids of a whole batch (see `RewardSource`).
        reward_processing_classes: Tokenizer or processor of each reward model; None: the one beside it, if it differs.
        value_peft_config: Adds an adapter to the value model; only adapter and head are trained. With
            `args.share_base_model`, None copies the policy's configuration.
        kl_controller: Sets the KL coefficient after each update. None: `args.kl_coef`, or adapts to `args.kl_target`.
        engine: Generates the responses instead of the engine named by `args.generation_engine`.
        policy_loss: A function `(logprobs, experience, args) -> PolicyLoss`; None: the one that `args` names.
        ptx_dataset: Rows in `SFTTrainer`'s formats for an added language-modeling loss, weighted by `args.ptx_coef`.
        tools: Functions, sync or async, with type hints and Google docstrings, that the policy may call.
        rollout_func: A function of prompts and trainer that makes whole rollouts, as for `GRPOTrainer`.
        environment_factory: A function that makes an environment, or a dict of such functions by the names in column
            `environment`. As for `GRPOTrainer`, it has `reset(**row)` and methods that the policy may call as tools.
            It may have `get_reward`, `turn_rewards` and `done`, and make its own tasks.

    Raises:
        ValueError: Arguments are incompatible. The check runs before any training.
    """

    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        model: ModelOrPath = None,  # pyright: ignore[reportArgumentType]  required, unlike processing_class
        ref_model: ModelOrPath | None = None,
        reward_model: ModelOrPath | Sequence[ModelOrPath] | None = None,
        train_dataset: Any = None,
        value_model: ModelOrPath | None = None,
        data_collator: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None,
        eval_dataset: Any = None,
        optimizers: Optimizers = (None, None),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: PeftConfig | None = None,
        *,
        reward_funcs: RewardSpec | Sequence[RewardSpec] | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
        value_peft_config: PeftConfig | None = None,
        kl_controller: KLController | None = None,
        engine: GenerationEngine | None = None,
        policy_loss: PolicyLossFunction | None = None,
        ptx_dataset: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        inputs = TrainerInputs(
            args=args,
            processing_class=processing_class,
            model=model,
            ref_model=ref_model,
            reward_model=reward_model,
            train_dataset=train_dataset,
            value_model=value_model,
            data_collator=data_collator,
            eval_dataset=eval_dataset,
            optimizers=optimizers,
            callbacks=callbacks,
            peft_config=peft_config,
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_processing_classes,
            value_peft_config=value_peft_config,
            kl_controller=kl_controller,
            engine=engine,
            policy_loss=policy_loss,
            ptx_dataset=ptx_dataset,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        super().__init__(inputs)

    # ---- The loop: `Trainer.train` calls this ----

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: PPOConfig | None = None,
        resume_from_checkpoint: str | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        self._begin_run(resume_from_checkpoint)
        for prompts in self._prompt_batches():  # ends with the data, or at a signal
            rollout = self.collect_rollout(prompts)  # 1. sample, score, compute log-probabilities and values
            self._check_and_count_scores(rollout)  # NaN ends the run; stage 2 scales by the counted scores
            experience = self.estimate_advantages(rollout)  # 2. rewards, KL, GAE
            statistics = self.learn(experience)  # 3. epochs x mini-batches x micro-batches
            self._end_update(rollout, experience, statistics)  # 4. KL coefficient, metrics, log, evaluate, save
        return self._finish_run()

    def _check_and_count_scores(self, rollout: Rollout) -> None:
        """Stop at values that are not finite, and count the scores in the moments that scale them."""
        self._guard.check_rollout(rollout)
        if self.args.score_scaling:
            self.score_moments.add(scaling_scores(rollout, self.args), self._run.sum_over_ranks)

    # ---- 1. Rollout ----

    @torch.no_grad()
    def collect_rollout(
        self, prompts: Prompts, responses: Responses | None = None, scores: Scores | None = None
    ) -> Rollout:
        """Sample a response to each prompt, score it, and compute log-probabilities and values.

        Slow rewards (async functions, endpoints) run while the models compute.

        Args:
            prompts: This rank's prompts.
            responses: Responses that were sampled already, or None.
            scores: Their scores, or None.

        Returns:
            The rollout. Its `logprobs` come from learning's own forward function, so the first importance ratio is 1.
        """
        run, model = self._run, self.model_wrapped
        model.eval()  # not chained: DeepSpeed returns None
        if responses is None:
            with run.timer.phase("generate"):
                responses, prompts = self._respond(prompts)
        batch = self._scoring_batch(responses, prompts)
        # Rewards have their own random numbers, also those that run while the models compute.
        with run.streams.rewards.in_use(), self.scorer.start(batch) if scores is None else nullcontext() as pending:
            with run.timer.phase("evaluate"):
                output = policy_and_value_outputs(run, model, responses)
                ref_logprobs = reference_logprobs(run, model, self.reference, responses)
            with run.timer.phase("score"):
                scores = scores or self.score_responses(responses, prompts, pending)
        return Rollout(
            responses=responses,
            ended=batch.ended,
            logprobs=output.logprobs,
            ref_logprobs=ref_logprobs,
            values=output.values,
            final_values=output.final_values,
            scores=scores.scores,
            token_scores=scores.token_scores,
            scores_by_source=scores.by_source,
        )

    def generate_responses(
        self, prompts: Prompts, config: GenerationConfig | None = None, policy: nn.Module | None = None
    ) -> Responses:
        """Sample a response to each prompt and truncate it after the stop token or stop string.

        A response with neither keeps all its tokens and counts as not ended (`Rollout.ended`). It is scored and
        learned like the others; `missing_eos_penalty`, `missing_eos_score` and `bootstrap_truncated` change that.

        Args:
            prompts: `B` prompts.
            config: Sampling parameters; None takes those of training.
            policy: The wrapper of another model to sample from, whose attribute `policy` is that model; None: the
                trained policy.

        Returns:
            `B` prompts with their responses.

        Raises:
            NonFiniteLogitsError: The policy's logits are NaN or infinite.
        """
        return self.sampler.sample(self.model_wrapped if policy is None else policy, prompts, config)

    def _respond(self, prompts: Prompts, config: GenerationConfig | None = None) -> tuple[Responses, Prompts]:
        """Sample responses, or play episodes; return them and the prompts with their new columns."""
        if self._play is not None:
            return self._play(self.model_wrapped, prompts, config)
        return self.generate_responses(prompts, config), self._with_baselines(prompts)

    def _with_baselines(self, prompts: Prompts) -> Prompts:
        """Add the baselines' responses, with which some rewards compare, as columns."""
        if not self._baselines.kinds:
            return prompts

        def respond_as(kind: str) -> Responses:
            if kind == "self" or self.reference is None:
                return self.generate_responses(prompts)
            with self.reference.generating(self.model_wrapped, self.policy_model) as generating:
                return self.generate_responses(prompts, policy=generating)

        return self._baselines.respond(prompts, respond_as)

    def score_responses(self, responses: Responses, prompts: Prompts, pending: PendingScores | None = None) -> Scores:
        """Score truncated responses with all reward sources.

        Args:
            responses: `B` prompts with their responses.
            prompts: The prompts of the same rows, with the other columns of the data set.
            pending: Slow sources that run already for these responses, or None.

        Returns:
            The weighted sums, and the scores of each source.
        """
        with self._run.streams.rewards.in_use():
            if pending is None:
                return self.scorer(self._scoring_batch(responses, prompts))
            return pending.result()

    def _scoring_batch(self, responses: Responses, prompts: Prompts) -> ScoringBatch:
        run, tokens = self._run, self.tokens
        ended = tokens.ended(responses)
        return ScoringBatch(responses, prompts, ended, tokens.stops, run.tokenizer, run.template_kwargs)

    # ---- 2. Advantages ----

    def estimate_advantages(self, rollout: Rollout) -> Experience:
        """Compute rewards, advantages and returns of a rollout, and whiten the advantages.

        Args:
            rollout: This rank's rollout.

        Returns:
            The experience. Advantages have mean 0 and variance 1 over `loss_mask` (tokens of scored responses that
            the policy wrote) on all ranks.
        """
        args, sum_over_ranks, mask = self.args, self._run.sum_over_ranks, rollout.loss_mask
        rewards = scaled = self.shape_rewards(rollout)
        if args.whiten_rewards:
            scaled = masked_whiten(rewards, mask, shift_mean=False, reduce_sum=sum_over_ranks)
        advantages, returns = self.compute_advantages(rollout, scaled)
        whitened = masked_whiten(advantages, mask, reduce_sum=sum_over_ranks)
        weights = None
        if args.importance_sampling_correction:
            weights = rollout.importance_weights(args.importance_sampling_clip_max)
        return Experience(
            responses=rollout.responses,
            ended=rollout.ended,
            logprobs=rollout.logprobs,
            values=rollout.values,
            rewards=rewards,
            advantages=whitened,
            returns=zero_outside(returns, mask),
            loss_mask=mask,
            importance_weights=weights,
        )

    def shape_rewards(self, rollout: Rollout) -> Tensor:
        """Compute each token's reward: minus its KL penalty, plus its token reward, plus the score at the last token.

            r_t = -coef KL_t + token_score_t + score [t is the last token that the policy wrote]

        Override this method to add a reward or a penalty, for example on length.

        Args:
            rollout: `B` responses of this rank.

        Returns:
            Rewards, float32 `(B, T)`, 0 outside the response mask; NaN at the end of a response without a score.
        """
        scores, token_scores = shape_scores(rollout, self.args, self._score_unit)
        kl = rollout.kl(self.args.kl_estimator)
        return token_rewards(kl, scores, rollout.response_mask, self.kl_controller.coef, token_scores)[1]

    def compute_advantages(self, rollout: Rollout, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Compute advantages and returns with GAE (Schulman et al., arXiv 1506.02438).

        Args:
            rollout: `B` responses of this rank.
            rewards: Rewards from `shape_rewards`, whitened if `whiten_rewards` is set, `(B, T)`.

        Returns:
            Advantages before whitening, and returns, float32 `(B, T)` each, 0 outside `rollout.loss_mask`.
        """
        return learning.advantages_and_returns(rollout, rewards, self.args, self._critic_only.warms_up)

    # ---- 3. Learning ----

    def learn(self, experience: Experience) -> UpdateStatistics:
        """Take `num_ppo_epochs * num_mini_batches` optimizer steps, with new mini-batches in every epoch.

        Args:
            experience: This rank's experience.

        Returns:
            Sums of the update's metrics, and the gradient norm of the last step before clipping.
        """
        self._guard.check_experience(experience)
        run, args = self._run, self.args
        statistics = UpdateStatistics(
            watches_kl=args.kl_stop is not None,
            shares_prefixes=run.models.shares_prefixes,
        )
        generator = minibatch_generator(args.seed, self.state.global_step, args.process_index)
        self.model_wrapped.train()
        with run.timer.phase("learn"):
            for _ in range(args.num_ppo_epochs):
                statistics.begin_epoch()
                for minibatch in experience.shuffled_minibatches(args.num_mini_batches, generator):
                    statistics.grad_norm = self.optimizer_step(minibatch, statistics)
                if args.kl_stop is not None and statistics.kl_of_epoch(run.sum_over_ranks) > args.kl_stop:
                    break
        if statistics.losses:
            self._tr_loss += torch.stack(statistics.losses).mean()
        self.sampler.engine.policy_changed()
        return statistics

    def optimizer_step(self, minibatch: Experience, statistics: UpdateStatistics) -> float | Tensor:
        """Take one optimizer step on a mini-batch, with gradients accumulated over micro-batches.

        Each micro-batch's loss is the sum over its tokens, divided by the tokens of the whole mini-batch on all ranks,
        so the gradient is the same for any number and size of micro-batches.

        Args:
            minibatch: This rank's share of the mini-batch.
            statistics: Collects the metrics of each micro-batch.

        Returns:
            Gradient norm before clipping. Without a step, if no response has a score, that of the last step.
        """
        run, model = self._run, self.model_wrapped
        num_tokens = float(run.sum_over_ranks(minibatch.loss_mask.sum()))
        if num_tokens == 0:
            return statistics.grad_norm
        losses: list[Tensor] = []
        ptx_loss = 0.0 if self.ptx is None else self.ptx.learn(model, statistics, self._forward_context)
        parts = learning.weighted_micro_batches(minibatch, num_tokens, run)
        for number, micro_batch in enumerate(parts, start=1):
            with learning.accumulate(self.accelerator, model, number == len(parts), self.args):
                loss, figures = self._backward(micro_batch, num_tokens)
            statistics.add(micro_batch, *figures)
            losses.append(loss * self.accelerator.num_processes)  # a share of the sum; Trainer logs the ranks' mean
            if number < len(parts):
                run.fire("on_substep_end")
        losses[-1] = losses[-1] + ptx_loss
        return self._clip_and_step(losses, statistics)

    def _clip_and_step(self, losses: Sequence[Tensor], statistics: UpdateStatistics) -> float | Tensor:
        """Clip the gradients, step and clear them.

        Args:
            losses: Losses of the step's micro-batches.
            statistics: Of the update; those of the step's micro-batches are the last. Gets the step's loss.

        Returns:
            Gradient norm before clipping.
        """
        run, loss = self._run, torch.stack(list(losses)).sum()
        self._critic_only.drop_policy_gradients()
        norms = learning.gradient_norms(self.accelerator, run.models)
        grad_norm = self._clip_gradients()
        self._guard.check_step(statistics, len(losses), loss, grad_norm)
        if norms is not None:
            statistics.grad_norms.append(norms)
        run.fire("on_pre_optimizer_step")
        self.optimizer.step()
        run.fire("on_optimizer_step")
        statistics.losses.append(loss)
        self.model_wrapped.zero_grad()
        if self.ptx is not None:
            self.ptx.count_step()
        return grad_norm

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        """Run models as Trainer's training step does."""
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            yield

    def _backward(self, part: Experience, num_tokens: float) -> tuple[Tensor, Losses]:
        """Run a micro-batch's passes forward and backward; return its loss, and outputs and losses of each token.

        Where each model has a pass (see `learning.model_passes`), the backward pass of one runs before the
        other's forward pass, to hold one model's activations at a time. An overridden
        `compute_loss` has one backward pass.
        """
        model, run_backward = self.model_wrapped, partial(learning.backward, self.accelerator)
        if type(self).compute_loss is PPOTrainer.compute_loss:
            return self._sum_of_passes(model, part, num_tokens, run_backward)
        with self._forward_context():
            loss, losses = self.compute_loss(model, part, return_outputs=True, num_items_in_batch=num_tokens)
        return run_backward(loss), losses

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Experience,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Any:
        """Compute `policy loss + vf_coef * value loss` of a micro-batch, from `policy_loss` and `value_loss`.

        To change a term, override `policy_loss` or `value_loss`. If you override this method, training calls it, and
        runs one backward pass for both models. In warm-up the policy has no pass: its loss and entropy are 0.

        Args:
            model: The `PolicyAndValue`.
            inputs: The micro-batch.
            return_outputs: Whether to return the per-token parts too.
            num_items_in_batch: Number of tokens to divide by; None: the tokens of the micro-batch.

        Returns:
            The loss, a scalar; with `return_outputs` also `(PolicyAndValueOutput, PolicyLoss, ValueLoss)`.
        """
        num_tokens = float(inputs.loss_mask.sum() if num_items_in_batch is None else num_items_in_batch)
        loss, losses = self._sum_of_passes(model, inputs, num_tokens, lambda term: term)
        return (loss, losses) if return_outputs else loss

    def _sum_of_passes(
        self, model: nn.Module, part: Experience, num_tokens: float, with_term: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Losses]:
        """Run the policy, the value model, or both in one pass, and add up the terms of the loss.

        Args:
            model: The `PolicyAndValue`.
            part: The micro-batch.
            num_tokens: Number of tokens to divide by.
            with_term: Takes the term of each pass before the next pass begins; training runs the backward pass in it.
        """
        args, losses, zero = self.args, Losses.before(part), part.logprobs.new_zeros(())
        total, responses = zero, part.responses
        for only in learning.model_passes(self.accelerator, args, self.value_model, self._critic_only.warms_up):
            output, policy_loss, value_loss = losses
            with self._forward_context():
                output = output._replace(**model(*responses.batch, only=only, places=responses.places)._asdict())
                if only == "value_model":
                    term = zero + learning.zero_of_policy(model, self.policy_model)
                else:
                    policy_loss = self.policy_loss(output.logprobs, part)
                    term = learning.policy_term(policy_loss, output, part, num_tokens, args)
                if only != "policy":
                    value_loss = self.value_loss(output.values, part)
                    term = term + learning.value_term(value_loss, part, num_tokens, args)
            total, losses = total + with_term(term), Losses(output, policy_loss, value_loss)
        return total, losses

    def policy_loss(self, logprobs: Tensor, experience: Experience) -> PolicyLoss:
        """Compute the policy loss of each token: PPO's clipped loss, or your `policy_loss` function.

        Args:
            logprobs: Current log-probabilities of the response tokens, nats, `(B, T)`.
            experience: The micro-batch.

        Returns:
            Losses, `(B, T)`. Training minimizes the mean of `loss` over the mini-batch's tokens, and logs `figures`.
        """
        if self._policy_loss is not None:
            return self._policy_loss(logprobs, experience, self.args)
        return clipped_policy_loss(
            logprobs,
            experience.logprobs,
            experience.advantages,
            self.args.cliprange,
            experience.importance_weights,
            self.args.cliprange_high,
        )

    def value_loss(self, values: Tensor, experience: Experience) -> ValueLoss:
        """Compute the value loss of each token before `vf_coef`: the clipped squared error.

        Args:
            values: Current values of the response tokens, `(B, T)`.
            experience: The micro-batch.

        Returns:
            Losses, `(B, T)`. Training minimizes `vf_coef` times the mean of `loss` over tokens, and logs `figures`.
        """
        return clipped_value_loss(values, experience.values, experience.returns, self.args.cliprange_value)

    # ---- 4. The end of an update ----

    def _end_update(self, rollout: Rollout, experience: Experience, statistics: UpdateStatistics) -> dict[str, float]:
        """Update the KL coefficient and count the update; log, evaluate and save if due; return the metrics."""
        run, warms_up = self._run, self._critic_only.warms_up
        metrics = self._rollout_metrics.record(rollout, experience, self.kl_controller, self._score_unit)
        metrics |= self._critic_only.metrics(statistics.metrics(run.sum_over_ranks, run.gather))
        if "objective/kl" in metrics and not warms_up:  # in warm-up the policy, and so the KL, is constant
            self.kl_controller.update(metrics["objective/kl"], self.sizes.batch_size)
            check_coefficient(self.kl_controller)  # before it is saved
        metrics |= named_apart(run.logged.drain(), metrics)
        self._count_update(metrics, statistics.grad_norm)
        self._make_samples()
        self._report("on_step_end")
        return metrics

    # ---- The update of your own loop ----

    def step(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Sequence[float] | Sequence[Tensor] | Tensor,
        response_masks: Sequence[Tensor] | None = None,
        sampling_logprobs: Sequence[Tensor] | None = None,
        ended: Sequence[bool] | Tensor | None = None,
    ) -> dict[str, float]:
        """Run one PPO update on responses that you sampled in your own loop.

        Each call is a full update, with logs, checkpoints, events and schedule. The trainer needs no data set and no
        rewards, but it needs `total_episodes` or `max_steps`. The first call starts the run, or resumes it from
        `args.resume_from_checkpoint`; `state.global_step` then counts the completed updates. The last call ends the
        run. A signal ends the run with a checkpoint after the update of the running or next call.

        Args:
            queries: Token ids of this rank's `per_device_train_batch_size * gradient_accumulation_steps` prompts, long
                `(C_i,)` each.
            responses: Token ids of the policy's responses, including the stop token, long `(T_i,)` each.
            scores: Score of each response, `(B,)`, or a reward for each of its tokens, `(T_i,)` each; NaN excludes a
                response from learning.
            response_masks: True on the tokens that the policy wrote, bool `(T_i,)` each; all other tokens, like a
                tool's, are context. None: the policy wrote all tokens.
            sampling_logprobs: Log-probability of each response token in the distribution it was sampled from, after
                temperature, `top_k`, `top_p` and `min_p`, nats, `(T_i,)` each. Values of tokens that the policy did
                not write are ignored. With `importance_sampling_correction` they give the importance weights, like an
                engine's log-probabilities. None: no correction.
            ended: Whether each response ended by itself, bool `(B,)`; False where a limit cut it. None: a response
                ended if its last turn holds the stop token or a stop string.

        Returns:
            The update's metrics.

        Raises:
            ValueError: The number of rows is not that of an update, a row has another type or length, or is too long
                for the models, an id is not in a vocabulary, a response has no token of the policy, a score is not a
                number, or a log-probability is above 0 or not finite. The trainer is unchanged.
            RuntimeError: The run has had all its updates, or `close` has ended it.
            RunStopped: A signal ended the run.
        """
        external = ExternalRows(queries, responses, scores, response_masks, sampling_logprobs, ended)
        with raise_on_all_ranks(self.accelerator):
            rows, row_scores = external.padded(self._run, self.sizes.local_batch_size, self._preparation)
        with self._external_run.update(self._begin_external_run, self._leave_if_stopped, self._finish_run):
            self._run.fire("on_step_begin")
            rollout = self.collect_rollout(Prompts.of_responses(rows), rows, row_scores)
            self._check_and_count_scores(rollout)
            experience = self.estimate_advantages(rollout)
            return self._end_update(rollout, experience, self.learn(experience))
