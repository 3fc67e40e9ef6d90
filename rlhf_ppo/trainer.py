"""PPOTrainer: proximal policy optimization of a language model against a reward, as a `transformers.Trainer`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import TrainOutput

from rlhf_ppo.algorithm.advantages import KLController, check_coefficient, token_rewards
from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss, clipped_policy_loss, clipped_value_loss
from rlhf_ppo.algorithm.masked import RunningMoments, ScoreMoments, masked_whiten
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.prompts import NoPrompts, PromptCollator, Prompts, check_lengths, num_rows
from rlhf_ppo.data.rollout import Experience, Responses, Rollout
from rlhf_ppo.generation.protocol import GenerationEngine, length_and_filling, sample_with
from rlhf_ppo.generation.sampling import join_responses
from rlhf_ppo.models.policy_and_value import PolicyAndValue, PolicyAndValueOutput, ResponseLogprobs
from rlhf_ppo.models.unwrapping import configuration_kept
from rlhf_ppo.processes import distributed
from rlhf_ppo.reporting.metrics import UpdateStatistics
from rlhf_ppo.rewards.resolve import RewardSpec
from rlhf_ppo.rewards.reward_model import load_reward_models
from rlhf_ppo.rewards.scorer import Scores, ScoringBatch, shape_scores, whole_scores
from rlhf_ppo.trainer_base import TrainerBase
from rlhf_ppo.training import checks, construction, learning
from rlhf_ppo.training.construction import ModelOrPath
from rlhf_ppo.training.datasets import load_data
from rlhf_ppo.training.episodes import EpisodeRollouts
from rlhf_ppo.training.external_loop import given_responses
from rlhf_ppo.training.learning import PolicyLossFunction
from rlhf_ppo.training.optimization import Optimizers
from rlhf_ppo.training.ptx import LanguageModeling
from rlhf_ppo.training.rollouts import policy_and_value_outputs, reference_logprobs, rollout_of
from rlhf_ppo.training.run_state import RunState, Stateful, special_tokens

if TYPE_CHECKING:
    from peft import PeftConfig

logger = distributed.get_logger(__name__)

Losses = tuple[PolicyAndValueOutput, PolicyLoss, ValueLoss]
"""Model outputs, policy loss and value loss of each token of a micro-batch."""


class PPOTrainer(TrainerBase):
    """Train a language model with PPO (Schulman et al., arXiv 1707.06347) against a reward, under a KL penalty.

    One Trainer step is one PPO update: generate `per_device_train_batch_size * gradient_accumulation_steps` responses
    on every rank, score them, then take `num_ppo_epochs * num_mini_batches` optimizer steps on them.

    Args:
        args: The training arguments.
        processing_class: The policy's tokenizer, with any padding side. None loads it from the directory or hub name
            of `model`.
        model: The policy: a causal language model, a `PeftModel`, a directory or a hub name.
        ref_model: The reference policy of the KL penalty. None uses the initial policy; with `args.kl_coef=0` None
            uses no reference.
        reward_model: A sequence-classification model with one label, or a list of these models. None if only
            `reward_funcs` score.
        train_dataset: Rows with `prompt` (text or conversation), `text` or `input_ids`; `reward_funcs` receive the
            other columns. A path or hub name loads the split `train`.
        value_model: A sequence-classification model with one label; it is trained with the policy. None starts from
            the reward model, or from the policy's backbone with a zero head.
        data_collator: Makes batches with `input_ids` and `attention_mask`, padded on either side.
        eval_dataset: Rows for `evaluate` and `generate_completions`, a path or hub name (split `test` or
            `validation`), or a dict of these.
        optimizers: An optimizer over all trainable parameters of both models, and a scheduler that counts PPO updates.
            Either may be a function, called when training starts. The optimizer's function takes the list of
            `(name, parameter)`, with names like `policy.lm_head.weight` and `value_model.score.weight`; the
            scheduler's function takes the optimizer and the number of updates.
        callbacks: Trainer callbacks.
        peft_config: Adds an adapter to the policy. The reference is then the policy without the adapter.
        reward_funcs: One or several Python functions with `GRPOTrainer`'s signature, sync or async, or their names
            (see `rlhf_ppo.rewards.resolve.resolve_reward`); or objects that score the token ids of a whole batch (see
            `rlhf_ppo.rewards.scorer.RewardSource`).
        reward_processing_classes: The tokenizer of each reward model that does not use the policy's tokens. None loads
            the tokenizer saved beside the reward model if its tokens differ.
        value_peft_config: Adds an adapter to the value model; only adapter and head are trained. With
            `args.share_base_model`, None copies the policy's configuration.
        kl_controller: Sets the coefficient of the KL penalty after each update. None keeps `args.kl_coef`, or adapts
            it to `args.kl_target`.
        engine: Generates the responses instead of the engine named by `args.generation_engine`.
        policy_loss: A function `(logprobs, experience, args) -> PolicyLoss`; see the method `policy_loss`. None uses
            the loss named by `args.policy_loss`.
        ptx_dataset: Rows in `SFTTrainer`'s formats (`text`; `prompt` and `completion`; or `messages`) for an added
            language-modeling loss, weighted by `args.ptx_coef`.
        tools: Functions, sync or async, with type hints and Google docstrings, that the policy may call.
        rollout_func: A function of prompts and trainer that makes whole rollouts, as for `GRPOTrainer`.
        environment_factory: A function without arguments that makes an environment, or a dict of such functions, of
            which the column `environment` names one. As for `GRPOTrainer`, an environment has `reset(**row)` and
            methods that the policy may call as tools. It may have `get_reward`, `turn_rewards` and `done`, and make
            its own tasks without `train_dataset`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Arguments are incompatible. The check runs before any training.
    """

    _tag_names = ("rlhf_ppo", "ppo")

    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase | None = None,
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
        # Check everything that needs no weights.
        checks.check_arguments(args)
        self._reward_funcs = reward_funcs
        self._episodes = episodes = EpisodeRollouts.of(args, tools, environment_factory, rollout_func)
        given = (episodes, reward_funcs, reward_model, train_dataset, eval_dataset)
        self._is_stepped = all(each is None for each in given)  # for `step`, which receives responses and scores
        functions = construction.reward_functions(reward_funcs, reward_model, episodes, self._is_stepped)
        checks.check_has_reward(reward_model, bool(functions))
        tokenizer = construction.load_tokenizer(model) if processing_class is None else processing_class
        train_dataset = NoPrompts() if self._is_stepped else train_dataset
        train_dataset, eval_dataset = load_data(args, tokenizer, train_dataset, eval_dataset, episodes)
        adapters = {"peft_config": peft_config, "value_peft_config": value_peft_config}
        checks.check_others(args, optimizers, kl_controller, ptx_dataset)
        self._policy_loss = learning.resolve_policy_loss(args.policy_loss if policy_loss is None else policy_loss)
        self.tokens = tokens = special_tokens(args, tokenizer)
        checks.check_optimization(args, optimizers, num_rows(train_dataset))

        # Load and prepare the models.
        rewards = load_reward_models(args, reward_model, reward_processing_classes, tokenizer)
        models = construction.assemble_models(
            args, model, ref_model, rewards, value_model, **adapters,
            needs_reference=construction.needs_reference(args, functions, kl_controller),
            accelerator=construction.early_accelerator(self, args),
        )  # fmt: skip
        self.policy_model, self.value_model, self.reference = models.policy, models.value_model, models.reference
        self.reward_models = [each.model for each in models.rewards]

        # Tokenize the prompts, make the state of the run, and call Trainer's constructor.
        preparation = construction.prompt_preparation(args, tokenizer, tokens, models, functions, episodes)
        train_dataset, eval_dataset = preparation.both(train_dataset, eval_dataset)  # drops long prompts
        self.sizes = sizes = args.fill_derived(distributed.num_processes(args), num_rows(train_dataset))
        vocabulary, limit = preparation.vocabulary, preparation.limit
        self._run = run = RunState(args, tokenizer, tokens, functions, sizes, vocabulary, limit)
        self.kl_controller = construction.make_kl_controller(args, kl_controller)
        self._critic_only, self.score_moments = learning.CriticOnly(run), RunningMoments()
        if kl_controller is not None or args.kl_target is not None:
            run.stateful.register("kl_controller", self.kl_controller)
        if args.score_scaling:
            run.stateful.register("score_moments", self.score_moments)
        distributed.use_one_device(args)
        with configuration_kept(models.policy, "use_cache"):
            super().__init__(
                model=PolicyAndValue(models.policy, models.value_model, args.temperature), args=args,
                data_collator=data_collator or PromptCollator(tokens.pad), train_dataset=train_dataset,
                eval_dataset=eval_dataset, processing_class=tokenizer, callbacks=callbacks, optimizers=optimizers,
            )  # fmt: skip

        # Make the parts that need Trainer's accelerator.
        self._engine, self._preparation, self._rollouts, self.scorer = construction.make_parts(
            self, run, models, preparation, episodes, engine, generate=lambda *given: self.generate_responses(*given)
        )
        self._ptx = None if ptx_dataset is None else LanguageModeling(run, self._critic_only, ptx_dataset)

    # ---- The loop ----

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Run PPO.

        SIGTERM, SIGINT and SIGHUP end the run with a checkpoint after the update that is running. A second signal ends
        the process at once.

        Args:
            resume_from_checkpoint: A checkpoint directory; True for the newest complete checkpoint of `output_dir`;
                None for `args.resume_from_checkpoint`.
            trial: Ignored; for compatibility with Trainer.
            ignore_keys_for_eval: Ignored; for compatibility with Trainer.

        Returns:
            Number of updates, mean loss and speed.

        Raises:
            ValueError: The checkpoint is incomplete or belongs to another model, or `output_dir` holds another run.
            RuntimeError: Another process trains in `output_dir`.
            RunStopped: A signal ended the run. This is a `SystemExit` with code 143 (SIGTERM), 130 (SIGINT) or 129
                (SIGHUP).
        """
        if self._is_stepped:
            raise ValueError("train_dataset=None: pass the prompts to train on, or call step() with responses")
        with self._open_run(resume_from_checkpoint) as checkpoint:
            return super().train(checkpoint, None, ignore_keys_for_eval)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: PPOConfig | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        loop = self._begin_run(resume_from_checkpoint, ignore_keys_for_eval)
        self._evaluate_on_start()
        if self._begins_steps:
            self._begin_epoch()
            return TrainOutput(self.state.global_step, 0.0, {})
        for epoch in itertools.count(loop.epoch):
            for prompts in self._prompts(epoch):
                experience = self._next_experience(partial(self.collect_rollout, loop.model, prompts))
                loop.grad_norm = self.learn(loop.model, experience)
                self._end_update()
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            self._leave_if_stopped()
            self._end_epoch(epoch)
            if self.control.should_training_stop:
                break
        return self._finish_run()

    def _prompts(self, epoch: int) -> Iterator[Prompts]:
        """Yield this rank's prompts for each update of an epoch, after the batches that a resumed run has done.

        Each prompt is repeated `args.num_generations` times in adjacent rows.
        """
        run, loop, num_batches = self._run, self._run.loop, self._run.loop.num_skipped
        loop.epoch = epoch
        self._begin_epoch()
        if self.state.global_step >= self.state.max_steps:  # resumed from the run's last checkpoint
            self.control.should_training_stop = True
            return
        for batch in loop.passes.batches(epoch, num_batches):
            num_batches += 1
            run.latest_prompts = Prompts.from_collated(batch, self.args.device)
            yield run.latest_prompts.repeated(self.args.num_generations)
        if num_batches == 0:
            logger.warning(f"The data gave no full batch in pass {epoch}; training stops.")
            self.control.should_training_stop = True

    def _next_experience(self, collect: Callable[[], Rollout]) -> Experience:
        """Collect a rollout and estimate its advantages."""
        run = self._run
        run.fire("on_step_begin")
        rollout = collect()
        run.guard.check_rollout(rollout)
        experience = self.estimate_advantages(rollout)
        run.guard.check_experience(experience)
        return experience

    def _end_update(self) -> None:
        """Update the KL coefficient, count the update; log, evaluate and save if due."""
        mean_kl = self._run.metrics.get("objective/kl")  # an overridden step may log none
        if mean_kl is not None and not self._critic_only.warms_up:  # in warm-up the policy, and so the KL, is constant
            self.kl_controller.update(mean_kl, self.sizes.batch_size)
            check_coefficient(self.kl_controller)  # before it is saved
        self._count_update()
        self._make_samples()
        self._report("on_step_end")

    # ---- Rollout ----

    @torch.no_grad()
    def collect_rollout(self, model: nn.Module, prompts: Prompts) -> Rollout:
        """Sample a response to each prompt, score it, and compute log-probabilities and values.

        Slow rewards (async functions, endpoints) run while the models compute.

        Args:
            model: The prepared `PolicyAndValue`.
            prompts: This rank's prompts.

        Returns:
            The rollout. Its `logprobs` come from the forward function that learning uses, so before the first
            optimizer step the importance ratio is 1.
        """
        model.eval()
        with self._run.timer.phase("generate"):
            responses, prompts = self._rollouts.respond(model, prompts)
        return self._evaluate_responses(model, responses, prompts)

    def _evaluate_responses(self, model: nn.Module, responses: Responses, prompts: Prompts) -> Rollout:
        """Start slow rewards, compute log-probabilities and values, and collect the scores."""
        run = self._run
        with run.streams.rewards.in_use():  # rewards have their own random numbers; the forward passes draw none
            with run.timer.phase("score"):
                batch = ScoringBatch.of(responses, prompts, self.tokens.ended(responses))
                self.scorer.start(batch)
            score = partial(self.score_responses, responses, prompts)
            return self._score_rollout(model, responses, batch.ended, score)

    @torch.no_grad()
    def _score_rollout(
        self, model: nn.Module, responses: Responses, ended: Tensor, score: Callable[[], Scores]
    ) -> Rollout:
        """Compute old log-probabilities, values and reference log-probabilities, then collect the scores."""
        run = self._run
        with run.timer.phase("evaluate"):
            output = policy_and_value_outputs(run, model, responses)
            ref_logprobs = reference_logprobs(run, model, self.reference, responses, output.logprobs)
        with run.timer.phase("score"):
            scores = score()
        return rollout_of(responses, ended, output, ref_logprobs, scores)

    def generate_responses(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Responses:
        """Sample a response to each prompt and truncate it after the stop token or stop string.

        A response that has neither keeps all its tokens and counts as not ended (`Rollout.ended`): by default it is
        scored and learned like the others; `missing_eos_penalty`, `missing_eos_score` and `bootstrap_truncated` change
        that.

        Args:
            policy: The unwrapped policy.
            prompts: `B` prompts.
            config: Sampling parameters.

        Returns:
            `B` prompts with their responses.

        Raises:
            NonFiniteLogitsError: The policy's logits are NaN or infinite.
        """
        check_lengths(prompts.input_ids.shape[1], length_and_filling(config)[0], self._rollouts.longest_sequence)
        with self._rollouts.sampling(policy, "policy" if policy is self.policy_model else "reference"):
            ids, logprobs, _ = sample_with(self._engine, policy, prompts, config, self.tokens.stop_strings)
        return join_responses(prompts, ids, self.tokens.stop, self.tokens.pad, self.tokens.stop_strings, logprobs)

    def score_responses(self, responses: Responses, prompts: Prompts) -> Scores:
        """Score truncated responses with all reward sources.

        Args:
            responses: `B` prompts with their responses.
            prompts: The prompts of the same rows, with the other columns of the data set.

        Returns:
            The weighted sums, and the scores of each source.
        """
        with distributed.raise_on_all_ranks(self.accelerator), self._run.streams.rewards.in_use():
            return self.scorer(ScoringBatch.of(responses, prompts, self.tokens.ended(responses)))

    # ---- Advantages ----

    def estimate_advantages(self, rollout: Rollout) -> Experience:
        """Compute rewards, advantages and returns of a rollout, and whiten the advantages.

        Args:
            rollout: This rank's rollout.

        Returns:
            The experience that the losses read. Advantages have mean 0 and variance 1 over `loss_mask` on all ranks;
            `loss_mask` leaves out padding, tokens of tools, and responses without a score.
        """
        args, run, mask = self.args, self._run, rollout.loss_mask
        if args.score_scaling:
            self.score_moments.add(whole_scores(rollout), run.sum_over_ranks)
        rewards = shaped = self.shape_rewards(rollout)
        if args.whiten_rewards:
            rewards = masked_whiten(shaped, mask, shift_mean=False, reduce_sum=run.sum_over_ranks)
        advantages, returns = self.compute_advantages(rollout, rewards)
        whitened = masked_whiten(advantages, mask, reduce_sum=run.sum_over_ranks)
        weights = rollout.importance_weights(args.importance_sampling_clip_max)
        self._rollout_metrics.record(
            rollout, self.kl_controller, self._score_unit, (shaped, returns, whitened), weights
        )
        return Experience.of(rollout, whitened, returns, weights if args.importance_sampling_correction else None)

    def shape_rewards(self, rollout: Rollout) -> Tensor:
        """Compute each token's reward: minus its KL penalty, plus its token reward, plus the score at the last token.

            r_t = -coef KL_t + token_score_t + score [t is the last token that the policy wrote]

        Override this method to add a reward or a penalty, for example on length.

        Args:
            rollout: `B` responses of this rank.

        Returns:
            Rewards, float32 `(B, T)`, 0 outside the response mask.
        """
        scores, token_scores = shape_scores(rollout, self.args, self._score_unit)
        kl = rollout.kl(self.args.kl_estimator)
        _, rewards = token_rewards(kl, scores, rollout.response_mask, self.kl_controller.coef, token_scores)
        return rewards

    def compute_advantages(self, rollout: Rollout, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Compute advantages and returns with GAE.

        Args:
            rollout: `B` responses of this rank.
            rewards: Rewards from `shape_rewards`, whitened if `whiten_rewards` is set, `(B, T)`.

        Returns:
            Advantages before whitening, and returns, float32 `(B, T)` each, in the unit of `rewards`, 0 outside
            `rollout.loss_mask`.
        """
        return learning.advantages_and_returns(rollout, rewards, self.args, self._critic_only.warms_up)

    @property
    def _score_unit(self) -> ScoreMoments | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.score_moments.moments if self.args.score_scaling else None

    # ---- Learning ----

    def learn(self, model: nn.Module, experience: Experience) -> float | Tensor:
        """Take `num_ppo_epochs * num_mini_batches` optimizer steps, with new mini-batches in every epoch.

        Args:
            model: The prepared `PolicyAndValue`.
            experience: This rank's experience.

        Returns:
            Gradient norm of the last step, before clipping.
        """
        run, args, grad_norm = self._run, self.args, 0.0
        model.train()
        statistics = UpdateStatistics(watches_kl=args.kl_stop is not None, learns_ptx=args.ptx_coef > 0)
        generator = distributed.minibatch_generator(args.seed, self.state.global_step, args.process_index)
        with run.timer.phase("learn"):
            for epoch in range(args.num_ppo_epochs):
                num_parts = len(statistics.sums)
                for minibatch in experience.shuffled_minibatches(args.num_mini_batches, generator):
                    grad_norm = self.update(model, minibatch, statistics)
                if args.kl_stop is not None:
                    statistics.num_epochs = epoch + 1
                    if statistics.mean_kl(num_parts, run.sum_over_ranks) > args.kl_stop:
                        break
            run.metrics |= self._critic_only.metrics(statistics.metrics(run.sum_over_ranks, run.gather))
        self._engine.policy_changed()
        return grad_norm

    def update(self, model: nn.Module, minibatch: Experience, statistics: UpdateStatistics) -> float | Tensor:
        """Take one optimizer step on a mini-batch, with gradients accumulated over micro-batches.

        The loss of every micro-batch is a sum over its tokens, divided by the tokens of the whole mini-batch on all
        ranks. The gradient is the same for any number and size of micro-batches.

        Args:
            model: The prepared `PolicyAndValue`.
            minibatch: This rank's share of the mini-batch.
            statistics: Collects the metrics of each micro-batch.

        Returns:
            Gradient norm before clipping; 0 if no response of the mini-batch has a score, which takes no step.
        """
        run = self._run
        num_tokens = float(run.sum_over_ranks(minibatch.loss_mask.sum()))
        if num_tokens == 0:
            return 0.0
        losses = list[Tensor]()
        ptx_loss = 0.0 if self._ptx is None else self._ptx.learn(model, statistics, self._forward_context)
        parts = learning.weighted_micro_batches(minibatch, num_tokens, run.unwrapped(model).packs_rows, run)
        for index, part in enumerate(parts):
            is_last = index == len(parts) - 1
            with learning.accumulate(self.accelerator, model, is_last, self.args):
                loss, (output, policy, value) = self._backward(model, part, num_tokens)
            statistics.add(part, output, policy, value)
            losses.append(loss * self.accelerator.num_processes)
            if not is_last:
                run.fire("on_substep_end")
        losses[-1] = losses[-1] + ptx_loss
        grad_norm = self._optimizer_step(model, losses, statistics)
        if self._ptx is not None:
            self._ptx.count_step()
        return grad_norm

    def _backward(self, model: nn.Module, part: Experience, num_tokens: float) -> tuple[Tensor, Losses]:
        """Run the backward pass of a micro-batch; return its loss, and model outputs and losses of each token.

        On one process policy and value model have separate backward passes, so that only one model's activations are
        in memory; in critic warm-up the value model runs alone. Several processes, `torch_compile`, and an
        overridden `compute_loss` use `compute_loss` and one backward pass.
        """
        warms_up = self._critic_only.warms_up
        if self._has_own_loss or not (self._sequential_backward or warms_up):
            with self._forward_context():
                loss, figures = self.compute_loss(model, part, return_outputs=True, num_items_in_batch=num_tokens)
            return learning.backward(self.accelerator, loss), figures
        if warms_up:  # the old log-probabilities take the place of a forward pass
            of_policy = ResponseLogprobs(part.logprobs, torch.full_like(part.logprobs, torch.nan))
            policy_share, policy = 0.0, learning.no_policy_loss(part.logprobs)
        else:
            with self._forward_context():
                of_policy = model(*part.batch, only="policy", places=part.places)
                policy = self.policy_loss(of_policy.logprobs, part)
            term = learning.policy_term(policy, of_policy, part, num_tokens, self.args)
            policy_share = learning.backward(self.accelerator, term)
        with self._forward_context():
            of_values = model(*part.batch, only="value_model", places=part.places)
            value = self.value_loss(of_values.values, part)
        term = learning.value_term(value, part, num_tokens, self.args)
        term = term + learning.zero_of_policy(model, self._run.unwrapped(model).policy) if warms_up else term
        loss = policy_share + learning.backward(self.accelerator, term)
        return loss, (PolicyAndValueOutput(*of_policy, *of_values), policy, value)

    @property
    def _sequential_backward(self) -> bool:
        """Whether policy and value model run forward and backward one after the other, which saves memory.

        DDP, DeepSpeed and FSDP exchange gradients in one backward pass in which every parameter takes part.
        """
        is_alone = self.accelerator.distributed_type == DistributedType.NO
        return is_alone and not self.args.torch_compile and not self._has_own_loss

    @property
    def _has_own_loss(self) -> bool:
        return getattr(self.compute_loss, "__func__", None) is not PPOTrainer.compute_loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Experience,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Any:
        """Compute `policy loss + vf_coef * value loss` of a micro-batch, from `policy_loss` and `value_loss`.

        To change a term, override `policy_loss` or `value_loss`. Training calls this method if you override it, and
        with several processes or `torch_compile`. Otherwise it computes the two terms one after the other to save
        memory. During critic warm-up the loss is the value term.

        Args:
            model: The `PolicyAndValue`.
            inputs: The micro-batch.
            return_outputs: Whether to return the per-token parts too.
            num_items_in_batch: Number of tokens to divide by; None: the tokens of the micro-batch.

        Returns:
            The loss, a scalar; with `return_outputs` also `(PolicyAndValueOutput, PolicyLoss, ValueLoss)`.
        """
        num_tokens = float(inputs.loss_mask.sum() if num_items_in_batch is None else num_items_in_batch)
        output = PolicyAndValueOutput(*model(*inputs.batch, places=inputs.places))
        value = self.value_loss(output.values, inputs)
        if self._critic_only.warms_up:  # a gradient of 0, because DDP and DeepSpeed wait for every gradient
            policy_share = 0.0 * output.logprobs.sum()
            policy, output = learning.no_policy_loss(inputs.logprobs), output._replace(logprobs=inputs.logprobs)
        else:
            policy = self.policy_loss(output.logprobs, inputs)
            policy_share = learning.policy_term(policy, output, inputs, num_tokens, self.args)
        loss = policy_share + learning.value_term(value, inputs, num_tokens, self.args)
        return (loss, (output, policy, value)) if return_outputs else loss

    def policy_loss(self, logprobs: Tensor, experience: Experience) -> PolicyLoss:
        """Compute the policy loss of each token: PPO's clipped loss, or the function that `policy_loss` gives.

        Args:
            logprobs: Current log-probabilities of the response tokens, nats, `(B, T)`.
            experience: The micro-batch.

        Returns:
            Losses of the tokens, `(B, T)`. Training minimizes the mean of `loss` over the mini-batch's tokens, and
            logs each entry of `figures` by its name.
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
            Losses of the tokens, `(B, T)`. Training minimizes `vf_coef` times the mean of `loss` over
            `experience.loss_mask`, and logs each entry of `figures` by its name.
        """
        return clipped_value_loss(values, experience.values, experience.returns, self.args.cliprange_value)

    # ---- The external loop ----

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
            ValueError: The number of rows is not that of an update, a row is too long for the models, an id is not in
                a vocabulary, a response has no token of the policy, or a log-probability is above 0 or not finite.
                Nothing has changed.
            RuntimeError: The run has had all its updates, or `close` has ended it.
            RunStopped: A signal ended the run.
        """
        checked, checked_scores = given_responses(
            self._run, queries, responses, scores, response_masks, sampling_logprobs, ended
        )

        def collect() -> Rollout:
            model = self._run.loop.model.eval()
            return self._score_rollout(model, checked, self.tokens.ended(checked), lambda: checked_scores)

        with self._step_of_run() as loop:
            loop.grad_norm = self.learn(loop.model, self._next_experience(collect))
            metrics = dict(self._run.metrics)
            self._end_update()
        return metrics

    def close(self) -> None:
        """End a run of `step` before its last update.

        Writes a checkpoint (unless `save_strategy="no"`, or the latest update has one), logs the updates since the
        last log, fires `on_train_end`, releases `output_dir` and restores the signal handlers. All processes must call
        it. `with PPOTrainer(...) as trainer:` calls it at the end of the block, also after an error. If one of several
        processes fails, it only releases `output_dir`.

        Without an open run it does nothing, so you may call it twice. Afterwards `save_model`, `evaluate` and
        `generate_completions` work as after `train`, `train` starts another run, and `step` raises an error. To
        continue the run, create a new trainer with `resume_from_checkpoint=True`.

        Raises:
            DivergenceError: A weight is not finite. `output_dir` is released nevertheless.
            RunStopped: A signal arrived after the last update; the run ended with a checkpoint.
        """
        self._close_steps(saves=True)

    def __enter__(self) -> Self:
        """Return the trainer; the end of the block calls `close`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Call `close`; after an error of one of several processes only release `output_dir`."""
        self._close_steps(saves=kind is None or self.accelerator.num_processes == 1)

    # ---- State, and checks of the constructor ----

    def register_stateful(self, name: str, part: Stateful) -> None:
        """Save an object's state in every checkpoint and restore it on resume.

        Args:
            name: Key of the state in checkpoints.
            part: An object with `state_dict` and `load_state_dict`. Its state must be the same on all ranks: the main
                process saves it, and all ranks load it. A new run starts from the object's current state.

        Raises:
            TypeError: Its state cannot be in a checkpoint.
            ValueError: The name is taken.
        """
        self._run.stateful.register(name, part)

    @property
    def reward_model(self) -> nn.Module | None:
        """The first reward model (TRL's attribute)."""
        return next(iter(self.reward_models), None)
