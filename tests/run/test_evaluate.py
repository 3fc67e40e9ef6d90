"""Evaluation: every row once, the same numbers each time, and training continues as if nothing had happened."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset

from rlhf_ppo import PPOTrainer
from rlhf_ppo.reporting.metrics import EVALUATED
from tests.conftest import prompt_rows, tiny_policy, write_rows
from tests.run.test_resume import noise
from tests.runs import QUICK, MakeTrainer, RecordingTrainer, SeenPrompts, assert_identical, end_of_run, history

FIVE_ROWS = Dataset.from_list([{**row, "number": index} for index, row in enumerate(prompt_rows(5, seed=1))])
SPEED = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}


def numbers(number: list[int], **columns: Any) -> list[float]:
    """Reward: the row's number."""
    return [float(value) for value in number]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
def test_every_row_counts_once_also_in_a_part_of_a_batch(batch_size: int, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        **QUICK, eval_dataset=FIVE_ROWS, reward_funcs=numbers, per_device_eval_batch_size=batch_size
    )
    metrics = trainer.evaluate()
    assert metrics["eval_score"] == pytest.approx(2.0)  # the mean of 0 to 4
    assert metrics["eval_rewards/numbers/std"] == pytest.approx(2.5**0.5)
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
    assert output.num_samples == 5
    assert trainer.args.dataloader_drop_last is True  # training still leaves out a part of a batch


def test_each_data_set_of_a_call_has_its_own_rows_also_with_persistent_workers(make_trainer: MakeTrainer) -> None:
    """Trainer keeps one loader for all data sets that calls pass; of the audit's five prompts each counts once."""
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = make_trainer(**QUICK, eval_dataset=FIVE_ROWS, reward_funcs=numbers, value_model=None, **workers)
    sets = {"first": FIVE_ROWS.select([0, 1]), "second": FIVE_ROWS.select([2, 3, 4])}
    assert trainer.evaluate()["eval_score"] == pytest.approx(2.0)
    metrics = trainer.evaluate(sets)
    assert (metrics["eval_first_score"], metrics["eval_second_score"]) == pytest.approx((0.5, 3.0))
    assert trainer.audit_critic(sets, num_prefixes=2, num_continuations=4).num_prompts == 5


def test_held_out_prompts_of_a_call_may_be_a_file(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """As those of the constructor may, of which a dict has names too."""
    path = str(tmp_path / "test.jsonl")
    write_rows(path, FIVE_ROWS.select([2, 3, 4]))
    own = {"own": FIVE_ROWS}
    trainer = make_trainer(**QUICK, eval_dataset=own, reward_funcs=numbers, value_model=None)
    assert trainer.evaluate(path)["eval_score"] == trainer.predict(path).metrics["test_score"] == pytest.approx(3.0)
    assert trainer.evaluate({"file": path})["eval_file_score"] == pytest.approx(3.0)
    assert trainer.evaluate("own")["eval_score"] == pytest.approx(2.0)
    assert trainer.audit_critic(path, num_prefixes=2, num_continuations=4).num_prompts == 3
    with pytest.raises(ValueError, match="eval_dataset='other' cannot be loaded as a file"):
        trainer.evaluate("other")


def test_each_prompt_is_prepared_once(make_trainer: MakeTrainer) -> None:
    """A second time the pad token at its end, which the mask marks as text, would be left out."""
    rows = [{"input_ids": [4, 5, 0], "attention_mask": [1, 1, 1]}] * 2
    trainer = make_trainer(SeenPrompts, **QUICK, train_dataset=rows, eval_dataset={"own": rows})
    trainer.evaluate()
    trainer.evaluate({"given": rows, "own": trainer.eval_dataset["own"]})
    trainer.evaluate(trainer.eval_dataset)
    trainer.evaluate(trainer.train_dataset)
    trainer.predict(trainer.eval_dataset["own"])
    assert {tuple(ids) for batch in trainer.seen for ids in batch} == {(4, 5, 0)}


def by_token(completion_ids: list[list[int]], **columns: Any) -> list[list[float]]:
    """Reward: something for each token."""
    return [[token % 5 / 10 for token in ids] for ids in completion_ids]


def odd(number: list[int], log_metric: Any, **columns: Any) -> list[float | None]:
    """Reward: none for the third row."""
    log_metric("mean_number", sum(number) / len(number))
    return [None if value == 2 else float(value) for value in number]


ALIKE = {f"eval_{name}": key for key, name in EVALUATED.items()} | {
    f"eval_{key}": key
    for key in ("mean_number", *(f"rewards/{name}/{kind}" for name in ("by_token", "odd") for kind in ("mean", "std")))
}
"""Each figure of an evaluation, and the figure of training that it must equal on the same responses."""


class OneRollout(PPOTrainer):
    """Uses the first rollout of five rows, in which two responses ended, again and again, a batch after the other."""

    first, start = cast(Any, None), 0

    def collect_rollout(self, *args: Any, **kwargs: Any) -> Any:
        rollout = super().collect_rollout(*args, **kwargs)
        if self.first is None:
            self.first = dataclasses.replace(rollout, ended=torch.tensor([True, False, False, True, False]))
            return self.first
        self.start += len(rollout)
        rows = slice(self.start - len(rollout), self.start)
        by_source = {name: values[rows] for name, values in self.first.scores_by_source.items()}
        tensors = {name: values[rows] for name, values in vars(self.first).items() if isinstance(values, torch.Tensor)}
        responses = self.first.responses[rows]
        return dataclasses.replace(self.first, responses=responses, scores_by_source=by_source, **tensors)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kl_estimator": "k3", "temperature": 0.7},
        {"score_clip": 1.5, "missing_eos_penalty": 2.0, "reward_weights": [2.0, 0.5]},
        {"score_scaling": True, "missing_eos_penalty": 1.0},
    ],
)
def test_every_figure_equals_trainings_on_the_same_responses(
    settings: dict[str, Any], make_trained: MakeTrainer
) -> None:
    trainer = make_trained(
        OneRollout,
        **{**QUICK, "per_device_train_batch_size": 5, "total_episodes": 5, "per_device_eval_batch_size": 2},
        train_dataset=FIVE_ROWS,
        eval_dataset=FIVE_ROWS,
        ref_model=tiny_policy(seed=9),
        reward_funcs=[by_token, odd],
        **settings,
    )
    training = next(log for log in trainer.state.log_history if "objective/scores" in log)
    metrics = trainer.evaluate()

    assert metrics.keys() == ALIKE.keys() | SPEED | {"epoch"}
    assert training["objective/kl"] != 0 and training["rewards/by_token/std"] > 0
    unit = trainer.score_moments if "score_scaling" in settings else None
    if unit is not None:  # training's scores are in standard deviations, an evaluation's in the reward's unit
        assert unit.std != pytest.approx(1.0, abs=0.1)
        training = training | {"objective/scores": unit.std * training["objective/scores"]}
    for evaluated, key in ALIKE.items():
        assert metrics[evaluated] == pytest.approx(training[key], rel=1e-5), (evaluated, key)


