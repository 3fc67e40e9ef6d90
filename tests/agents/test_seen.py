"""What a run shows of its episodes: tables, kept completions and the report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_ppo.reporting.completion_files import find_completions, read_completions
from rlhf_ppo.reporting.report import report_data
from rlhf_ppo.reporting.run_log import read_runs
from tests.agents.test_episodes import ASKED, DONE, made

CALL = [("add", {"x": 2.0})]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("seen")
    options = {"num_sample_generations": 1}
    trainer = made(folder, CALL, CALL, DONE, options=options, eval_dataset=[{"prompt": ASKED}] * 2)
    trainer.train()
    return trainer


def test_kept_completions_have_turns_their_rewards_messages_and_the_end(trained: Any) -> None:
    [file] = find_completions(trained.args.output_dir).values()
    row = read_completions(file)[0]

    assert [message["role"] for message in json.loads(row["messages"])] == ["assistant", "tool"] * 2 + ["assistant"]
    assert row["turn_reward"] == [2.0, 2.0, 0.0] and row["end"] == "answer"
    assert [turn is not None for turn in row["token_turn"]] == row["token_written"]
    numbers = [turn for turn in row["token_turn"] if turn is not None]
    assert numbers == sorted(numbers) and {*numbers} == {0, 1, 2}
    last_of_first = len(row["token_turn"]) - 1 - row["token_turn"][::-1].index(0)
    assert row["token_reward"][last_of_first] == pytest.approx(2.0, abs=0.01)  # beside the KL


def test_the_report_has_who_spoke_what_was_paid_and_the_end(trained: Any) -> None:
    [run] = report_data(read_runs([trained.args.output_dir]))["runs"]
    episode = run["responses"][0]["rows"][0]["episode"]

    assert episode == {"end": "answer", "turn_reward": [2.0, 2.0, 0.0], "speakers": ["add", "add", ""]}
    assert run["samples"][0]["rows"][0]["response"].splitlines()[1] == "add: got 2.0"
