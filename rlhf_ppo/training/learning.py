"""Learning from a rollout: advantages, losses, critic warm-up, interruptible mini-batches, gradients."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from rlhf_ppo.algorithm.advantages import gae, turn_gae, turn_starts
from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss, sequence_weights, token_mean
from rlhf_ppo.checkpoints.complete import explaining_load_error
from rlhf_ppo.checkpoints.state import PartialUpdate, Progress, check_same_update, num_learned_minibatches
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.inherited import reduces_once
from rlhf_ppo.data.rollout import Experience, Rollout, micro_batches
from rlhf_ppo.models.policy_and_value import PolicyAndValue, PolicyAndValueOutput, ResponseLogprobs
from rlhf_ppo.processes.distributed import get_logger, minibatch_generator, raise_on_all_ranks
from rlhf_ppo.processes.signals import MicroBatchStopCheck, Stopped
from rlhf_ppo.reporting.metrics import UpdateStatistics
from rlhf_ppo.rewards.functions import function_name
from rlhf_ppo.rewards.resolve import found_function
from rlhf_ppo.training.run_state import RunState

logger = get_logger(__name__)

_PTX = "ptx_coef above 0 (1: yes)"


def advantages_and_returns(
    rollout: Rollout, rewards: Tensor, args: PPOConfig, warms_up: bool = False
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns with GAE; one pass if both have the same lambda.

    Decoupled GAE: VAPO, 2504.05118, section 4.1, after VC-PPO, 2503.01491, section 3.3.

    Args:
        rollout: `B` responses.
        rewards: Reward of each token, `(B, T)`.
        args: Gives `gamma`, `lam`, `lam_policy`, `lam_critic`, `gae_level` and `bootstrap_truncated`.
        warms_up: Whether this is an update of critic warm-up, whose returns have lambda 1.

    Returns:
        Advantages and returns, float32 `(B, T)` each, in the reward's unit, 0 outside `rollout.loss_mask`.
    """
    bootstrap = rollout.final_values.masked_fill(rollout.ended, 0.0) if args.bootstrap_truncated else None
    estimator = turn_gae if args.gae_level == "turn" else gae

    def estimate(lam: float) -> tuple[Tensor, Tensor]:
        return estimator(rewards, rollout.values, rollout.loss_mask, args.gamma, lam, bootstrap)

    lam_critic = args.lam if args.lam_critic is None else args.lam_critic
    lam_critic = 1.0 if warms_up else lam_critic
    lam_policy = args.lam if args.lam_policy is None else args.lam_policy
    advantages, returns = estimate(lam_policy)
    return advantages, returns if lam_policy == lam_critic else estimate(lam_critic)[1]


def monte_carlo_returns(rollout: Rollout, rewards: Tensor, args: PPOConfig) -> Tensor:
    """Compute the discounted sum of the rewards from each token on, float32 `(B, T)`: the return of lambda 1.

    Args:
        rollout: `B` responses.
        rewards: Reward of each token, `(B, T)`.
        args: As for `advantages_and_returns`.

    Returns:
        In the reward's unit; NaN for responses that no reward scored.
    """
    returns = advantages_and_returns(rollout, rewards, args, warms_up=True)[1]
    return returns.masked_fill(rollout.scores.isnan()[:, None], torch.nan)


def valued_tokens(loss_mask: Tensor, args: PPOConfig) -> Tensor:
    """Return the tokens with a value: all learned tokens, or with `gae_level="turn"` the first tokens of turns.

    Args:
        loss_mask: True on the learned tokens, bool `(B, T)`.
        args: Gives `gae_level`.

    Returns:
        bool `(B, T)`.
    """
    return turn_starts(loss_mask) if args.gae_level == "turn" else loss_mask


PolicyLossFunction = Callable[[Tensor, Experience, PPOConfig], PolicyLoss]
"""Takes the current log-probabilities of response tokens, nats `(B, T)`, the micro-batch and the arguments."""


def resolve_policy_loss(given: str | PolicyLossFunction) -> PolicyLossFunction | None:
    """Return the policy loss for an argument.

    Args:
        given: 'ppo', 'path/file.py:function', 'package.module.function', or a function.

    Returns:
        The function; None for PPO's loss, which is `PPOTrainer.policy_loss`.

    Raises:
        TypeError: The name is not that of a function.
        ValueError: The loss, file or module does not exist.
    """
    if not isinstance(given, str):
        return given
    if given == "ppo":
        return None
    function: Any = found_function(given, "policy_loss")
    if function is None:
        raise ValueError(
            f"policy_loss={given!r} is not a loss; write 'ppo', 'path/file.py:function' or 'package.module.function'"
        )
    return function


