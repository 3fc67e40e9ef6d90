"""Bad input ends in an error that names the argument, its value and the fix, before anything is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset

from rlhf_ppo.data.prompts import PromptCollator
from rlhf_ppo.ranks.processes import num_processes
from tests.conftest import count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK, MakeTrainer


def of_length(length: int) -> Dataset:
    """A hundred good prompts, but for one."""
    return Dataset.from_list([*prompt_rows(50), {"input_ids": [5] * length}, *prompt_rows(49)])


def without_eos(**kwargs: Any) -> Any:
    tokenizer = make_tokenizer(**kwargs)
    tokenizer.eos_token = None
    return tokenizer


def same_twice() -> dict[str, Any]:
    policy = tiny_policy()
    return {"model": policy, "ref_model": policy}


FOLLOWING: dict[str, Any] = {
    **{"eval_dataset": {"a": prompt_rows(2), "b": prompt_rows(2)}, "eval_strategy": "steps", "eval_steps": 1},
    **{"save_strategy": "steps", "save_steps": 1},
}
"""Evaluates two data sets."""

# What is passed, and the words of the error.
BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no data": (lambda: {"train_dataset": None}, "train_dataset=None"),
    "texts instead of rows": (lambda: {"train_dataset": ["a b"] * 8}, r"rows of type str \('a b'\): give a data set"),
    "columns instead of rows": (lambda: {"train_dataset": {"prompt": ["w4"] * 8}}, "train_dataset is of type dict"),
    "a number as data": (lambda: {"eval_dataset": {"held out": 5}}, r"eval_dataset\['held out'\] is of type int"),
    "a number as reward": (lambda: {"reward_funcs": 5}, "reward_funcs holds '5': write"),
    "no function as reward": (lambda: {"reward_funcs": [None]}, "reward_funcs holds 'None': write"),
    "data smaller than a batch": (
        lambda: {"train_dataset": [{"input_ids": [5]}], "total_episodes": None},
        "the training set has 1 prompts, fewer than the 2 of one batch",
    ),
    "a prompt that is too long for the model": (
        lambda: {"train_dataset": of_length(61)},
        r"longest prompt \(61 tokens\) and response_length=4 take 65 positions, but the model has 64",
    ),
    "a prompt that is too long for the value model": (
        lambda: {"train_dataset": of_length(20), "value_model": tiny_scorer(max_position_embeddings=16)},
        "take 24 positions, but the model has 16",
    ),
    "an evaluation prompt that is too long": (
        lambda: {"eval_dataset": of_length(61)},
        "take 65 positions, but the model has 64",
    ),
    "a schedule that follows the score of no data set": (
        lambda: FOLLOWING | {"lr_scheduler_type": "reduce_lr_on_plateau"},
        r"metric_for_best_model='score' names none of the data sets of eval_dataset, \['a', 'b'\]: set .*'a_score'",
    ),
    "a best model by the KL of no data set": (
        lambda: FOLLOWING | {"load_best_model_at_end": True, "metric_for_best_model": "eval_kl"},
        r"metric_for_best_model='eval_kl' names none .*such as 'a_score'",
    ),
    "a tokenizer with neither PAD nor EOS": (
        lambda: {"processing_class": without_eos(pad_token=None)},
        "processing_class has neither a pad_token nor an",
    ),
    "no EOS to stop at": (
        lambda: {"processing_class": without_eos()},
        "stop_token='eos', but processing_class has no eos",
    ),
    "no stop token to penalise the lack of": (
        lambda: {"processing_class": without_eos(), "stop_token": None, "missing_eos_penalty": 1.0},
        "missing_eos_penalty=1.0 needs something that ends a response",
    ),
    "a reward model of another tokenizer": (
        lambda: {"reward_model": tiny_scorer(vocab_size=20)},
        "reward_model has 20 token ids.*reward_processing_classes",
    ),
    "a value model with two labels": (
        lambda: {"value_model": tiny_scorer(num_labels=2)},
        "value_model is a .* with num_labels=2, but a value_model gives one number",
    ),
    "a language model as reward model": (
        lambda: {"reward_model": tiny_policy()},
        "reward_model is a LlamaForCausalLM",
    ),
    "reference and policy in one": (same_twice, "model and ref_model are the same object"),
    "a reward of an unknown name": (
        lambda: {"reward_funcs": [count_w4, "corectness"]},
        "reward_funcs holds 'corectness': write 'path/file.py:name'",
    ),
    "the weight of an unknown reward": (
        lambda: {"reward_weights": {"count_w5": 1.0}},
        r"names \['count_w5'\].*rewards are \['count_w4'\]",
    ),
    "a number of responses that does not divide": (
        lambda: {"num_generations": 3},
        r"num_generations=3 does not divide the 2 ",
    ),
    "a warm-up of a critic that cannot learn": (
        lambda: {"critic_warmup_steps": 2, "vf_coef": 0.0},
        "critic_warmup_steps=2 .* with vf_coef=0 it learns nothing",
    ),
    "texts without a weight": (
        lambda: {"ptx_dataset": [{"text": "w1 w2"}]},
        r"ptx_coef=0\.0 weighs a loss on ptx_dataset: set both",
    ),
    "a stream for PPO-ptx": (
        lambda: {"ptx_coef": 0.1, "ptx_dataset": Dataset.from_list([{"text": "w1"}]).to_iterable_dataset()},
        "ptx_dataset=IterableDataset.* must be a datasets.Dataset or a list of rows",
    ),
    "a name for PPO-ptx": (
        lambda: {"ptx_coef": 0.1, "ptx_dataset": "texts"},
        "ptx_dataset='texts' must be a datasets.Dataset or a list of rows: load a name",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_construction_fails_with_the_reason(case: str, make_trainer: MakeTrainer) -> None:
    make, message = BAD[case]
    with pytest.raises((TypeError, ValueError), match=f"(?s){message}"):
        make_trainer(**QUICK | make())


@pytest.mark.parametrize("metric", ["b_score", "eval_b_score"])
def test_a_schedule_follows_the_score_of_one_data_set(metric: str, make_trained: MakeTrainer) -> None:
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": metric, "save_strategy": "no"}
    trainer = make_trained(**QUICK | FOLLOWING | options)
    assert trainer.lr_scheduler.last_epoch == 3


@pytest.mark.parametrize(
    ("metric", "greater_is_better", "keeps"),
    [("a_score", True, True), ("b_score", True, False), ("a_score", False, False), ("b_score", False, True)],
)
def test_a_plateau_is_that_of_the_data_set_in_the_direction_that_is_better(
    metric: str, greater_is_better: bool, keeps: bool, make_trained: MakeTrainer
) -> None:
    """The score of a rises with each evaluation, that of b falls; the rate is halved where it is no better."""

    def by_set(completions: list[str], sign: list[int], trainer_state: Any, **_: Any) -> list[float]:
        return [each * float(trainer_state.global_step) for each in sign]

    def rows(sign: int) -> list[dict[str, Any]]:
        return [{**row, "sign": sign} for row in prompt_rows(2)]

    trainer = make_trained(
        **QUICK | FOLLOWING | {"eval_dataset": {"a": rows(1), "b": rows(-1)}, "save_strategy": "no"},
        train_dataset=[{**row, "sign": 0} for row in prompt_rows(8)], reward_funcs=by_set,
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        metric_for_best_model=metric, greater_is_better=greater_is_better,
    )  # fmt: skip
    (rate,) = {group["lr"] for group in trainer.optimizer.param_groups}
    assert rate == trainer.args.learning_rate * (1 if keeps else 0.25)  # after three evaluations, the first the best


@pytest.mark.parametrize(
    "case",
    [{"reward_funcs": lambda completions, **_: [None] * len(completions)}, {"metric_for_best_model": "accuracy"}],
    ids=["no score", "unknown"],
)
def test_a_schedule_whose_metric_is_not_evaluated_says_so(case: dict[str, Any], make_trainer: MakeTrainer) -> None:
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "save_strategy": "no", "eval_strategy": "steps"}
    trainer = make_trainer(**QUICK | options | {"eval_steps": 1, "eval_dataset": prompt_rows(2)} | case)
    metric = case.get("metric_for_best_model", "score")
    with pytest.raises(ValueError, match=f"the schedule follows .*='{metric}', .* no eval_{metric}, only"):
        trainer.train()


def test_a_stream_is_checked_as_its_rows_come(make_trainer: MakeTrainer) -> None:
    stream = of_length(61).select(range(49, 51)).to_iterable_dataset()
    with pytest.raises(ValueError, match="take 65 positions, but the model has 64"):
        make_trainer(**QUICK, train_dataset=stream).train()


def test_a_collator_that_loses_rows_during_the_run_does_not_end_it_silently(make_trainer: MakeTrainer) -> None:
    calls = list[int]()

    def losing(rows: list[Any]) -> Any:
        calls.append(len(rows))  # the first call is the constructor's check
        return PromptCollator(0)(rows[:1] if len(calls) > 2 else rows)

    trainer = make_trainer(**QUICK, train_dataset=prompt_rows(16), data_collator=losing)
    with pytest.raises(ValueError, match="data_collator returned 1 prompts of train_dataset, not the 2 of an update"):
        trainer.train()


def test_launched_processes_that_do_not_know_each_other_are_refused(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `accelerate launch` starts two processes on CPUs without `use_cpu`: each is rank 0 of one."""
    args = make_trainer().args
    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="the launcher started 2 processes without accelerators"):
        num_processes(args)


@pytest.mark.parametrize("column", ["prompts", "completions", "trainer_state", "log_metric", "log_extra"])
def test_a_column_with_the_name_of_another_argument_is_refused_at_the_start(column: str, make_trainer: Any) -> None:
    rows = [{"input_ids": [3, 4], column: "a"}] * 8
    with pytest.raises(ValueError, match=f"train_dataset has the column '{column}', but reward functions get another"):
        make_trainer(train_dataset=rows)
