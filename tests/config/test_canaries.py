"""A secret in any field of any arguments is written nowhere."""

from __future__ import annotations

import copy
import json
import pickle
import re
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from rlhf_ppo import PPOConfig
from rlhf_ppo.cli.arguments import RewardArguments, SFTArguments
from rlhf_ppo.terminal import is_secret

CANARY, USER = "QxCanary91", "QxUser92"
ADDRESS = f"https://{USER}:{CANARY}@host/v1?api_key={CANARY}"


def leaks(text: Any) -> bool:
    return CANARY in str(text) or USER in str(text)


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
