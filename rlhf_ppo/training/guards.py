"""Guards around the updates of a run: divergence, and the end of a run after a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import output_directory
from rlhf_ppo.data.rollout import Experience, Rollout
from rlhf_ppo.generation.sampling import NonFiniteLogitsError
from rlhf_ppo.models.capabilities import weights_not_finite
from rlhf_ppo.processes.distributed import get_logger, raise_on_all_ranks
from rlhf_ppo.processes.signals import RunStopped, Stopped, exit_despite_threads, say
from rlhf_ppo.reporting.metrics import UpdateStatistics
from rlhf_ppo.rewards.scorer import masked_kl

if TYPE_CHECKING:
    from rlhf_ppo.training.learning import InterruptibleLearning
    from rlhf_ppo.training.run_state import RunState

logger = get_logger(__name__)

MAX_SKIPPED_IN_A_ROW = 5
"""Number of skipped updates in a row after which `on_divergence="skip"` stops."""

MAX_OVERFLOWS_IN_A_ROW = 25
"""Number of steps in a row that fp16's loss scaling skips before a run stops; each halves the scale."""

_LARGE_LEARNING_RATE = 1e-3
_LARGE_COEFFICIENT = 1e3
_COEFFICIENTS = ("vf_coef", "entropy_coef", "kl_coef", "ptx_coef")

_FIGURES = {
    "policy/approxkl_avg": "the policy's log-probabilities",
    "val/ratio": "the importance ratios",
    "loss/policy_avg": "the policy loss",
    "loss/value_avg": "the value loss",
}
"""Checked quantities of an optimizer step in the order of their computation; loss and gradient norm follow."""


class DivergenceError(ValueError):
    """A value of training is not finite. The message names the value, the update, the cause and the next step."""


@dataclass
class Skipped:
    """Counts of `on_divergence="skip"`; part of a checkpoint.

    Attributes:
        rows: Responses left out, on all ranks.
        updates: Updates in which optimizer steps were left out.
        in_a_row: Skipped updates since the last complete update.
        overflows_in_a_row: Optimizer steps skipped by fp16's loss scaling since the last step that was taken.
    """

    rows: int = 0
    updates: int = 0
    in_a_row: int = 0
    overflows_in_a_row: int = 0


