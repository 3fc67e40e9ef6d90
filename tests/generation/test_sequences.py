"""Where a response ends, and the one mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ppo.compat.trl import truncate_response
from rlhf_ppo.data.rollout import Prompts, Responses
from rlhf_ppo.generation.sampling import (
    StopStrings,
    ended,
    join_responses,
    last_turn,
    response_mask,
)
from tests.conftest import make_tokenizer

PAD = 99


def prompts(*rows: list[int], width: int = 3) -> Prompts:
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.arange(width) >= width - torch.tensor([len(row) for row in rows])[:, None]
    return Prompts(ids, mask, {})


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(0, 3))
def test_the_mask_against_list_operations(rows: list[list[int]], stop: int) -> None:
    mask = response_mask(torch.tensor(rows), stop)
    for row, marks in zip(rows, mask.tolist(), strict=True):
        length = row.index(stop) + 1 if stop in row else len(row)
        assert marks == [True] * length + [False] * (5 - length)


@pytest.mark.parametrize(("stop", "pad"), [(0, 9), (7, 9), (7, 7), (7, 10**6)])
def test_truncation_keeps_the_stop_token_and_pads_what_follows(stop: int, pad: int) -> None:
    sampled = torch.tensor([[4, stop, 5, stop], [5, 5, 5, 5], [stop, 1, 2, 3]])
    assert truncate_response(stop, pad, sampled).tolist() == [[4, stop, pad, pad], [5, 5, 5, 5], [stop, pad, pad, pad]]
    assert sampled[0].tolist() == [4, stop, 5, stop], "the sampled ids stay as they are"


def test_joined_rows_have_their_masks_and_no_column_that_nobody_reaches() -> None:
    sampled = torch.tensor([[4, 1, 8, 8, 8], [6, 7, 1, 1, 8]])
    joined = join_responses(prompts([11], [12, 13, 14]), sampled, stop_token_id=1, pad_token_id=PAD)
    assert joined.query_responses.tolist() == [[PAD, PAD, 11, 4, 1, PAD], [12, 13, 14, 6, 7, 1]]
    assert joined.attention_mask.int().tolist() == [[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert joined.response_mask.int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert joined.context_length == 3 and joined.response_ids.tolist() == [[4, 1, PAD], [6, 7, 1]]


def test_a_token_counts_only_where_it_is_real() -> None:
    """Neither in the prompt, nor in the padding that follows, which may be the same id."""
    sampled = torch.tensor([[4, 1, 8], [4, 5, 6], [1, 2, 3]])
    joined = join_responses(prompts([1], [1, 1], [5]), sampled, stop_token_id=1, pad_token_id=1)
    assert ended(joined, 1).tolist() == [True, False, True]
    assert ended(joined, 5).tolist() == [False, True, False]
    assert ended(joined, 8).tolist() == [False, False, False]
    assert ended(joined, None).tolist() == [False, False, False]
    ended_by_another = join_responses(prompts([1], [1, 1], [5]), sampled, stop_token_id=4, pad_token_id=1)
    assert ended(ended_by_another, 1).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("written", "last"), [("111", "111"), ("110", "110"), ("0110", "0110"), ("101100", "001100"), ("1001", "0001")]
)
def test_the_last_turn_is_behind_the_last_gap(written: str, last: str) -> None:
    mask = torch.tensor([[letter == "1" for letter in written]])
    assert last_turn(mask).tolist() == [[letter == "1" for letter in last]]


def test_a_response_has_ended_if_its_last_turn_has() -> None:
    """The stop token 1, or the stop string w4 (id 7), ends other turns too, and tools may write it."""
    ids = torch.tensor([[4, 1, 5, 6], [4, 5, 6, 1], [4, 6, 1, 6], [4, 7, 5, 6], [4, 5, 6, 7], [4, 6, 7, 6]])
    written = torch.tensor([[True, True, False, True]] * 6)
    in_turns = Responses(torch.cat((ids[:, :1], ids), dim=1), torch.ones(6, 5).bool(), written)
    assert ended(in_turns, 1).tolist() == [False, True, False, False, False, False]
    strings = StopStrings(make_tokenizer(), ("w4",))
    assert ended(in_turns, 1, strings).tolist() == [False, True, False, False, True, False]


def test_sampling_logprobs_are_cut_like_their_tokens() -> None:
    sampled = torch.tensor([[4, 1, 8, 8, 8], [6, 7, 1, 1, 8]])
    logprobs = torch.tensor([[-0.1, -0.2, float("nan"), 0.0, 0.0], [-0.3, -0.4, -0.5, -0.6, -0.7]])
    joined = join_responses(prompts([11], [12, 13]), sampled, stop_token_id=1, pad_token_id=PAD, logprobs=logprobs)
    assert joined.sampling_logprobs is not None
    assert torch.equal(joined.sampling_logprobs, torch.tensor([[-0.1, -0.2, 0.0], [-0.3, -0.4, -0.5]]))
    assert join_responses(prompts([11], [12]), sampled, 1, PAD).sampling_logprobs is None
