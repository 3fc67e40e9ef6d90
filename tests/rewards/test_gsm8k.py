"""PPO on GSM8K's problems with the correctness reward, by a policy that knows numbers and nothing else."""

import collections
import json
import re
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaForCausalLM

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.compat.environments import make_environment
from tests.conftest import QUIET, tiny_config, tiny_scorer
from tests.runs import record_rollouts

NUM_ROWS, NUM_ANSWERS = 64, 4


@pytest.fixture(scope="module")
def problems(shared_data: Any) -> list[dict[str, str]]:
    """The first problems whose answer is one of the commonest, so that a guess is right one time in four."""
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    commonest = [answer for answer, _ in collections.Counter(map(last_number, rows)).most_common(NUM_ANSWERS)]
    return [row for row in rows if last_number(row) in commonest][:NUM_ROWS]


def last_number(row: dict[str, str]) -> int:
    """What GSM8K's own script compares: the number behind `####`."""
    found = re.search(r"#### (-?[0-9.,]+)", row["answer"])
    assert found is not None
    return int(found[1].replace(",", ""))


def guessing_policy(token_ids: list[int]) -> LlamaForCausalLM:
    """A policy over GPT-2's tokens that says one of `token_ids`, each as likely as the other, whatever it is asked."""
    torch.manual_seed(0)
    policy = LlamaForCausalLM(tiny_config(vocab_size=50258, hidden_size=16, max_position_embeddings=512))
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "o_proj" in name or "down_proj" in name or "lm_head" in name:
                weight.zero_()
        policy.model.embed_tokens.weight[:, 0] = 3.0  # what the normalised state has in common for all tokens
        policy.lm_head.weight[token_ids, 0] = 20.0
    return policy


def test_the_reward_is_one_exactly_where_the_answer_is_right(
    problems: list[dict[str, str]], shared_data: Any, tmp_path: Any
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizer_gpt2")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    answers = sorted({last_number(row) for row in problems})
    assert len(answers) == NUM_ANSWERS
    ids = [tokenizer(f" {answer}")["input_ids"] for answer in answers]
    assert all(len(of_one) == 1 for of_one in ids)
    environment = make_environment("multi_objective", reward_weights='{"correctness": 1.0, "formatting": 0.1}')
    args = PPOConfig(
        output_dir=str(tmp_path),
        total_episodes=NUM_ROWS,
        per_device_train_batch_size=NUM_ROWS // 2,
        num_ppo_epochs=1,
        response_length=1,
        temperature=1.0,
        kl_coef=0.0,
        logging_steps=1,
        **QUIET,
        reward_weights=environment.reward_weights,
        **environment.settings,
    )
    rows = [{"prompt": f"{row['question']}\nAnswer:", "answer": row["answer"]} for row in problems]
    trainer = PPOTrainer(
        args,
        tokenizer,
        model=guessing_policy([of_one[0] for of_one in ids]),
        value_model=tiny_scorer(vocab_size=50258, hidden_size=16, max_position_embeddings=512),
        reward_funcs=environment.reward_funcs,
        train_dataset=Dataset.from_list(rows),
    )
    rollouts = record_rollouts(trainer)

    trainer.train()

    wanted = {row["prompt"]: last_number(row) for row in rows}
    expected, given = [], []
    for rollout in rollouts:
        prompts = rollout.query_responses[:, : rollout.context_length]
        real = rollout.attention_mask[:, : rollout.context_length]
        questions = [tokenizer.decode(ids[mask]) for ids, mask in zip(prompts, real, strict=True)]
        guesses = [int(tokenizer.decode(ids)) for ids in rollout.responses]
        expected += [float(wanted[question] == guess) for question, guess in zip(questions, guesses, strict=True)]
        given += rollout.scores_by_source["correctness"].tolist()
    assert len(given) == NUM_ROWS and given == expected
    assert 4 <= sum(given) <= 32, "a guess of four is right about one time in four"
    logged = [entry for entry in trainer.state.log_history if "objective/scores" in entry]
    assert [entry["objective/scores"] for entry in logged] == pytest.approx(
        [sum(given[:32]) / 32, sum(given[32:]) / 32]
    )