class DivergenceGuard:
    """Check scores, log-probabilities, KL, values, advantages, losses, gradients and weights of a run.

    With `on_divergence="stop"` a value that is not finite raises, on all ranks together. With "skip", responses with
    such values are left out, and so is the rest of an update whose loss or gradient is not finite. Weights that are
    not finite always raise, before anything is saved.

    Args:
        run: The run, whose accelerator exists.
        model: Policy and value model, unwrapped; errors use the names of its weights.

    Attributes:
        skipped: Counts of this run.
        last_checkpoint: Checkpoint that the run last wrote or resumed from.
        left_out: A reason for each response of this rank that was left out of the current update.
        num_steps: Allowed optimizer steps of the current update.
        own_losses: The user's loss functions, by the name of the value that each gives.
    """

    def __init__(self, run: RunState, model: nn.Module) -> None:
        self.run, self.args, self.accelerator, self.model = run, run.args, run.accelerator, model
        self.last_checkpoint: str | None = None
        self.own_losses: Mapping[str, str] = {}
        self.start(Skipped())

    def start(self, skipped: Skipped) -> None:
        """Start with the counts of a new or resumed run."""
        self.skipped = skipped
        self._begin_update()

    def _begin_update(self) -> None:
        self.left_out: list[str] = []
        self.num_steps, self._cut_by, self._cut_in = 0, None, ""

    @property
    def skips(self) -> bool:
        """Whether values that are not finite are left out instead of raised."""
        return self.args.on_divergence == "skip"

    @property
    def is_update_cut(self) -> bool:
        """Whether the rest of the current update is left out."""
        return self._cut_by is not None

    # ---- Rollout ----

    def refuse(self, reason: str) -> None:
        """Leave out a response with an invalid score; the reward source then treats it as unscored.

        Raises:
            DivergenceError: `on_divergence` is "stop".
        """
        if not self.skips:
            raise DivergenceError(self._message(reason, None))
        self.left_out.append(reason)

    def checked_rollout(self, rollout: Rollout) -> Rollout:
        """Return the rollout, with responses that are not finite marked as unscored.

        Raises:
            DivergenceError: `on_divergence` is "stop", and a value of any rank is not finite.
        """
        finite = _finite_rows(rollout, self.args.kl_estimator)
        return self._checked(rollout, finite, ~rollout.scores.isnan(), _without)

    def checked_experience(self, experience: Experience) -> Experience:
        """Return the experience without responses whose advantages or returns are not finite.

        Raises:
            DivergenceError: `on_divergence` is "stop", and a value of any rank is not finite.
        """
        finite = {
            "the returns (rewards minus kl_coef times KL, summed)": _all_finite(experience.returns),
            "the advantages": _all_finite(experience.advantages),
        }
        return self._checked(experience, finite, experience.loss_mask.any(dim=1), _without_experience)

    def _checked(self, batch: Any, finite: dict[str, Tensor], counted: Tensor, without: Callable[..., Any]) -> Any:
        of_figures = torch.stack(list(finite.values()))
        with raise_on_all_ranks(self.accelerator):
            if bool(of_figures.all()):
                return batch
            reasons = _first_of_each_row(list(finite), of_figures)
            if not self.skips:
                raise DivergenceError(self._message(min(reasons.values())[1], self._cause()))
            self.left_out += [reason for row, (_, reason) in reasons.items() if counted[row]]
        return without(batch, ~of_figures.all(dim=0))

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Add the cause and the next step to errors about logits that are not finite."""
        try:
            yield
        except NonFiniteLogitsError as error:
            raise NonFiniteLogitsError(f"{error}. Here {self._cause()}; {self._where_to_resume()}") from error

    # ---- Learning ----

    def allows_step(self, statistics: UpdateStatistics, num_parts: int, loss: Tensor, grad_norm: Any) -> bool:
        """Return whether an optimizer step may be taken, with one exchange and one read from the device.

        An overflow of gradients under fp16's loss scaling is not a divergence: the scaler skips that step.

        Args:
            statistics: Holds the sums of the step's micro-batches, the last `num_parts`.
            num_parts: Number of micro-batches of the step.
            loss: This rank's loss.
            grad_norm: Gradient norm before clipping.

        Returns:
            False if a value is not finite; the caller then leaves out the rest of the update.

        Raises:
            DivergenceError: `on_divergence` is "stop" and a value is not finite, or fp16 overflowed
                `MAX_OVERFLOWS_IN_A_ROW` times in a row.
        """
        sums = torch.stack(statistics.sums[-num_parts:]).sum(dim=0)
        watched = [sums[UpdateStatistics.KEYS.index(key)] for key in _FIGURES]
        norm = getattr(grad_norm, "full_tensor", lambda: grad_norm)()
        norm = norm.to(sums.device) if isinstance(norm, Tensor) else sums.new_full((), norm)  # no copy from the host
        not_finite = ~torch.stack([*watched, loss.detach().float(), norm.float()]).isfinite()
        flags: list[float] = self.run.sum_over_ranks(not_finite.float()).tolist()  # pyright: ignore[reportUnknownMemberType]
        names = [*_FIGURES.values(), "the loss", "the norm of the gradient"]
        found = next((name for name, flag in zip(names, flags, strict=True) if flag), None)
        if found is None or (found == names[-1] and self.accelerator.mixed_precision == "fp16"):
            self._count_step(has_overflowed=found is not None)
            return True
        reason = f"{found} became not finite in optimizer step {self.num_steps + 1}"
        given = self.own_losses
        function = " or ".join(dict.fromkeys(given.values())) if found in names[-2:] else given.get(found, "")
        if not self.skips:
            raise DivergenceError(self._message(reason, self._cause(function)))
        self._cut_by, self._cut_in = reason, function
        return False

    def _count_step(self, has_overflowed: bool) -> None:
        self.num_steps += not has_overflowed
        self.skipped.overflows_in_a_row = self.skipped.overflows_in_a_row + 1 if has_overflowed else 0
        if self.skipped.overflows_in_a_row >= MAX_OVERFLOWS_IN_A_ROW:
            reason = f"fp16's gradients overflowed in {MAX_OVERFLOWS_IN_A_ROW} optimizer steps in a row"
            raise DivergenceError(self._message(reason, self._cause()))

    def finish_update(self) -> dict[str, float]:
        """Count and log the responses and steps left out of an update; every rank calls this.

        Returns:
            Totals of the run for the log with "skip", else nothing.

        Raises:
            DivergenceError: `MAX_SKIPPED_IN_A_ROW` updates in a row were skipped.
        """
        left_out, cut_by, cut_in, took_steps = self.left_out, self._cut_by, self._cut_in, self.num_steps > 0
        self._begin_update()
        if not self.skips:
            return {}
        num_rows = self._sum_of(len(left_out))
        if cut_by is None and num_rows and not took_steps:
            cut_by = "no response was left to learn from"
        self.skipped.rows += num_rows
        self.skipped.updates += cut_by is not None
        self.skipped.in_a_row = 0 if cut_by is None else self.skipped.in_a_row + 1
        if num_rows:
            self._warn_of_rows(left_out)
        if cut_by is not None:
            logger.warning(f"Skipped in {self.run.moment()}: {cut_by}; {self._cause(cut_in)}")
            self.check_weights()
        if self.skipped.in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise DivergenceError(
                self._message(f"{cut_by}, the last of {MAX_SKIPPED_IN_A_ROW} skipped updates in a row")
            )
        return {"guard/skipped_rows": self.skipped.rows, "guard/skipped_updates": self.skipped.updates}

    @contextmanager
    def apart_from_updates(self) -> Iterator[None]:
        """Keep the counts of an evaluation apart from those of updates."""
        kept, self.left_out = self.left_out, []
        try:
            yield
            if self.skips and self._sum_of(len(self.left_out)):
                self._warn_of_rows(self.left_out)
        finally:
            self.left_out = kept

    def log_skipped(self) -> None:
        """Log at the end of a run how many responses and updates were left out."""
        if self.skipped.rows or self.skipped.updates:
            logger.warning(
                f"on_divergence='skip' left out {self.skipped.rows} responses, and steps of {self.skipped.updates} "
                "updates, in which something was not finite."
            )

    # ---- Weights ----

    def check_weights(self, together: bool = True) -> None:
        """Check that every weight is finite; called before any is saved.

        Args:
            together: Whether every rank calls this, so that an error of one rank is raised on all.

        Raises:
            DivergenceError: A weight is not finite.
        """
        with raise_on_all_ranks(self.accelerator) if together else nullcontext():
            if found := weights_not_finite(self.model):
                raise DivergenceError(
                    f"after update {self.run.state.global_step}: {_weights(found)}; {self._settings()}. The model was "
                    f"not saved; {self._where_to_resume()}"
                )

    # ---- Messages ----

    def _sum_of(self, number: int) -> int:
        return int(self.run.sum_over_ranks(torch.tensor(float(number), device=self.accelerator.device)))

    def _warn_of_rows(self, left_out: Sequence[str]) -> None:
        told = gather_object(list(left_out))
        logger.warning(f"Left out {len(told)} responses of {self.run.moment()}; the first because {told[0]}.")

    def _message(self, reason: str, cause: str | None = None) -> str:
        """Build the error message: position, value, cause, next step."""
        advice = "" if self.skips else "; on_divergence='skip' skips values that are not finite instead"
        why = reason if cause is None else f"{reason}; {cause}"
        return f"{self.run.moment()}: {why}. Nothing of it was saved; {self._where_to_resume()}{advice}"

    def _where_to_resume(self) -> str:
        saved = self.last_checkpoint
        if saved is None or not os.path.isdir(saved):
            return "no checkpoint was saved before"
        return f"the last good checkpoint is {saved}: continue with resume_from_checkpoint={saved!r}"

    def _cause(self, function: str = "") -> str:
        """Return the likely cause: weights that are not finite already, the user's function, and unusual settings."""
        found = weights_not_finite(self.model)
        return f"the cause: {_weights(found)}; {self._settings()}" if found else self._settings(function)

    def _settings(self, function: str = "") -> str:
        args, causes = self.args, [f"your {function}"] if function else []
        if self.accelerator.mixed_precision == "fp16":
            causes.append("fp16, which overflows above 65504 (set bf16=True instead)")
        if args.learning_rate > _LARGE_LEARNING_RATE:
            causes.append(f"learning_rate={args.learning_rate} (the default is 3e-6)")
        for name in _COEFFICIENTS:
            if (value := getattr(args, name)) > _LARGE_COEFFICIENT:
                causes.append(f"{name}={value} (the default is {getattr(PPOConfig, name)})")
        if args.max_grad_norm == 0:
            causes.append("max_grad_norm=0, which clips no gradient (set it to 1)")
        usual = f"learning_rate={args.learning_rate}, kl_coef={args.kl_coef}, or rewards that are too large"
        return f"likely causes: {'; '.join(causes) or usual}"


