"""A secret in any option of any subcommand, and in any field of any arguments, is shown and written nowhere."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from rlhf_ppo import PPOConfig
from rlhf_ppo.cli.main import COMMANDS, main
from rlhf_ppo.cli.training import RewardArguments, SFTArguments
from rlhf_ppo.terminal import hide_from_ps, is_secret, redacted, restore_hidden_words

CANARY, USER = "QxCanary91", "QxUser92"
ADDRESS = f"https://{USER}:{CANARY}@host/v1?api_key={CANARY}"
VALUES = {
    "address": ADDRESS,
    "setting": f"keyword(api_key='{CANARY}')",
    "object": json.dumps({"headers": {"Authorization": f"Bearer {CANARY}"}, "token": CANARY, "at": ADDRESS}),
    "list": json.dumps([ADDRESS, {"password": CANARY}]),
}
"""Forms in which a value of any option may hold a secret."""

MAY_BE_SECRET = re.compile("token|key|secret|passw|auth|cred|cookie", re.IGNORECASE)
HARMLESS = re.compile(
    "(stop|eos|pad|eval|bos)_token(_id)?|.*tokens.*|.*num_.*|hub_strategy|ds3_.*|.*token_(level|type|length|weights).*"
    "|.*_keys?_.*|author.*"
)
"""Options with such names that hold no secret; another one must be hidden, or be added here."""


def leaks(text: Any) -> bool:
    return CANARY in str(text) or USER in str(text)


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each subcommand."""
    found: dict[str, argparse.ArgumentParser] = {}
    with pytest.MonkeyPatch.context() as patch:
        for command in COMMANDS:
            patch.setattr(argparse.ArgumentParser, "print_help", lambda self, *_, to=command: found.update({to: self}))
            with pytest.raises(SystemExit):
                main([*command.split(), "--help-all"])
    return found


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if action.option_strings and not isinstance(action, argparse._HelpAction):
            for option in action.option_strings:
                yield option, action


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_shows_a_secret_in_a_command_line(
    command: str, parsers: dict[str, argparse.ArgumentParser], monkeypatch: pytest.MonkeyPatch
) -> None:
    unsafe: list[list[str]] = []
    for option, _ in options(parsers[command]):
        name = option.lstrip("-").replace("-", "_")
        values = list(VALUES.values())
        if MAY_BE_SECRET.search(name) and not HARMLESS.fullmatch(name):
            values.append(CANARY)
        for value in values:
            for words in ([option, value], [f"{option}={value}"], [option, "x", value]):
                words = [*command.split(), *words]
                if value is CANARY and words[-2] == "x":
                    continue
                hidden, environment = hide_from_ps(words)
                unsafe += [words] * (leaks(hidden) or leaks(json.dumps(redacted({name: value}))))
                with monkeypatch.context() as patch:
                    for variable, text in environment.items():
                        patch.setenv(variable, text)
                    assert restore_hidden_words(hidden) == words
    assert unsafe == []


@pytest.mark.parametrize("command", COMMANDS)
def test_no_error_of_a_wrong_value_shows_a_secret(
    command: str, parsers: dict[str, argparse.ArgumentParser], capsys: pytest.CaptureFixture[str]
) -> None:
    parsers[command].raises_errors = False  # a command collects its errors, and prints them as the parser does
    for option, action in options(parsers[command]):
        if action.choices is None and action.type not in (int, float):
            continue
        with pytest.raises(SystemExit):
            argparse.ArgumentParser.parse_args(parsers[command], [option, ADDRESS])
        assert not leaks(capsys.readouterr()), option
    with pytest.raises(SystemExit):
        main([*command.split(), "--no_such_option", ADDRESS, f"--hub_tokn={CANARY}"])
    assert not leaks("".join(capsys.readouterr()))


@pytest.mark.parametrize("config", [PPOConfig, SFTArguments, RewardArguments])
def test_no_field_is_written_with_a_secret(config: Any, tmp_path: Any) -> None:
    unsafe: list[str] = []
    plain = config(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    for field in fields(config):
        if not re.search("str|dict|list|Any", str(get_type_hints(config)[field.name])):
            continue  # a number
        values: list[Any] = [ADDRESS, [ADDRESS], {"api_key": CANARY, "at": {"url": ADDRESS}}]
        if is_secret(field.name):
            values.append(CANARY)
        for value in values:
            args = pickle.loads(pickle.dumps(plain))
            object.__setattr__(args, field.name, value)
            written = [pickle.dumps(args), repr(args), str(args)]
            written += [json.dumps(args.to_dict(), default=str), str(args.to_sanitized_dict())]
            unsafe += [field.name] * any(map(leaks, written))
    assert sorted({*unsafe}) == []


@pytest.mark.parametrize("config", [PPOConfig, SFTArguments, RewardArguments])
def test_copies_keep_the_secrets_that_files_do_not(config: Any, tmp_path: Any) -> None:
    args = config(output_dir=str(tmp_path), hub_token=CANARY, use_cpu=True, bf16=False, report_to="none")
    assert copy.copy(args).hub_token == copy.deepcopy(args).hub_token == CANARY
    read = pickle.loads(pickle.dumps(args))
    assert (read.hub_token, read.output_dir, read.learning_rate) == (None, args.output_dir, args.learning_rate)