def own_losses(trainer: type, base: type, policy_loss: PolicyLossFunction | None) -> dict[str, str]:
    """Name the losses that are the user's, by the value of `DivergenceGuard` that each gives.

    Args:
        trainer: The trainer's class, which may override the methods of `base`.
        base: `PPOTrainer`.
        policy_loss: Result of `resolve_policy_loss`.
    """
    methods = {"the policy loss": "policy_loss", "the value loss": "value_loss", "the loss": "compute_loss"}
    own = {
        value: f"{trainer.__name__}.{method}()"
        for value, method in methods.items()
        if getattr(trainer, method) is not getattr(base, method)
    }
    if "the policy loss" not in own and policy_loss is not None:
        own["the policy loss"] = f"policy_loss={function_name(policy_loss)}"
    return own | ({"the importance ratios": own["the policy loss"]} if "the policy loss" in own else {})


def weighted_micro_batches(
    minibatch: Experience, num_tokens: float, packs_rows: bool, run: RunState
) -> list[Experience]:
    """Cut a mini-batch into micro-batches, after weighting each token as its loss counts in the mini-batch.

    Args:
        minibatch: This rank's share.
        num_tokens: Learned tokens of the mini-batch, on all ranks.
        packs_rows: Whether the models read rows without padding.
        run: The run.
    """
    args, mask = run.args, minibatch.loss_mask
    if args.loss_aggregation == "sequence":
        weights = sequence_weights(mask, num_tokens, run.sum_over_ranks)
        minibatch = replace(minibatch, loss_weights=weights.expand(mask.shape))
    if args.gae_level == "turn":  # a mean over the first tokens of turns
        starts = valued_tokens(mask, args)
        num_turns = run.sum_over_ranks(starts.sum())
        minibatch = replace(minibatch, value_weights=starts * (num_tokens / num_turns))
    max_rows, max_tokens = args.per_device_train_batch_size, args.max_tokens_per_micro_batch
    return micro_batches(minibatch, max_rows, max_tokens, run.gather, packs_rows)


def policy_term(
    policy: PolicyLoss,
    output: ResponseLogprobs | PolicyAndValueOutput,
    part: Experience,
    num_tokens: float,
    args: PPOConfig,
) -> Tensor:
    """Compute a micro-batch's share of the policy loss.

        mean_t(w_t loss_t - entropy_coef entropy_t)

    over the mini-batch's tokens. The weights w follow `loss_aggregation`.

    Args:
        policy: Loss of each token.
        output: Log-probability and entropy of each token.
        part: The micro-batch.
        num_tokens: Learned tokens of the mini-batch, on all ranks.
        args: Gives `entropy_coef`.

    Raises:
        TypeError: `policy` lacks a field, or a field is no tensor.
        ValueError: Its loss has another shape than the tokens, or no gradient.
    """
    loss = _loss_of("policy_loss", policy, ("loss", "ratio", "clipped"), part)
    if output.logprobs.requires_grad and not loss.requires_grad:
        raise ValueError("policy_loss returned a loss without a gradient: compute it from logprobs, without detach()")
    if part.loss_weights is not None:
        loss = loss * part.loss_weights
    if args.entropy_coef > 0:
        loss = loss - args.entropy_coef * output.entropy
    return token_mean(loss, part.loss_mask, num_tokens)


def value_term(value: ValueLoss, part: Experience, num_tokens: float, args: PPOConfig) -> Tensor:
    """Compute a micro-batch's share of `vf_coef` times the value loss, a mean over the mini-batch's tokens.

    With `gae_level="turn"` it is a mean over the first tokens of turns.
    """
    loss = _loss_of("value_loss", value, ("loss", "clipped"), part)
    loss = loss if part.value_weights is None else loss * part.value_weights
    return args.vf_coef * token_mean(loss, part.loss_mask, num_tokens)


