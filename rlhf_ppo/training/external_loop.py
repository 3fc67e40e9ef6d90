"""The external loop: updates on responses that the caller of `PPOTrainer.step` passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from rlhf_ppo.data.prompts import check_lengths
from rlhf_ppo.data.rollout import Responses, Rollout
from rlhf_ppo.models.capabilities import Vocabulary
from rlhf_ppo.processes.distributed import preserve_rng
from rlhf_ppo.rewards.scorer import MAX_SCORE, RewardSource, Scores, ScoringBatch
from rlhf_ppo.training.run_state import RunState


class ExternalScores(RewardSource):
    """Placeholder for the rewards of a trainer that receives scores."""

    name = "score"
    reads_columns = False

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Raise: there is no reward.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "reward_model and reward_funcs are both None, so that only step(), which is given scores, can be used: "
            "pass one of them"
        )


class StepDriver:
    """Run one update per `step` call, with everything that `train` does around an update.

    Args:
        run: The run.
        open_run: Opens the run in its block; gives the prepared model.
        update: Runs one update on the rollout of a function; returns its metrics.
        leave_if_stopped: Leaves the run if a signal ended it.
        save_last: Saves the latest update, unless that is done.
        finish_run: Logs and saves the rest.

    Attributes:
        is_beginning: Whether `Trainer.train` is setting up the run.
    """

    def __init__(
        self,
        run: RunState,
        open_run: Callable[[], AbstractContextManager[nn.Module]],
        update: Callable[[Callable[[], Rollout]], dict[str, float]],
        leave_if_stopped: Callable[[], None],
        save_last: Callable[[], None],
        finish_run: Callable[[], Any],
    ) -> None:
        self.run, self.open_run, self.update = run, open_run, update
        self.leave_if_stopped, self.save_last, self.finish_run = leave_if_stopped, save_last, finish_run
        self.is_beginning = False
        self._stack = ExitStack()
        self._model: nn.Module | None = None
        self._is_over = self._is_closed = False

    def step(self, collect: Callable[[nn.Module], Rollout]) -> dict[str, float]:
        """Run an update.

        Args:
            collect: Takes the prepared model, returns the rollout of the caller's responses.
        """
        run = self.run
        if self._is_over:
            done = run.state.global_step
            if self._is_closed:
                raise RuntimeError(
                    f"the run was closed after {done} of {run.state.max_steps} updates; make a new PPOTrainer with "
                    "resume_from_checkpoint=True in its arguments to continue the run"
                )
            raise RuntimeError(f"the run is over after {done} updates; raise total_episodes for more, or resume it")
        with self._closed_by_errors():
            model = self._set_up()
            if run.state.global_step >= run.state.max_steps:  # resumed from the run's last checkpoint
                self._finish()
                raise RuntimeError(f"the run has had all its {run.state.max_steps} updates; raise total_episodes")
            metrics = self.update(lambda: collect(model))
            self.leave_if_stopped()
            if run.control.should_training_stop or run.state.global_step >= run.state.max_steps:
                self._finish()
        return metrics

    def close(self, saves: bool) -> None:
        """End the run before its last update, see `PPOTrainer.close`; do nothing without an open run.

        Args:
            saves: Whether to save, log and fire `on_train_end`, which all ranks do together.
        """
        if self._is_over or self._model is None:
            return
        self._is_closed = True
        with self._closed_by_errors():
            if saves:
                self.run.signals.agree(self.run.args.device)
                if self.run.args.save_strategy != "no":
                    with preserve_rng():
                        self.save_last()
                self.finish_run()
        self._release()

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        self._is_over = self._model is not None  # else a later call may set up the run
        self._stack.close()

    def _set_up(self) -> nn.Module:
        """Set up the run in the first call."""
        if self._model is None:
            self._model = self._stack.enter_context(self.open_run())
        return self._model

    def _finish(self) -> None:
        self.finish_run()
        self._release()


def given_responses(
    run: RunState,
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    scores: Sequence[float] | Sequence[Tensor] | Tensor,
    response_masks: Sequence[Tensor] | None,
    sampling_logprobs: Sequence[Tensor] | None,
    ended: Sequence[bool] | Tensor | None = None,
) -> tuple[Responses, Scores]:
    """Check and pad the responses of `PPOTrainer.step`.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value does not fit; see `PPOTrainer.step`.
    """
    num_rows, device = run.sizes.local_batch_size, run.args.device
    for name, of_rows in {"queries": queries, "responses": responses}.items():
        for row, ids in enumerate(_counted(name, of_rows, num_rows)):
            check_ids(f"{name}[{row}]", ids, run.vocabulary)
    if response_masks is not None:
        _check_masks(response_masks, responses)
    rows = padded_responses(queries, responses, response_masks, num_rows, run.tokens.pad, device)
    check_lengths(rows.context_length, rows.responses.shape[1], run.longest_sequence)
    if sampling_logprobs is not None:
        rows = replace(rows, sampling_logprobs=_logprobs(sampling_logprobs, rows))
    if ended is not None:
        rows = replace(rows, ended=_bools("ended", ended, num_rows).to(device))
    if _are_of_tokens(scores):
        values, per_token = _token_scores(scores, rows)
        return rows, Scores(values, per_token, {ExternalScores.name: values + per_token.sum(dim=1)})
    numbers = [_number(f"scores[{row}]", score) for row, score in enumerate(_counted("scores", scores, num_rows))]
    values = torch.tensor(numbers, dtype=torch.float32, device=device)
    per_token = torch.zeros_like(rows.response_mask, dtype=torch.float32)
    return rows, Scores(values, per_token, {ExternalScores.name: values})


def padded_responses(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    response_masks: Sequence[Tensor] | None,
    num_rows: int,
    pad_token_id: int,
    device: torch.device,
) -> Responses:
    """Pad token ids: queries on the left, responses on the right.

    Args:
        queries: Token ids of each prompt, long `(C_i,)`, on any device.
        responses: Token ids of each response with its stop token, long `(T_i,)`.
        response_masks: True on the policy's tokens of each response, bool `(T_i,)`; None: all tokens.
        num_rows: Number of rows.
        pad_token_id: Id of the padding.
        device: Device of the result.
    """
    context, length = max(map(len, queries)), max(map(len, responses))
    ids = torch.full((num_rows, context + length), pad_token_id, dtype=torch.long)
    attention = torch.zeros(num_rows, context + length, dtype=torch.bool)
    written = torch.zeros(num_rows, length, dtype=torch.bool)
    for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
        real = slice(context - len(query), context + len(response))
        ids[row, real], attention[row, real] = torch.cat([query.cpu(), response.cpu()]), True
        written[row, : len(response)] = True if response_masks is None else response_masks[row].bool().cpu()
    return Responses(ids.to(device), attention.to(device), written.to(device))


def _check_masks(response_masks: Sequence[Tensor], responses: Sequence[Tensor]) -> None:
    for row, mask in enumerate(_counted("response_masks", response_masks, len(responses))):
        name = f"response_masks[{row}]"
        _check_row(name, mask, "True for the tokens that the policy wrote")
        _check_length(name, mask, len(responses[row]))
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(f"{name}={mask!r:.60} must hold only True and False")
        if not bool(mask.any()):
            raise ValueError(
                f"{name} marks no token as the policy's; mark at least one, and give the row the score NaN if nothing "
                "is to be learned from it"
            )


def _counted(name: str, rows: Any, num_rows: int) -> Any:
    """Return an argument's rows; check their number."""
    try:
        found = len(rows)
    except TypeError:
        raise TypeError(f"{name}={rows!r:.60} must be a list with one entry for each response") from None
    if found != num_rows:
        raise ValueError(
            f"{name} has {found} entries, but an update takes {num_rows} responses on each process: "
            "per_device_train_batch_size x gradient_accumulation_steps"
        )
    return rows


