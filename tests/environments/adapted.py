"""Environments of other packages for `test_text.py`; worker processes import them from here, without torch.

`BaseTextEnv` follows SkyRL-gym (Apache License 2.0), `AgentInstanceBase` OpenRLHF (Apache License 2.0), `StepResult`
and the client OpenEnv (BSD 3-Clause), `RagenEnv` RAGEN (Apache License 2.0).
"""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

ACTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}


def lake(**options: Any) -> Any:
    return gymnasium.make("FrozenLake-v1", is_slippery=False, **options)


def cell(observation: Any, environment: Any) -> str:
    assert environment.unwrapped.s == observation
    return f"{observation // 4} {observation % 4}"


def short_lake() -> Any:
    return lake(max_episode_steps=3)


class RagenEnv:
    """RAGEN and old Gym: `reset(seed)` returns the observation, `step` four values."""

    def reset(self, seed: int | None = None, mode: str | None = None) -> str:
        self.left = 3
        return f"{seed} left {self.left}"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.left -= 1
        return f"{action}: left {self.left}", 0.25, True, {"TimeLimit.truncated": action == "cut"}


class BaseTextEnv:
    """SkyRL-gym's base class."""

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        raise NotImplementedError

    def close(self) -> None: ...


class Sum(BaseTextEnv):
    def __init__(self, extras: dict[str, Any]) -> None:
        self.answer, self.turns = extras["answer"], 0

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [*prompt[:-1], {"role": "user", "content": prompt[-1]["content"] + " Think."}], {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        done = action == self.answer
        told = [{"role": "user", "content": "Wrong."}, {"role": "user", "content": f"Turn {self.turns}."}]
        step = {"observations": [] if done else told, "reward": float(done), "done": done, "metadata": {}}
        return step | ({"postprocessed_action": "x"} if action == "rewrite" else {})


class AgentInstanceBase(ABC):
    """OpenRLHF's base class."""

    @abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states

    @abstractmethod
    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]: ...


class Agent(AgentInstanceBase):
    def __init__(self) -> None:
        self.steps = 0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.steps = 0
        return {"observation": states["observation"] + "?"}

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        self.steps += 1
        feedback = f"[{state_dict['observation_text']}|{state_dict['action_text']}|{state_dict['label']}]"
        step = {"rewards": np.array(self.steps / 2), "environment_feedback": feedback, "done": self.steps == 2}
        return step | {"scores": np.array(9.0), "extra_logs": {}}


@dataclass
class StepResult:
    """OpenEnv's result."""

    observation: Any
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] | None = None


@dataclass
class Echo:
    text: str


class EnvClient:
    """An OpenEnv client, async by default."""

    async def reset(self, **kwargs: Any) -> StepResult:
        return StepResult(Echo(f"seed {kwargs['seed']}"))

    async def step(self, action: Echo) -> StepResult:
        await asyncio.sleep(0)
        return StepResult(Echo(action.text * 2), None if action.text == "n" else 2.0, action.text == "end")


class SyncEnvClient:
    def reset(self, **kwargs: Any) -> StepResult:
        return asyncio.run(EnvClient().reset(**kwargs))

    def step(self, action: Echo) -> StepResult:
        return asyncio.run(EnvClient().step(action))


def text_of(observation: Echo, _: Any) -> str:
    return observation.text
