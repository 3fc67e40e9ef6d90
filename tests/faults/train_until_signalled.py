"""A training run for a process of its own, which comes to a moment, says so, and goes no further."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from rlhf_ppo import PPOTrainer
from rlhf_ppo.cli.main import main
from rlhf_ppo.processes import signals
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.training.saving import CheckpointWriter
from tests.conftest import count_w4, prompt_rows
from tests.faults.conftest import make_saving

FOR_LONG = 3600.0
RUN: dict[str, Any] = {
    "total_episodes": 8, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2, "num_sample_generations": 4,
    "disable_tqdm": True,
}  # fmt: skip
"""Four updates; a sample table after each, an evaluation after the second and the fourth."""

Now = Callable[[], None]
trainers: list[PPOTrainer] = []


def rewards(sleep: Callable[[], Any], is_now: Callable[[Any], bool]) -> Callable[..., list[float]]:
    def reward(trainer_state: Any, **columns: Any) -> list[float]:
        if is_now(trainer_state):
            sleep()
        return count_w4(**columns)

    return named(reward)


def named(reward: Any) -> Any:
    """Log under the name that the run's reward has when it is resumed."""
    reward.__name__ = count_w4.__name__
    return reward


class At(TrainerCallback):
    """Does something at an event of the third update."""

    def __init__(self, event: str, act: Callable[[], Any]) -> None:
        setattr(self, event, self._act)
        self.act = act

    def _act(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.act()


class SavesAt(TrainerCallback):
    """Asks for a checkpoint after an update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == self.step


def train(output_dir: str, moment: str, address: str) -> None:
    """Train until a moment of the third update, or after the second, and wait there.

    Args:
        output_dir: The run's; `ready` is written there when the moment has come.
        moment: One of `MOMENTS`.
        address: A server that never answers.
    """
    now = announced(output_dir)
    torch.set_num_threads(1)
    trainer = MOMENTS[moment](Path(output_dir), now, address)
    trainer.train()
    trainer.save_model()


def announced(output_dir: str) -> Now:
    """Write this process's errors into `<output_dir>-stderr`; return what writes `<output_dir>-ready`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it,
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and this one under nohup
    os.dup2(os.open(f"{output_dir}-stderr", os.O_WRONLY | os.O_CREAT), 2)
    return Path(f"{output_dir}-ready").touch


def run_command(output_dir: str, words: list[str]) -> None:
    """Run `rlhf-ppo` with these words, with a final save that takes long."""
    now = announced(output_dir)
    torch.set_num_threads(1)
    save = CheckpointWriter.save_model

    def slow(writer: CheckpointWriter, *args: Any) -> None:
        if not writer.run.is_saving:
            now()
            time.sleep(FOR_LONG)
        save(writer, *args)

    CheckpointWriter.save_model = slow
    main([*words, "--output_dir", output_dir])


def make(output_dir: Path, num_ppo_epochs: int = 1, **given: Any) -> PPOTrainer:
    """The run of which every moment is one."""
    given = {"eval_dataset": prompt_rows(2), **given}
    trainers.append(make_saving(output_dir, given=given, **RUN, num_ppo_epochs=num_ppo_epochs))
    return trainers[-1]


def third(state: Any) -> bool:
    return state.global_step == 2 and not trainers[-1]._run.is_evaluating


def in_generation(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    trainer = make(output_dir)
    forward = trainer.policy_model.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 2 and trainer._run.timer.running == "generate":
            now()
            time.sleep(2)
        return forward(*args, **kwargs)

    trainer.policy_model.forward = slow
    return trainer


def in_a_reward(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    return make(output_dir, reward_funcs=rewards(lambda: (now(), time.sleep(FOR_LONG)), third))


def in_the_first_update(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    def is_first(state: Any) -> bool:
        return state.global_step == 0

    return make(output_dir, reward_funcs=rewards(lambda: (now(), time.sleep(FOR_LONG)), is_first))


def in_a_reward_that_catches_errors(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    def stubborn() -> None:
        while True:
            try:
                now()
                time.sleep(FOR_LONG)
            except Exception:
                pass

    return make(output_dir, reward_funcs=rewards(stubborn, third))


def in_a_reward_with_a_time_limit(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    trainer = in_a_reward(output_dir, now, address)
    source: Any = trainer.scorer.sources["count_w4"]
    source.timeout = FOR_LONG
    return trainer


def in_an_async_reward(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    async def reward(trainer_state: Any, **columns: Any) -> list[float]:
        if third(trainer_state):
            now()
            await asyncio.to_thread(time.sleep, FOR_LONG)
        return count_w4(**columns)

    return make(output_dir, reward_funcs=named(reward))


def in_a_reward_with_a_thread(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    signals.SECONDS_FOR_THREADS = 1.0

    def join() -> None:
        thread = threading.Thread(target=time.sleep, args=[FOR_LONG])
        thread.start()
        now()
        thread.join()

    return make(output_dir, reward_funcs=rewards(join, third))


def in_a_request(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    endpoint = RewardEndpoint(address)

    async def reward(trainer_state: Any, log_extra: Any, log_metric: Any, **columns: Any) -> list[Any]:
        if third(trainer_state):
            now()
            return await endpoint(**columns)
        return count_w4(**columns)

    return make(output_dir, reward_funcs=named(reward))


def in_learning(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    return make(output_dir, callbacks=[At("on_optimizer_step", lambda: (now(), time.sleep(1)))])


def in_a_save(output_dir: Path, now: Now, address: str, step: int = 3) -> PPOTrainer:
    trainer = make(output_dir, callbacks=[SavesAt(step)])
    save = trainer._save_rng_state

    def slow(output_dir: str) -> None:
        now()
        time.sleep(1)
        save(output_dir)

    trainer._save_rng_state = slow
    return trainer


def in_the_last_save(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    return in_a_save(output_dir, now, address, step=4)


def in_an_evaluation(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    trainer = make(
        output_dir,
        reward_funcs=rewards(
            lambda: (now(), time.sleep(FOR_LONG)), lambda state: state.global_step == 2 and is_evaluating[0]
        ),
    )
    is_evaluating, evaluate = [False], trainer.evaluate

    def evaluating(*args: Any, **kwargs: Any) -> Any:
        is_evaluating[0] = True
        return evaluate(*args, **kwargs)

    trainer.evaluate = evaluating
    return trainer


def in_a_sample_table(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    def is_now(state: Any) -> bool:
        return state.global_step == 2 and trainer._run.is_evaluating

    trainer = make(output_dir, reward_funcs=rewards(lambda: (now(), time.sleep(FOR_LONG)), is_now))
    return trainer


def in_learning_that_lasts(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    return make(output_dir, callbacks=[At("on_optimizer_step", lambda: (now(), time.sleep(FOR_LONG)))])


def in_learning_that_takes_20_seconds(output_dir: Path, now: Now, address: str) -> PPOTrainer:
    return make(output_dir, callbacks=[At("on_pre_optimizer_step", lambda: (now(), time.sleep(2)))], num_ppo_epochs=10)


MOMENTS = {name: value for name, value in list(globals().items()) if name.startswith("in_")}