def _check_length(name: str, row: Tensor, num_tokens: int) -> None:
    if len(row) != num_tokens:
        raise ValueError(f"{name} has {len(row)} values for the {num_tokens} tokens of the response")


def _check_row(name: str, row: Tensor, of: str) -> None:
    if not isinstance(row, Tensor) or row.dim() != 1 or row.is_complex():
        raise TypeError(f"{name}={row!r:.60} must be a tensor of {of}, with one dimension")
    if len(row) == 0:
        raise ValueError(f"{name} is empty; each row needs at least one token")
    if row.is_meta:
        raise ValueError(f"{name} is on the device 'meta', where tensors hold no numbers; pass it on 'cpu'")


def check_ids(name: str, ids: Tensor, vocabulary: Vocabulary) -> None:
    """Raise where a row holds something other than ids of the vocabulary.

    Args:
        name: Name of the row in errors.
        ids: Token ids, long `(T,)`, on any device.
        vocabulary: The ids that all models have.

    Raises:
        TypeError: It is no tensor of integers with one dimension.
        ValueError: It is empty, or an id is outside the vocabulary.
    """
    _check_row(name, ids, "token ids")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        advice = "a mask goes into response_masks" if ids.dtype == torch.bool else "convert it with .long()"
        raise TypeError(f"{name}={ids!r:.60} must hold token ids, which are integers, not {ids.dtype}; {advice}")
    ids = ids.cpu().long()
    outside = (ids < 0) | (ids >= vocabulary.size)
    if bool(outside.any()):
        token = int(outside.int().argmax())
        raise ValueError(
            f"{name}[{token}]={int(ids[token])} is not a token id: {vocabulary.limited_by} has {vocabulary.size}, 0 "
            f"to {vocabulary.size - 1}; pass the ids of the trainer's own tokenizer, without padding"
        )


