"""What ends no turn, what gaps cannot change, and what is refused at construction: the edges of an episode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.environments.tools import text_environment
from rlhf_ppo.training import episodes
from tests.agents.box import Box
from tests.agents.chat import ScriptedEngine, chat_model, chat_tokenizer, ppo_config, turn_text
from tests.agents.test_kept_caches import Talk, sharp
from tests.agents.test_resume import player, tokenizer_of_words

ASKED = [{"role": "user", "content": "Q"}]


def made(folder: Path, turns: list[str], tokenizer: Any = None, **options: Any) -> PPOTrainer:
    tokenizer = tokenizer or chat_tokenizer()
    return PPOTrainer(
        ppo_config(folder, **options), tokenizer, chat_model(tokenizer), train_dataset=[{"prompt": ASKED}] * 2,
        environment_factory=Box, engine=ScriptedEngine(tokenizer, turns),
    )  # fmt: skip


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
            ppo_config(tmp_path, **options), tokenizer_of_words(), sharp(player()), train_dataset=rows,
            reward_funcs="length", environment_factory=text_environment(Talk),
        )  # fmt: skip
        trainer.noise = noise
        trainer.train()
        logs = [log for log in trainer.state.log_history if "objective/kl" in log]
        assert [log["val/first_logratio"] for log in logs] == [0.0, 0.0]
        return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}

    quiet, noisy = trained(0.0), trained(7.0)
    assert all(torch.equal(noisy[name], value) for name, value in quiet.items())


def test_a_template_whose_calls_nobody_can_parse_is_an_error(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template += "{# another one #}"
    with pytest.raises(
        ValueError, match=r"a way to parse calls.* is not known: set processing_class.response_template"
    ):
        made(tmp_path, [], tokenizer)


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({"tool_timeout": 60.0, "max_tool_calling_iterations": 29, "ddp_timeout": 1800}, ""),
        ({"tool_timeout": 60.0, "max_tool_calling_iterations": 30, "ddp_timeout": 1800}, "60 seconds, in 30 rounds"),
        ({"tool_timeout": None, "ddp_timeout": 1800}, "None, any time"),
    ],
)
def test_tools_may_not_take_longer_than_other_processes_wait(
    options: dict[str, Any], waits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, [], **options)  # a single process waits for nobody
    monkeypatch.setattr(episodes, "num_processes", lambda args: 2)
    if not waits:
        made(tmp_path, [], **options)
        return
    with pytest.raises(
        ValueError, match=rf"tool_timeout={waits}.*ddp_timeout=1800 .*: lower tool_timeout or max_tool"
    ):
        made(tmp_path, [], **options)
