"""What reports, plots and cards read of a run's directory, in every shape: it is shown, or a sentence names it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ppo.checkpoints.files import write_json
from rlhf_ppo.reporting.run_log import RunSettings, read_audit, read_log, where_results_are

ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda parts: st.lists(parts, max_size=2) | st.dictionaries(st.text(max_size=5), parts, max_size=2),
    max_leaves=4,
)
"""JSON values of all kinds, NaN and huge numbers too."""
READ_BACK = ("trainer_state.json", "ppo_state.json", "ppo_run.json", "ppo_arguments.json", "manifest.json")

SETTINGS: dict[str, Any] = {
    "arguments": {"seed": 1},
    "versions": {"torch": "2"},
    "made_of": {"policy": "p"},
    "health": {},
}
AUDIT: dict[str, Any] = {
    **{"num_prompts": 2, "num_prefixes": 4, "num_continuations": 4, "findings": ["off"], "calibration": []},
    **{"figures": {"tau": {"value": 0.5, "low": 0.1, "high": 0.9}}, "by_position": [{"first": 1, "last": None}]},
}
LOG: dict[str, Any] = {"log_history": [{"step": 1, "episode": 2, "objective/scores": 0.5}], "global_step": 1}


def read_settings(folder: Path) -> None:
    json.dumps([RunSettings.load(folder).without_seed()])


READERS: dict[str, tuple[str, dict[str, Any], Callable[[Path], Any]]] = {
    "settings": ("ppo_settings.json", SETTINGS, read_settings),
    "critic audit": ("critic_audit.json", AUDIT, read_audit),
    "log": ("trainer_state.json", LOG, read_log),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_file_of_any_shape_is_read_or_named(kind: str, tmp_path: Path) -> None:
    name, before, read = READERS[kind]
    write_json(tmp_path / name, before)
    read(tmp_path)

    @settings(max_examples=80, deadline=None)
    @given(st.sampled_from(["", *before]), ODD, st.booleans())
    def check(key: str, value: Any, is_removed: bool) -> None:
        content = {**before, key: value} if key else value
        if is_removed and isinstance(content, dict):
            content.pop(key, None)
        (tmp_path / name).write_text(json.dumps(content))
        try:
            read(tmp_path)
        except ValueError as error:
            assert name in str(error)

    check()
    for data in (b"", b"{", b"\xff\xfe", b"[" * 9999, b"1" * 9999):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=name):
            read(tmp_path)


def test_the_commands_that_a_run_prints_take_a_directory_of_any_name(tmp_path: Path) -> None:
    run = tmp_path / "der Lauf über (1)"
    run.mkdir()
    write_json(run / "trainer_state.json", LOG)
    commands = re.findall("`(.*?)`", where_results_are(run, run))
    assert [shlex.split(command) for command in commands] == [
        ["rlhf-ppo", name, str(run)] for name in ("plot", "report")
    ]
