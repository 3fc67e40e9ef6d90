"""Caches kept between turns: each token is drawn from the distribution of the training forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from rlhf_ppo import PPOTrainer
from rlhf_ppo.generation.transformers_engine import FiniteLogitsCheck
from tests.agents.chat import ppo_config
from tests.agents.games import LONGEST, WORDS, Talk, player, sharp, tokenizer_of_words
from tests.runs import record_rollouts


def windowed() -> MistralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "num_key_value_heads": 1}
    config = MistralConfig(vocab_size=len(WORDS), max_position_embeddings=512, sliding_window=9, **sizes, **ends)
    return MistralForCausalLM(config)


def played(directory: Path, model: Any, kind: str) -> tuple[Any, dict[tuple[int, ...], torch.Tensor]]:
    """Make one rollout; return it and the logits of each context that was sampled from."""
    rows = [{"prompt": "a b", "seed": row, "kind": kind, "moves": 3 + row % 4} for row in range(16)]
    trainer = PPOTrainer(
        ppo_config(directory, response_length=200, per_device_train_batch_size=16, num_generations=1),
        tokenizer_of_words(),
        model,
        train_dataset=rows,
        reward_funcs="length",
        environment_factory=Talk,
    )
    seen, check = {}, FiniteLogitsCheck.__call__

    def noting(self: Any, input_ids: Any, scores: Any) -> Any:
        for ids, logits in zip(input_ids.tolist(), scores, strict=True):
            while ids[0] == 0:  # the padding
                ids.pop(0)
            seen[tuple(ids)] = logits.float().log_softmax(-1)
        return check(self, input_ids, scores)

    rollouts = record_rollouts(trainer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FiniteLogitsCheck, "__call__", noting)
        trainer.train()
    return rollouts[0], seen


@pytest.mark.parametrize("kind", LONGEST)
@pytest.mark.parametrize("make", [player, windowed])
def test_every_turn_is_drawn_from_the_distribution_of_the_training_forward(
    tmp_path: Path, make: Any, kind: str
) -> None:
    rollout, seen = played(tmp_path, sharp(make()), kind)
    checked = 0
    for row, behind in enumerate(rollout.responses.episode_mask):
        ids = rollout.responses.query_responses[row][rollout.responses.attention_mask[row]].tolist()
        written, logprobs = rollout.response_mask[row][behind].tolist(), rollout.logprobs[row][behind].tolist()
        start = len(ids) - len(written)
        for place, (of_policy, logprob) in enumerate(zip(written, logprobs, strict=True), start):
            if of_policy:
                assert float(seen[tuple(ids[:place])][ids[place]]) == pytest.approx(logprob, abs=1e-5)
                checked += 1
    assert checked > 200
