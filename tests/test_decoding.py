"""Decoding with a critic: whose values choose, at which cost, and a critic that was saved beside its policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_ppo import PPOTrainer
from rlhf_ppo.decoding import Candidate, Sampling, _heaviest, best_of_n, value_guided_search, values_of
from tests.conftest import make_tokenizer, prompt_rows, tiny_policy, tiny_scorer

EOS = 1
PROMPTS = ["w1 w2", "w3", "w5 w6 w7"] * 8
HOW = Sampling(max_new_tokens=12, temperature=1.0, batch_size=50)


@pytest.fixture
def counts_low_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The critic's value is the number of ids below 12 so far."""

    def count(critic: Any, prompts: Any, responses: Sequence[Sequence[int]], ended: Any) -> Tensor:
        return torch.tensor([float(low_ids(ids)) for ids in responses])

    monkeypatch.setattr("rlhf_ppo.decoding.values_of", count)


def low_ids(ids: Sequence[int]) -> int:
    return sum(each < 12 for each in ids)


def models() -> tuple[Any, Any, Any]:
    return tiny_policy(), tiny_scorer(), make_tokenizer()


def mean_value(found: Any) -> float:
    return sum(low_ids(each.ids) for each in found.chosen) / len(found.chosen)


@pytest.mark.usefixtures("counts_low_ids")
def test_the_most_valued_of_n_is_chosen() -> None:
    found = best_of_n(*models(), PROMPTS, 6, HOW)
    for chosen, candidates in zip(found.chosen, found.candidates, strict=True):
        assert len(candidates) == 6 and all(each.is_finished for each in candidates)
        assert low_ids(chosen.ids) == chosen.value == max(low_ids(each.ids) for each in candidates)
        assert all(EOS not in each.ids[:-1] and (each.ids[-1] == EOS or len(each.ids) == 12) for each in candidates)
    assert found.num_sampled_tokens == sum(len(each.ids) for row in found.candidates for each in row)
    assert found.num_valued_rows == 6 * len(PROMPTS)
    assert found.texts[0] == make_tokenizer().decode(found.chosen[0].ids, skip_special_tokens=True)


@pytest.mark.usefixtures("counts_low_ids")
def test_search_in_blocks_beats_best_of_as_many() -> None:
    """A beginning with many low ids is worth continuing, where the values count them."""
    torch.manual_seed(0)
    prompts, how = PROMPTS * 4, Sampling(max_new_tokens=12, temperature=1.0, stop_token_id=50)  # which is not an id
    best = best_of_n(*models(), prompts, 4, how)
    search = value_guided_search(*models(), prompts, width=4, block=1, sampling=how)
    beams = value_guided_search(*models(), prompts, width=4, block=1, sampling=how, keep=2)
    assert mean_value(search) > mean_value(best) + 1 and mean_value(beams) > mean_value(best) + 1
    assert search.num_sampled_tokens == 4 * 12 * len(prompts)
    assert all(len(each.ids) <= 12 and each.is_finished for row in search.candidates for each in row)


@pytest.mark.usefixtures("counts_low_ids")
def test_one_block_of_all_tokens_is_best_of_n() -> None:
    found = []
    for decode in (lambda: best_of_n(*models(), PROMPTS, 4, HOW),
                   lambda: value_guided_search(*models(), PROMPTS, width=4, block=12, sampling=HOW)):  # fmt: skip
        torch.manual_seed(0)
        found.append(decode().chosen)
    assert found[0] == found[1]


def test_a_continued_beginning_keeps_its_distribution() -> None:
    """Blocks of 1 token with one candidate sample from the policy: the first two tokens' frequencies agree."""
    policy, critic, tokenizer = tiny_policy(), tiny_scorer(), make_tokenizer()
    how = Sampling(max_new_tokens=2, temperature=1.0, stop_token_id=31, batch_size=4000)
    found = value_guided_search(policy, critic, tokenizer, ["w1 w2"] * 4000, width=1, block=1, sampling=how)
    ids = tokenizer("w1 w2", return_tensors="pt").input_ids
    first = policy(ids).logits[0, -1].detach().softmax(0)
    token = int(first.argmax())
    second = policy(torch.cat((ids, torch.tensor([[token]])), 1)).logits[0, -1].softmax(0)
    behind = [each.ids[1] for each in found.chosen if each.ids[0] == token]
    assert len(behind) / 4000 == pytest.approx(float(first[token]), abs=4 * (0.25 / 4000) ** 0.5)
    seen = torch.bincount(torch.tensor(behind), minlength=32) / len(behind)
    assert float((seen - second.detach()).abs().max()) < 4 * (0.25 / len(behind)) ** 0.5


