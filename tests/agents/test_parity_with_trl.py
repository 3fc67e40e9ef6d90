"""The same environment, tools and script under TRL's `GRPOTrainer` and here: equal tokens, masks, messages, calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from datasets import Dataset

from tests.agents.chat import CALLING, Seen, chat_tokenizer, run_ours, run_trl, turn_text

LOG: list[tuple[Any, ...]] = []

PROMPT = [{"role": "user", "content": "Q"}]


class Desk:
    """An environment with tools of every kind."""

    def reset(self, **row: Any) -> str:
        LOG.append(("reset", json.dumps(row, sort_keys=True)))
        return "OBS"

    def fast(self, x: int) -> Any:
        """Double a number.

        Args:
            x: A number.
        """
        LOG.append(("fast", x))
        return x * 2

    async def slow(self, x: int) -> Any:
        """Wait.

        Args:
            x: A number.
        """
        await asyncio.sleep(0)
        LOG.append(("slow", x))
        return {"slow": x}

    def boom(self) -> str:
        """Fail."""
        raise KeyError("no")

    def nothing(self) -> None:
        """Return nothing."""

    def listed(self) -> list[Any]:
        """Return a list."""
        return [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    def long(self) -> str:
        """Return a long text."""
        return "long " * 300

    def get_reward(self) -> float:
        LOG.append(("get_reward",))
        return 0.5


def standalone(x: int) -> int:
    """Square a number.

    Args:
        x: A number.
    """
    LOG.append(("standalone", x))
    return x * x


Calls = list[tuple[str, Any]]


def script_of(template: str, *turns: Calls | str) -> list[str]:
    """Write turns in a template's format; one call at a time where it allows no more."""
    tokenizer = chat_tokenizer(template)
    return [
        turn_text(tokenizer, template, *turn)
        if isinstance(turn, list)
        else turn_text(tokenizer, template, content=turn)
        for turn in turns
    ]


ONE: list[Calls] = [
    [("fast", {"x": 2})],
    [("nope", {})],
    [("fast", {"y": 1})],
    [("boom", {})],
    [("nothing", {})],
    [("listed", {})],
    [("slow", {"x": 3})],
]
"""A call in each turn: a sync one, an unknown name, wrong arguments, one that raises, None, a list, an async one."""

ONE_CALL = ("llama3_1", "gptoss")
"""Templates that allow no more than one call in a turn."""

DROPS_LISTS = ("qwen3", "qwen3_instruct_2507")
"""Templates that leave out content that is a list, so that TRL's policy reads an empty answer."""

MANY: Calls = [("slow", {"x": 1}), ("fast", {"x": 2}), ("nope", {}), ("slow", {"y": 1}), ("boom", {}), ("nothing", {})]


def both(tmp_path: Any, template: str, script: Any, options: dict[str, Any] | None = None, **given: Any) -> list[Seen]:
    usual: dict[str, Any] = {"train_dataset": Dataset.from_list([{"prompt": PROMPT, "level": 7}] * 2)}
    if "tools" not in given:
        usual["environment_factory"] = Desk
    runs, logs = [], []
    for name, run in (("trl", run_trl), ("ours", run_ours)):
        LOG.clear()
        runs.append(run(tmp_path / name, template, script, options, **(usual | given)))
        logs.append(sorted(map(repr, LOG)))
    assert logs[0] == logs[1]
    return runs


def assert_same(trl: Seen, ours: Seen) -> None:
    assert trl.rows and sorted(ours.rows) == sorted(trl.rows)
    own = ("trainer_state", "log_extra", "log_metric")
    seen = [[{key: row[key] for key in row if key not in own} for row in run.rewarded] for run in (ours, trl)]
    assert seen[0] == seen[1]
    for name in ("tools/call_frequency", "tools/failure_frequency"):
        assert ours.metrics.get(name) == pytest.approx(trl.metrics[name]), name


@pytest.mark.parametrize("template", CALLING)
def test_one_call_after_another_in_every_template(tmp_path: Any, template: str) -> None:
    calls = [turn for turn in ONE if template not in DROPS_LISTS or turn[0][0] != "listed"]
    trl, ours = both(tmp_path, template, script_of(template, *calls, "Done"), {"response_length": 1500})

    assert_same(trl, ours)
    assert trl.metrics["tools/call_frequency"] == len(calls)
    assert ours.metrics["tools/failure_frequency"] == pytest.approx(3 / len(calls))
    assert len(ours.rewarded[0]["completions"][0]) == 2 * len(calls) + 1


@pytest.mark.parametrize("template", CALLING)
def test_the_text_of_a_list_reaches_the_policy_in_every_template(tmp_path: Any, template: str) -> None:
    """Reward functions get the list, as TRL's do; a template that would leave it out is given its text."""
    given = {"environment_factory": Desk, "train_dataset": [{"prompt": PROMPT}] * 2}
    seen = run_ours(tmp_path, template, script_of(template, [("listed", {})], "Done"), **given)
    text = chat_tokenizer(template).decode(seen.rows[0][1])
    assert "one" in text and "two" in text
    assert seen.rewarded[0]["completions"][0][1]["content"][0] == {"type": "text", "text": "one"}


@pytest.mark.parametrize("template", [name for name in CALLING if name not in ONE_CALL])
def test_several_calls_in_a_turn_sync_ones_first(tmp_path: Any, template: str) -> None:
    trl, ours = both(tmp_path, template, script_of(template, MANY, "Done"))

    assert_same(trl, ours)
    answers = [message["content"] for message in ours.rewarded[0]["completions"][0] if message["role"] == "tool"]
    assert answers[0] == "4" and answers[-1] == "{'slow': 1}" and len(answers) == len(MANY)


SCRIPTS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any]]] = {
    "rounds": ([[("fast", {"x": 1})]], {"max_tool_calling_iterations": 3}, {}),
    "length": ([[("fast", {"x": 1})]], {"response_length": 300}, {}),
    "too long": ([[("long", {})], "Done"], {"response_length": 500}, {}),
    "no call": (["Hello"], {}, {}),
    "no prompt": ([[("fast", {"x": 1})], "Done"], {}, {"train_dataset": Dataset.from_list([{"level": 1}] * 2)}),
    "tools alone": ([[("standalone", {"x": 3})], "Done"], {}, {"tools": [standalone]}),
    "both": (
        [[("standalone", {"x": 3}), ("fast", {"x": 3})], "Done"],
        {},
        {"tools": [standalone], "environment_factory": Desk},
    ),
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_limits_prompts_and_tools(tmp_path: Any, case: str) -> None:
    turns, options, given = SCRIPTS[case]
    assert_same(*both(tmp_path, "qwen3", script_of("qwen3", *turns), options, **given))


RAW = {
    "arguments that are no object": '<tool_call>\n{"name": "fast", "arguments": "x"}\n</tool_call><|im_end|>',
    "no JSON": "<tool_call>\n{name: fast}\n</tool_call><|im_end|>",
    "no name": '<tool_call>\n{"arguments": {"x": 1}}\n</tool_call><|im_end|>',
    "no end": '<tool_call>\n{"name": "fast", "arguments": {"x": 1}}<|im_end|>',
    "thoughts": "<think>\nhm\n</think>\n\nHello<|im_end|>",
}


@pytest.mark.parametrize("text", RAW)
def test_turns_that_are_hard_to_parse(tmp_path: Any, text: str) -> None:
    assert_same(*both(tmp_path, "qwen3", [RAW[text], *script_of("qwen3", "Done")]))