def _loss_of(name: str, returned: Any, fields: Sequence[str], part: Experience) -> Tensor:
    """Return the loss of each token that a function or method, perhaps the user's, has returned.

    Raises:
        TypeError: A field is missing, or is no tensor.
        ValueError: The loss has another shape.
    """
    if missing := [field for field in fields if not isinstance(getattr(returned, field, None), Tensor)]:
        kind = "PolicyLoss" if name == "policy_loss" else "ValueLoss"
        raise TypeError(
            f"{name} returned {type(returned).__name__} without the tensors {missing}: return "
            f"{kind}({', '.join(fields)}) of rlhf_ppo.algorithm.losses"
        )
    if returned.loss.shape != part.loss_mask.shape:
        shape, expected = tuple(returned.loss.shape), tuple(part.loss_mask.shape)
        raise ValueError(f"{name} returned a loss of shape {shape}, expected {expected}: the loss of each token")
    return returned.loss


_NOT_MEASURED = frozenset({"policy/entropy_avg", "loss/policy_avg", "val/first_logratio"})
"""Metrics of the policy's forward passes, which warm-up skips."""


class CriticOnly:
    """Critic warm-up: the first `critic_warmup_steps` updates, in which only the value model learns.

    The policy's parameters, including those shared with the value model, then have no gradient: neither weight decay
    nor an optimizer's moments move them. Returns have lambda 1. Value pretraining: VC-PPO, 2503.01491; VAPO,
    2504.05118.
    """

    def __init__(self, run: RunState) -> None:
        self.run, self.args = run, run.args
        self._hooks: list[Any] = []
        self._held: set[int] = set()
        self._left_out: list[tuple[Tensor, Tensor | None]] = []

    @property
    def warms_up(self) -> bool:
        """Whether only the value model learns in the current update."""
        return self.run.state.global_step < self.args.critic_warmup_steps

    def drop_policy_gradients(self, policy: nn.Module) -> None:
        """Remove the gradients of the policy's parameters where only the value model learns."""
        if self.warms_up:
            for parameter in policy.parameters():
                parameter.grad = None

    def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Drop metrics of the policy's forward passes during warm-up, and add whether it is active."""
        if self.args.critic_warmup_steps == 0:
            return dict(metrics)
        kept = {name: value for name, value in metrics.items() if not (self.warms_up and name in _NOT_MEASURED)}
        return kept | {"val/critic_warmup": float(self.warms_up)}

    def begin(self, optimizer: Any, policy_groups: Sequence[int]) -> None:
        """Freeze the policy's parameter groups under DeepSpeed, whose groups always have gradients.

        Args:
            optimizer: The prepared optimizer.
            policy_groups: Indices of the policy's groups; empty without such groups.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if policy_groups:
            while hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer
            groups = optimizer.param_groups  # ZeRO passes them to the optimizer one at a time
            self._held = {id(groups[index]) for index in policy_groups}
            self._hooks = [optimizer.register_step_pre_hook(self._hide), optimizer.register_step_post_hook(self._show)]

    def _hide(self, optimizer: Any, *_: Any) -> None:
        if self.warms_up:
            held = [group for group in optimizer.param_groups if id(group) in self._held]
            self._left_out = [(each, each.grad) for group in held for each in group["params"]]
            for each, _grad in self._left_out:
                each.grad = None

    def _show(self, *_: Any) -> None:
        for each, grad in self._left_out:  # some exist for the whole run
            each.grad = grad
        self._left_out = []


def zero_of_policy(model: nn.Module, policy: nn.Module) -> Tensor | float:
    """Return 0 as a function of the policy's parameters, for DDP, which waits for each of them in a backward pass."""
    finds_unused = getattr(model, "find_unused_parameters", True) and not getattr(model, "static_graph", False)
    if finds_unused:
        return 0.0
    trained = [each for each in policy.parameters() if each.requires_grad]
    return torch.stack([0.0 * parameter.sum().float() for parameter in trained]).sum()


def no_policy_loss(logprobs: Tensor) -> PolicyLoss:
    """Return the policy loss of an unchanged policy: 0, with a ratio of 1."""
    nothing = torch.zeros_like(logprobs)
    return PolicyLoss(nothing, torch.ones_like(logprobs), nothing.bool())


