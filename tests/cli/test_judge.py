"""The win rate of `rlhf-ppo eval`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from datasets import Dataset
from rlhf_ppo.cli.evaluate import WinRate, compare, evaluate

from rlhf_ppo.cli import evaluate as module
from rlhf_ppo.rewards.judges import RewardModelJudge
from rlhf_ppo.rewards.reading import Answer
from tests.conftest import make_tokenizer, tiny_policy, tiny_scorer

ROWS = Dataset.from_list([{"prompt": f"w{index}", "answer": str(index)} for index in range(4)])


def by_length(prompts: Any, completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float | None]:
    return [None if wanted == "3" else float(len(text)) for text, wanted in zip(completions, answer, strict=True)]


def answers(texts: Sequence[str], tokenizer: Any = None) -> list[Answer]:
    return [Answer(prompt, text, tokenizer=tokenizer) for prompt, text in zip(ROWS["prompt"], texts, strict=True)]


def test_wins_losses_ties_and_failed_verdicts_of_a_reward_function():
    found = compare(by_length, ROWS, answers(["long", "s", "same", "x"]), answers(["s", "long", "also", "y"]))

    assert found == WinRate(wins=1, losses=1, ties=1, failed=1)
    assert str(found) == "Model win rate: 50.00% of 3 (1 ties; 1 failed verdicts)"


def test_a_coroutine_judges_too():
    async def by_length_later(**columns: Any) -> list[float | None]:
        return by_length(**columns)

    assert compare(by_length_later, ROWS, answers(["ab"] * 4), answers(["a"] * 4)) == WinRate(3, 0, 0, 1)


def test_a_reward_model_prefers_what_it_scores_higher(tmp_path):
    scorer, tokenizer = tiny_scorer(), make_tokenizer()
    scorer.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    ours, theirs = [" w4 w5", " w6", " w7 w8", " w9"], [" w10", " w11 w12", " w7 w8", " w13"]
    scores = [
        [
            scorer.eval()(**tokenizer(f"{prompt}{text} <eos>", return_tensors="pt")).logits.item()
            for prompt, text in zip(ROWS["prompt"], texts, strict=True)
        ]
        for texts in (ours, theirs)
    ]
    wins = sum(a > b for a, b in zip(*scores, strict=True))

    judge = RewardModelJudge(str(tmp_path / "judge"))
    found = compare(judge, ROWS, answers(ours), answers(theirs))

    assert (found.wins, found.ties, found.failed) == (wins, 1, 0)
    swapped = compare(judge, ROWS, answers(theirs), answers(ours))
    assert (swapped.wins, swapped.losses) == (found.losses, found.wins)


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, seed in (("one", 0), ("two", 1)):
        tiny_policy(seed=seed).save_pretrained(name)
        make_tokenizer().save_pretrained(name)
    ROWS.add_column("chosen", ["w4"] * 4).to_json("prompts.jsonl")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


SHORT = ["--dataset_name", "prompts.jsonl", "--max-new-tokens", "8", "--batch-size", "3"]


def test_two_models_answer_the_same_prompts(places, capsys, monkeypatch):
    asked = []

    def count(completions: Sequence[str], **columns: Any) -> list[float]:
        asked.append((columns["prompts"], list(completions)))
        return [float(len(text)) for text in completions]

    monkeypatch.setattr(module, "resolve_reward", lambda spec: count)
    found = evaluate(["--model", "one", "--opponent", "two", "--judge", "length", *SHORT])

    ((prompts, texts),) = asked
    by_prompt = {
        prompt: [text for asked, text in zip(prompts, texts, strict=True) if asked == prompt] for prompt in prompts
    }
    assert list(by_prompt) == ROWS["prompt"] and all(
        len(pair) == 2 and pair[0] != pair[1] for pair in by_prompt.values()
    )
    assert found.wins == sum(len(ours) > len(theirs) for ours, theirs in by_prompt.values())
    assert "<eos>" not in "".join(texts) and max(len(text.split()) for text in texts) <= 8
    assert capsys.readouterr().out.startswith("Model win rate: ")


def test_the_same_model_ties_with_itself(places):
    found = evaluate(["--model", "one", "--opponent", "one", "--judge", "length", *SHORT])

    assert found == WinRate(wins=0, losses=0, ties=4, failed=0)


def test_the_data_set_may_be_the_opponent(places):
    found = evaluate(["--model", "one", "--opponent-column", "chosen", "--judge", "length", *SHORT])

    assert found.wins > 0 and found.wins + found.losses + found.ties == 4


@pytest.mark.parametrize(
    "options",
    ["--judge length", "--opponent two --opponent-column chosen --judge length", "--opponent two"],
)
def test_one_opponent_and_one_judge(options, places, capsys):
    with pytest.raises(SystemExit):
        evaluate(["--model", "one", *options.split(), *SHORT])

    assert "give one of them" in capsys.readouterr().err
