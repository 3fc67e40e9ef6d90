"""Judges: a reward model reads in every role what it reads in training; every kind judges in training and in eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf_ppo.cli.judge import judge as evaluate
from rlhf_ppo.compat.environments import make_environment
from rlhf_ppo.data.prompts import PromptEncoder
from rlhf_ppo.data.rollout import Prompts, Responses
from rlhf_ppo.generation.engine_factory import BaselineCompletions
from rlhf_ppo.models.frozen import FrozenScorer
from rlhf_ppo.rewards.builtin import builtin_reward
from rlhf_ppo.rewards.judges import FunctionJudge, PreferenceReward
from rlhf_ppo.rewards.scorer import Answer
from tests.conftest import make_tokenizer, tiny_policy, tiny_scorer, write_rows
from tests.rewards.local_server import url
from tests.rewards.test_reward_model_tokens import TEMPLATE, responses
from tests.runs import QUICK


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], float]:
    """Every row of real ids that a reward model has read so far, with its score."""
    rows: dict[tuple[int, ...], float] = {}
    forward = FrozenScorer.forward

    def note(self: FrozenScorer, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        scores = forward(self, input_ids, attention_mask)
        for ids, real, score in zip(input_ids, attention_mask, scores, strict=True):
            rows[tuple(ids[real].tolist())] = score.item()
        return scores

    monkeypatch.setattr(FrozenScorer, "forward", note)
    return rows


def taken(rows: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    found = dict(rows)
    rows.clear()
    return found


def load_tokenizer(name: str, shared_data: Path) -> Any:
    if name == "metaspace":
        tokenizer = AutoTokenizer.from_pretrained(shared_data / "stories260K")
    else:
        file = str(shared_data / "tokenizer_neox20b" / "tokenizer.json")
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|endoftext|>", pad_token="<|padding|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


QUESTIONS = ["Lily and my sister", "Once upon a time", "He said:", "The dog"]
OURS = [" couldn't find the ball.", " there was a cat", " it was late END", " ran"]
THEIRS = [" sat down", " a big", " no END", " is"]
ENDINGS = ["eos", "cut", "stop string", "cut"]


def answered(tokenizer: Any, prompts: list[list[int]], texts: list[str]) -> Responses:
    """What a policy would have said, in its tokens: each text behind its question."""
    answers = []
    for question, text, ending in zip(QUESTIONS, texts, ENDINGS, strict=True):
        ids = tokenizer(question + text)["input_ids"][len(tokenizer(question)["input_ids"]) :]
        answers.append(ids + [tokenizer.eos_token_id] * (ending == "eos"))
    return responses(list(zip(prompts, answers, strict=True)))


@pytest.mark.parametrize("reader", ["metaspace", "byte-level"])
@pytest.mark.parametrize("policy", ["metaspace", "byte-level"])
def test_a_judge_reads_what_the_same_model_reads_in_training(
    policy: str, reader: str, shared_data: Path, make_trainer: Any, read: Any, tmp_path: Path
) -> None:
    """The same ids, the same score: of texts and conversations, ended by EOS, by a stop string, or cut."""
    tokenizer, own = load_tokenizer(policy, shared_data), load_tokenizer(reader, shared_data)
    tiny_scorer(vocab_size=len(own), max_position_embeddings=256).save_pretrained(tmp_path / "reward")
    own.save_pretrained(tmp_path / "reward")
    config = {"preference_model": str(tmp_path / "reward"), "opponent": "reference", "stop_strings": ["END"]}
    environment = make_environment("preference_comparison", config)
    trainer = make_trainer(
        **QUICK,
        **environment.settings,
        model=tiny_policy(vocab_size=len(tokenizer)),
        value_model=tiny_scorer(vocab_size=len(tokenizer)),
        processing_class=tokenizer,
        reward_model=str(tmp_path / "reward"),
        reward_funcs=environment.reward_funcs,
        train_dataset=Dataset.from_dict({"prompt": QUESTIONS}),
    )
    sources, encode = trainer.scorer.sources, PromptEncoder(tokenizer, "prompts", None)
    baselines = BaselineCompletions(("reference",), tokenizer, trainer.tokens)
    conversations = [[{"role": "user", "content": text}] for text in QUESTIONS]
    prefilled = [[*messages, {"role": "assistant", "content": "Well, my sister"}] for messages in conversations]
    for column in (QUESTIONS, conversations, prefilled):
        encoded = [encode({"prompt": prompt}, 0)["input_ids"] for prompt in column]
        ours, theirs = answered(tokenizer, encoded, OURS), answered(tokenizer, encoded, THEIRS)
        context = ours.context_length
        prompts = Prompts(ours.query_responses[:, :context], ours.attention_mask[:, :context], {"prompt": column})
        trainer.scorer.sources, trainer.scorer.names = {"reward_model": sources["reward_model"]}, ["reward_model"]
        for made in (ours, theirs):
            trainer.score_responses(made, prompts)
        in_training = taken(read)
        trainer.scorer.sources, trainer.scorer.names = {"preference": sources["preference"]}, ["preference"]
        trainer.score_responses(ours, baselines.respond(prompts, lambda _, other=theirs: other))
        judged = taken(read)
        assert judged.keys() == in_training.keys() and len(judged) == 2 * len(QUESTIONS)
        assert judged == pytest.approx(in_training, abs=1e-5)


# ---- Every kind of judge ----

JUDGES = """
def scores(prompts, completions, completion_ids, **columns):
    assert len(prompts) == len(completions) == len(completion_ids) == len(columns["topic"])
    return [float(len(text)) for text in completions]