def _weights(found: Mapping[str, float]) -> str:
    name = next(iter(found))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"weights that are not finite in {name}{more}"


def _all_finite(values: Tensor) -> Tensor:
    return values.isfinite().all(dim=1)


def _finite_rows(rollout: Rollout, kl_estimator: str) -> dict[str, Tensor]:
    """Return for each quantity of a rollout, in order of computation, which rows are finite, `(B,)`."""
    ref_logprobs, of_reference = rollout.ref_logprobs, dict[str, Tensor]()
    kl = masked_kl(rollout, kl_estimator)
    if ref_logprobs is not None and kl is not None:
        of_reference = {"the reference's log-probabilities": ref_logprobs, "the KL": kl}
    per_token = {
        "the policy's log-probabilities": rollout.logprobs,
        **of_reference,
        "the values": rollout.values,
        "the rewards of tokens": rollout.token_scores,
    }
    finite = {name: _all_finite(values.masked_fill(~rollout.response_mask, 0.0)) for name, values in per_token.items()}
    finite["the values"] = finite["the values"] & rollout.final_values.isfinite()
    return finite | {"the scores": ~rollout.scores.isinf()}


def _first_of_each_row(names: Sequence[str], of_figures: Tensor) -> dict[int, tuple[int, str]]:
    """Return for each bad row the index and name of its first quantity that is not finite."""
    bad = (~of_figures).cpu()
    rows: list[int] = bad.any(dim=0).nonzero().flatten().tolist()  # pyright: ignore[reportUnknownMemberType]
    first = {row: int(bad[:, row].int().argmax()) for row in rows}
    return {row: (number, f"{names[number]} of response {row} are not finite") for row, number in first.items()}


