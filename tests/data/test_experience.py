"""Prompts, responses, rollouts and experience: shapes that are checked, cutting, trimming, shuffling."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf_ppo.data.rollout import Experience, Prompts, Responses, Rollout, sizes_within
from rlhf_ppo.ranks.random_streams import minibatch_generator

CPU = torch.device("cpu")
PAD = 99
PROMPT_LENGTHS, RESPONSE_LENGTHS = [2, 4, 1, 3, 1], [3, 1, 6, 2, 1]
ENDED = torch.tensor([True, False, True, False, True])


def responses() -> Responses:
    """Five ragged rows; real ids are `10 * row + position`."""
    context, length = max(PROMPT_LENGTHS), max(RESPONSE_LENGTHS)
    ids = 10 * torch.arange(5)[:, None] + torch.arange(context + length)
    prompt_mask = torch.arange(context) >= context - torch.tensor(PROMPT_LENGTHS)[:, None]
    response_mask = torch.arange(length) < torch.tensor(RESPONSE_LENGTHS)[:, None]
    attention_mask = torch.cat((prompt_mask, response_mask), dim=1)
    return Responses(ids.masked_fill(~attention_mask, PAD), attention_mask, response_mask)


def per_token(offset: float = 0.0) -> Tensor:
    return torch.arange(30.0).view(5, 6) + offset


def experience() -> Experience:
    names = ("logprobs", "values", "rewards", "advantages", "returns")
    return Experience(
        responses=responses(),
        ended=ENDED,
        **{name: per_token(100 * index) for index, name in enumerate(names)},
        loss_mask=per_token() % 7 < 5,
        importance_weights=per_token(400),
    )


def rollout() -> Rollout:
    return Rollout(
        responses=responses(),
        ended=ENDED,
        **{name: per_token(100 * index) for index, name in enumerate(("logprobs", "ref_logprobs", "values"))},
        final_values=torch.arange(5.0),
        scores=torch.arange(5.0) + 10,
        token_scores=per_token(300),
        scores_by_source={"a": torch.arange(5.0)},
    )


# ---- Prompts ----

ROWS = [[5, 6], [7, 7, 8, 9], [4]]


@pytest.mark.parametrize(
    "layout",
    [
        [[0, 0, 5, 6], [7, 7, 8, 9], [0, 0, 0, 4]],
        [[5, 6, 0, 0], [7, 7, 8, 9], [4, 0, 0, 0]],
        [[0, 5, 6, 0], [7, 7, 8, 9], [0, 4, 0, 0]],
        [[0, 5, 0, 6, 0], [7, 7, 0, 8, 9], [0, 4, 0, 0, 0]],
    ],
    ids=["left", "right", "both", "within"],
)
@pytest.mark.parametrize("fill", [0, 7, 10**6])
def test_padding_moves_to_the_left_whatever_its_side_and_id(layout: list[list[int]], fill: int) -> None:
    ids = torch.tensor(layout)
    mask = ids != 0
    batch = {"input_ids": ids.masked_fill(~mask, fill), "attention_mask": mask.long(), "topic": ["a", "b", "c"]}
    prompts = Prompts.from_collated(batch, CPU)
    assert prompts.input_ids.shape == (3, 4) and prompts.attention_mask.dtype == torch.bool
    for row, tokens in enumerate(ROWS):
        assert prompts.input_ids[row][prompts.attention_mask[row]].tolist() == tokens
        assert prompts.attention_mask[row].tolist() == [False] * (4 - len(tokens)) + [True] * len(tokens)
    assert prompts.columns == {"topic": ["a", "b", "c"]} and len(prompts) == 3


def test_an_empty_prompt_is_an_error_that_names_its_row() -> None:
    mask = torch.tensor([[1, 1], [0, 0]])
    with pytest.raises(ValueError, match="prompt 1 of the batch is empty"):
        Prompts.from_collated({"input_ids": mask, "attention_mask": mask}, CPU)


# ---- Cutting ----


def test_parts_hold_every_real_token_once_in_order_without_common_padding() -> None:
    whole = experience()
    of_rows = [slice(0, 2), [2, 3], slice(4, 5)]
    parts = [whole[rows].trimmed() for rows in of_rows]
    assert [len(part) for part in parts] == [2, 2, 1]
    widths = [(part.responses.context_length, part.advantages.shape[1]) for part in parts]
    assert widths == [(4, 3), (3, 6), (1, 1)]
    for start, part in zip((0, 2, 4), parts, strict=True):
        assert torch.equal(part.ended, ENDED[start : start + len(part)])
        for row in range(len(part)):
            ours, all_ours = part.responses, whole.responses
            real, all_real = ours.attention_mask[row], all_ours.attention_mask[start + row]
            assert torch.equal(ours.query_responses[row][real], all_ours.query_responses[start + row][all_real])
            written, all_written = ours.response_mask[row], all_ours.response_mask[start + row]
            for name in ("logprobs", "values", "advantages", "returns", "loss_mask", "importance_weights"):
                assert torch.equal(getattr(part, name)[row][written], getattr(whole, name)[start + row][all_written])
            assert int(written.sum()) == RESPONSE_LENGTHS[start + row]


@given(lengths=st.lists(st.integers(1, 30), min_size=1), max_tokens=st.integers(1, 60))
def test_parts_hold_all_rows_and_no_two_neighbours_would_fit_together(lengths: list[int], max_tokens: int) -> None:
    sizes, parts = sizes_within(lengths, max_tokens), []
    for size in sizes:
        parts.append(lengths[sum(map(len, parts)) :][:size])
    assert list(itertools.chain(*parts)) == lengths and min(sizes) > 0
    assert all(sum(part) <= max_tokens or len(part) == 1 for part in parts)
    assert all(sum(part) + after[0] > max_tokens for part, after in itertools.pairwise(parts))


def test_the_loss_mask_leaves_out_padding_and_responses_without_a_score() -> None:
    whole = dataclasses.replace(rollout(), scores=torch.tensor([1.0, float("nan"), -1.0, 0.0, float("nan")]))
    expected = [0 if row in (1, 4) else length for row, length in enumerate(RESPONSE_LENGTHS)]
    assert whole.loss_mask.sum(dim=1).tolist() == expected and not (whole.loss_mask & ~whole.response_mask).any()


# ---- Shuffling ----


def order(batch: Experience, num_mini_batches: int, seed: int = 0, update: int = 0, rank: int = 0) -> list[list[int]]:
    minibatches = batch.shuffled_minibatches(num_mini_batches, minibatch_generator(seed, update, rank))
    return [(part.responses.query_responses[:, -7] // 10).tolist() for part in minibatches]


def wide_experience(lengths: list[int]) -> Experience:
    """Rows with prompts of 4 tokens and responses of these lengths."""
    ids = 10 * torch.arange(len(lengths))[:, None] + torch.arange(10)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    attention_mask = torch.cat((torch.ones(len(lengths), 4, dtype=torch.bool), mask), dim=1)
    names = ("logprobs", "values", "rewards", "advantages", "returns")
    return Experience(
        responses=Responses(ids, attention_mask, mask),
        ended=mask[:, 0],
        **{name: torch.zeros(len(lengths), 6) for name in names},
        loss_mask=mask,
    )


def test_the_longest_rows_of_a_mini_batch_come_first() -> None:
    lengths = [1, 6, 3, 2, 5, 4] * 2
    minibatches = list(wide_experience(lengths).shuffled_minibatches(3, minibatch_generator(0, 0, 0)))
    of_parts = [part.loss_mask.sum(dim=1).tolist() for part in minibatches]
    assert of_parts == [sorted(part, reverse=True) for part in of_parts]
    of_rows = [length for part in of_parts for length in part]
    assert of_rows != sorted(of_rows, reverse=True), "the mini-batches are drawn, not sorted"
    rows = [row for part in minibatches for row in (part.responses.query_responses[:, 0] // 10).tolist()]
    assert sorted(rows) == list(range(12)) and [lengths[row] for row in rows] == of_rows


def test_the_order_is_a_function_of_seed_update_and_rank() -> None:
    batch = wide_experience([6] * 12)
    assert order(batch, 3) == order(batch, 3)
    others = [order(batch, 3, seed=1), order(batch, 3, update=1), order(batch, 3, rank=1)]
    orders = [str(each) for each in (order(batch, 3), *others)]
    assert len(set(orders)) == 4