def later(**columns):
    async def score():
        return scores(**columns)
    return score()


def pairs(prompts, pairs):
    return [0.5 if len(one) == len(two) else float(len(two) > len(one)) for one, two in pairs]


async def pairs_later(prompts, completions):
    return pairs(prompts, completions)


def feedback(prompt, first, second):
    return float(len(first) > len(second)) - float(len(first) < len(second))


class Judge:
    def judge(self, prompts, completions, shuffle_order=True):
        assert not shuffle_order
        return pairs(prompts, completions)


trl = Judge()
"""
KINDS = ["judges_here.py:scores", "judges_here.py:later", "judges_here.py:pairs", "judges_here.py:pairs_later"]
KINDS += ["judges_here.py:feedback", "judges_here.py:trl", "the server"]


@pytest.fixture
def places(empty_place: None) -> None:
    tiny_policy().save_pretrained("one")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained("one")
    Path("judges_here.py").write_text(JUDGES)
    rows = [{"prompt": f"w{row}", "topic": str(row), "chosen": "w4 w5 w6"} for row in range(4)]
    write_rows("prompts.jsonl", rows)


OPTIONS = "--model one --opponent-column chosen --dataset_name prompts.jsonl --max-new-tokens 4 --judge".split()


def test_what_training_accepts_as_judge_eval_accepts(places: None, server: Any) -> None:
    """All of these prefer the longer one."""
    expected = evaluate([*OPTIONS, "judges_here.py:scores"])
    assert 0 < expected.wins + expected.losses and expected.failed == 0
    for kind in KINDS:
        kind = url(server) if kind == "the server" else kind
        (reward,) = make_environment("preference_comparison", {"judge": kind, "opponent": "dataset"}).reward_funcs
        rewards = reward(
            prompts=["p", "q"], completions=["aa", "b"], chosen=["a", "bb"], topic=["", ""], completion_ids=[[1], [1]]
        )
        assert rewards == [1.0, -1.0], kind
        assert evaluate([*OPTIONS, kind]) == expected, kind
    body = server.requests[-1][1]
    assert set(body) == {"prompts", "completions", "completion_ids", "columns"} and "topic" in body["columns"]


def test_a_function_judges_the_beginning_that_the_template_wrote() -> None:
    """As in training: the template opens `<think>`, and a format is read with it."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

    def begins(completions: list[str], policy_answers: list[Answer], **_: Any) -> list[float]:
        return [float(one.prefilled == "w4") for one in policy_answers]

    asked = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w4"}]
    ids = tokenizer("w5 w4")["input_ids"]
    answers = [Answer(asked, "w6", prompt_ids=ids, response_ids=[6], tokenizer=tokenizer), Answer("w5", "w6")]
    assert FunctionJudge(begins).scores(answers, {}) == [1.0, 0.0]


def test_a_reward_function_that_names_its_columns_is_no_pairwise_judge() -> None:
    def exact(completions: list[str], answer: list[str]) -> list[float]:
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    judge = PreferenceReward(exact, "dataset")
    assert judge.compare([Answer("2+2?", "4")], [Answer("2+2?", "5")], {"answer": ["4"]}) == [(0.0, 1.0)]


def test_a_function_that_reads_tokens_gets_them_of_both_sides_or_is_refused() -> None:
    """A data set's text is read with the policy's tokenizer; without one it has no tokens, rather than none at all."""

    def brief(completion_ids: list[list[int]], log_extra: Any, **_: Any) -> list[float]:
        log_extra("length", [len(ids) for ids in completion_ids])
        return [-float(len(ids)) for ids in completion_ids]

    judge = PreferenceReward(FunctionJudge(brief), "dataset")
    columns = {"log_extra": lambda name, values: pytest.fail("the reward's own columns are of other rows")}
    tokenizer = make_tokenizer()
    long, short = (Answer("w5", text, tokenizer=tokenizer) for text in ("w6 w7 w8", "w6"))
    assert judge.compare([short, long], [long, short], columns) == [(0.0, 1.0), (1.0, 0.0)]
    with pytest.raises(ValueError, match="requires the argument 'completion_ids'"):
        judge.compare([Answer("w5", "w6 w7")], [Answer("w5", "w6")], {})


def test_a_format_is_read_once_where_a_data_set_has_the_whole_answer() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    asked = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "<think>"}]
    ids = tokenizer("w5")["input_ids"]
    answers = [
        Answer(asked, text, prompt_ids=ids, tokenizer=tokenizer) for text in ("hm</think>4", "<think>hm</think>4")
    ]
    assert [answer.prefilled for answer in answers] == ["<think>"] * 2
    assert FunctionJudge(builtin_reward("think_format_reward")).scores(answers, {}) == [1.0, 1.0]
