"""`PPOTrainer.step`: the rows that its caller passes, their checks and padding, and the run that spans its calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.rollout import Responses
from rlhf_ppo.generation.protocol import MAX_ROUNDING
from rlhf_ppo.generation.sampling import warn_of_stored_settings
from rlhf_ppo.models.capabilities import check_rows
from rlhf_ppo.rewards.scorer import RewardSource, Scores, ScoringBatch
from rlhf_ppo.run.datasets import PromptPreparation
from rlhf_ppo.run.run_state import RunState


class ExternalScores(RewardSource):
    """Placeholder for the rewards of a trainer that receives scores."""

    name = "score"

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Raise: there is no reward.

        Raises:
            ValueError: Always.
        """
        raise ValueError("pass reward_model or reward_funcs: without them only step() works, which receives scores")


@dataclass(frozen=True)
class ExternalRows:
    """The arguments of `PPOTrainer.step`, which documents them."""

    queries: Sequence[Tensor]
    responses: Sequence[Tensor]
    scores: Sequence[float] | Sequence[Tensor] | Tensor
    response_masks: Sequence[Tensor] | None
    sampling_logprobs: Sequence[Tensor] | None
    ended: Sequence[bool] | Tensor | None

    def padded(self, run: RunState, num_rows: int, preparation: PromptPreparation) -> tuple[Responses, Scores]:
        """Check the rows, and pad them to those of an update.

        Args:
            run: The run.
            num_rows: Rows of an update on this rank.
            preparation: Gives the vocabulary and the longest sequence.

        Raises:
            ValueError: A value does not fit; see `PPOTrainer.step`.
        """
        for name, rows in vars(self).items():
            if rows is None:
                continue
            if len(rows) != num_rows:
                raise ValueError(
                    f"{name} has {len(rows)} entries, but an update takes {num_rows} responses on each process: "
                    "per_device_train_batch_size x gradient_accumulation_steps"
                )
            is_of_tokens = name not in ("scores", "ended")
            for row, values in enumerate(rows):
                if is_of_tokens and (not isinstance(values, Tensor) or values.dim() != 1):
                    raise ValueError(f"{name}[{row}] must be a tensor with one number for each token: {values!r:.80}")
        ids = {"queries": self.queries, "responses": self.responses}
        check_rows(ids, preparation.vocabulary, preparation.longest_sequence)
        device = run.args.device
        padded = padded_responses(self.queries, self.responses, self.response_masks, run.tokens.pad, device)
        responses = replace(
            padded,
            sampling_logprobs=None if self.sampling_logprobs is None else _logprobs(self.sampling_logprobs, padded),
            ended=None if self.ended is None else torch.as_tensor(self.ended, dtype=torch.bool, device=device),
            on_host=padded.masks,
        )
        if self.sampling_logprobs is None:  # else another engine may have sampled
            warn_of_stored_settings(run.models.policy, run.args)
        return responses, _scores(self.scores, responses)


def _scores(scores: Sequence[float] | Sequence[Tensor] | Tensor, rows: Responses) -> Scores:
    """Return the scores of padded responses, from one score of each or from rewards of its tokens."""
    num_rows, device = len(rows), rows.response_mask.device
    if _are_of_tokens(scores):
        token_scores = _of_tokens("scores", scores, rows)
        written = rows.response_mask.cpu()
        unknown = token_scores.isnan() & written
        has_none = (unknown | ~written).all(dim=1)
        if (partly := unknown.any(dim=1) & ~has_none).any():
            raise ValueError(
                f"scores[{int(partly.nonzero()[0])}] is NaN at some tokens: give each token a number, or NaN at all "
                "tokens of a response without a score"
            )
        values = torch.zeros(num_rows).masked_fill(has_none, math.nan).to(device)
        token_scores = token_scores.masked_fill(has_none[:, None], 0.0).to(device)
        return Scores(values, token_scores, {ExternalScores.name: values + token_scores.sum(dim=1)})
    values = torch.tensor([_number(*each) for each in enumerate(scores)], dtype=torch.float32, device=device)
    token_scores = torch.zeros_like(rows.response_mask, dtype=torch.float32)
    return Scores(values, token_scores, {ExternalScores.name: values})


def _number(row: int, score: Any) -> float:
    try:
        return float(score)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"scores[{row}] must be a number, NaN for a response without a score, or scores a list of tensors with a "
            f"reward for each token: {score!r:.80}"
        ) from error


