"""How the value model learns: beside the policy, or alone while critic warm-up lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss, explained_variance
from rlhf_ppo.checkpoints.fits import begun_models
from rlhf_ppo.checkpoints.progress import PPOTrainerState
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.experience import Experience
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.models.policy_and_value import PolicyAndValue, PolicyAndValueOutput
from rlhf_ppo.processes.logs import get_logger
from rlhf_ppo.training.advantages import valued_tokens
from rlhf_ppo.training.objective import Objective
from rlhf_ppo.training.optimization import Optimization
from rlhf_ppo.training.stepping import OptimizerSteps

logger = get_logger(__name__)

_NOT_MEASURED = frozenset({"policy/entropy_avg", "loss/policy_avg", "loss/positive_nll_avg", "val/first_logratio"})
"""Metrics of passes of the policy, which warm-up does not make."""

Learned = tuple[PolicyAndValueOutput, PolicyLoss, ValueLoss]
Estimate = Callable[[], tuple[Tensor, Tensor]]


class CriticRun(Protocol):
    """What the value model's learning asks of its trainer."""

    is_fsdp_enabled: bool
    model: Any
    optimizer: Any
    state: PPOTrainerState
    _config: PPOConfig
    _objective: Objective
    _optimization: Optimization
    _steps: OptimizerSteps
    _sum: Callable[[Tensor], Tensor]

    def value_loss(self, values: Tensor, experience: Experience) -> ValueLoss:
        """See `PPOTrainer`."""
        ...

    def _unwrapped(self, model: nn.Module) -> PolicyAndValue: ...


