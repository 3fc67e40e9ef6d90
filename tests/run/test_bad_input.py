"""Bad input ends in an error that names the argument, its value and the fix, before anything is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.prompts import PromptCollator
from tests.conftest import count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK

MakeTrainer = Callable[..., PPOTrainer]


def ids(*prompts: list[int]) -> Dataset:
    return Dataset.from_dict({"input_ids": list(prompts)})


def rows_with(bad: list[int], at: int) -> Dataset:
    """A hundred good prompts, but for one."""
    rows = prompt_rows(100)
    rows[at] = {"input_ids": bad}
    return Dataset.from_list(rows)


def bare_tokenizer() -> Any:
    tokenizer = make_tokenizer(pad_token=None)
    tokenizer.eos_token = None
    return tokenizer


def lora(**kwargs: Any) -> Any:
    return pytest.importorskip("peft").LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **kwargs})


def lora_policy(**kwargs: Any) -> Any:
    return pytest.importorskip("peft").get_peft_model(tiny_policy(), lora(**kwargs))


def same_twice(one: str, other: str) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        policies = {"model", "ref_model"}
        shared = tiny_policy() if {one, other} <= policies else tiny_scorer()
        return {one: shared, other: shared}

    return make


# What is passed, the error and its words.
BAD: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    # the data
    "no data": (lambda: {"train_dataset": None}, ValueError, "train_dataset=None"),
    "data smaller than a batch": (
        lambda: {"train_dataset": ids([5]), "total_episodes": None},
        ValueError, "the training set has 1 prompts, fewer than the 2 of one batch",
    ),
    "data smaller than a batch without the long prompts": (
        lambda: {"train_dataset": ids([5], [5, 6, 7]), "max_prompt_length": 2},
        ValueError, "the training set has 1 prompts, fewer than the 2 of .* or raise max_prompt_length=2, which drops",
    ),
    "a prompt that is too long for the model": (
        lambda: {"train_dataset": rows_with([5] * 61, at=50)}, ValueError,
        r"longest prompt \(61 tokens\) and response_length=4 take 65 positions, but the model has 64: "
        "set max_prompt_length=60",
    ),
    "a response that is too long for the model": (
        lambda: {"response_length": 64}, ValueError, "response_length=64 take .* but the model has 64"
    ),
    "a prompt that is too long for the value model": (
        lambda: {"train_dataset": rows_with([5] * 20, at=1), "value_model": tiny_scorer(max_position_embeddings=16)},
        ValueError, "take 24 positions, but the model has 16",
    ),
    "an evaluation prompt that is too long": (
        lambda: {"eval_dataset": rows_with([5] * 61, at=7)}, ValueError, "take 65 positions, but the model has 64"
    ),
    # the tokenizer
    "a tokenizer with neither PAD nor EOS": (
        lambda: {"processing_class": bare_tokenizer()}, ValueError, "processing_class has neither a pad_token nor an"
    ),
    "no EOS to stop at": (
        lambda: {"processing_class": _without_eos()}, ValueError, "stop_token='eos', but processing_class has no eos"
    ),
    "no stop token to penalise the lack of": (
        lambda: {"processing_class": _without_eos(), "stop_token": None, "missing_eos_penalty": 1.0},
        ValueError, "missing_eos_penalty=1.0 needs something that ends a response; set stop_token_id, stop_strings",
    ),
    "no stop token to replace the score for the lack of": (
        lambda: {"processing_class": _without_eos(), "stop_token": None, "missing_eos_score": -1.0},
        ValueError, "missing_eos_score=-1.0 needs something that ends a response; set stop_token_id, stop_strings",
    ),
    "a tokenizer as the model": (
        lambda: {"model": make_tokenizer()}, TypeError, r"model is \w+, called with \d+ arguments: pass a model"
    ),
    "an adapter of another model": (
        lambda: {"peft_config": lora(target_modules=["c_attn"])},
        ValueError, r"peft_config does not fit the model, which has \['down_proj', .*c_attn",
    ),
    "a value model of another tokenizer": (
        lambda: {"value_model": tiny_scorer(vocab_size=20)}, ValueError, "value_model has 20 token ids"
    ),
    "a reward model of another tokenizer": (
        lambda: {"reward_model": tiny_scorer(vocab_size=20)},
        ValueError, "reward_model has 20 token ids.*reward_processing_classes",
    ),
    # the models
    "a reward model with two labels": (
        lambda: {"reward_model": tiny_scorer(num_labels=2)}, ValueError, "reward_model has num_labels=2"
    ),
    "a value model with two labels": (
        lambda: {"value_model": tiny_scorer(num_labels=2)}, ValueError, "value_model has num_labels=2"
    ),
    "a language model as reward model": (
        lambda: {"reward_model": tiny_policy()}, ValueError, "reward_model is a LlamaForCausalLM"
    ),
    "a reward model as policy": (
        lambda: {"model": tiny_scorer()}, ValueError, "model is a LlamaForSequenceClassification"
    ),
    "a reward model as reference": (
        lambda: {"ref_model": tiny_scorer()}, ValueError, "ref_model is a LlamaForSequenceClassification"
    ),
    "something else as policy": (lambda: {"model": torch.nn.Linear(2, 2)}, TypeError, "model must be a transformers"),
    "reference and policy in one": (
        same_twice("model", "ref_model"), ValueError, "model and ref_model are the same object"
    ),
    "reward and value model in one": (
        same_twice("reward_model", "value_model"), ValueError, "reward_model and value_model are the same object"
    ),
    # the reward functions
    "a reward of an unknown name": (
        lambda: {"reward_funcs": [count_w4, "corectness"]},
        ValueError, "reward_funcs holds 'corectness': write 'path/file.py:name'"
    ),
    "more tokenizers than reward models": (
        lambda: {"reward_model": tiny_scorer(), "reward_processing_classes": [None, None]},
        ValueError, "reward_processing_classes has 2 entries for 1 reward models",
    ),
    "two reward models in one": (
        lambda: {"reward_model": [tiny_scorer()] * 2}, ValueError, r"reward_model\[0\] and reward_model\[1\] are"
    ),
    "as many weights as there are no rewards": (
        lambda: {"reward_weights": [1.0, 2.0]}, ValueError, r"reward_weights has 2 numbers \(\[1.0, 2.0\]\) for 1 "
    ),
    "the weight of an unknown reward": (
        lambda: {"reward_weights": {"count_w5": 1.0}}, ValueError, r"names \['count_w5'\].*rewards are \['count_w4'\]"
    ),
    # adapters
    "a peft_config for a PeftModel": (
        lambda: {"model": lora_policy(), "peft_config": lora()}, ValueError, "model is already a PeftModel"
    ),
    "an adapter that is not there": (
        lambda: {"model": lora_policy(), "model_adapter_name": "mine"},
        ValueError, r"model_adapter_name='mine' is not an adapter of the policy, which has \['default'\]",
    ),
    "an adapter of a bare model": (
        lambda: {"model_adapter_name": "mine"}, ValueError, "model_adapter_name='mine', but model is not a PeftModel"
    ),
    "a reference adapter that is not there": (
        lambda: {"model": lora_policy(), "ref_adapter_name": "old"},
        ValueError, "ref_adapter_name='old' is not an adapter of the policy",
    ),
    "a reference adapter and a reference": (
        lambda: {"model": lora_policy(), "ref_adapter_name": "default", "ref_model": tiny_policy()},
        ValueError, "ref_adapter_name='default' and ref_model are both given",
    ),
}  # fmt: skip


def _without_eos() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


@pytest.fixture
def nothing_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the weights were changed")

    monkeypatch.setattr(torch.optim.AdamW, "step", forbidden)


@pytest.fixture
def nothing_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("responses were generated")

    monkeypatch.setattr(PPOTrainer, "generate_responses", forbidden)


@pytest.mark.usefixtures("nothing_trained", "nothing_generated")
@pytest.mark.parametrize("case", BAD)
def test_construction_fails_with_the_reason(case: str, make_trainer: MakeTrainer) -> None:
    make, error, message = BAD[case]
    with pytest.raises(error, match=f"(?s){message}"):
        make_trainer(**QUICK | make())


def test_a_stream_is_checked_as_its_rows_come(make_trainer: MakeTrainer) -> None:
    stream = Dataset.from_dict({"prompt": [*["w1 w2"] * 4, "w1 <eos>"]}).to_iterable_dataset()
    trainer = make_trainer(**QUICK, train_dataset=stream)
    with pytest.raises(ValueError, match="row 4 of train_dataset ends in the EOS token"):
        trainer.train()
    long_stream = Dataset.from_list([{"input_ids": [5] * 61}] * 2).to_iterable_dataset()
    with pytest.raises(ValueError, match="take 65 positions, but the model has 64"):
        make_trainer(**QUICK, train_dataset=long_stream).train()


def test_a_collator_that_loses_rows_during_the_run_does_not_end_it_silently(make_trainer: MakeTrainer) -> None:
    calls = list[int]()

    def losing(rows: list[Any]) -> Any:
        calls.append(len(rows))  # the first call is the constructor's check
        return PromptCollator(0)(rows[:1] if len(calls) > 2 else rows)

    trainer = make_trainer(**QUICK, train_dataset=prompt_rows(16), data_collator=losing)
    with pytest.raises(ValueError, match="data_collator returned 1 prompts of train_dataset, not the 2 of an update"):
        trainer.train()
