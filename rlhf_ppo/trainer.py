"""PPOTrainer: proximal policy optimization of a language model against a reward, as a `transformers.Trainer`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, has_length

from rlhf_ppo.algorithm.advantages import gae
from rlhf_ppo.algorithm.losses import clipped_policy_loss, clipped_value_loss, explained_variance, token_mean
from rlhf_ppo.algorithm.masked import masked_whiten
from rlhf_ppo.algorithm.penalties import kl_estimate, penalize_missing_eos, token_rewards
from rlhf_ppo.assembly import (
    ModelOrPath,
    as_functions,
    assemble_models,
    check_vocabularies,
    max_positions,
    special_tokens,
    vocab_size,
)
from rlhf_ppo.batch import Experience, Prompts, Responses, Rollout, pad_right
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data import PromptCollator, check_lengths, longest_prompt, prepare_prompts
from rlhf_ppo.distributed import sum_over_ranks
from rlhf_ppo.evaluation.completions import completions_table, print_table, report_table
from rlhf_ppo.generation.engine import greedy_config, sample_responses, sampling_config
from rlhf_ppo.generation.sequences import contains_token, join_responses
from rlhf_ppo.models.logprobs import response_logprobs
from rlhf_ppo.models.policy_and_value import PolicyAndValue, PolicyAndValueOutput
from rlhf_ppo.reporting.metrics import (
    UpdateStatistics,
    episode_columns,
    evaluation_metrics,
    gather_columns,
    rollout_metrics,
)
from rlhf_ppo.reproducibility import isolated_rng, shuffling_generator
from rlhf_ppo.rewards.functions import RewardFunction
from rlhf_ppo.rewards.reward_model import RewardModel
from rlhf_ppo.rewards.scorer import Scorer, Scores, ScoringBatch
from rlhf_ppo.seams import PPOSeams, num_processes

if TYPE_CHECKING:
    import pandas as pd
    from peft import PeftConfig
    from transformers import GenerationConfig


class PPOTrainer(PPOSeams):
    """Train a language model with PPO (Schulman et al., arXiv 1707.06347) against a reward, under a KL penalty.

    One Trainer step is one PPO update: generate `per_device_train_batch_size * gradient_accumulation_steps` responses
    on every rank, score them, then take `num_ppo_epochs * num_mini_batches` optimizer steps on them.

    Args:
        args: The arguments.
        processing_class: The policy's tokenizer; its padding side does not matter.
        model: The policy: a causal language model, a `PeftModel`, a directory or a hub name.
        ref_model: The policy that the KL penalty compares with; None compares with the initial policy.
        reward_model: A sequence-classification model with one label that shares the policy's tokens; None if
            `reward_funcs` alone score.
        train_dataset: Rows with `prompt` (text or conversation), `text` or `input_ids`; other columns reach
            `reward_funcs`.
        value_model: A sequence-classification model with one label, trained along; None makes one from the reward
            model, or from the policy's backbone with a zero head.
        data_collator: Makes batches with `input_ids` and `attention_mask`, padded on either side.
        eval_dataset: Rows for `evaluate` and `generate_completions`, or a dict of such data sets.
        optimizers: An optimizer over the trainable parameters and a scheduler that counts PPO updates.
        callbacks: Trainer callbacks.
        peft_config: Adds an adapter to the policy; the reference is then the policy without it.
        reward_funcs: One or several Python functions with `GRPOTrainer`'s signature, sync or async.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The arguments cannot work together; found here, before any training.
    """

    _tag_names = ("rlhf_ppo", "ppo")

    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase,
        model: ModelOrPath,
        ref_model: ModelOrPath | None = None,
        reward_model: ModelOrPath | None = None,
        train_dataset: Any = None,
        value_model: ModelOrPath | None = None,
        data_collator: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None,
        eval_dataset: Any = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: PeftConfig | None = None,
        *,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    ) -> None:
        if not isinstance(args, PPOConfig):
            raise TypeError(f"args must be a PPOConfig, got {type(args).__name__}")
        if train_dataset is None:
            raise ValueError("train_dataset=None: pass the prompts to train on")
        self.tokens = special_tokens(args, processing_class)
        self._functions = as_functions(reward_funcs)
        self._logged_by_functions: dict[str, list[float]] = {}
        if reward_model is None and not self._functions:
            raise ValueError("reward_model and reward_funcs are both None: pass one of them, or both")
        args.fill_derived(num_processes(args), len(train_dataset) if has_length(train_dataset) else None)

        models = assemble_models(args, model, ref_model, reward_model, value_model, peft_config)
        check_vocabularies(models, processing_class, self.tokens)
        self.policy_model, self.value_model, self.reward_model = models.policy, models.value_model, models.reward_model
        self.reference = models.reference
        self._max_positions = max_positions(models)
        self._tokenizer = processing_class
        self._config = args
        train_dataset = self._prepared(train_dataset, "train_dataset")
        args.fill_derived(num_processes(args), len(train_dataset) if has_length(train_dataset) else None)
        use_cache = cast(PolicyAndValue, models.policy).config.use_cache
        super().__init__(
            model=PolicyAndValue(models.policy, models.value_model, args.temperature),
            args=args,
            data_collator=PromptCollator(self.tokens.pad) if data_collator is None else data_collator,
            train_dataset=train_dataset,
            eval_dataset=None if eval_dataset is None else self._prepared(eval_dataset, "eval_dataset"),
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=cast(Any, optimizers),
        )
        self.model.config.use_cache = use_cache  # Trainer switches it off, and it would be saved with the policy
        for frozen in (self.reference.model, self.reward_model):
            if frozen is not None:
                frozen.to(self.args.device)
        self.scorer = self._make_scorer()
        self._sum = sum_over_ranks(self.accelerator)

    # ---- The loop ----

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Run PPO.

        Args:
            resume_from_checkpoint: A checkpoint's directory; True for the newest whole one in `output_dir`; None for
                what `args.resume_from_checkpoint` says.
            trial: The trial of a hyperparameter search.
            ignore_keys_for_eval: Accepted as Trainer does; evaluation has no model outputs to ignore.

        Returns:
            Number of updates, mean loss and speed.

        Raises:
            ValueError: The checkpoint is not whole, or of another model.
        """
        checkpoint = self._resolve_checkpoint(resume_from_checkpoint)
        set_seed(self.args.seed, device_specific=True)
        return super().train(checkpoint, trial, ignore_keys_for_eval)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: PPOConfig | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        args = self.args
        model, loader, epochs, num_skipped = self._set_up_training(resume_from_checkpoint, trial)
        start, episodes_before = time.time(), self.state.episode
        grad_norm, learning_rate = None, None

        def finish(event: str, epoch: int) -> None:
            self._fire(event)
            self._maybe_log_save_evaluate(
                self._tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start, learning_rate
            )

        self._fire("on_train_begin")
        if args.eval_on_start:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        for epoch in epochs:
            self._fire("on_epoch_begin")
            for prompts in self._rollout_prompts(loader, epoch, num_skipped, resume_from_checkpoint):
                self._fire("on_step_begin")
                rollout = self.collect_rollout(model, prompts)
                experience = self.estimate_advantages(rollout)
                grad_norm = self.learn(model, experience)
                learning_rate = self._get_learning_rate()
                self._advance_step(learning_rate, (start, episodes_before))
                finish("on_step_end", epoch)
                self._sample_completions_if_due()
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            num_skipped, resume_from_checkpoint = 0, None
            self._advance_epoch(epoch)
            finish("on_epoch_end", epoch)
            if self.control.should_training_stop:
                break
        return self._finalize_training(trial, self.state.max_steps * cast(int, args.batch_size), start)

    # ---- Rollout ----

    @torch.no_grad()
    def collect_rollout(self, model: nn.Module, prompts: Prompts) -> Rollout:
        """Generate a response to each prompt, score it, and evaluate all models on it.

        Args:
            model: The prepared `PolicyAndValue`.
            prompts: This rank's prompts.

        Returns:
            The rollout. Its log-probabilities come from the forward pass that the optimizer steps use, so that the
            importance ratio starts at 1.
        """
        model.eval()
        policy = self._unwrapped(model).policy
        with self._timer.phase("generate"):
            responses = self.generate_responses(policy, prompts, sampling_config(self.args, self.tokens.stop))
        with self._timer.phase("score"):
            scores = self.score_responses(responses, prompts)
        with self._timer.phase("evaluate"):
            output = self._in_passes(responses, model)
            with self.reference.as_model(policy) as reference:
                ref_output = self._in_passes(responses, self._logprobs_of(reference))
        return Rollout(
            query_responses=responses.query_responses,
            attention_mask=responses.attention_mask,
            response_mask=responses.response_mask,
            stopped=contains_token(responses, self.tokens.end),
            logprobs=output[0],
            ref_logprobs=ref_output[0],
            values=output[2],
            final_values=output[3],
            scores=scores.total,
            scores_by_source=scores.by_source,
        )

    def generate_responses(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Responses:
        """Sample a response to each prompt and truncate it after the stop token.

        Args:
            policy: The unwrapped policy.
            prompts: `B` prompts.
            config: How to sample.

        Returns:
            `B` responses behind their prompts.
        """
        check_lengths(prompts.input_ids.shape[1], self.args.response_length, self._max_positions)
        with self.accelerator.autocast():
            sampled = sample_responses(policy, prompts, config, self.args.local_rollout_forward_batch_size)
        return join_responses(prompts, sampled, self.tokens.stop, self.tokens.pad)

    def score_responses(self, responses: Responses, prompts: Prompts) -> Scores:
        """Score truncated responses with every reward source.

        Args:
            responses: `B` responses behind their prompts.
            prompts: The same rows' prompts, with the data set's other columns.

        Returns:
            Weighted sums and each source's scores, `(B,)`.
        """
        return self.scorer(
            ScoringBatch(responses.query_responses, responses.attention_mask, responses.response_mask, prompts.columns)
        )

    def _in_passes(self, responses: Responses, forward: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Call `forward` on a few rows at a time, trimmed, and put the `(b, T')` or `(b,)` results together."""
        outputs = []
        for part in responses.parts(self.args.local_rollout_forward_batch_size):
            with self.accelerator.autocast():
                outputs.append(forward(part.query_responses, part.attention_mask, part.response_mask))
        length = responses.response_mask.shape[1]
        return tuple(
            pad_right(list(results), length) if results[0].dim() == 2 else torch.cat(results)
            for results in zip(*outputs, strict=True)
        )

    def _logprobs_of(self, policy: nn.Module) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
        return lambda *sequences: response_logprobs(policy, *sequences, self.args.temperature)

    # ---- Advantages ----

    def estimate_advantages(self, rollout: Rollout) -> Experience:
        """Turn scores and KL into per-token rewards, and those into advantages and returns.

        Args:
            rollout: This rank's rollout.

        Returns:
            The experience to learn from; advantages are whitened over the real tokens of all ranks.
        """
        args, mask = self.args, rollout.response_mask
        scores = penalize_missing_eos(rollout.scores, rollout.stopped, args.missing_eos_penalty)
        kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, args.kl_estimator).masked_fill(~mask, 0.0)
        non_score_reward, rewards = token_rewards(kl, scores, mask, args.kl_coef)
        if args.whiten_rewards:
            rewards = masked_whiten(rewards, mask, shift_mean=False, reduce_sum=self._sum)
        cut = rollout.final_values.masked_fill(rollout.stopped, 0.0) if args.bootstrap_truncated else None
        advantages, returns = gae(rewards, rollout.values, mask, args.gamma, args.lam, cut)
        columns = gather_columns(episode_columns(rollout, scores, kl, non_score_reward), self.accelerator.gather)
        self._metrics |= rollout_metrics(columns) | self._metrics_of_reward_functions()
        self._metrics["val/explained_variance"] = float(explained_variance(rollout.values, returns, mask, self._sum))
        self._num_response_tokens = int(columns["length"].sum())
        self._count_input_tokens(rollout.attention_mask)
        return Experience(
            query_responses=rollout.query_responses,
            attention_mask=rollout.attention_mask,
            response_mask=mask,
            logprobs=rollout.logprobs,
            values=rollout.values,
            advantages=masked_whiten(advantages, mask, reduce_sum=self._sum),
            returns=returns,
        )

    # ---- Learning ----

    def learn(self, model: nn.Module, experience: Experience) -> float | Tensor:
        """Take `num_ppo_epochs * num_mini_batches` optimizer steps, reshuffling in every epoch.

        Args:
            model: The prepared `PolicyAndValue`.
            experience: This rank's experience.

        Returns:
            Gradient norm of the last step, before clipping.
        """
        args = self.args
        model.train()
        grad_norm: float | Tensor = 0.0
        statistics = UpdateStatistics()
        generator = shuffling_generator(args.seed, self.state.global_step, args.process_index)
        with self._timer.phase("learn"):
            for _ in range(args.num_ppo_epochs):
                for minibatch in experience.shuffled_minibatches(args.num_mini_batches, generator):
                    grad_norm = self.update(model, minibatch, statistics)
            self._metrics |= statistics.metrics(self._sum, self.accelerator.gather)
        return grad_norm

    def update(self, model: nn.Module, minibatch: Experience, statistics: UpdateStatistics) -> float | Tensor:
        """Take one optimizer step on a mini-batch, accumulating over micro-batches.

        Every micro-batch is divided by the mini-batch's real tokens on all ranks, so how it is cut changes nothing.

        Args:
            model: The prepared `PolicyAndValue`.
            minibatch: This rank's share of the mini-batch.
            statistics: Takes the figures of each micro-batch.

        Returns:
            Gradient norm before clipping.
        """
        args = self.args
        num_tokens = float(self._sum(minibatch.response_mask.sum()))
        parts = minibatch.parts(args.per_device_train_batch_size)
        for index, part in enumerate(parts):
            is_last = index == len(parts) - 1
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            with self._gradient_sync(model, is_last):
                with self.compute_loss_context_manager(), self.accelerator.autocast():
                    loss, (output, policy_loss, value_loss) = self.compute_loss(
                        model, part, return_outputs=True, num_items_in_batch=num_tokens
                    )
                # Data-parallel engines average gradients over ranks; the loss is already divided by all ranks' tokens.
                self._backward(loss * self.accelerator.num_processes)
            statistics.add(part, output, policy_loss, value_loss)
            self._add_to_logged_loss(loss.detach() * self.accelerator.num_processes)
            if not is_last:
                self._fire("on_substep_end")
        return self._optimizer_step(model)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Experience,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Any:
        """Compute `policy loss + vf_coef * value loss` of a micro-batch.

        Args:
            model: The `PolicyAndValue`.
            inputs: The micro-batch.
            return_outputs: Whether to return the per-token parts too.
            num_items_in_batch: Real tokens to divide by; the micro-batch's own when None.

        Returns:
            The loss, a scalar; with `return_outputs` also `(PolicyAndValueOutput, PolicyLoss, ValueLoss)`.
        """
        args, mask = self.args, inputs.response_mask
        num_tokens = float(mask.sum()) if num_items_in_batch is None else float(num_items_in_batch)
        output = PolicyAndValueOutput(*model(inputs.query_responses, inputs.attention_mask, mask))
        policy_loss = clipped_policy_loss(output.logprobs, inputs.logprobs, inputs.advantages, args.cliprange)
        value_loss = clipped_value_loss(output.values, inputs.values, inputs.returns, args.cliprange_value)
        loss = token_mean(policy_loss.loss, mask, num_tokens) + args.vf_coef * token_mean(
            value_loss.loss, mask, num_tokens
        )
        return (loss, (output, policy_loss, value_loss)) if return_outputs else loss

    # ---- Evaluation and samples ----

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sample responses to evaluation prompts and score them.

        Args:
            eval_dataset: Prompts in any form that `train_dataset` may have, or a dict of such data sets; the
                constructor's when None.
            ignore_keys: Accepted as Trainer does; there are no model outputs to ignore.
            metric_key_prefix: Put before each key.

        Returns:
            `eval_score` (after the missing-EOS penalty), `eval_kl` and `eval_entropy` (nats per response),
            `eval_response_length_mean` (tokens), `eval_ended_frac`, `eval_rewards/<name>/mean|std`, and speed.
        """
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._prepared(eval_dataset, "eval_dataset")
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Collect a rollout for every batch of `dataloader`, with its own random numbers, the same at every call."""
        args = self.args
        parts: list[dict[str, Tensor]] = []
        with isolated_rng(args.seed):
            self.callback_handler.eval_dataloader = dataloader
            for batch in dataloader:
                rollout = self.collect_rollout(self.model_wrapped, Prompts.from_collated(batch, args.device))
                scores = penalize_missing_eos(rollout.scores, rollout.stopped, args.missing_eos_penalty)
                kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, args.kl_estimator)
                kl = kl.masked_fill(~rollout.response_mask, 0.0)
                columns = episode_columns(rollout, scores, kl, -args.kl_coef * kl)
                parts.append(gather_columns(columns, self.accelerator.gather_for_metrics))
                self._fire("on_prediction_step")
        self._timer.drain()
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        metrics = evaluation_metrics(columns, metric_key_prefix)
        extra = {f"{metric_key_prefix}_{name}": value for name, value in self._metrics_of_reward_functions().items()}
        return EvalLoopOutput(None, None, metrics | extra, len(columns["scores"]))  # pyright: ignore

    @torch.no_grad()
    def generate_completions(self, sampling: bool = False) -> pd.DataFrame | None:
        """Respond greedily to evaluation prompts; show the table and send it to the trackers in `report_to`.

        Args:
            sampling: Whether to stop after one batch.

        Returns:
            One row per prompt: query, model response, score, and each reward when there are several. None without an
            evaluation data set.
        """
        if self.eval_dataset is None:
            return None
        rows: list[dict[str, Any]] = []
        policy = self._unwrapped(self.model_wrapped).policy
        with isolated_rng(self.args.seed):
            for batch in self._evaluation_batches():
                prompts = Prompts.from_collated(batch, self.args.device)
                responses = self.generate_responses(policy, prompts, greedy_config(self.args, self.tokens.stop))
                scores = self.score_responses(responses, prompts)
                table = self._table_rows(prompts, responses, scores)
                rows += self.accelerator.gather_for_metrics(table, use_gather_object=True)
                if sampling:
                    break
        self._metrics_of_reward_functions()
        table = completions_table(
            [row["query"] for row in rows],
            [row["response"] for row in rows],
            [row["score"] for row in rows],
            {name: [row[name] for row in rows] for name in self.scorer.names},
        )
        if self.is_world_process_zero():
            print_table(table)
            report_table(table, self)
        return table

    def _table_rows(self, prompts: Prompts, responses: Responses, scores: Scores) -> list[dict[str, Any]]:
        decode = self._tokenizer.batch_decode
        queries = [ids[mask] for ids, mask in zip(prompts.input_ids, prompts.attention_mask, strict=True)]
        answers = [ids[mask] for ids, mask in zip(responses.responses, responses.response_mask, strict=True)]
        by_source = {name: values.tolist() for name, values in scores.by_source.items()}
        return [
            {"query": query, "response": answer, "score": score, **{name: by_source[name][row] for name in by_source}}
            for row, (query, answer, score) in enumerate(
                zip(decode(queries, skip_special_tokens=True), decode(answers), scores.total.tolist(), strict=True)
            )
        ]

    def _sample_completions_if_due(self) -> None:
        num_samples = self.args.num_sample_generations
        if num_samples > 0:
            every = max(1, self.state.max_steps // num_samples)
            if (self.state.global_step - 1) % every == 0:
                self.generate_completions(sampling=True)

    # ---- Construction ----

    def _prepared(self, dataset: Any, name: str) -> Any:
        """Tokenize and check a data set, or each of a dict of them."""
        if isinstance(dataset, Mapping):
            return {key: self._prepared(value, f"{name}[{key!r}]") for key, value in dataset.items()}
        prepared = prepare_prompts(
            dataset,
            self._tokenizer,
            max_prompt_length=self._config.max_prompt_length,
            num_proc=self._config.dataset_num_proc,
            name=name,
            vocab_size=vocab_size(self.policy_model),
        )
        if has_length(prepared):
            check_lengths(longest_prompt(prepared), self._config.response_length, self._max_positions)
        return prepared

    def _make_scorer(self) -> Scorer:
        sources: list[Any] = []
        if self.reward_model is not None:
            sources.append(
                RewardModel(self.reward_model, self.args.local_rollout_forward_batch_size, self.accelerator.autocast)
            )
        sources += [
            RewardFunction(function, self._tokenizer, lambda: self.state, self._log_metric)
            for function in self._functions
        ]
        return Scorer(sources, self.args.reward_weights)

    def _log_metric(self, name: str, value: float) -> None:
        self._logged_by_functions.setdefault(name, []).append(float(value))

    def _metrics_of_reward_functions(self) -> dict[str, float]:
        """Return and forget what reward functions logged since the last call, averaged over calls and ranks."""
        if not self._functions:
            return {}
        logged, self._logged_by_functions = self._logged_by_functions, {}
        values: dict[str, list[float]] = {}
        for of_one_rank in gather_object([logged]):
            for name, numbers in of_one_rank.items():
                values.setdefault(name, []).extend(numbers)
        return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}

    def _reward_functions_read_columns(self) -> bool:
        return bool(self._functions)