def padded_responses(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    response_masks: Sequence[Tensor] | None,
    pad_token_id: int,
    device: torch.device,
) -> Responses:
    """Pad token ids: queries on the left, responses on the right.

    Args:
        queries: Token ids of each prompt, long `(C_i,)`, on any device.
        responses: Token ids of each response with its stop token, long `(T_i,)`.
        response_masks: True on the policy's tokens of each response, bool `(T_i,)`; None: all tokens.
        pad_token_id: Id of the padding.
        device: Device of the result.

    Raises:
        ValueError: A mask has another length than its response.
    """
    num_rows, context, length = len(queries), max(map(len, queries)), max(map(len, responses))
    ids = torch.full((num_rows, context + length), pad_token_id, dtype=torch.long)
    attention = torch.zeros(num_rows, context + length, dtype=torch.bool)
    written = torch.zeros(num_rows, length, dtype=torch.bool)
    for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
        if response_masks is not None:
            _check_length("response_masks", row, response_masks[row], len(response))
        real = slice(context - len(query), context + len(response))
        ids[row, real], attention[row, real] = torch.cat([query.cpu(), response.cpu()]), True
        written[row, : len(response)] = True if response_masks is None else response_masks[row].bool().cpu()
    return Responses(ids.to(device), attention.to(device), written.to(device))


def _check_length(name: str, row: int, values: Tensor, length: int) -> None:
    if len(values) != length:
        raise ValueError(f"{name}[{row}] has {len(values)} values for the {length} tokens of the response")


def _of_tokens(name: str, per_row: Sequence[Tensor], rows: Responses) -> Tensor:
    """Pad numbers of each response's tokens on the right, float32 `(B, T)`, on the CPU.

    Args:
        name: Name of the argument.
        per_row: Numbers of each response, floating point `(T_i,)`.
        rows: The padded responses.

    Returns:
        The numbers, 0 on tokens that the policy did not write.
    """
    padded = torch.zeros(rows.response_mask.shape)
    lengths = rows.episode_mask.sum(dim=1).tolist()
    for row, (numbers, length) in enumerate(zip(per_row, lengths, strict=True)):
        _check_length(name, row, numbers, length)
        padded[row, :length] = numbers.detach().float().cpu()
    return padded.masked_fill_(~rows.response_mask.cpu(), 0.0)


def _logprobs(per_row: Sequence[Tensor], rows: Responses) -> Tensor:
    """Return the sampling log-probabilities, nats, float32 `(B, T)`, 0 on tokens that the policy did not write."""
    padded = _of_tokens("sampling_logprobs", per_row, rows)
    wrong = (~padded.isfinite() | (padded > MAX_ROUNDING)).any(dim=1)
    if bool(wrong.any()):
        raise ValueError(
            f"sampling_logprobs[{int(wrong.int().argmax())}]: pass the natural logarithm of the probability that each "
            "token was drawn with, which is finite and at most 0"
        )
    return padded.to(rows.response_mask.device)


def _are_of_tokens(scores: object) -> TypeGuard[Sequence[Tensor]]:
    """Return whether scores are rewards of tokens: a list of tensors, one of them with several numbers."""
    if not isinstance(scores, list | tuple):
        return False
    return all(isinstance(row, Tensor) and row.dim() == 1 for row in scores) and any(len(row) > 1 for row in scores)


def _check_strategies(args: PPOConfig) -> None:
    for name in ("logging_strategy", "eval_strategy", "save_strategy"):
        if getattr(args, name) == "epoch":
            raise ValueError(f"{name}='epoch' never comes: step() knows of no passes over data; set it to 'steps'")


class ExternalRun:
    """The run that spans the calls of `PPOTrainer.step`."""

    def __init__(self, run: RunState) -> None:
        self.run, self._has_begun = run, False
        self._held: ExitStack | None = None  # while it is open, such as the lock of its directory

    @property
    def is_preparing(self) -> bool:
        """Whether Trainer's `train` only prepares the run, in the first call."""
        return self._held is not None and not self._has_begun

    @contextmanager
    def update(
        self, begin: Callable[[ExitStack], object], leave_if_stopped: Callable[[], None], finish: Callable[[], object]
    ) -> Iterator[None]:
        """Begin the run in the first call; end it after the last update, a signal or an error.

        Args:
            begin: Prepares the run; what the run holds enters the stack.
            leave_if_stopped: Leaves the run after a signal, with an exception.
            finish: Finishes the run after its last update.

        Raises:
            RuntimeError: The run is over.
            ValueError: Something is to be done after each pass over data.
        """
        run = self.run
        with ExitStack() as ending:
            ending.callback(self._release)
            if self._held is None and not self._has_begun:
                _check_strategies(run.args)
                self._held = ExitStack()
                begin(self._held)
                self._has_begun = True
            if self._held is None or run.is_over:
                done, of = run.state.global_step, run.state.max_steps
                raise RuntimeError(
                    f"the run of step() is over after {done} of {of} updates; to continue, make a new PPOTrainer with "
                    "resume_from_checkpoint=True, and a larger total_episodes for more updates"
                )
            with run.noting_error():
                yield
            leave_if_stopped()
            if run.control.should_training_stop or run.is_over:
                finish()
            else:
                ending.pop_all()

    def close(self, finish: Callable[[], object] | None) -> None:
        """End the run before its last update; do nothing without an open run.

        Args:
            finish: Saves, logs and finishes, which all ranks do together; None only releases what the run holds.
        """
        if self._held is None:
            return
        with ExitStack() as ending:
            ending.callback(self._release)
            if finish is not None:
                finish()

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
