"""TRL's own tests of `rollout_func`, tools and environments, for its GRPOTrainer and for ours, with a scripted engine.

Written after the tests of these names in `tests/test_grpo_trainer.py` of huggingface/trl (Apache License 2.0). Two
kinds cannot run here. TRL tests that weights reach `trainer.vllm_generation` before `rollout_func`; this trainer
has no such attribute, and a `rollout_func` samples with what it brings. And TRL's policies see images of data sets,
environments and tools; here these are errors, as tested below.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
from datasets import Dataset

from rlhf_ppo.environments.pool import EpisodeError
from tests.agents.chat import Seen, chat_tokenizer, run_ours, run_trl, turn_text

Run = Callable[..., Seen]
ASKED = [{"role": "user", "content": "Q"}]
THREE = {"per_device_train_batch_size": 3, "num_generations": 3}


@pytest.fixture(params=["trl", "ours"])
def run(request: pytest.FixtureRequest, tmp_path: Any) -> Run:
    trainer = run_trl if request.param == "trl" else run_ours
    return lambda *given, **more: trainer(tmp_path, "qwen3", *given, **more)


def data(*rows: dict[str, Any]) -> Dataset:
    return Dataset.from_list([{"prompt": ASKED, **row} for row in rows or ({}, {}, {})])


def write(*calls: tuple[str, Any], text: str = "") -> str:
    return turn_text(chat_tokenizer(), "qwen3", *calls, content=text)


DONE = "Done!<|im_end|>"


def by_row(*rounds: Sequence[str]) -> Callable[[str, int], str]:
    """Return a script with a turn for each running row of each round."""
    places = [itertools.cycle(turns) for turns in rounds]
    return lambda context, number: next(places[number])


def by_length(completions: list[Any], **columns: Any) -> list[float]:
    """Score episodes differently, so that something is learned."""
    return [float(len(str(messages)) + place) for place, messages in enumerate(completions)]


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        Their product.
    """
    return a * b


