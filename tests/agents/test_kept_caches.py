"""Caches kept between turns: each token is read once, and drawn from the distribution of the training forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from rlhf_ppo import PPOTrainer
from rlhf_ppo.generation.sampling import FiniteLogitsCheck
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from rlhf_ppo.models.unwrapping import transformers_model
from tests.agents.chat import ppo_config
from tests.agents.games import LONGEST, WORDS, Talk, player, sharp, tokenizer_of_words
from tests.runs import record_rollouts


def windowed() -> MistralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "num_key_value_heads": 1}
    config = MistralConfig(vocab_size=len(WORDS), max_position_embeddings=512, sliding_window=9, **sizes, **ends)
    return MistralForCausalLM(config)


def played(
    directory: Path, model: Any, kind: str, engine: Any = None, **options: Any
) -> tuple[Any, dict[tuple[int, ...], torch.Tensor], int]:
    """Make one rollout; return it, the logits of each context that was sampled from, and the tokens that were read."""
    rows = [{"prompt": "a b", "seed": row, "kind": kind, "moves": 3 + row % 4} for row in range(16)]
    usual = {"response_length": 200, "per_device_train_batch_size": 16, "num_generations": 1, **options}
    trainer = PPOTrainer(
        ppo_config(directory, **usual),
        tokenizer_of_words(),
        model,
        train_dataset=rows,
        engine=engine,
        reward_funcs="length",
        environment_factory=Talk,
    )
    read, seen, check = [0], {}, FiniteLogitsCheck.__call__

    def noting(self: Any, input_ids: Any, scores: Any) -> Any:
        for ids, logits in zip(input_ids.tolist(), scores, strict=True):
            while ids[0] == 0:  # the padding
                ids.pop(0)
            seen[tuple(ids)] = logits.float().log_softmax(-1)
        return check(self, input_ids, scores)

    def counting(module: Any, args: Any, kwargs: Any) -> None:
        read[0] += kwargs["input_ids"].numel()

    rollouts = record_rollouts(trainer)
    play = trainer._play
    assert play is not None

    def watched(policy: Any, *given: Any) -> Any:
        hook = transformers_model(policy).register_forward_pre_hook(counting, with_kwargs=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FiniteLogitsCheck, "__call__", noting)
            result = play(policy, *given)
        hook.remove()
        return result

    trainer._play = watched
    trainer.train()
    return rollouts[0], seen, read[0]


@pytest.mark.parametrize("kind", LONGEST)
@pytest.mark.parametrize("make", [player, windowed])
def test_every_turn_is_drawn_from_the_distribution_of_the_training_forward(
    tmp_path: Path, make: Any, kind: str
) -> None:
    rollout, seen, _ = played(tmp_path, sharp(make()), kind)
    checked = 0
    for row in range(len(rollout.query_responses)):
        ids = rollout.query_responses[row][rollout.attention_mask[row]].tolist()
        behind = rollout.attention_mask[row, -rollout.response_mask.shape[1] :]
        written, logprobs = rollout.response_mask[row][behind].tolist(), rollout.logprobs[row][behind].tolist()
        start = len(ids) - len(written)
        for place, (of_policy, logprob) in enumerate(zip(written, logprobs, strict=True), start):
            if of_policy:
                assert float(seen[tuple(ids[:place])][ids[place]]) == pytest.approx(logprob, abs=1e-5)
                checked += 1
    assert checked > 200


class ReadsAgain(TransformersEngine):
    """The same engine, which keeps nothing."""

    def continuing(self) -> TransformersEngine:
        return self


def test_each_token_of_a_game_is_read_once(tmp_path: Path) -> None:
    options = {"response_length": 300}
    rollout, _, read = played(tmp_path / "kept", sharp(player()), "board", **options)
    again, _, read_again = played(tmp_path / "again", sharp(player()), "board", ReadsAgain(64), **options)

    assert int(again.attention_mask.sum()) > 500
    assert read / int(rollout.attention_mask.sum()) < 1.05
    assert read_again / int(again.attention_mask.sum()) > 2.5
