"""Guards around the updates of a run: divergence, and the end of a run after a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import output_directory
from rlhf_ppo.data.experience import Experience
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.generation.sampling import NonFiniteLogitsError
from rlhf_ppo.models.capabilities import weights_not_finite
from rlhf_ppo.processes.distributed import get_logger, raise_on_all_ranks
from rlhf_ppo.processes.signals import RunStopped, Stopped, exit_despite_threads, say
from rlhf_ppo.reporting.metrics import UpdateStatistics
from rlhf_ppo.rewards.shaping import masked_kl

if TYPE_CHECKING:
    from rlhf_ppo.training.learning import InterruptibleLearning
    from rlhf_ppo.training.run_state import RunState

logger = get_logger(__name__)

MAX_SKIPPED_IN_A_ROW = 5
"""With how many skipped updates in a row `on_divergence="skip"` stops after all."""

MAX_OVERFLOWS_IN_A_ROW = 25
"""With how many optimizer steps in a row that fp16's loss scaling leaves out a run stops; each halves the scale."""

_LARGE_LEARNING_RATE = 1e-3
_LARGE_COEFFICIENT = 1e3
_COEFFICIENTS = ("vf_coef", "entropy_coef", "kl_coef", "ptx_coef", "positive_nll_coef")

_FIGURES = {
    "policy/approxkl_avg": "the policy's log-probabilities",
    "val/ratio": "the importance ratios",
    "loss/policy_avg": "the policy loss",
    "loss/value_avg": "the value loss",
}
"""What is watched of an optimizer step, in the order in which it is computed; the loss and the gradient come last."""


class DivergenceError(ValueError):
    """Something that training computes with is not finite: the message says what, when, why, and how to go on."""


@dataclass
class Skipped:
    """What was left out so far; part of a checkpoint.

    Attributes:
        rows: Responses of all ranks.
        updates: Updates in which optimizer steps were left out.
        in_a_row: Such updates since the last complete one.
        overflows_in_a_row: Optimizer steps that fp16's loss scaling left out since the last one that was taken.
    """

    rows: int = 0
    updates: int = 0
    in_a_row: int = 0
    overflows_in_a_row: int = 0


