"""Rewards given as text: built-ins, dotted names, functions in files, addresses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.rewards.builtin import BUILTIN_REWARDS
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.rewards.resolve import resolve_reward, resolve_rewards


def brief(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


@pytest.fixture(autouse=True)
def own_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a test imports and where it looked."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_callables_come_back_as_they_are() -> None:
    assert resolve_reward(brief) is brief
    assert resolve_rewards(None) == [] and resolve_rewards(brief) == [brief]
    assert resolve_rewards((brief, brief)) == [brief, brief]


def test_built_ins_by_name() -> None:
    reward = resolve_reward("length_penalty")
    assert isinstance(reward, BUILTIN_REWARDS["length_penalty"])
    assert resolve_rewards("length_penalty") == [reward]
    assert resolve_reward("think_format_reward")(completions=["<think>a</think>b", "b"]) == [1.0, 0.0]


def test_addresses() -> None:
    assert resolve_reward("https://judge.example/v1/score") == RewardEndpoint("https://judge.example/v1/score")


def test_a_dotted_name_is_imported_also_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_rewards_of_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "style.py").write_text("def polite(completions, **_):\n    return [1.5] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    assert resolve_reward("my_rewards_of_test.style.polite")(completions=["a", "b"]) == [1.5, 1.5]
    assert resolve_reward("math.dist").__name__ == "dist"


def test_a_file_is_run_once_and_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_test.py").write_text("SCORE = 2.5\n")
    file = tmp_path / "rewards.py"
    file.write_text("import neighbour_of_test\nCALLS = []\ndef f(completions, **_):\n    CALLS.append(1)\n"
                    "    return [neighbour_of_test.SCORE + len(CALLS)] * len(completions)\n")  # fmt: skip
    reward = resolve_reward(f"{file}:f")
    assert reward.__name__ == "f"
    assert reward(completions=["a"]) == [3.5]
    assert resolve_reward(f"{file}:f")(completions=["a"]) == [4.5]


def test_files_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, score in (("one", 1.0), ("two", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "json.py").write_text(f"def f(completions, **_):\n    return [{score}]\n")
    monkeypatch.chdir(tmp_path)
    assert [resolve_reward(f"{folder}/json.py:f")(completions=["a"]) for folder in ("one", "two")] == [[1.0], [2.0]]
    import json

    assert json.loads("1") == 1  # nothing that exists is hidden


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("corectness", "is no reward: give .*'correctness'.*a reward model is passed as reward_model"),
        ("EleutherAI/pythia-160m", "is no reward"),
        ("no_such_module_here.f", "there is no module 'no_such_module_here'"),
        ("json.no_such_submodule.f", "there is no module 'json.no_such_submodule'"),
        ("json.no_such_function", "json.*__init__.py has no 'no_such_function'"),
        ("json.JSONDecoder", "which is a class: name a function"),
        ("string.digits", "which is str: name a function"),
        ("nowhere/rewards.py:f", "there is no file '.*nowhere/rewards.py'"),
    ],
)
def test_texts_that_lead_nowhere(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"reward_funcs holds '{spec}', .*{says}|reward_funcs holds '{spec}', {says}"):
        resolve_reward(spec)


def test_what_a_module_fails_to_import_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_of_test.py").write_text("import no_such_dependency\ndef f(): ...\n")
    monkeypatch.chdir(tmp_path)
    for spec in ("broken_of_test.f", "broken_of_test.py:f"):
        for _ in range(2):  # the half-run file is not kept
            with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
                resolve_reward(spec)


def test_what_is_neither() -> None:
    with pytest.raises(TypeError, match="reward_funcs holds 7, which cannot be called"):
        resolve_rewards([brief, 7])  # pyright: ignore[reportArgumentType]
