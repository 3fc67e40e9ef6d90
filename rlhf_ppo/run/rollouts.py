"""Rollouts: log-probabilities and values of sampled responses, their metrics, and the stop at a value not finite."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from rlhf_ppo.algorithm.advantages import FixedKLController, KLController, ScoreMoments
from rlhf_ppo.data.rollout import Experience, PackedIndices, Prompts, Responses, Rollout, forward_in_batches
from rlhf_ppo.models.capabilities import weights_not_finite
from rlhf_ppo.models.policy_and_value import PolicyAndValueOutput, Reference
from rlhf_ppo.models.unwrapping import advice_by_type
from rlhf_ppo.ranks.processes import raise_on_all_ranks
from rlhf_ppo.reporting import metrics
from rlhf_ppo.reporting.completion_files import (
    NUM_KEPT_COMPLETIONS,
    RecordedUpdate,
    completion_rows,
    write_completions,
)
from rlhf_ppo.rewards.scorer import WrongRewardError, scores_in_reward_unit
from rlhf_ppo.run.learning import valued_tokens
from rlhf_ppo.run.run_state import RunState

if TYPE_CHECKING:
    from transformers import GenerationConfig


Play = Callable[[nn.Module, Prompts, "GenerationConfig | None"], tuple[Responses, Prompts]]
"""Plays episodes with the prepared model, as the settings say; returns responses and updated prompts."""


def policy_and_value_outputs(run: RunState, model: nn.Module, responses: Responses) -> PolicyAndValueOutput:
    """Compute log-probabilities and values of responses, without entropies; the update keeps their temperature."""
    run.models.temperature = run.args.temperature  # a callback may change it

    def forward(*batch: Tensor, places: PackedIndices) -> tuple[Tensor, ...]:
        return model(*batch, with_entropy=False, places=places)

    return PolicyAndValueOutput(*_forward(run, responses, forward))


def reference_logprobs(
    run: RunState, model: nn.Module, reference: Reference | None, responses: Responses
) -> Tensor | None:
    """Compute the reference's log-probabilities, `(B, T)`; None if there is no reference.

    Args:
        run: The run.
        model: The prepared `PolicyAndValue`.
        reference: The reference, or None.
        responses: `B` responses.
    """
    if reference is None:
        return None
    if reference.model is not None:
        separate: Any = run.accelerator.unwrap_model(reference.model, keep_torch_compile=False)
        separate.temperature = run.args.temperature
    with reference.forward(model, run.models.policy) as forward:
        return _forward(run, responses, forward)[0]


def _forward(run: RunState, responses: Responses, forward: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    def evaluate(part: Responses) -> tuple[Tensor, ...]:
        with run.accelerator.autocast():
            return forward(*part.batch, places=part.places)

    max_rows = run.args.local_rollout_forward_batch_size
    return forward_in_batches(responses, evaluate, max_rows, run.models.packs_rows)


class RolloutMetrics:
    """Metrics, counts and first responses of the current update's rollout.

    Attributes:
        num_response_tokens: Tokens of the responses of all ranks.
    """

    def __init__(self, run: RunState) -> None:
        self.run, self.num_response_tokens, self._num_unscored = run, 0, 0
        self._latest: RecordedUpdate | None = None

    def record(
        self,
        rollout: Rollout,
        experience: Experience,
        kl_controller: KLController,
        score_unit: ScoreMoments | None,
    ) -> dict[str, float]:
        """Return the metrics of a rollout; keep it until the log and count its tokens.

        Args:
            rollout: This rank's rollout.
            experience: The same with rewards, advantages and returns.
            kl_controller: Gives the coefficient of the KL penalty.
            score_unit: Moments that scale scores; None without scaling.
        """
        run, step = self.run, self.run.state.global_step + 1
        columns = metrics.rollout_columns(rollout, run.args, kl_controller.coef, score_unit, experience.rewards)
        self._latest = RecordedUpdate(step, rollout, experience, columns, run.logged.columns)
        of_all_ranks = metrics.gather_columns(columns, run.gather)
        self._check_scored(of_all_ranks)
        measured = self._measured(rollout, experience, of_all_ranks)
        if not isinstance(kl_controller, FixedKLController):
            measured["objective/kl_coef"] = float(kl_controller.coef)
        self._count_tokens(rollout.responses.attention_mask, of_all_ranks["length"])
        return measured

    def _check_scored(self, columns: Mapping[str, Tensor]) -> None:
        """Warn of responses without a score on any rank; raise after three updates without any score."""
        scores, rewards = columns["scores"], [name for name in columns if name.startswith("rewards/")]
        metrics.warn_of_unscored(scores)
        self._num_unscored = self._num_unscored + 1 if scores.isnan().all() else 0
        if self._num_unscored == 3:
            raise WrongRewardError(
                "no response of the last three updates has a score: a reward whose weight is not 0 must return "
                f"numbers; there are {', '.join(name.removeprefix('rewards/') for name in rewards)}"
            )

    def _measured(self, rollout: Rollout, experience: Experience, columns: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics of a rollout, its critic and its engine; `columns` are those of all ranks."""
        run, args = self.run, self.run.args
        valued = valued_tokens(rollout.loss_mask, args)
        weights = rollout.importance_weights(args.importance_sampling_clip_max)
        return {
            **metrics.rollout_metrics(columns),
            "response/unique_frac": metrics.unique_fraction(rollout.responses, run.gather),
            **metrics.critic_metrics(rollout.values, experience.returns, valued, run.sum_over_ranks, run.gather),
            **metrics.sampling_metrics(rollout, weights, run.sum_over_ranks, run.gather),
        }

    def _count_tokens(self, attention_mask: Tensor, lengths: Tensor) -> None:
        """Count the tokens of this rank's rows, as far as Trainer counts them, and of the responses of all ranks."""
        run, counted = self.run, self.run.args.include_num_input_tokens_seen
        self.num_response_tokens = int(lengths.sum())
        if counted != "no":
            tokens = attention_mask.sum() if counted == "non_padding" else torch.tensor(attention_mask.numel())
            run.state.num_input_tokens_seen += int(run.sum_over_ranks(tokens.to(run.args.device)))

    def save_completions(self) -> None:
        """Write the first responses of the latest update into the run's directory, if it has a rollout."""
        run, latest, self._latest = self.run, self._latest, None
        rows: list[dict[str, Any]] = []
        if latest is not None and latest.step == run.state.global_step:
            num_rows = -(-NUM_KEPT_COMPLETIONS // run.accelerator.num_processes)
            rows = completion_rows(latest, run.tokenizer, run.args.kl_estimator, num_rows)
        rows = gather_object(rows)
        if rows and run.args.process_index == 0:
            write_completions(str(run.args.output_dir), rows[:NUM_KEPT_COMPLETIONS])


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
    own = metrics.evaluation_metrics(columns, prefix)
    logged = {f"{prefix}_{name}": value for name, value in run.logged.drain().items()}
    return own | metrics.named_apart(logged, own)


# ---- The stop at the first value that is not finite ----

_FIGURES = {
    "policy/approxkl_avg": "the policy's log-probabilities",
    "val/ratio": "the importance ratios",
    "loss/policy_avg": "the policy loss",
    "loss/value_avg": "the value loss",
}
"""Checked quantities of an optimizer step in the order of their computation; loss and gradient norm follow."""
_SAMPLED = "the sampling log-probabilities"


class DivergenceError(ValueError):
    """A value of training is not finite. The message names the update, the value and the last checkpoint."""


class DivergenceGuard:
    """Raise `DivergenceError` on all ranks at the first score, loss, gradient norm or weight that is not finite.

    Args:
        run: The run; errors use the names of the weights of its models.
    """

    def __init__(self, run: RunState) -> None:
        self.run = run

    def check_rollout(self, rollout: Rollout) -> None:
        """Check log-probabilities, KL, values and scores; a score of NaN stands for no score."""
        of_tokens = {
            "the policy's log-probabilities": rollout.logprobs,
            _SAMPLED: rollout.responses.sampling_logprobs,
            "the reference's log-probabilities": rollout.ref_logprobs,
            "the KL": rollout.kl(self.run.args.kl_estimator),
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
        with raise_on_all_ranks(self.run.accelerator):
            if not bool(finite.all()):
                number, row = (~finite).nonzero()[0].tolist()
                name = list(figures)[number]
                fix = "The engine or rollout_func must give one for each token, or none" if name == _SAMPLED else None
                raise DivergenceError(self._message(f"{name} of response {row}: not finite", fix))

    def check_step(
        self, statistics: metrics.UpdateStatistics, num_parts: int, loss: Tensor, grad_norm: Tensor | float
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
        watched = [sums[metrics.UpdateStatistics.KEYS.index(key)] for key in _FIGURES]
        norm = getattr(grad_norm, "full_tensor", lambda: grad_norm)()
        norm = norm.to(sums.device) if isinstance(norm, Tensor) else sums.new_full((), norm)  # no copy from the host
        not_finite = ~torch.stack([*watched, loss.detach().float(), norm.float()]).isfinite()
        flags: list[float] = self.run.sum_over_ranks(not_finite.float()).tolist()  # pyright: ignore[reportUnknownMemberType]
        names = [*_FIGURES.values(), "the loss", "the norm of the gradient"]
        first = next((name for name, flag in zip(names, flags, strict=True) if flag), None)
        if first is not None and not (first == names[-1] and self.run.accelerator.mixed_precision == "fp16"):
            raise DivergenceError(self._message(f"{first} became not finite while learning"))

    def check_weights(self, together: bool = True) -> None:
        """Check that every weight is finite; called before any is saved.

        Args:
            together: Whether every rank calls this, so that an error of one rank is raised on all.
        """
        self.run.check_in_step()
        with raise_on_all_ranks(self.run.accelerator) if together else nullcontext():
            if names := weights_not_finite(self.run.models):
                raise DivergenceError(self._message(f"the weights {', '.join(names[:3])} are not finite"))

    def _message(self, reason: str, fix: str | None = None) -> str:
        saved = self.run.last_checkpoint
        if saved is None or not os.path.isdir(saved):
            resume = "no checkpoint was saved before"
        else:
            resume = f"the last good checkpoint is {saved}"
        fix = fix or advice_by_type(self.run.models, "Look at the rewards, lower learning_rate, or raise kl_coef")
        return f"{self.run.position()}: {reason}. Nothing from this update was saved; {resume}. {fix}"
