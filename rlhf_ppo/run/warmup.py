"""Critic warm-up: the first updates, in which only the value model learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlhf_ppo.run.run_state import RunState

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

    def drop_policy_gradients(self) -> None:
        """Remove the gradients of the policy's parameters where only the value model learns."""
        if self.warms_up:
            for parameter in self.run.models.policy.parameters():
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

    def _hide(self, optimizer: Any, *_: object) -> None:
        if self.warms_up:
            held = [group for group in optimizer.param_groups if id(group) in self._held]
            self._left_out = [(weight, weight.grad) for group in held for weight in group["params"]]
            for weight, _grad in self._left_out:
                weight.grad = None

    def _show(self, *_: object) -> None:
        for weight, grad in self._left_out:  # some exist for the whole run
            weight.grad = grad
        self._left_out = []
