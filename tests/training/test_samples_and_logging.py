"""What a run shows: sample tables when they are due, and every documented metric in the log and in the trackers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.processes.signals import RunStopped
from rlhf_ppo.reporting.health import CHECKS
from tests.conftest import count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK, RecordingTrainer, assert_identical, end_of_run, history, record_rollouts

MakeTrainer = Callable[..., PPOTrainer]
PROMPTS = Dataset.from_list(prompt_rows(5, seed=1))

# The documented keys of predecessor and successor, for one reward function called count_w4.
METRICS = {
    "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward", "objective/scores",
    "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg", "loss/value_avg",
    "val/clipfrac_avg", "val/ratio", "val/ratio_var", "val/num_eos_tokens", "lr", "episode", "eps",
    "val/explained_variance", "val/first_logratio", "response/unique_frac",
    "val/values_mean", "val/values_min", "val/values_max", "val/returns_mean",
    "response/length_mean", "response/length_min", "response/length_max",
    "response/ended_frac", "rewards/count_w4/mean", "rewards/count_w4/std", "grad_norm", "loss",
    "policy/grad_norm", "val/grad_norm", "learning_rate",
    "epoch", "time/generate", "time/score", "time/evaluate", "time/learn", "time/tokens_per_second",
}  # fmt: skip


def measured(entry: dict[str, Any]) -> set[str]:
    """The keys of a log entry, without those of the health checks, which are 0 or 1."""
    checks = {check.key for check in CHECKS if check.reads == "updates"}
    assert {entry[name] for name in checks & entry.keys()} <= {0, 1}
    return entry.keys() - checks


# ---- The log ----


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


@pytest.mark.parametrize(
    ("settings", "logged"),
    [
        ({"logging_steps": 10}, [1, 5]),
        ({"logging_steps": 2}, [1, 2, 4, 5]),
        ({"logging_steps": 10, "total_episodes": 2}, [1]),
        ({"logging_steps": 10, "max_steps": 4, "total_episodes": None}, [1, 4]),
        ({"logging_steps": 10, "callbacks": [StopAfter(3)]}, [1, 3]),
        ({"logging_steps": 3, "callbacks": [StopAfter(3)]}, [1, 3]),
        ({"logging_strategy": "epoch"}, [1, 5]),
        ({"logging_strategy": "no"}, []),
        ({"logging_strategy": "no", "callbacks": [StopAfter(3)]}, []),
    ],
)
def test_the_first_and_the_last_update_of_any_run_are_logged(
    settings: dict[str, Any], logged: list[int], make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(**{**QUICK, "total_episodes": 10, **settings})
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == logged
    assert all(measured(entry) == METRICS | {"step"} for entry in logs)


def test_sigterm_ends_in_a_log_that_the_resumed_run_does_not_repeat(make_trainer: MakeTrainer) -> None:
    """The stopped run logs its last update; the checkpoint is that of a run that goes on."""

    def run(*callbacks: TrainerCallback, **settings: Any) -> PPOTrainer:
        given = {**QUICK, "total_episodes": 12, "logging_steps": 4, "callbacks": list(callbacks), **settings}
        return make_trainer(**given)

    class Sigterm(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    whole, stopped = run(), run(Sigterm(), save_strategy="steps", save_steps=50)
    whole.train()
    with pytest.raises(RunStopped, match="143"):
        stopped.train()
    assert [entry["step"] for entry in stopped.state.log_history if "loss" in entry] == [1, 3]
    resumed = run(save_strategy="steps", save_steps=50)
    resumed.train(resume_from_checkpoint=True)
    assert resumed._initial_global_step == 3
    assert_identical(history(resumed), history(whole))


def test_what_reward_functions_log_is_averaged_over_calls(make_trainer: MakeTrainer) -> None:
    def logging(log_metric: Any, trainer_state: Any, completions: list[str], **columns: Any) -> list[float]:
        log_metric("reward/first", 10.0 * trainer_state.global_step)
        log_metric("reward/first", 10.0 * trainer_state.global_step + 4)
        return [0.0] * len(completions)

    trainer = make_trainer(**QUICK, reward_funcs=logging, logging_steps=3)
    trainer.train()
    logged = [entry["reward/first"] for entry in trainer.state.log_history if "reward/first" in entry]
    assert logged == pytest.approx([2.0, 17.0])  # the first update, and the mean of 12 and 22


def test_what_a_reward_function_logs_once_is_logged_once(make_trainer: MakeTrainer) -> None:
    def logging(log_metric: Any, trainer_state: Any, completions: list[str], **columns: Any) -> list[float]:
        if trainer_state.global_step == 0:
            log_metric("only_first", 1.0)
        return [0.0] * len(completions)

    trainer = make_trainer(**QUICK, reward_funcs=logging)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "only_first" in entry] == [1]


# ---- Sample tables ----


def tables_of(make_trainer: MakeTrainer, **overrides: Any) -> list[int]:
    trainer = cast(RecordingTrainer, make_trainer(RecordingTrainer, **{**QUICK, **overrides}))
    trainer.train()
    return sorted(trainer.tables)


@pytest.mark.parametrize(
    ("num_samples", "updates", "due"),
    [(0, 4, []), (1, 4, [4]), (2, 4, [1, 4]), (4, 4, [1, 2, 3, 4]), (10, 4, [1, 2, 3, 4]), (3, 6, [1, 3, 6])],
)
def test_tables_are_spread_over_the_run(
    num_samples: int, updates: int, due: list[int], make_trainer: MakeTrainer
) -> None:
    run = {"eval_dataset": PROMPTS, "total_episodes": 2 * updates, "num_sample_generations": num_samples}
    assert tables_of(make_trainer, **run) == due


def stream() -> IterableDataset:
    return Dataset.from_list(prompt_rows(8)).to_iterable_dataset().shuffle(seed=1, buffer_size=4)


def test_without_an_evaluation_set_the_first_training_prompts_are_answered(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(RecordingTrainer, **{**QUICK, "num_sample_generations": 2, "per_device_eval_batch_size": 3})
    first = [row["input_ids"] for row in cast(Any, trainer.train_dataset).select(range(3))]
    table = cast(Any, trainer.generate_completions())
    assert list(table["query"]) == make_tokenizer().batch_decode(first, skip_special_tokens=True)
    trainer.train()
    assert sorted(cast(RecordingTrainer, trainer).tables) == [0, 1, 3]
    printed = capsys.readouterr().out
    assert "After update 3: training prompts" in printed and "held-out" not in printed
    assert "num_sample_generations" not in caplog.text  # it changes something
    saved = Path(trainer.args.output_dir, "_samples")
    assert sorted(file.name for file in saved.iterdir()) == [f"update-0000{step}.csv" for step in (0, 1, 3)]
    assert list(pd.read_csv(saved / "update-00003.csv")["query"]) == list(table["query"])


def test_the_title_says_that_prompts_were_held_out(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(**QUICK, eval_dataset=PROMPTS).generate_completions()
    assert "After update 0: held-out prompts" in capsys.readouterr().out


def test_a_stream_s_latest_prompts_are_answered(make_trainer: MakeTrainer) -> None:
    settings = {**QUICK, "train_dataset": stream(), "total_episodes": 8, "num_sample_generations": 4}
    trainer = cast(RecordingTrainer, make_trainer(RecordingTrainer, **settings))
    assert trainer.generate_completions() is None
    rollouts = record_rollouts(trainer)
    trainer.train()
    tokenizer = make_tokenizer()
    for step, rollout in enumerate(rollouts, start=1):
        length = rollout.query_responses.shape[1] - rollout.response_mask.shape[1]
        prompts = zip(rollout.query_responses[:, :length], rollout.attention_mask[:, :length], strict=True)
        texts = [tokenizer.decode(ids[real], skip_special_tokens=True) for ids, real in prompts]
        assert list(trainer.tables[step]["query"]) == texts


@pytest.mark.parametrize("train_dataset", [None, stream], ids=["rows", "stream"])
def test_tables_of_training_prompts_change_nothing_in_the_run(train_dataset: Any, make_trainer: MakeTrainer) -> None:
    data = {} if train_dataset is None else {"train_dataset": train_dataset()}
    ends = []
    for number in (0, 10):
        settings = {**QUICK, **data, "total_episodes": 12, "num_sample_generations": number, "reward_funcs": draws}
        trainer = make_trainer(**settings)
        trainer.train()
        ends.append(end_of_run(trainer))
    assert_identical(*ends)


def draws(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward that takes a random number of training's."""
    return [ids.count(7) + float(torch.rand(())) for ids in completion_ids]


