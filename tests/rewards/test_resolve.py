"""Reward functions named by a text."""

import functools
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo import PPOTrainer
from rlhf_ppo.rewards.builtin import BUILTIN_REWARDS, Correctness, Formatting, Keyword, Length, LengthPenalty
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.rewards.functions import function_name
from rlhf_ppo.rewards.resolve import check_reward_name, resolve_reward, resolve_rewards
from tests.conftest import count_w4
from tests.runs import QUICK

SOURCE = """
from dataclasses import dataclass

CONSTANT = 3

def brief(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]

@dataclass
class Fixed:
    value: float

    def __call__(self, completions, **kwargs):
        return [self.value] * len(completions)

fixed = Fixed(2.0)

def _hidden():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with a file of rewards and a package on the path that holds the same."""
    (tmp_path / "my-rewards.py").write_text(SOURCE)
    package = tmp_path / "on_path" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text(SOURCE)
    (package / "broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "on_path"), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("spec", [count_w4, functools.partial(count_w4, x=1), print])
def test_a_callable_stays(spec: Callable[..., Any]) -> None:
    assert resolve_reward(spec) is spec


@pytest.mark.parametrize("name", ["brief", "fixed"])
@pytest.mark.parametrize(
    "where", ["mine.rewards.{}", "my-rewards.py:{}", "./my-rewards.py:{}", "{folder}/my-rewards.py:{}"]
)
def test_dotted_names_and_files(folder: Path, where: str, name: str) -> None:
    reward = resolve_reward(where.format(name, folder=folder))
    expected = {"brief": [-1.0, -2.0], "fixed": [2.0, 2.0]}[name]
    assert reward(completions=["a", "b c"], completion_ids=[[5], [5, 6]]) == expected
    assert pickle.loads(pickle.dumps(reward))(completions=["a", "b c"], completion_ids=[[5], [5, 6]]) == expected


def test_the_home_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(os.sep)
    assert resolve_reward("~/my-rewards.py:brief")(completion_ids=[[5]]) == [-1.0]


def test_a_file_runs_once_and_files_of_one_name_are_two(folder: Path) -> None:
    assert resolve_reward("my-rewards.py:fixed") is resolve_reward(f"{folder}/my-rewards.py:fixed")
    other = folder / "other" / "my-rewards.py"
    other.parent.mkdir()
    other.write_text("def brief(**kwargs):\n    return 'other'\n")
    assert resolve_reward("other/my-rewards.py:brief")() == "other"
    assert resolve_reward("my-rewards.py:brief")(completion_ids=[[5]]) == [-1.0]


def test_built_ins_by_name() -> None:
    reward = resolve_reward("length_penalty")
    assert isinstance(reward, BUILTIN_REWARDS["length_penalty"])
    assert resolve_rewards("length_penalty") == [reward] and resolve_rewards(None) == []
    assert resolve_rewards((count_w4, "length_penalty")) == [count_w4, reward]
    assert resolve_reward("think_format_reward")(completions=["<think>a</think>b", "b"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ('keyword(keywords=["yes", "no"])', Keyword(["yes", "no"])),
        ("length_penalty(max_words=20, penalty=0.1)", LengthPenalty(20, 0.1)),
        (r"formatting(pattern=r'^\(a\)$')", Formatting(r"^\(a\)$")),
        ("correctness(mode=numeric, column=gold)", Correctness("numeric", "gold")),
        ("correctness(column=null)", Correctness()),
        ("length()", Length()),
        ("https://h/score(timeout=5, retries=0)", RewardEndpoint("https://h/score", timeout=5, retries=0)),
        ("https://h/a(b)", RewardEndpoint("https://h/a(b)")),
    ],
)
def test_settings_stand_behind_the_name(spec: str, expected: Any) -> None:
    assert resolve_reward(spec) == expected


def test_settings_of_trls_rewards_and_of_functions(folder: Path) -> None:
    punishment = resolve_reward("get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)")
    assert punishment(completions=["a", "b"], completion_ids=[[1] * 3, [1] * 9]) == [-0.5, -1]
    (folder / "scaled.py").write_text("def f(completions, scale=1):\n    return [scale] * len(completions)\n")
    scaled: Any = resolve_reward("scaled.py:f(scale=3)")
    assert scaled(completions=["a"]) == [3] and function_name(scaled) == "f"
    (folder / "a (copy)").mkdir()
    (folder / "scaled.py").rename(folder / "a (copy)" / "scaled.py")
    assert resolve_reward("a (copy)/scaled.py:f(scale=4)")(completions=["a"]) == [4]
    (folder / "row.py").write_text("def f(prompt, generated, full_text):\n    return len(full_text)\n")
    assert resolve_reward("custom(function='row.py:f')")(prompts=["ab"], completions=["c"]) == [3]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("keyword(['yes'])", "whose settings cannot be read; write them as name=value"),
        ("keyword(keywords=__import__('os').getcwd())", "whose settings cannot be read"),
        ("keyword(keywords=[)", "whose settings cannot be read"),
        ("length_penalty(max_word=3)", "'length_penalty' cannot be made with the settings {'max_word': 3}"),
        ("https://h/score(timeot=5)", "unexpected keyword argument 'timeot'; it takes ['name', 'timeout'"),
        ("my-rewards.py:brief(completion_ids=1, x=2)(y=3)", "whose settings cannot be read"),
        ("nonsense(a=1)", "'nonsense', which is not a reward's name"),
    ],
)
def test_settings_that_cannot_be_read_or_are_not_there(spec: str, words: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        resolve_reward(spec)


def test_modules_are_looked_for_in_the_working_directory_and_beside_a_file(folder: Path) -> None:
    """As `python -m` and `python file.py` would, which a console script does not."""
    (folder / "rewards_at_work.py").write_text("def f(completions, **_):\n    return [1.5] * len(completions)\n")
    assert resolve_reward("rewards_at_work.f")(completions=["a", "b"]) == [1.5, 1.5]
    beside = folder / "other"
    beside.mkdir()
    (beside / "neighbour_of_test.py").write_text("SCORE = 2.5\n")
    (beside / "json.py").write_text("import neighbour_of_test\ndef f(**_):\n    return neighbour_of_test.SCORE\n")
    assert resolve_reward("other/json.py:f")() == 2.5
    import json

    assert json.loads("1") == 1  # nothing that exists is hidden


def test_a_name_is_checked_without_running_what_it_names(folder: Path) -> None:
    (folder / "fails.py").write_text("raise RuntimeError\nf = len")
    for spec in ("fails.py:f", "fails.f", "nobody.rewards.brief", "length", "keyword(keywords=['a'])", "http://a/b"):
        check_reward_name(spec)
    (folder / "notepad.py").write_bytes(b"\xef\xbb\xbfdef f(completions): ...")
    (folder / "latin.py").write_bytes(b"# coding: latin-1\nMARK = '\xe9'\ndef f(completions): ...")
    for spec in ("notepad.py:f", "latin.py:f"):  # as Python reads them
        check_reward_name(spec)
    for spec, words in (("missing.py:f", "judge holds 'missing.py:f', but there is no"), ("lenght", "judge holds '"),
                        ("keyword(wrods=['a'])", "wrods")):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=words):
            check_reward_name(spec, "judge")


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("brief", ValueError, "is not a reward's name; .*'path/file.py:f.*'correctness'.*passed as reward_model$"),
        ("EleutherAI/pythia-160m", ValueError, "which is not a reward's name"),
        ("my-rewards.py:Fixed", TypeError, "is a class, not a function or an object that can be called"),
        ("", ValueError, "holds '', which is not"),
        ("a..b", ValueError, "holds 'a..b', which is not"),
        ("mine.rewards:brief", ValueError, "holds 'mine.rewards:brief', which is not"),
        (3, TypeError, "holds 3, which cannot be called"),
        ("missing.py:brief", ValueError, "there is no file 'missing.py' in /"),
        ("my-rewards.py:breif", ValueError, r"my-rewards.py has no 'breif'; it has \['Fixed', 'brief', .*'fixed'\]"),
        ("my-rewards.py:CONSTANT", TypeError, "holds 'my-rewards.py:CONSTANT', which is 3 and cannot be called"),
        ("mine.rewards.breif", ValueError, r"rewards.py has no 'breif'; it has \['Fixed', 'brief'"),
        ("mine.missing.brief", ValueError, "finds no module 'mine.missing'"),
        ("nobody.rewards.brief", ValueError, "finds no module 'nobody'"),
    ],
)
def test_what_is_not_there(folder: Path, spec: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        resolve_reward(spec)


def test_what_a_module_itself_raises_comes_through_with_a_note(folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all") as error:
        resolve_reward("mine.broken.brief")
    assert "'mine.broken.brief'" in error.value.__notes__[0]
    (folder / "raises.py").write_text("raise RuntimeError('mine')\n")
    for _ in range(2):  # a failed load leaves nothing behind
        with pytest.raises(RuntimeError, match="mine") as failure:
            resolve_reward("raises.py:brief")
        assert "'raises.py:brief'" in failure.value.__notes__[0]


def test_the_trainer_takes_names(folder: Path, make_trainer: Callable[..., PPOTrainer]) -> None:
    trainer = make_trainer(
        **QUICK,
        reward_funcs=["my-rewards.py:brief", count_w4, "mine.rewards.fixed"],
        reward_weights={"brief": 0.5, "count_w4": 0.0, "Fixed": 1.0},
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["rewards/brief/mean"] == -logged["response/length_mean"]
    assert logged["objective/scores"] == pytest.approx(2.0 - 0.5 * logged["response/length_mean"])
    assert make_trainer(**QUICK, reward_funcs="my-rewards.py:brief").scorer.names == ["brief"]