class InterruptibleLearning:
    """Mini-batches of an update; a signal may interrupt them between two micro-batches.

    A signal drops the gradients of one mini-batch and keeps the rollout and the earlier optimizer steps. A resumed run
    repeats that mini-batch with the same random numbers.

    Args:
        run: The run.
        keep: Saves the update's metrics in a `PartialUpdate` when learning is interrupted.

    Attributes:
        partial: The current update, from its first to its last mini-batch; None between updates. In a resumed run, the
            update to finish.
    """

    def __init__(self, run: RunState, keep: Callable[[PartialUpdate], None]) -> None:
        self.run, self.args, self.accelerator = run, run.args, run.accelerator
        self.between = MicroBatchStopCheck(run.signals, self.accelerator.num_processes, self.args.device)
        self.keep = keep
        self.partial: PartialUpdate | None = None
        self._num_prompts = 0

    @property
    def num_minibatches(self) -> int:
        """Optimizer steps of a whole update."""
        return self.args.num_ppo_epochs * self.args.num_mini_batches

    def start(self, checkpoint: str | None, progress: Progress) -> None:
        """Start a run; read the partial update of the checkpoint, if it has one.

        Args:
            checkpoint: The checkpoint's directory, or None.
            progress: Progress of the run.

        Raises:
            ValueError: It cannot be read, or cannot be finished with this run's arguments.
        """
        self.partial, self._num_prompts = None, progress.num_prompts
        if checkpoint is None or num_learned_minibatches(checkpoint) is None:
            return
        name = "the number of processes"
        check_same_update({name: progress.num_processes}, {name: self.accelerator.num_processes})
        with (
            raise_on_all_ranks(self.accelerator),
            explaining_load_error(checkpoint, "the update that it is in the middle of"),
        ):
            loaded = PartialUpdate.load(checkpoint, self.args.process_index, self.args.device)
        check_same_update(loaded.begun_with, self._begun_with())
        self.partial = loaded

    def _begun_with(self) -> dict[str, int]:
        learned_by = {name: getattr(self.args, name) for name in ("num_ppo_epochs", "num_mini_batches", "seed")}
        return learned_by | {"the number of prompts": self._num_prompts, _PTX: int(self.args.ptx_coef > 0)}

    @contextmanager
    def learning(self, model: nn.Module, experience: Experience) -> Iterator[tuple[PartialUpdate, UpdateStatistics]]:
        """Yield the partial update and its statistics; keep both if a signal interrupts learning.

        Args:
            model: The prepared model; an interrupt drops its gradients.
            experience: This rank's experience; a resumed run continues with the saved one.
        """
        # The partial update keeps its own experience: an overridden `learn` may have changed this one.
        learned = self.partial or PartialUpdate(experience, self._begun_with())
        self.partial = learned if type(learned.experience) is Experience else None  # a subclass cannot be saved
        # An update that has begun goes on with the figures that it has.
        watches_kl = UpdateStatistics.KL in learned.named if learned.sums else self.args.kl_stop is not None
        try:
            statistics = UpdateStatistics(
                list(learned.sums), tuple(learned.named), watches_kl=watches_kl, grad_norms=list(learned.grad_norms),
                learns_ptx=self.args.ptx_coef > 0,
            )  # fmt: skip
            yield learned, statistics
        except Stopped:
            norm: Any = learned.grad_norm
            learned.grad_norm = float(getattr(norm, "full_tensor", lambda: norm)())
            self.keep(learned)
            self.run.streams.mark_streams()  # the callbacks' events are not fired again
            self._drop_gradients(model)
            raise
        self.partial = None

    def minibatches(self, learned: PartialUpdate, statistics: UpdateStatistics) -> Iterator[Experience]:
        """Yield the remaining mini-batches.

        A mini-batch counts as learned when the caller asks for the next one. If a signal comes before, the resumed run
        repeats it.

        Args:
            learned: The partial update.
            statistics: Statistics of its micro-batches.
        """
        args, update = self.args, self.run.state.global_step
        generator = minibatch_generator(args.seed, update, args.process_index)
        shuffled, num_per_epoch = learned.experience.shuffled_minibatches, args.num_mini_batches
        epochs = (shuffled(num_per_epoch, generator) for _ in range(args.num_ppo_epochs))
        minibatches = itertools.chain.from_iterable(epochs)
        for minibatch in itertools.islice(minibatches, learned.num_minibatches, None):
            self.run.streams.mark()
            if self.partial is not None:
                self.between.check_before_minibatch()
            start = time.monotonic()
            yield minibatch
            self.between.seconds = time.monotonic() - start
            learned.num_minibatches, learned.num_micro_batches = learned.num_minibatches + 1, 0
            learned.sums, learned.named = list(statistics.sums), list(statistics.named)
            learned.grad_norms = list(statistics.grad_norms)
            if self._moved_too_far(learned, statistics):
                break

    def _moved_too_far(self, learned: PartialUpdate, statistics: UpdateStatistics) -> bool:
        """Return, the same on all ranks, whether an epoch has ended with a KL above `kl_stop`."""
        per_epoch, limit = self.args.num_mini_batches, self.args.kl_stop
        if limit is None or not statistics.watches_kl or learned.num_minibatches % per_epoch:
            return False
        statistics.num_epochs = learned.num_minibatches // per_epoch
        kl = statistics.mean_kl(learned.epoch_start, self.run.sum_over_ranks)
        learned.epoch_start = len(statistics.sums)
        return kl > limit

    def micro_batches(self, parts: Sequence[Experience]) -> Iterator[tuple[Experience, bool]]:
        """Yield each micro-batch and whether it is the last; fire `on_substep_end` after all but the last.

        A signal ends this before a micro-batch, on all ranks. Events of an earlier, interrupted run are not fired
        again.
        """
        for index, part in enumerate(parts):
            if self.partial is not None:
                self.between.check_before_micro_batch(index)
            is_last = index == len(parts) - 1
            yield part, is_last
            if not is_last:
                self._end_micro_batch(index)

    def _end_micro_batch(self, index: int) -> None:
        if (learned := self.partial) is not None:
            if index < learned.num_micro_batches:
                return
            learned.num_micro_batches = index + 1
        self.run.fire("on_substep_end")

    def _drop_gradients(self, model: nn.Module) -> None:
        model.zero_grad()
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            cast(Any, model).optimizer.zero_grad()  # its own sums of micro-batches
        self.accelerator.gradient_state._set_sync_gradients(True)

    def checkpoint_name(self, num_updates: int) -> str:
        """Return a checkpoint's name: completed updates, and mini-batches of a partial update."""
        return f"checkpoint-{num_updates}" + ("" if self.partial is None else f"-{self.partial.num_minibatches}")

    def save(self, checkpoint: str) -> None:
        """Write this process's partial update into a checkpoint."""
        if self.partial is not None:
            self.partial.save(checkpoint, self.args.process_index)

    def progress(self) -> str | None:
        """Return the learned part of a partial update for the log; None between updates."""
        if self.partial is None:
            return None
        return f"{self.partial.num_minibatches} of {self.num_minibatches} mini-batches learned"


