"""A signal in each phase of an episode: the resumed run is bit for bit the undisturbed one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.environments.tools import text_environment
from rlhf_ppo.generation.protocol import Sampled
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from rlhf_ppo.processes.signals import RunStopped
from tests.agents.chat import ppo_config
from tests.agents.games import Game, reached
from tests.runs import assert_identical, history, parameters

WORDS = ["<pad>", "</s>", "a", "b", "c", "d", *map(str, range(10))]


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")


def player() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=512, **sizes, **ends))


class Engine:
    """transformers' `generate`, which a signal may end."""

    reads_sharded = False
    called = "the test's engine"

    def sample(self, policy: Any, prompts: Any, config: Any) -> Sampled:
        reached("generate")
        return TransformersEngine(8).sample(policy, prompts, config)

    def policy_changed(self) -> None: ...


class Learning(TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        reached("learn")


def reward(completions: Any, **kwargs: Any) -> list[float]:
    reached("reward")
    return [len(text) / 50 for text in completions]


OPTIONS = {
    **{"max_steps": 3, "per_device_train_batch_size": 8, "num_generations": 1, "response_length": 24},
    **{"num_ppo_epochs": 2, "num_mini_batches": 2, "learning_rate": 0.01, "gae_level": "turn"},
    **{"save_strategy": "steps", "save_steps": 1},
}


def trainer(directory: Path, resume: bool = False) -> Any:
    return PPOTrainer(
        ppo_config(directory, **OPTIONS, resume_from_checkpoint=resume, overwrite_output_dir=not resume),
        tokenizer_of_words(),
        player(),
        reward_funcs=[reward],
        callbacks=[Learning()],
        environment_factory=text_environment(Game),
        engine=Engine(),
    )


def outcome(trained: Any) -> dict[str, Any]:
    log = [{key: value for key, value in entry.items() if "latency" not in key} for entry in history(trained)]
    return {"weights": parameters(trained), "log": log}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    trained = trainer(tmp_path_factory.mktemp("undisturbed"))
    trained.train()
    return outcome(trained)


@pytest.mark.parametrize(("phase", "at"), [("generate", 6), ("tool", 30), ("reset", 12), ("reward", 2), ("learn", 6)])
def test_a_signal_gives_the_rollout_up_and_the_resumed_run_is_the_undisturbed_one(
    tmp_path: Path, undisturbed: dict[str, Any], phase: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = tmp_path / "count"
    monkeypatch.setenv("KILL", f"{phase} {at} {int(signal.SIGTERM)} {os.getpid()} {count}")
    start = time.monotonic()
    with pytest.raises(RunStopped):
        trainer(tmp_path / "run").train()
    assert count.stat().st_size >= at and time.monotonic() - start < 15

    monkeypatch.delenv("KILL")
    resumed = trainer(tmp_path / "run", resume=True)
    resumed.train()
    assert_identical(outcome(resumed), undisturbed)


def test_episodes_have_gaps_and_ratio_one(undisturbed: dict[str, Any]) -> None:
    logs = [log for log in undisturbed["log"] if "episode/turns_mean" in log]

    assert len(logs) == 3 and all(log["val/first_logratio"] == 0 for log in logs)
    assert max(log["episode/turns_mean"] for log in logs) > 1.2 and logs[0]["environment/tokens_mean"] > 0