class CriticLearning:
    """The value model's part of an update, and critic warm-up: the first updates, in which it learns alone.

    VC-PPO, 2503.01491 (value pretraining); VAPO, 2504.05118. While it lasts returns are
    those of lambda 1, and the policy's parameters, those that it shares with the value model included, have no
    gradient: neither weight decay nor an optimizer's moments move them. The gate is judged on each rollout before it
    is learned from, on all ranks alike.

    Args:
        run: The trainer.

    Attributes:
        is_over: Whether the explained variance has passed the gate.
    """

    def __init__(self, run: CriticRun) -> None:
        self.run, self.args = run, run._config
        self.is_over = False
        self._hooks: list[Any] = []
        self._held: set[int] = set()
        self._left_out: list[tuple[Tensor, Tensor | None]] = []

    @property
    def is_alone(self) -> bool:
        """Whether the value model learns alone in the update that the run is at."""
        return not self.is_over and self.run.state.global_step < self.args.critic_warmup_steps

    def judged(self, rollout: Rollout, estimate: Estimate) -> tuple[Tensor, Tensor]:
        """Return advantages and returns of an update, after ending warm-up if the values of its rollout are good.

        Args:
            rollout: This rank's.
            estimate: Gives advantages and returns, `(B, T)` each: in warm-up the returns of lambda 1.
        """
        gate, estimated = self.args.critic_warmup_explained_variance, estimate()
        if gate is None or not self.is_alone:
            return estimated
        mask = valued_tokens(rollout.loss_mask, self.args)
        found = float(explained_variance(rollout.values, estimated[1], mask, self.run._sum))
        if found < gate:
            return estimated
        self.is_over = True
        logger.info(
            f"Critic warm-up ends after {self.run.state.global_step} updates: the values' explained variance is "
            f"{found:.3g}. The policy learns from now on."
        )
        return estimate()

    def backward(self, model: nn.Module, part: Experience, num_tokens: float) -> tuple[Tensor, Any, ValueLoss]:
        """Add the gradients of the value loss up.

        Args:
            model: The prepared `PolicyAndValue`.
            part: The micro-batch.
            num_tokens: Real tokens of the mini-batch, of all ranks.

        Returns:
            The micro-batch's share of the loss, what the value model says, and its loss of each token.
        """
        run = self.run
        with run._steps.forward_context():
            output = model(*part.batch, only="value_model", places=part.places)
            value = run.value_loss(output.values, part)
        term = run._objective.value_term(value, part, num_tokens)
        if self.is_alone:
            term = term + self._policy_taking_part(model)
        return run._steps.backward(term), output, value

    def learn_alone(self, model: nn.Module, part: Experience, num_tokens: float) -> tuple[Tensor, Learned]:
        """Do the same, and say of the policy, which no pass is made of, what is so: it is where it sampled.

        Args:
            model: The prepared `PolicyAndValue`.
            part: The micro-batch.
            num_tokens: Real tokens of the mini-batch, of all ranks.
        """
        loss, of_value_model, value = self.backward(model, part, num_tokens)
        logprobs = part.logprobs
        nothing = torch.zeros_like(logprobs)
        policy = PolicyLoss(nothing, torch.ones_like(logprobs), nothing.bool())
        output = PolicyAndValueOutput(logprobs, torch.full_like(logprobs, torch.nan), *of_value_model)
        return loss, (output, policy, value)

    def drop_policy_gradients(self, model: nn.Module) -> None:
        """Leave the policy's parameters without a gradient while the value model learns alone."""
        if self.is_alone:
            for parameter in self.run._unwrapped(model).policy.parameters():
                parameter.grad = None

    def measured(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Leave out of an update's metrics what was not measured, and add whether it was one of warm-up."""
        if self.args.critic_warmup_steps == 0:
            return dict(metrics)
        kept = {name: value for name, value in metrics.items() if not (self.is_alone and name in _NOT_MEASURED)}
        return kept | {"val/critic_warmup": float(self.is_alone)}

    # ---- Engines ----

    def _policy_taking_part(self, model: nn.Module) -> Tensor | float:
        """Return 0 as a function of the policy's parameters, where DDP counts on each of them in a backward pass."""
        finds_unused = getattr(model, "find_unused_parameters", True) and not getattr(model, "static_graph", False)
        if finds_unused:
            return 0.0
        trained = [each for each in self.run._unwrapped(model).policy.parameters() if each.requires_grad]
        return torch.stack([0.0 * parameter.sum().float() for parameter in trained]).sum()

    def begin(self) -> None:
        """Under DeepSpeed, whose parts of the optimizer's groups always have gradients, hold the policy's groups."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.run._optimization.policy_groups:
            optimizer = _innermost(self.run.optimizer)
            groups = optimizer.param_groups  # ZeRO gives the optimizer one of them at a time
            self._held = {id(groups[index]) for index in self.run._optimization.policy_groups}
            self._hooks = [
                optimizer.register_step_pre_hook(self._hide),
                optimizer.register_step_post_hook(self._show),
            ]

    def _hide(self, optimizer: Any, *_: Any) -> None:
        if self.is_alone:
            held = [group for group in optimizer.param_groups if id(group) in self._held]
            self._left_out = [(each, each.grad) for group in held for each in group["params"]]
            for each, _grad in self._left_out:
                each.grad = None

    def _show(self, *_: Any) -> None:
        for each, grad in self._left_out:  # some are made once for the whole run
            each.grad = grad
        self._left_out = []

    # ---- Checkpoints ----

    @contextmanager
    def loading(self, checkpoint: str) -> Iterator[None]:
        """Let FSDP load an optimizer that has no state of the policy yet, as in warm-up, and give it none.

        torch asks for the state of all parameters that require a gradient.

        Args:
            checkpoint: Its directory.
        """
        policy = self.run._unwrapped(self.run.model).policy
        held = [each for each in policy.parameters() if each.requires_grad]
        if not self.run.is_fsdp_enabled or "policy" in begun_models(checkpoint):
            held = []
        for parameter in held:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in held:
                parameter.requires_grad_(True)

    def state_dict(self) -> dict[str, Any]:
        """Return whether warm-up is over; how many updates it has had, `global_step` says."""
        return {"is_over": self.is_over} if self.args.critic_warmup_steps else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.is_over = bool(state["is_over"])


def check_warmup(args: PPOConfig, policy: nn.Module, value_model: nn.Module) -> None:
    """Check that the value model can learn alone, if it is to.

    Args:
        args: The arguments.
        policy: The trained language model.
        value_model: The trained value model.

    Raises:
        ValueError: It cannot.
    """
    steps, gate = args.critic_warmup_steps, args.critic_warmup_explained_variance
    if steps == 0:
        if gate is not None:
            raise ValueError(
                f"critic_warmup_explained_variance={gate} ends a warm-up that critic_warmup_steps=0 does not begin; "
                "set critic_warmup_steps to the most updates that it may last"
            )
        return
    for name in ("vf_coef", "critic_learning_rate"):
        if getattr(args, name) == 0:
            raise ValueError(
                f"critic_warmup_steps={steps} trains the value model alone, but with {name}=0 it learns nothing; "
                f"raise {name}"
            )
    own = {id(each) for each in value_model.parameters() if each.requires_grad}
    if not own - {id(each) for each in policy.parameters()}:
        raise ValueError(
            f"critic_warmup_steps={steps} trains the value model alone, but it has no trainable parameters of its "
            "own; give it some (value_peft_config, or requires_grad_ on its head), or set critic_warmup_steps=0"
        )


def _innermost(optimizer: Any) -> Any:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