def _without(rollout: Rollout, rows: Tensor) -> Rollout:
    """Mark rows of a rollout as unscored, and make them finite."""
    names = ("logprobs", "ref_logprobs", "values", "final_values", "token_scores", "sampling_logprobs")
    by_source = {name: values.masked_fill(rows, torch.nan) for name, values in rollout.scores_by_source.items()}
    scores = rollout.scores.masked_fill(rows, torch.nan)
    return replace(rollout, **_cleared(rollout, names, rows), scores=scores, scores_by_source=by_source)


def _without_experience(experience: Experience, rows: Tensor) -> Experience:
    """Mask out rows of an experience, and make them finite: 0 times NaN is NaN in a backward pass."""
    loss_mask = experience.loss_mask & ~rows[:, None]
    return replace(experience, loss_mask=loss_mask, **_cleared(experience, ("advantages", "returns"), rows))


def _cleared(batch: Any, names: Sequence[str], rows: Tensor) -> dict[str, Tensor]:
    given = {name: getattr(batch, name) for name in names}
    return {
        name: values.masked_fill(rows[:, None] if values.dim() == 2 else rows, 0.0)
        for name, values in given.items()
        if values is not None
    }


class SignalStop:
    """End a run after a signal, with a checkpoint.

    An interrupted rollout is dropped: the checkpoint has the state after the update before it, including random
    numbers. Interrupted learning is saved after its last optimizer step, and the resumed run finishes it. The resumed
    run also repeats an interrupted sample table or evaluation.

    Args:
        run: The run.
        learning: Holds the partial update.
        save: Saves a checkpoint; takes the prepared model, and None.
        stop_rewards: Cancels pending rewards.
    """

    def __init__(
        self,
        run: RunState,
        learning: InterruptibleLearning,
        save: Callable[[nn.Module, Any], None],
        stop_rewards: Callable[[], None],
    ) -> None:
        self.run, self.learning, self.save, self.stop_rewards = run, learning, save, stop_rewards

    @contextmanager
    def saving(self, model: nn.Module) -> Iterator[None]:
        """Catch `Stopped` in the block, and write a checkpoint."""
        self.run.streams.mark()
        try:
            yield
        except Stopped as stop:
            self.run.signals.stopped = stop.number
            self.stop_rewards()
            self.save_where_it_stopped(model)

    def save_where_it_stopped(self, model: nn.Module) -> None:
        """Write a checkpoint of the last mark, unless it exists."""
        run = self.run
        name = self.learning.checkpoint_name(run.state.global_step)
        checkpoint, last = os.path.join(output_directory(run.args), name), run.guard.last_checkpoint
        if last is not None and os.path.realpath(last) == os.path.realpath(checkpoint):
            return
        self._leave_evaluation()
        run.streams.rewind()
        self.save(model, None)
        if self.learning.partial is None:  # else callbacks that look for `checkpoint-<step>` would not find it
            run.fire("on_save")

    def _leave_evaluation(self) -> None:
        if self.run.control.should_evaluate:
            self.run.control.should_evaluate = False
            self.run.progress.due.append("evaluation")

    def after_event(self, event: str) -> None:
        """Fire an event at the end of an update or a pass; after a signal, leave a due evaluation to the next run."""
        self.run.fire(event)
        self.run.agree_on_control()
        self.run.streams.mark()
        if self.run.signals.stopped is not None:
            self._leave_evaluation()

    def end(self, number: int) -> NoReturn:
        """Log the position and the checkpoint of a run that a signal ended, and end it.

        Raises:
            RunStopped: Always.
        """
        run, checkpoint = self.run, str(self.run.guard.last_checkpoint)
        done, of = run.state.global_step, run.state.max_steps
        learned = self.learning.progress()
        where = f"after update {done} of {of}" if learned is None else f"in update {done + 1} of {of}, {learned}"
        run.signals.wait_until_logged()
        if run.args.process_index == 0:
            say(
                f"{signal.Signals(number).name}: the run has ended {where}, with the checkpoint {checkpoint}; "
                "resume_from_checkpoint=True (--resume_from_checkpoint True) continues from it."
            )
        exit_despite_threads(128 + number)
        raise RunStopped(number, checkpoint)


def awaited(num_updates: int, phase: str, is_saving: bool, keeps_partial_update: bool) -> str:
    """Return for the log the work that is finished before a signal ends the run.

    Args:
        num_updates: Number of completed updates.
        phase: The current phase.
        is_saving: Whether a checkpoint is being written.
        keeps_partial_update: Whether a partial update can be saved.
    """
    if is_saving:
        return f"the run ends when checkpoint-{num_updates} is written"
    if phase == "learn" and keeps_partial_update:
        return "the run ends with a checkpoint after the current pass of learning"
    if phase == "learn":  # of an overridden `learn`, or of a subclass of `Experience`
        update = num_updates + 1
        return f"the run ends with a checkpoint when update {update} is learned, because its steps cannot be undone"
    return f"the run ends with a checkpoint of update {num_updates} after the current pass or reward"