class DivergenceGuard:
    """Watches one run's scores, log-probabilities, KL, values, advantages, losses, gradients and weights.

    What `on_divergence` says happens with what is not finite: "stop" raises, on all ranks together; "skip" leaves out
    a response whose score, log-probability, KL or value is not finite, and the rest of an update in which a loss or
    gradient is not. Weights that are not finite always raise, before anything is saved.

    Args:
        args: The arguments.
        accelerator: Knows the processes and the precision.
        reduce_sum: Adds a tensor up over all ranks.
        model: Policy and value model, unwrapped: its weights' names are those in errors.
        moment: Tells for an error what the models run for, such as "update 3".
        num_updates: Tells how many updates are done.

    Attributes:
        skipped: What was left out so far.
        last_checkpoint: Where the run was last saved or resumed from.
        left_out: Why responses of this update were left out, one reason for each of this rank's.
        num_steps: Optimizer steps of this update that were allowed.
    """

    def __init__(
        self,
        args: PPOConfig,
        accelerator: Accelerator,
        reduce_sum: Callable[[Tensor], Tensor],
        model: nn.Module,
        moment: Callable[[], str],
        num_updates: Callable[[], int],
    ) -> None:
        self.args, self.accelerator, self.reduce_sum = args, accelerator, reduce_sum
        self.model, self.moment, self.num_updates = model, moment, num_updates
        self.last_checkpoint: str | None = None
        self.start(Skipped())

    def start(self, skipped: Skipped) -> None:
        """Begin a run, or go on with one that has left something out."""
        self.skipped = skipped
        self._begin_update()

    def _begin_update(self) -> None:
        self.left_out: list[str] = []
        self.num_steps, self._cut_by = 0, None

    @property
    def skips(self) -> bool:
        """Whether what is not finite is left out rather than raised."""
        return self.args.on_divergence == "skip"

    @property
    def is_update_cut(self) -> bool:
        """Whether the rest of the current update is left out."""
        return self._cut_by is not None

    # ---- Rollout ----

    def refuse(self, reason: str) -> None:
        """Leave out a response whose score cannot be used; called by the reward, which then takes it for unscored.

        Raises:
            DivergenceError: `on_divergence` is "stop".
        """
        if not self.skips:
            raise DivergenceError(self._told(reason, None))
        self.left_out.append(reason)

    def checked_rollout(self, rollout: Rollout) -> Rollout:
        """Return a rollout without what is not finite: responses that are left out count as unscored.

        Raises:
            DivergenceError: `on_divergence` is "stop" and something is not finite, on any rank.
        """
        finite = _finite_rows(rollout, self.args.kl_estimator)
        return self._checked(rollout, finite, ~rollout.scores.isnan(), _without)

    def checked_experience(self, experience: Experience) -> Experience:
        """Return the experience without responses whose advantages or returns are not finite.

        Raises:
            DivergenceError: `on_divergence` is "stop" and something is not finite, on any rank.
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
                raise DivergenceError(self._told(min(reasons.values())[1], self._cause()))
            self.left_out += [reason for row, (_, reason) in reasons.items() if counted[row]]
        return without(batch, ~of_figures.all(dim=0))

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Tell of logits that nothing can be sampled from what their cause is, and how to go on."""
        try:
            yield
        except NonFiniteLogitsError as error:
            raise NonFiniteLogitsError(f"{error}. Here {self._cause()}; {self._going_on()}") from error

    # ---- Learning ----

    def allows_step(self, statistics: UpdateStatistics, num_parts: int, loss: Tensor, grad_norm: Any) -> bool:
        """Tell whether an optimizer step may be taken, with one exchange and one reading from the device.

        A gradient that fp16's loss scaling made overflow is no divergence: the scaler itself leaves the step out.

        Args:
            statistics: Holds the sums of the step's micro-batches, the last `num_parts`.
            num_parts: How many micro-batches the step has.
            loss: This rank's loss, as it was propagated back.
            grad_norm: The gradients' norm before clipping.

        Returns:
            False if something is not finite; the rest of the update is then to be left out.

        Raises:
            DivergenceError: `on_divergence` is "stop" and something is not finite, or fp16 overflowed
                `MAX_OVERFLOWS_IN_A_ROW` times.
        """
        sums = torch.stack(statistics.sums[-num_parts:]).sum(dim=0)
        watched = [sums[UpdateStatistics.KEYS.index(key)] for key in _FIGURES]
        norm = getattr(grad_norm, "full_tensor", lambda: grad_norm)()
        norm = norm.to(sums.device) if isinstance(norm, Tensor) else sums.new_full((), norm)  # no copy from the host
        not_finite = ~torch.stack([*watched, loss.detach().float(), norm.float()]).isfinite()
        flags: list[float] = self.reduce_sum(not_finite.float()).tolist()  # pyright: ignore[reportUnknownMemberType]
        names = [*_FIGURES.values(), "the loss", "the norm of the gradient"]
        found = next((name for name, flag in zip(names, flags, strict=True) if flag), None)
        if found is None or (found == names[-1] and self.accelerator.mixed_precision == "fp16"):
            self._count_step(has_overflowed=found is not None)
            return True
        reason = f"{found} became not finite in optimizer step {self.num_steps + 1}"
        if not self.skips:
            raise DivergenceError(self._told(reason, self._cause()))
        self._cut_by = reason
        return False

    def _count_step(self, has_overflowed: bool) -> None:
        self.num_steps += not has_overflowed
        self.skipped.overflows_in_a_row = self.skipped.overflows_in_a_row + 1 if has_overflowed else 0
        if self.skipped.overflows_in_a_row >= MAX_OVERFLOWS_IN_A_ROW:
            reason = f"fp16's gradients overflowed in {MAX_OVERFLOWS_IN_A_ROW} optimizer steps in a row"
            raise DivergenceError(self._told(reason, self._cause()))

    def finish_update(self) -> dict[str, float]:
        """Count and say what was left out of an update; every rank calls this.

        Returns:
            The totals of the run, for the log, with "skip"; else nothing.

        Raises:
            DivergenceError: As many updates in a row as `MAX_SKIPPED_IN_A_ROW` were skipped.
        """
        left_out, cut_by, took_steps = self.left_out, self._cut_by, self.num_steps > 0
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
            logger.warning(f"Skipped in {self.moment()}: {cut_by}; {self._cause()}")
            self.check_weights()
        if self.skipped.in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise DivergenceError(self._told(f"{cut_by}, the last of {MAX_SKIPPED_IN_A_ROW} skipped updates in a row"))
        return {"guard/skipped_rows": self.skipped.rows, "guard/skipped_updates": self.skipped.updates}

    @contextmanager
    def apart_from_updates(self) -> Iterator[None]:
        """Count what an evaluation leaves out to no update."""
        kept, self.left_out = self.left_out, []
        try:
            yield
            if self.skips and self._sum_of(len(self.left_out)):
                self._warn_of_rows(self.left_out)
        finally:
            self.left_out = kept

    def say_what_was_skipped(self) -> None:
        """Tell at the end of a run what was left out of it, if anything."""
        if self.skipped.rows or self.skipped.updates:
            logger.warning(
                f"on_divergence='skip' left out {self.skipped.rows} responses, and steps of {self.skipped.updates} "
                "updates, in which something was not finite."
            )

    # ---- Weights ----

    def check_weights(self, together: bool = True) -> None:
        """Make sure that every weight is finite, before any is saved.

        Args:
            together: Whether every rank calls this, so that one rank's error is raised on all.

        Raises:
            DivergenceError: One is not.
        """
        if together:
            with raise_on_all_ranks(self.accelerator):
                self.check_weights(together=False)
        elif found := weights_not_finite(self.model):
            raise DivergenceError(
                f"after update {self.num_updates()}: {_weights(found)}; {self._settings()}. The model was not saved; "
                f"{self._going_on()}"
            )

    # ---- Saying it ----

    def _sum_of(self, number: int) -> int:
        return int(self.reduce_sum(torch.tensor(float(number), device=self.accelerator.device)))

    def _warn_of_rows(self, left_out: Sequence[str]) -> None:
        told = gather_object(list(left_out))
        logger.warning(f"Left out {len(told)} responses of {self.moment()}; the first because {told[0]}.")

    def _told(self, reason: str, cause: str | None = None) -> str:
        """Put the whole sentence together: when, what, why, and how to go on."""
        advice = "" if self.skips else "; on_divergence='skip' leaves out what is not finite instead"
        why = reason if cause is None else f"{reason}; {cause}"
        return f"{self.moment()}: {why}. Nothing of it was saved; {self._going_on()}{advice}"

    def _going_on(self) -> str:
        saved = self.last_checkpoint
        if saved is None or not os.path.isdir(saved):
            return "no checkpoint was saved before"
        return f"the last good checkpoint is {saved}: go on with resume_from_checkpoint={saved!r}"

    def _cause(self) -> str:
        """Name the likely cause: weights that are not finite already, and the settings."""
        found = weights_not_finite(self.model)
        return f"the cause: {_weights(found)}; {self._settings()}" if found else self._settings()

    def _settings(self) -> str:
        args, causes = self.args, []
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
    """Tell of each figure of a rollout, in the order in which it is computed, in which rows it is finite, `(B,)`."""
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
    """Name each bad row's first figure that is not finite, with its place in the order."""
    bad = (~of_figures).cpu()
    rows: list[int] = bad.any(dim=0).nonzero().flatten().tolist()  # pyright: ignore[reportUnknownMemberType]
    first = {row: int(bad[:, row].int().argmax()) for row in rows}
    return {row: (number, f"{names[number]} of response {row} are not finite") for row, number in first.items()}


