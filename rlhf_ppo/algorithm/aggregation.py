"""How the policy's losses of tokens become the loss of a mini-batch."""

from __future__ import annotations

from torch import Tensor

from rlhf_ppo.algorithm.masked import ReduceSum


def aggregation_weights(
    mask: Tensor,
    aggregation: str,
    num_tokens: float,
    response_length: int,
    reduce_sum: ReduceSum | None = None,
) -> Tensor | None:
    """Weigh tokens so that their weighted mean, over the mini-batch's tokens, is the loss that is asked for.

        token:     w_it = 1                                  one mean over all tokens
        sequence:  w_it = num_tokens / (n l_i)               the mean within each of n responses, then over responses
        constant:  w_it = num_tokens / (n response_length)   the sum over a number that no length changes

    DAPO, 2503.14476, section 3.3, for the first; Dr. GRPO, 2503.20783, section 3.2, for the last.

    Args:
        mask: True on the tokens of this rank's part of the mini-batch that are learned from, bool `(B, T)`.
        aggregation: "token", "sequence" or "constant".
        num_tokens: True values of the masks of the whole mini-batch, of all ranks.
        response_length: Longest response, in tokens.
        reduce_sum: Sums over all ranks, each of which must make the same call; None when there is one process.

    Returns:
        Weights, float32 `(B, 1)`; None for "token".

    Raises:
        ValueError: Any other aggregation.
    """
    if aggregation == "token":
        return None
    lengths = mask.sum(dim=1, keepdim=True).float()
    num_responses = (lengths > 0).sum()
    num_responses = num_responses if reduce_sum is None else reduce_sum(num_responses)
    if aggregation == "sequence":
        return num_tokens / (num_responses * lengths.clamp(min=1))
    if aggregation == "constant":
        return (num_tokens / (num_responses * response_length)).expand_as(lengths)
    raise ValueError(f"loss_aggregation={aggregation!r} is unknown; use 'token', 'sequence' or 'constant'")


def imitation_weights(
    mask: Tensor, is_positive: Tensor, num_tokens: float, reduce_sum: ReduceSum | None = None
) -> Tensor:
    """Weigh tokens so that the weighted mean of their -log pi, over all tokens, is the mean over positive responses.

        w_it = num_tokens / sum_j p_j l_j  if p_i, else 0

    with `p_i` whether response `i` is positive, and `l_i` its length. All are 0 where no response is positive. VAPO,
    2504.05118 (positive example LM loss).

    Args:
        mask: True on the tokens of this rank's part of the mini-batch that are learned from, bool `(B, T)`.
        is_positive: Which responses are imitated, bool `(B,)`.
        num_tokens: True values of the masks of the whole mini-batch, of all ranks.
        reduce_sum: Sums over all ranks, each of which must make the same call; None when there is one process.

    Returns:
        Weights, float32 `(B, T)`.
    """
    positive = mask & is_positive[:, None]
    num_positive = positive.sum()
    num_positive = num_positive if reduce_sum is None else reduce_sum(num_positive)
    return positive * (num_tokens / num_positive.clamp(min=1))