@pytest.mark.parametrize(
    ("values", "chosen"), [([0.4, 0.7, 0.4], "a"), ([0.3, 0.7, 0.3], "b"), ([-0.5, -0.6, -0.4], "a")]
)
def test_values_of_equal_answers_add_up(values: list[float], chosen: str) -> None:
    """By hand: .8 > .7; .6 < .7; shifted by .6: .1 + .2 > 0."""
    candidates = [Candidate([index], value, True) for index, value in enumerate(values)]
    assert "aba"[_heaviest(candidates, lambda each: "aba"[each.ids[0]], str).ids[0]] == chosen


def test_values_are_the_classifiers_own() -> None:
    """After the last token; before the stop token where the response has ended."""
    critic = tiny_scorer()
    prompts, responses = [[3, 4, 5], [6]], [[7, 8], [9, 10, EOS]]
    values = values_of(critic, prompts, responses, [False, True])
    expected = [float(critic(torch.tensor([ids])).logits) for ids in ([3, 4, 5, 7, 8], [6, 9, 10])]
    assert values.tolist() == pytest.approx(expected, abs=1e-5)


def test_ids_that_the_critic_lacks_are_never_sampled() -> None:
    """As in training; the policy would sample one in each second response."""
    policy, how = tiny_policy(vocab_size=40), Sampling(max_new_tokens=8, temperature=1.0)
    found = best_of_n(policy, tiny_scorer(), make_tokenizer(), PROMPTS, 2, how)
    assert max(token for row in found.candidates for each in row for token in each.ids) < 32
    assert policy(torch.tensor([[4, 5]])).logits.softmax(-1)[..., 32:].sum() > 0.1


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)])
def test_a_saved_critic_has_the_trainers_values(
    make_trainer: Callable[..., PPOTrainer], tmp_path: Any, adapter: Any
) -> None:
    """The critic is wider and deeper than the policy, and has more token ids."""
    scorer = tiny_scorer(seed=2, hidden_size=64, num_hidden_layers=3, vocab_size=40)
    scorer.save_pretrained(tmp_path / "base")
    scorer.config.name_or_path = scorer.name_or_path = str(tmp_path / "base")
    trainer = make_trainer(save_critic=True, value_model=scorer, value_peft_config=adapter)
    trainer.train()
    trainer.save_model()
    folder = tmp_path / "run" / "critic"
    if adapter is None:
        critic = AutoModelForSequenceClassification.from_pretrained(folder)
    else:
        base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
        critic = PeftModel.from_pretrained(base, folder)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(make_tokenizer())
    assert not (tmp_path / "run" / "value_model").exists()
    rows = ([[3, 4, 5], [6]], [[7, 8], [9, 10, 11]], [False, False])
    assert torch.allclose(values_of(critic, *rows), values_of(trainer.value_model, *rows), atol=1e-6)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    found = best_of_n(policy, critic, make_tokenizer(), ["w1", "w2 w3"], 3, HOW)
    assert all(
        each.value == max(one.value for one in row) for each, row in zip(found.chosen, found.candidates, strict=True)
    )


@pytest.mark.usefixtures("plain_runs")
def test_without_save_critic_there_is_none(make_trainer: Callable[..., PPOTrainer], tmp_path: Any) -> None:
    trainer = make_trainer(train_dataset=Dataset.from_list(prompt_rows(16)))
    trainer.save_model()
    assert not (tmp_path / "run" / "critic").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_of_n(*models(), PROMPTS, 0), "n=0 must be at least 1"),
        (lambda: value_guided_search(*models(), PROMPTS, 3, keep=2), "width=3 must be a positive multiple of keep=2"),
        (lambda: value_guided_search(*models(), PROMPTS, block=0), "block=0"),
        (lambda: Sampling(temperature=0.0), "temperature=0.0 must be positive"),
        (lambda: Sampling(max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
        (
            lambda: best_of_n(tiny_policy(), tiny_scorer(num_labels=2), make_tokenizer(), PROMPTS),
            "critic has num_labels=2",
        ),
        (lambda: best_of_n(*models(), ["w1", ""]), "row 1 of prompts is empty"),
        (lambda: best_of_n(*models(), [{"input_ids": [4, 32]}]), "row 0 of prompts holds the token id 32"),
        (
            lambda: best_of_n(tiny_policy(), tiny_scorer(vocab_size=31), make_tokenizer(), PROMPTS),
            "critic has 31 token ids, but processing_class makes ids up to 31",
        ),
        (
            lambda: value_guided_search(*models(), PROMPTS, sampling=Sampling(max_new_tokens=62)),
            r"the longest prompt \(3 tokens\) and max_new_tokens=62 take 65 positions, but the model has 64",
        ),
    ],
)
def test_what_cannot_be_decoded_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