MAX_ROUNDING = 1e-3
"""Largest log-probability in nats: engines that compute in 16 bits may round to a little above 0."""


def _of_tokens(name: str, given: Sequence[Tensor], rows: Responses) -> Tensor:
    """Pad numbers of each response's tokens on the right, float32 `(B, T)`, on the CPU.

    Args:
        name: Name of the argument.
        given: Numbers of each response, floating point `(T_i,)`.
        rows: The padded responses.

    Returns:
        The numbers, 0 on tokens that the policy did not write.
    """
    padded = torch.zeros(rows.response_mask.shape)
    lengths = rows.episode_mask.sum(dim=1).tolist()
    for row, (numbers, length) in enumerate(zip(_counted(name, given, len(rows)), lengths, strict=True)):
        _check_row(f"{name}[{row}]", numbers, "numbers of tokens")
        _check_length(f"{name}[{row}]", numbers, length)
        padded[row, :length] = numbers.detach().float().cpu()
    return padded.masked_fill_(~rows.response_mask.cpu(), 0.0)


def _logprobs(given: Sequence[Tensor], rows: Responses) -> Tensor:
    """Return the sampling log-probabilities, nats, float32 `(B, T)`, 0 on tokens that the policy did not write."""
    padded = _of_tokens("sampling_logprobs", given, rows)
    for row, logprobs in enumerate(given):
        if not logprobs.is_floating_point():
            raise TypeError(f"sampling_logprobs[{row}]={logprobs!r:.60} must hold floating-point log-probabilities")
    check_logprobs("sampling_logprobs", padded)
    return padded.to(rows.response_mask.device)


def check_logprobs(name: str, padded: Tensor) -> None:
    """Raise a `ValueError` where a log-probability, of `(B, T)`, is not finite or above 0."""
    wrong = (~padded.isfinite() | (padded > MAX_ROUNDING)).nonzero().tolist()
    if wrong:
        row, token = wrong[0]
        raise ValueError(
            f"{name}[{row}] is {float(padded[row, token]):g} at token {token}; pass the natural logarithm of the "
            "probability that the engine drew the token with, which is finite and at most 0"
        )


def _are_of_tokens(scores: object) -> TypeGuard[Sequence[Tensor]]:
    """Return whether scores are rewards of tokens: a list of tensors, of which one has several numbers."""
    if not isinstance(scores, list | tuple):
        return False
    return all(isinstance(row, Tensor) and row.dim() == 1 for row in scores) and any(len(row) > 1 for row in scores)


def _token_scores(scores: Sequence[Tensor], rows: Responses) -> tuple[Tensor, Tensor]:
    """Pad the rewards of tokens.

    Returns:
        0, or NaN where a response has no rewards, `(B,)`; and the rewards, float32 `(B, T)`.
    """
    padded = _of_tokens("scores", scores, rows)
    has_none = (padded.isnan() | ~rows.response_mask.cpu()).all(dim=1)
    padded[has_none] = 0.0
    if wrong := (~(padded.abs() <= MAX_SCORE)).nonzero().tolist():
        row, token = wrong[0]
        raise ValueError(
            f"scores[{row}][{token}]={float(padded[row, token]):g} must lie between {-MAX_SCORE:g} and "
            f"{MAX_SCORE:g}; pass a smaller number, or NaN for all tokens to learn nothing from the response"
        )
    values = torch.zeros(len(rows)).masked_fill(has_none, math.nan)
    return values.to(rows.response_mask.device), padded.to(rows.response_mask.device)


def _bools(name: str, given: Sequence[bool] | Tensor, num_rows: int) -> Tensor:
    """Return one truth value for each response, bool `(B,)`."""
    rows = _counted(name, given, num_rows)
    values = rows.tolist() if isinstance(rows, Tensor) else list(rows)
    if others := [value for value in values if not isinstance(value, bool)]:
        raise TypeError(f"{name} holds {others[0]!r:.60}; it must hold only True and False")
    return torch.tensor(values, dtype=torch.bool)


def _number(name: str, score: object) -> float:
    try:
        if isinstance(score, str | bytes):  # float() would parse it
            raise TypeError
        number = float(cast(float, score))
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}={score!r:.60} must be one number") from None
    if abs(number) > MAX_SCORE:
        raise ValueError(
            f"{name}={number:g} must lie between {-MAX_SCORE:g} and {MAX_SCORE:g}; pass a smaller number, or NaN to "
            "learn nothing from the response"
        )
    return number
