"""What a run shows: sample tables when they are due, and every documented metric in the log and in the trackers."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from datasets import Dataset

from rlhf_ppo import PPOTrainer
from tests.conftest import make_tokenizer, prompt_rows, tiny_policy
from tests.runs import QUICK, MakeTrainer, RecordingTrainer, assert_identical

PROMPTS = Dataset.from_list(prompt_rows(5, seed=1))

# ---- The log ----


def test_what_reward_functions_log_is_averaged_over_calls(make_trained: MakeTrainer) -> None:
    def logging(log_metric: Any, trainer_state: Any, completions: list[str], **columns: Any) -> list[float]:
        log_metric("reward/first", 10.0 * trainer_state.global_step)
        log_metric("reward/first", 10.0 * trainer_state.global_step + 4)
        return [0.0] * len(completions)

    trainer = make_trained(**QUICK, reward_funcs=logging, logging_steps=3)
    logged = [entry["reward/first"] for entry in trainer.state.log_history if "reward/first" in entry]
    assert logged == pytest.approx([2.0, 17.0])  # the first update, and the mean of 12 and 22


# ---- Sample tables ----


@pytest.mark.parametrize(("num_samples", "updates", "due"), [(0, 4, []), (1, 4, [4]), (3, 6, [0, 3, 6])])
def test_tables_are_spread_over_the_run(
    num_samples: int, updates: int, due: list[int], make_trained: MakeTrainer
) -> None:
    run = {"eval_dataset": PROMPTS, "total_episodes": 2 * updates, "num_sample_generations": num_samples}
    trainer = cast(RecordingTrainer, make_trained(RecordingTrainer, **QUICK | run))
    assert sorted(trainer.tables) == due


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


def test_an_overridden_shape_rewards_is_part_of_the_objective(make_trained: Any) -> None:
    """A price of 0.5 for each token, or twice the reward: the RLHF reward has it, in its part that is not score."""

    class Priced(PPOTrainer):
        def shape_rewards(self, rollout: Any) -> Any:
            return super().shape_rewards(rollout) - 0.5 * rollout.response_mask

    class Doubled(PPOTrainer):
        def shape_rewards(self, rollout: Any) -> Any:
            return 2 * super().shape_rewards(rollout)

    def lengths(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    plain, priced, doubled = (
        make_trained(trainer_class, **QUICK, reward_funcs=lengths).state.log_history[0]
        for trainer_class in (PPOTrainer, Priced, Doubled)
    )
    assert doubled["objective/scores"] == priced["objective/scores"] == plain["objective/scores"] != 0
    for key in ("objective/non_score_reward", "objective/rlhf_reward"):
        assert priced[key] == pytest.approx(plain[key] - 0.5 * plain["response/length_mean"])
    assert doubled["objective/rlhf_reward"] == pytest.approx(2 * plain["objective/rlhf_reward"])