def test_training_does_not_notice_evaluations_and_sample_tables(make_trained: MakeTrainer) -> None:
    def run(**overrides: Any) -> RecordingTrainer:
        settings = {**QUICK, "total_episodes": 8, "reward_funcs": noise, **overrides}
        trainer = make_trained(RecordingTrainer, **settings)
        return cast(RecordingTrainer, trainer)

    plain = run(eval_dataset=FIVE_ROWS)
    watched = run(
        eval_dataset=FIVE_ROWS, eval_strategy="steps", eval_steps=1, eval_on_start=True, num_sample_generations=4
    )
    assert sorted(watched.tables) == [0, 1, 2, 4] and not plain.tables
    end = end_of_run(watched)
    evaluations = [entry for entry in end["history"] if "eval_score" in entry]
    assert len(evaluations) == 5
    end["history"] = [entry for entry in end["history"] if "eval_score" not in entry]
    assert_identical(end, end_of_run(plain))


def test_evaluation_does_not_leak_into_the_training_log(make_trained: MakeTrainer) -> None:
    def logging(log_metric: Any, completions: list[str], **columns: Any) -> list[float]:
        log_metric("rows", len(completions))
        return [0.0] * len(completions)

    trainer = make_trained(
        **QUICK, eval_dataset=FIVE_ROWS, reward_funcs=logging, eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=5, num_sample_generations=3,
    )  # fmt: skip
    assert [entry["rows"] for entry in history(trainer) if "rows" in entry] == [2.0] * 3
    assert [entry["eval_rows"] for entry in history(trainer) if "eval_rows" in entry] == [5.0] * 3
    assert all("time/generate" not in entry for entry in trainer.state.log_history if "eval_score" in entry)


def test_what_reward_functions_log_replaces_no_figure_of_the_run(make_trained: MakeTrainer) -> None:
    """Not the score that chooses the best checkpoint, nor the KL that the coefficient follows."""

    def scored(log: dict[str, float]) -> PPOTrainer:
        def constant(log_metric: Any, completions: list[str], **columns: Any) -> list[float]:
            for name, value in log.items():
                log_metric(name, value)
            return [-9.5] * len(completions)

        return make_trained(
            **QUICK, reward_funcs=constant, eval_dataset=FIVE_ROWS, eval_strategy="steps", eval_steps=1, kl_target=1.0
        )

    taken = {"objective/kl": 1e9, "loss/value_avg": 5.0, "loss": 6.0, "score": 777.0}
    trainer, plain = scored(taken), scored({})
    for log, expected in zip(history(trainer), history(plain), strict=True):
        assert {key: log[key] for key in expected} == expected
    training, evaluation = trainer.state.log_history[:2]
    assert [training[f"{key} logged"] for key in [*taken][:3]] == [1e9, 5.0, 6.0]
    assert evaluation["eval_score logged"] == 777.0