def accumulate(
    accelerator: Accelerator, model: nn.Module, is_last: bool, args: PPOConfig
) -> AbstractContextManager[Any]:
    """Exchange gradients with the last micro-batch only.

    DeepSpeed counts micro-batches itself; FSDP would keep unsharded gradients of both models on every rank, unless the
    arguments ask for it.
    """
    accelerator.gradient_state._set_sync_gradients(is_last)
    engine = accelerator.distributed_type
    is_exchanged = engine == DistributedType.DEEPSPEED or (engine == DistributedType.FSDP and not reduces_once(args))
    if is_last or is_exchanged:
        return nullcontext()
    return accelerator.no_sync(model)


def backward(accelerator: Accelerator, loss: Tensor) -> Tensor:
    """Add a loss's gradients to those of the parameters; return the detached loss.

    Engines average gradients over ranks, but the loss is already divided by the tokens of all ranks.
    """
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    accelerator.backward(loss * accelerator.num_processes, **({"scale_wrt_gas": False} if is_deepspeed else {}))
    return loss.detach()


def gradient_norms(accelerator: Accelerator, models: PolicyAndValue) -> Tensor | None:
    """Return the gradient norms of policy and value model without fp16's loss scale, float32 `(2,)`.

    Shared parameters count for the policy. With sharded gradients (FSDP2) every rank calls this.

    Args:
        accelerator: Gives the loss scale.
        models: Policy and value model, after the backward passes of a step.

    Returns:
        None without gradients, and under DeepSpeed, which holds them.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return None
    policy = list(models.policy.parameters())
    of_policy = {id(parameter) for parameter in policy}
    critic = [parameter for parameter in models.value_model.parameters() if id(parameter) not in of_policy]
    owned = [[each.grad for each in part if each.grad is not None] for part in (policy, critic)]
    if not any(owned):
        return None
    norms: list[Any] = [torch.nn.utils.get_total_norm(grads) for grads in owned]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    device = next(grads[0].device for grads in owned if grads)
    result = torch.stack([norm.float().to(device) for norm in norms])
    return result if accelerator.scaler is None else result / accelerator.scaler.get_scale()
