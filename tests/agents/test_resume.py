"""A signal in each phase of an episode: the resumed run is bit for bit the undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.environments.text import text_environment
from rlhf_ppo.generation.protocol import Sampled
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from rlhf_ppo.processes.signals import RunStopped
from tests.agents.chat import ppo_config
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


class Kill:
    """Sends SIGTERM once, at the n-th time that a phase is reached; a phase then lasts until the signal ends it."""

    def __init__(self) -> None:
        self.phase, self.at, self.seen = "", 0, 0

    def arm(self, phase: str, at: int) -> None:
        self.phase, self.at, self.seen = phase, at, 0

    def __call__(self, phase: str, waits: bool = True) -> None:
        if phase != self.phase:
            return
        self.seen += 1
        if self.seen == self.at:
            self.phase = ""
            os.kill(os.getpid(), signal.SIGTERM)
            if waits:
                time.sleep(20)


KILL = Kill()


class Game:
    """A game of the Gymnasium kind that depends on its seed and the moves alone."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        KILL("reset")
        self.dice, self.moves = random.Random(seed), 0
        return str(self.dice.randrange(10)), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        KILL("tool")
        self.moves += 1
        done = self.dice.random() < 0.3
        return str(self.dice.randrange(10)), float("a" in action) + self.dice.random(), done, self.moves == 4, {}


class Engine:
    """transformers' `generate`, which a signal ends in the second turn of a rollout."""

    reads_sharded = False
    called = "the test's engine"

    def __init__(self) -> None:
        self.inner, self.turn = TransformersEngine(lambda: 8), 0

    def sample(self, policy: Any, prompts: Any, config: Any) -> Sampled:
        KILL("generate", waits=False)
        return self.inner.sample(policy, prompts, config)

    def policy_changed(self) -> None: ...


class Learning(TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        KILL("learn", waits=False)


def reward(completions: Any, **kwargs: Any) -> list[float]:
    KILL("reward")
    return [len(text) / 50 for text in completions]


def trainer(directory: Path, **options: Any) -> Any:
    usual = {
        **{"max_steps": 3, "per_device_train_batch_size": 8, "num_generations": 1, "response_length": 24},
        **{
            "num_ppo_epochs": 2,
            "num_mini_batches": 2,
            "learning_rate": 0.01,
            "save_strategy": "steps",
            "save_steps": 1,
        },
        **{"gae_level": "turn", "overwrite_output_dir": not options.get("resume_from_checkpoint", False)},
    }
    return PPOTrainer(
        ppo_config(directory, **(usual | options)),
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
    tmp_path: Path, undisturbed: dict[str, Any], phase: str, at: int
) -> None:
    KILL.arm(phase, at)
    start = time.monotonic()
    with pytest.raises(RunStopped):
        trainer(tmp_path / "run").train()
    assert KILL.phase == "" and time.monotonic() - start < 15

    resumed = trainer(tmp_path / "run", resume_from_checkpoint=True)
    resumed.train()
    assert_identical(outcome(resumed), undisturbed)


def test_episodes_have_gaps_and_ratio_one(undisturbed: dict[str, Any]) -> None:
    logs = [log for log in undisturbed["log"] if "episode/turns_mean" in log]

    assert len(logs) == 3 and all(log["val/first_logratio"] == 0 for log in logs)
    assert max(log["episode/turns_mean"] for log in logs) > 1.2 and logs[0]["environment/tokens_mean"] > 0