def test_a_run_says_in_one_last_line_where_its_results_are(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = {**QUICK, "save_strategy": "steps", "num_sample_generations": 1, "disable_tqdm": False}
    trainer = make_trainer(**settings)
    trainer.train()
    assert "The policy is in" not in capsys.readouterr().out  # checkpoints are none of the user's
    trainer.save_model(str(tmp_path / "policy"))
    own = trainer.args.output_dir
    said = f"its curves: `rlhf-ppo plot {own}`; its report: `rlhf-ppo report {own}`; its samples: {own}/_samples."
    assert capsys.readouterr().out.splitlines() == [f"The policy is in {tmp_path / 'policy'}; {said}"]


def test_table_shows_greedy_answers_and_their_scores(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tiny_policy()
    trainer = make_trainer(**QUICK, model=policy, eval_dataset=PROMPTS, per_device_eval_batch_size=2)
    table = cast(Any, trainer.generate_completions())
    tokenizer = make_tokenizer()
    assert list(table.columns) == ["query", "model response", "score"] and len(table) == 5
    for index, row in table.iterrows():
        prompt = PROMPTS[index]["input_ids"]
        ids = torch.tensor([prompt])
        for _ in range(4):  # greedily, one token at a time
            following = policy(ids).logits[0, -1].argmax()
            ids = torch.cat((ids, following[None, None]), dim=1)
            if following == tokenizer.eos_token_id:
                break
        answer = ids[0, len(prompt) :].tolist()
        assert row["query"] == tokenizer.decode(prompt, skip_special_tokens=True)
        assert row["model response"] == tokenizer.decode(answer)  # an EOS is seen
        assert row["score"] == pytest.approx(answer.count(7) / len(answer))
    printed = capsys.readouterr().out
    assert table["query"][0].split()[0] in printed
    assert_identical(trainer.generate_completions(), table)


def test_sampling_stops_after_a_batch(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**QUICK, eval_dataset=PROMPTS, per_device_eval_batch_size=2)
    assert len(cast(Any, trainer.generate_completions(sampling=True))) == 2
    assert_identical(trainer.generate_completions(sampling=True), cast(Any, trainer.generate_completions()).head(2))


def test_several_rewards_have_a_column_each(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        **QUICK, eval_dataset=PROMPTS, reward_model=tiny_scorer(), reward_funcs=count_w4, reward_weights=[1.0, 3.0]
    )
    table = cast(Any, trainer.generate_completions())
    assert list(table.columns) == ["query", "model response", "score", "reward_model", "count_w4"]
    assert torch.allclose(
        torch.tensor(table["score"]), torch.tensor(table["reward_model"] + 3 * table["count_w4"]), atol=1e-5
    )


def test_a_logged_column_replaces_none_of_the_table(make_trainer: MakeTrainer) -> None:
    def graded(completion_ids: list[list[int]], log_extra: Any, **columns: Any) -> list[float]:
        for name in ("score", "messages", "note"):
            log_extra(name, ["good"] * len(completion_ids))
        return [1.0] * len(completion_ids)

    table = cast(Any, make_trainer(**QUICK, eval_dataset=PROMPTS, reward_funcs=graded).generate_completions())
    own, logged = ["query", "model response", "score"], ["score logged", "messages logged", "note"]
    assert list(table.columns) == own + logged and set(table["score"]) == {1.0}


def test_the_missing_eos_penalty_is_no_part_of_a_sample_s_score(make_trainer: MakeTrainer) -> None:
    plain, penalized = (
        make_trainer(**QUICK, eval_dataset=PROMPTS, missing_eos_penalty=penalty).generate_completions()
        for penalty in (None, 5.0)
    )
    assert_identical(plain, penalized)