def _without(rollout: Rollout, rows: Tensor) -> Rollout:
    """Make rows count as unscored, and finite."""

    def cleared(values: Tensor) -> Tensor:
        return values.masked_fill(rows[:, None] if values.dim() == 2 else rows, 0.0)

    per_token = ("logprobs", "ref_logprobs", "values", "final_values", "token_scores", "sampling_logprobs")
    given = {name: getattr(rollout, name) for name in per_token}
    return replace(
        rollout,
        **{name: cleared(values) for name, values in given.items() if values is not None},
        scores=rollout.scores.masked_fill(rows, torch.nan),
        scores_by_source={
            name: values.masked_fill(rows, torch.nan) for name, values in rollout.scores_by_source.items()
        },
    )


def _without_experience(experience: Experience, rows: Tensor) -> Experience:
    """Mask rows out, and make them finite: 0 times NaN is NaN in a backward pass."""
    names = ("advantages", "returns")
    return replace(
        experience,
        loss_mask=experience.loss_mask & ~rows[:, None],
        **{name: getattr(experience, name).masked_fill(rows[:, None], 0.0) for name in names},
    )


class SignalStop:
    """Ends a run after a signal.

    A rollout that is given up leaves the run where the update before has left it, the random numbers included.
    Learning that is given up leaves it after the last optimizer step: the resumed run finishes it. It also makes
    the sample table or the evaluation that was given up.

    Args:
        run: The run.
        learning: Knows the partial update.
        save: Saves a checkpoint of the prepared model and the trial.
        stop_rewards: Gives up rewards that are being computed.
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
    def saving(self, model: nn.Module, trial: Any) -> Iterator[None]:
        """End the block where a signal wants the run to end, with a checkpoint of what cannot be made again."""
        self.run.streams.mark()
        try:
            yield
        except Stopped as stop:
            self.run.signals.stopped = stop.number
            self.stop_rewards()
            self.save_where_it_stopped(model, trial)

    def save_where_it_stopped(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint of the last mark, unless it is there."""
        run = self.run
        name = self.learning.checkpoint_name(run.state.global_step)
        checkpoint, last = os.path.join(output_directory(run.args), name), run.guard.last_checkpoint
        if last is not None and os.path.realpath(last) == os.path.realpath(checkpoint):
            return
        self._leave_evaluation()
        run.streams.rewind()
        self.save(model, trial)
        if self.learning.partial is None:  # else callbacks that look for `checkpoint-<step>` would not find it
            run.fire("on_save")

    def _leave_evaluation(self) -> None:
        if self.run.control.should_evaluate:
            self.run.control.should_evaluate = False
            self.run.progress.due.append("evaluation")

    def after_event(self, event: str) -> None:
        """Fire an event at the end of an update or a pass; a run that is to end leaves the evaluation to the next."""
        self.run.fire(event)
        self.run.streams.mark()
        if self.run.signals.stopped is not None:
            self._leave_evaluation()

    def end(self, number: int) -> NoReturn:
        """Say where the run has ended, and end it.

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
                "resume_from_checkpoint=True (--resume_from_checkpoint True) goes on from it."
            )
        exit_despite_threads(128 + number)
        raise RunStopped(number, checkpoint)


def awaited(num_updates: int, phase: str, is_saving: bool, keeps_partial_update: bool) -> str:
    """Say what is finished before a signal ends the run.

    Args:
        num_updates: Updates that are done.
        phase: The phase that runs now.
        is_saving: Whether a checkpoint is being written.
        keeps_partial_update: Whether what is learned of an update can be kept.
    """
    if is_saving:
        return f"the run ends when checkpoint-{num_updates} is written"
    if phase == "learn" and keeps_partial_update:
        return "the run ends with a checkpoint after the current pass of learning"
    if phase == "learn":  # by an overridden `learn`, or of an `Experience` of the user's own
        update = num_updates + 1
        return f"the run ends with a checkpoint when update {update} is learned, whose steps cannot be taken back"
    return f"the run ends with a checkpoint of update {num_updates} after the current pass or reward"
