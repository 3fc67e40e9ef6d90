"""The benchmark of the critic on FrozenLake's turns, by hand."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "critic"


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("gymnasium")
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import turns  # pyright: ignore[reportMissingImports]

    return turns


def test_a_return_is_what_the_turns_to_come_are_paid(turns: Any) -> None:
    """Two turns of two tokens with a field between them, and a game of one turn; a nat of KL costs 0.1."""
    rollout: Any = SimpleNamespace(
        query_responses=torch.tensor([[30, 2, 1, 31, 3, 1], [30, 4, 1, 0, 0, 0]]),
        response_mask=torch.tensor([[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]]).bool(),
        logprobs=torch.tensor([[1.0, 2, 9, 0, 1], [0, 0, 9, 9, 9]]),
        ref_logprobs=torch.zeros(2, 5),
        values=torch.tensor([[0.5, 0, 0, 0.7, 0], [0.2, 0, 0, 0, 0]]),
        scores=torch.tensor([1.0, 0.0]),
        token_scores=torch.tensor([[0.0, 4, 0, 0, 0], [0, 0, 0, 0, 0]]),
    )
    (second, first), (only,) = turns.turns_of(rollout, 0.5, 0.1)[:2], turns.turns_of(rollout, 0.5, 0.1)[2:]
    assert second == (1, 31, pytest.approx(0.7), pytest.approx(1 - 0.1))
    assert first == (0, 30, pytest.approx(0.5), pytest.approx(4 - 0.3 + 0.5 * 0.9))
    assert only == (0, 30, pytest.approx(0.2), 0.0)


def test_figures_of_known_games(turns: Any) -> None:
    """Two fields at each of three moves, ten games each; one field wins three times as often as the other."""
    games = [
        (move, field, value, float(game < wins))
        for move in range(3)
        for field, wins, value in ((5, 3, 0.3), (6, 9, 0.9))
        for game in range(10)
    ]
    found = turns.figures([*games, (3, 7, 100.0, 1.0)])  # a field with too few games is left out
    assert found["turns"] == 60 and found["tau"] == 1 and found["bias"] == pytest.approx(0)
    assert found["slope"] == pytest.approx(1) and found["EV of move"] == pytest.approx(0)
    assert found["EV"] == pytest.approx(1 - (0.21 + 0.09) / 2 / (0.6 * 0.4))
    assert 0 < found["EV of field"] < found["EV"]
    turned = turns.figures([(move, field, -value, returned) for move, field, value, returned in games])
    assert turned["tau"] == -1 and turned["slope"] == pytest.approx(-1) and turned["EV"] < 0


def test_games_end_at_the_goal_in_a_hole_or_at_the_limit_of_tokens(turns: Any) -> None:
    """A policy that walks by a table, the stop token after each move: right to the goal, into a hole, or nowhere."""
    tokenizer = turns.example.make_tokenizer()
    word = tokenizer.convert_tokens_to_ids
    to_goal = {"0": "down", "4": "down", "8": "right", "9": "right", "10": "down", "14": "right"}
    to_hole = {"0": "right", "1": "down"}

    def policy(input_ids: torch.Tensor, table: dict[str, str], **others: Any) -> Any:
        logits = torch.full((*input_ids.shape, len(turns.example.WORDS)), -torch.inf)
        for row, last in enumerate(tokenizer.convert_ids_to_tokens(input_ids[:, -1].tolist())):
            logits[row, -1, word(table.get(last, "</s>"))] = 0.0
        return SimpleNamespace(logits=logits)

    given = turns.example.command_line(["--moves=8"])
    won = turns.play(partial(policy, table=to_goal), tokenizer, given, [1, 2])
    walked = [*(part for field, move in to_goal.items() for part in (field, move, "</s>"))]
    assert won.won == [1.0, 1.0] and won.prompts == [[word("0")]] * 2
    assert won.completions == [[word(part) for part in walked[1:]]] * 2
    assert won.masks == [[int(not part.isdigit()) for part in walked[1:]]] * 2
    lost = turns.play(partial(policy, table=to_hole), tokenizer, given, [1])
    assert lost.won == [0.0] and len(lost.completions[0]) == 5
    endless = turns.play(partial(policy, table={"0": "left"}), tokenizer, given, [1])
    assert endless.won == [0.0] and len(endless.completions[0]) == 23 and sum(endless.masks[0]) == 16
    silent = turns.play(partial(policy, table={}), tokenizer, given, [1])
    assert silent.won == [0.0] and len(silent.completions[0]) >= given.moves * 3 + 8


def test_a_variant_is_compared_with_plain_seed_by_seed(turns: Any) -> None:
    rows = [
        {"variant": variant, "seed": seed, "games won": 0.5 + 0.1 * seed + gain, "EV": 0.1}
        for variant, gain in (("plain", 0.0), ("better", 0.2))
        for seed in range(2)
    ]
    *_, last = turns.tables([*rows, {"variant": "grpo", "seed": 0, "games won": 0.7}])
    assert last.startswith("| grpo | 0.700 |")
    better = [*turns.tables(rows)][-1]
    assert better.startswith("| better | 0.750 ") and "| +0.200 [+0.200, +0.200] | +0.000 [+0.000, +0.000] |" in better


def test_grpo_is_paid_less_for_a_cut_response(turns: Any) -> None:
    import grpo  # pyright: ignore[reportMissingImports]

    task: Any = SimpleNamespace(
        reward=lambda prompts, completions: [0.5] * len(prompts),
        arguments={"missing_eos_penalty": 1.0},
        tokenizer=SimpleNamespace(eos_token_id=1),
    )
    paid = grpo.less_penalty(task)(prompts=["a", "b"], completions=["x", "y"], completion_ids=[[5, 1], [5, 6]])
    assert paid == [0.5, -0.5]
