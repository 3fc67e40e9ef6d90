"""The stop at the first value of a run that is not finite."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from rlhf_ppo.data.rollout import Experience, Rollout
from rlhf_ppo.models.capabilities import weights_not_finite
from rlhf_ppo.models.unwrapping import advice_by_type
from rlhf_ppo.ranks.processes import raise_on_all_ranks
from rlhf_ppo.reporting.metrics import UpdateStatistics
from rlhf_ppo.run.run_state import RunState

_FIGURES = {
    "policy/approxkl_avg": "the policy's log-probabilities",
    "val/ratio": "the importance ratios",
    "loss/policy_avg": "the policy loss",
    "loss/value_avg": "the value loss",
}
"""Checked quantities of an optimizer step in the order of their computation; loss and gradient norm follow."""


class DivergenceError(ValueError):
    """A value of training is not finite. The message names the update, the value and the last checkpoint."""


_SAMPLED = "the sampling log-probabilities"


class DivergenceGuard:
    """Raise `DivergenceError` on all ranks at the first score, loss, gradient norm or weight that is not finite.

    Args:
        run: The run; errors use the names of the weights of its models.
    """

    def __init__(self, run: RunState) -> None:
        self.run, self.args, self.accelerator, self.models = run, run.args, run.accelerator, run.models

    def check_rollout(self, rollout: Rollout) -> None:
        """Check log-probabilities, KL, values and scores; a score of NaN stands for no score."""
        of_tokens = {
            "the policy's log-probabilities": rollout.logprobs,
            _SAMPLED: rollout.responses.sampling_logprobs,
            "the reference's log-probabilities": rollout.ref_logprobs,
            "the KL": rollout.kl(self.args.kl_estimator),
            "the values": rollout.values,
            "the rewards of tokens": rollout.token_scores,
        }
        outside = ~rollout.response_mask
        figures = {name: values.masked_fill(outside, 0.0) for name, values in of_tokens.items() if values is not None}
        scores = rollout.scores.masked_fill(rollout.scores.isnan(), 0.0)
        self._check(figures | {"the value after the last token": rollout.final_values, "the score": scores})

    def check_experience(self, experience: Experience) -> None:
        """Check returns and advantages."""
        self._check({"the returns": experience.returns, "the advantages": experience.advantages})

    def _check(self, figures: Mapping[str, Tensor]) -> None:
        finite = torch.stack([values.isfinite().reshape(len(values), -1).all(dim=1) for values in figures.values()])
        with raise_on_all_ranks(self.accelerator):
            if not bool(finite.all()):
                number, row = (~finite).nonzero()[0].tolist()
                name = list(figures)[number]
                fix = "The engine or rollout_func must give one for each token, or none" if name == _SAMPLED else None
                raise DivergenceError(self._message(f"{name} of response {row}: not finite", fix))

    def check_step(
        self, statistics: UpdateStatistics, num_parts: int, loss: Tensor, grad_norm: Tensor | float
    ) -> None:
        """Check an optimizer step before it is taken, with one exchange and one read from the device.

        An overflow of gradients under fp16's loss scaling is not a divergence: the scaler skips that step.

        Args:
            statistics: Holds the sums of the step's micro-batches, the last `num_parts`.
            num_parts: Number of micro-batches of the step.
            loss: This rank's loss.
            grad_norm: Gradient norm before clipping.
        """
        sums = torch.stack(statistics.sums[-num_parts:]).sum(dim=0)
        watched = [sums[UpdateStatistics.KEYS.index(key)] for key in _FIGURES]
        norm = getattr(grad_norm, "full_tensor", lambda: grad_norm)()
        norm = norm.to(sums.device) if isinstance(norm, Tensor) else sums.new_full((), norm)  # no copy from the host
        not_finite = ~torch.stack([*watched, loss.detach().float(), norm.float()]).isfinite()
        flags: list[float] = self.run.sum_over_ranks(not_finite.float()).tolist()  # pyright: ignore[reportUnknownMemberType]
        names = [*_FIGURES.values(), "the loss", "the norm of the gradient"]
        first = next((name for name, flag in zip(names, flags, strict=True) if flag), None)
        if first is not None and not (first == names[-1] and self.accelerator.mixed_precision == "fp16"):
            raise DivergenceError(self._message(f"{first} became not finite while learning"))

    def check_weights(self, together: bool = True) -> None:
        """Check that every weight is finite; called before any is saved.

        Args:
            together: Whether every rank calls this, so that an error of one rank is raised on all.
        """
        self.run.check_in_step()
        with raise_on_all_ranks(self.accelerator) if together else nullcontext():
            if names := weights_not_finite(self.models):
                raise DivergenceError(self._message(f"the weights {', '.join(list(names)[:3])} are not finite"))

    def _message(self, reason: str, fix: str | None = None) -> str:
        saved = self.run.last_checkpoint
        if saved is None or not os.path.isdir(saved):
            resume = "no checkpoint was saved before"
        else:
            resume = f"the last good checkpoint is {saved}"
        fix = fix or advice_by_type(self.models, "Look at the rewards, lower learning_rate, or raise kl_coef")
        return f"{self.run.position()}: {reason}. Nothing from this update was saved; {resume}. {fix}"
