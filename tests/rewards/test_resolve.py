"""Functions named by a text."""

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_ppo.rewards.builtin import BUILTIN_REWARDS
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.rewards.resolve import resolve_reward, resolve_rewards
from tests.conftest import count_w4, tiny_scorer

SOURCE = """
from dataclasses import dataclass

def brief(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]

@dataclass
class Fixed:
    value: float

    def __call__(self, completions, **kwargs):
        return [self.value] * len(completions)

fixed = Fixed(2.0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory and home, with a file of rewards, and a package on the path that holds the same."""
    (tmp_path / "my-rewards.py").write_text(SOURCE)
    package = tmp_path / "on_path" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "on_path"), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["brief", "fixed"])
@pytest.mark.parametrize(
    "where", ["mine.rewards.{}", "my-rewards.py:{}", "{folder}/my-rewards.py:{}", "~/my-rewards.py:{}"]
)
def test_dotted_names_and_files(folder: Path, where: str, name: str) -> None:
    reward = resolve_reward(where.format(name, folder=folder))
    expected = {"brief": [-1.0, -2.0], "fixed": [2.0, 2.0]}[name]
    for each in (reward, pickle.loads(pickle.dumps(reward))):
        assert each(completions=["a", "b c"], completion_ids=[[5], [5, 6]]) == expected


def test_modules_are_looked_for_in_the_working_directory_and_beside_a_file(folder: Path) -> None:
    """As `python -m` and `python file.py` would, which a console script does not; nothing that exists is hidden."""
    (folder / "rewards_at_work.py").write_text("def f(completions, **_):\n    return [1.5] * len(completions)\n")
    assert resolve_reward("rewards_at_work.f")(completions=["a", "b"]) == [1.5, 1.5]
    beside = folder / "other"
    beside.mkdir()
    (beside / "neighbour_of_test.py").write_text("SCORE = 2.5\n")
    (beside / "json.py").write_text("import neighbour_of_test\ndef f(**_):\n    return neighbour_of_test.SCORE\n")
    assert resolve_reward("other/json.py:f")() == 2.5 and json.loads("1") == 1


def test_a_reward_model_is_no_reward_function() -> None:
    with pytest.raises(ValueError, match=r"holds a LlamaForSeq\w+, which is a model: pass it as reward_model"):
        resolve_rewards([tiny_scorer()])
    with pytest.raises(ValueError, match=r"holds 'org/name': write .*; pass a reward model as reward_model"):
        resolve_reward("org/name")


def test_built_ins_and_addresses() -> None:
    reward = resolve_reward("length_penalty")
    assert isinstance(reward, BUILTIN_REWARDS["length_penalty"]) and resolve_rewards(None) == []
    assert resolve_rewards("length_penalty") == [reward]
    assert resolve_rewards((count_w4, "length_penalty")) == [count_w4, reward]
    assert resolve_reward("think_format_reward")(completions=["<think>a</think>b", "b"]) == [1.0, 0.0]
    assert resolve_reward("https://h/a(b)") == RewardEndpoint("https://h/a(b)")
