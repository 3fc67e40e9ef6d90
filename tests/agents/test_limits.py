"""What ends a turn, and what gaps cannot change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.rollout import Rollout
from tests.agents.box import Box
from tests.agents.chat import ScriptedEngine, chat_model, chat_tokenizer, ppo_config, turn_text
from tests.agents.games import Talk, player, sharp, tokenizer_of_words

ASKED = [{"role": "user", "content": "Q"}]


def made(folder: Path, turns: list[str], tokenizer: Any = None, **options: Any) -> PPOTrainer:
    tokenizer = tokenizer or chat_tokenizer()
    return PPOTrainer(
        ppo_config(folder, **options),
        tokenizer,
        chat_model(tokenizer),
        train_dataset=[{"prompt": ASKED}] * 2,
        environment_factory=Box,
        engine=ScriptedEngine(tokenizer, turns),
    )


def test_a_stop_string_ends_a_turn_of_the_policy_and_none_in_an_answer(tmp_path: Path) -> None:
    """The answer `got 2.0` holds the stop string; the policy writes it in its second turn, which ends there."""
    call = turn_text(chat_tokenizer(), "qwen3", ("add", {"x": 2.0}))
    trainer = made(tmp_path, [call, "I got 2.0 and more<|im_end|>"], stop_strings=["got 2.0"])
    seen: list[Any] = []
    estimate = trainer.estimate_advantages

    def keeping(rollout: Rollout) -> Any:
        seen.append(rollout)
        return estimate(rollout)

    trainer.estimate_advantages = keeping  # type: ignore[method-assign]
    trainer.train()

    [rollout] = seen
    text = trainer.processing_class.decode(rollout.responses[0][rollout.episode_mask[0]])
    assert text.startswith(call) and "got 2.0\n</tool_response>" in text and text.endswith("I got 2.0")
    assert rollout.ended.all()


class Noisy(PPOTrainer):
    """Writes noise wherever the policy wrote nothing."""

    noise = 0.0

    def estimate_advantages(self, rollout: Rollout) -> Any:
        gaps = ~rollout.response_mask
        assert (gaps & rollout.episode_mask).any()
        for values in (rollout.logprobs, rollout.ref_logprobs, rollout.values, rollout.token_scores):
            assert values is not None
            values[gaps] += self.noise
        return super().estimate_advantages(rollout)


@pytest.mark.parametrize("level", ["token", "turn"])
def test_what_stands_in_gaps_changes_nothing(tmp_path: Path, level: str) -> None:
    def trained(noise: float) -> dict[str, torch.Tensor]:
        options = {
            **{"response_length": 80, "per_device_train_batch_size": 8, "num_generations": 1, "max_steps": 2},
            **{"gae_level": level, "bootstrap_truncated": True, "learning_rate": 0.01, "entropy_coef": 0.1},
        }
        rows = [{"prompt": "a b", "seed": row, "kind": "wild", "moves": 2 + row % 3} for row in range(16)]
        trainer = Noisy(
            ppo_config(tmp_path, **options),
            tokenizer_of_words(),
            sharp(player()),
            train_dataset=rows,
            reward_funcs="length",
            environment_factory=Talk,
        )
        trainer.noise = noise
        trainer.train()
        logs = [log for log in trainer.state.log_history if "objective/kl" in log]
        assert [log["val/first_logratio"] for log in logs] == [0.0, 0.0]
        return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}

    quiet, noisy = trained(0.0), trained(7.0)
    assert all(torch.equal(noisy[name], value) for name, value in quiet.items())