async def multiply_later(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        Their product.
    """
    return a * b


# ---- rollout_func ----


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    ids = [[5, 6, 7] for _ in prompts]
    return {"prompt_ids": [[4] for _ in prompts], "completion_ids": ids, "logprobs": [[-0.1] * 3 for _ in prompts]}


def test_rollout_func_makes_the_rollout(run: Run) -> None:
    called: list[Any] = []

    def noted(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        called.append((prompts, hasattr(trainer, "train")))
        return rollout(prompts, trainer)

    seen = run([DONE], rollout_func=noted, train_dataset=data({}, {}))
    assert seen.rows == [([4], [5, 6, 7], [True] * 3)] * 2
    assert called == [([ASKED, ASKED], True)]


def test_rollout_func_s_env_mask_marks_what_the_policy_did_not_write(run: Run) -> None:
    seen = run(
        [DONE],
        rollout_func=lambda prompts, trainer: rollout(prompts, trainer) | {"env_mask": [[1, 0, 1]] * len(prompts)},
        train_dataset=data({}, {}),
    )
    assert seen.rewarded[0]["completion_ids"] == [[5, 6, 7]] * 2
    length = seen.metrics.get("completions/mean_length", seen.metrics.get("response/length_mean"))
    assert length == 2


@pytest.mark.parametrize("key", ["prompt_ids", "completion_ids", "logprobs"])
def test_rollout_func_that_lacks_a_key_is_an_error(run: Run, key: str) -> None:
    def lacking(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {name: value for name, value in rollout(prompts, trainer).items() if name != key}

    with pytest.raises(ValueError, match="rollout_func must return keys"):
        run([DONE], rollout_func=lacking, train_dataset=data({}, {}))


def test_rollout_func_s_other_keys_reach_reward_functions(run: Run) -> None:
    seen = run(
        [DONE],
        rollout_func=lambda prompts, trainer: rollout(prompts, trainer) | {"found": list(range(len(prompts)))},
        train_dataset=data({}, {}),
    )
    assert seen.rewarded[0]["found"] == [0, 1]


# ---- tools ----


@pytest.mark.parametrize("tool", [multiply, multiply_later])
def test_training_with_tools(run: Run, tool: Any) -> None:
    """Two of three rows call the tool; a call has a wrong argument."""
    first = [write((tool.__name__, {"a": 3, "b": 4})), write((tool.__name__, {"a": 3, "c": 4})), write(text="No tool")]
    given = {"tools": [tool], "reward_funcs": [by_length], "train_dataset": data()}
    seen = run(by_row(first, [DONE, DONE]), THREE, **given)

    assert seen.metrics["tools/call_frequency"] == pytest.approx(2 / 3)
    assert seen.metrics["tools/failure_frequency"] == pytest.approx(1 / 2)
    assert seen.metrics["grad_norm"] > 0
    assert sum(not all(written) for _, _, written in seen.rows) == 2


def test_tools_that_answer_with_an_image_are_refused(tmp_path: Any) -> None:
    """TRL passes images on to models that see; there are no such policies here."""

    def look() -> list[Any]:
        """Look."""
        return [{"type": "image", "image": "pixels"}, {"type": "text", "text": "a cat"}]

    seen = run_ours(tmp_path, "qwen3", [write(("look", {})), DONE], tools=[look], train_dataset=data({}, {}))
    assert seen.metrics["tools/failure_frequency"] == 1
    assert "returned an image" in seen.rewarded[0]["completions"][0][1]["content"]


SEES = [{"type": "image", "image": "pixels"}, {"type": "text", "text": "Q"}]


@pytest.mark.parametrize("tools", [[multiply], None])
def test_prompts_with_an_image_are_refused(tmp_path: Any, tools: Any) -> None:
    with pytest.raises(ValueError, match="row 0 of train_dataset holds a content block of type 'image': write text"):
        run_ours(
            tmp_path, "qwen3", [DONE], tools=tools, train_dataset=[{"prompt": [{"role": "user", "content": SEES}]}]
        )


def test_environments_that_begin_with_an_image_are_refused(tmp_path: Any) -> None:
    class Seeing(Scored):
        def reset(self, **row: Any) -> Any:
            return SEES

    with pytest.raises(EpisodeError, match=r"environment Seeing: reset failed: .* returned an image"):
        run_ours(tmp_path, "qwen3", [DONE], environment_factory=Seeing, train_dataset=data({}, {}))


# ---- environments ----


class Counter:
    """Counts."""

    def reset(self, **row: Any) -> str:
        self.count = row.get("start", 0)
        return f"At {self.count}."

    def increment(self, step: int) -> int:
        """Count on.

        Args:
            step: How far.
        """
        self.count += step
        return self.count


class Scored(Counter):
    def get_reward(self) -> float:
        return float(self.count)


class ScoredLater(Counter):
    async def get_reward(self) -> float:
        return float(self.count)


def test_training_with_an_environment(run: Run) -> None:
    first = [write(("increment", {"step": 2})), write(("increment", {"wrong": 2})), write(text="No")]
    counts: list[Any] = []

    def reward(completions: list[Any], environments: list[Any], **columns: Any) -> list[float]:
        counts.extend(environment.count for environment in environments)
        return by_length(completions)

    given = {"environment_factory": Counter, "reward_funcs": [reward], "train_dataset": data(*[{"start": 5}] * 3)}
    seen = run(by_row(first, [DONE, DONE]), THREE, **given)

    assert counts == [7, 5, 5] and seen.metrics["grad_norm"] > 0
    assert seen.metrics["tools/call_frequency"] == pytest.approx(2 / 3)
    assert seen.metrics["tools/failure_frequency"] == pytest.approx(1 / 2)
    prompts = [chat_tokenizer().decode(prompt) for prompt, _, _ in seen.rows]
    assert all("QAt 5." in prompt and "increment" in prompt for prompt in prompts)


@pytest.mark.parametrize("factory", [Scored, ScoredLater])
def test_environment_owns_the_reward(run: Run, factory: type[Counter]) -> None:
    first = [write(("increment", {"step": step})) for step in (1, 2, 3)]
    given = {"environment_factory": factory, "reward_funcs": None, "train_dataset": data()}
    seen = run(by_row(first, [DONE] * 3), THREE, **given)

    assert seen.metrics[f"rewards/{factory.__name__}/mean"] == 2.0 and seen.metrics["grad_norm"] > 0


def scored_by(seen: Seen) -> float:
    """Return the mean of the weighted sums of rewards."""
    return seen.metrics.get("reward", seen.metrics.get("objective/scores", float("nan")))


def half(completions: list[Any], **columns: Any) -> list[float]:
    return [0.5] * len(completions)


def test_environment_owned_reward_coexists_with_reward_functions(run: Run) -> None:
    """`reward_weights` names the functions alone; the environment's reward has the weight 1, and is no tool."""
    first = [write(("increment", {"step": 1})), write(("decrement", {"step": 2})), write(text="No")]
    given = {"environment_factory": Scored, "reward_funcs": [half], "train_dataset": data()}
    seen = run(by_row(first, [DONE, DONE]), THREE | {"reward_weights": [0.5]}, **given)

    assert seen.metrics["rewards/half/mean"] == 0.5 and seen.metrics["rewards/Scored/mean"] == pytest.approx(1 / 3)
    assert scored_by(seen) == pytest.approx(0.5 * 0.5 + 1 / 3)
    prompt = chat_tokenizer().decode(seen.rows[0][0])
    assert "increment" in prompt and "get_reward" not in prompt and "reset" not in prompt


def test_environment_owned_rewards_of_mixed_environments(run: Run) -> None:
    """Two names of one class share a reward; an environment without a reward is scored by the functions alone."""
    environments = {"scored": Scored, "again": Scored, "plain": Counter}
    rows = data({"environment": "scored"}, {"environment": "again"}, {"environment": "plain"})
    options = {"per_device_train_batch_size": 6, "num_generations": 2}
    given = {"environment_factory": environments, "reward_funcs": [half], "train_dataset": rows}
    seen = run(by_row([write(("increment", {"step": 3}))] * 6, [DONE] * 6), options, **given)

    assert [name for name in seen.metrics if name.startswith("rewards/") and name.endswith("/mean")] == [
        "rewards/half/mean",
        "rewards/Scored/mean",
    ]
    assert seen.metrics["rewards/Scored/mean"] == 3.0
    assert scored_by(seen) == pytest.approx(0.5 + 3 * 4 / 6)


class Echo:
    """Repeats."""

    rows: ClassVar[list[dict[str, Any]]] = []

    def reset(self, **row: Any) -> str:
        self.rows.append(row)
        return "Echo."

    def shout(self, text: str) -> str:
        """Repeat loudly.

        Args:
            text: The words.
        """
        return text.upper()


def test_training_with_multiple_environments(run: Run) -> None:
    """The column `environment`, which `reset` does not get, names a row's environment and so its only tools."""
    Echo.rows.clear()
    calls = {"increment": ("increment", {"step": 4}), "shout": ("shout", {"text": "hi"})}

    def script(context: str, number: int) -> str:
        own, other = ("shout", "increment") if "Echo." in context else ("increment", "shout")
        assert f'"name": "{own}"' in context and f'"name": "{other}"' not in context
        return write(calls[own]) if number == 0 else DONE

    given = {"environment_factory": {"counter": Counter, "echo": Echo}, "reward_funcs": [by_length]}
    rows = data({"environment": "counter"}, {"environment": "echo"})
    seen = run(script, {"per_device_train_batch_size": 4, "num_generations": 2}, train_dataset=rows, **given)

    assert seen.metrics["tools/call_frequency"] == 1 and seen.metrics["tools/failure_frequency"] == 0
    texts = sorted(chat_tokenizer().decode(ids) for _, ids, _ in seen.rows)
    assert sum("HI" in text for text in texts) == 2 and len(texts) == 4
    assert Echo.rows and not any("environment" in row for row in Echo.rows)


def test_environment_owned_data(run: Run) -> None:
    """Without a data set `reset` gives the prompts, and `max_steps` the length of the run."""

    class Guess:
        def reset(self, **row: Any) -> str:
            return "Guess the word."

    turns = [write(text=text) for text in ("Done!", "DoneDone!", "DoneDoneDone!")]
    seen = run(by_row(turns), THREE, environment_factory=Guess, reward_funcs=[by_length], train_dataset=None)

    assert seen.metrics["grad_norm"] > 0
    assert all("Guess the word." in chat_tokenizer().decode(prompt) for prompt, _, _ in seen.rows)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>',
        '<toolcall>\n{"arguments": {"a": 3, "b": 4}}\n</toolcall><|im_end|>',
        '<tool_call>\n{"arguments": {a: 3, b: 4}}\n</tool_call><|im_end|>',
    ],
)
def test_malformed_tool_calls_end_the_episode(run: Run, text: str) -> None:
    """There is no second turn."""
    given = {"tools": [multiply], "reward_funcs": [by_length], "train_dataset": data()}
    seen = run(by_row([text] * 3), THREE, **given)

    assert all(all(written) for _, _, written in seen.rows)
    assert seen.metrics["tools/call_frequency"] == 0
