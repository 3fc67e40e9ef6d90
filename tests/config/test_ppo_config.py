"""PPOConfig: every field's default, command line, YAML and errors."""

import dataclasses
import inspect
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments, training_args
from trl.scripts.utils import TrlParser

from rlhf_ppo.config import RANGES, PPOConfig, checks
from rlhf_ppo.config.ppo_config import AgentArguments, EngineArguments, LoggingArguments, RecipeArguments

NAN, INF = math.nan, math.inf
FIELDS = {field.name: field for field in dataclasses.fields(PPOConfig)}
INHERITED = {field.name for field in dataclasses.fields(TrainingArguments)}
PARTS = (PPOConfig, EngineArguments, LoggingArguments, RecipeArguments, AgentArguments)
OWN = sorted({name for part in PARTS for name in inspect.get_annotations(part)})
HINTS = get_type_hints(PPOConfig)

VALUES: dict[str, Any] = {
    "bf16": False,  # there is no accelerator
    "dataloader_drop_last": True,
    "logging_steps": 0.5,
    "total_episodes": 10_000,
    "stop_strings": ["END", "###"],
    "reward_weights": [1.0, -0.5],
    "chat_template_kwargs": {"enable_thinking": False},
}
"""Valid values of options for which the type does not tell one."""

WRONG: dict[str, tuple[Any, ...]] = {
    "stop_strings": ([], [""], ["a", ""], "", ["\ufffd"], ["a", None], {"a": "b"}, "[]", '[""]', ["[]"], r"\n"),
    "reward_weights": ([], {}, [NAN], {"a": NAN}, ["a"], [True], {"a": "1"}, {1: 1.0}, 1.0, "", "1.0", '{"a": 1'),
    "num_mini_batches": (3,),  # does not divide 8
    "num_generations": (3,),
    "dataloader_drop_last": (False,),
}
"""Values beside those of another type, or out of the range, that are refused."""


def kinds(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def other_value(name: str) -> Any:
    """Return a valid value other than the default."""
    (kind, *_), default = kinds(HINTS[name]), FIELDS[name].default
    if name in VALUES:
        return VALUES[name]
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != default)
    if kind is bool:
        return not default
    candidates = (2, 1, 0) if kind is int else (3.0, 0.5) if kind is float else ("mine",)
    return next(each for each in candidates if name not in RANGES or RANGES[name].holds(each))


def make(**arguments: Any) -> PPOConfig:
    """PPOConfig with arguments that a type checker would refuse."""
    return PPOConfig(**arguments)


def from_command_line(*arguments: str) -> PPOConfig:
    return HfArgumentParser(cast(Any, PPOConfig)).parse_args_into_dataclasses(list(arguments))[0]  # pyright: ignore


def from_yaml(path: Path, text: str) -> PPOConfig:
    path.write_text(text)
    return TrlParser(cast(Any, PPOConfig)).parse_args_and_config(["--config", str(path)])[0]  # pyright: ignore


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tests mean the same on a machine with an accelerator."""
    set_accelerator(monkeypatch, None)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


def set_accelerator(monkeypatch: pytest.MonkeyPatch, capability: int | None) -> None:
    """Pretend no accelerator, or a GPU: 8 is Ampere, 7 (T4, V100) emulates bf16."""
    for module in (checks, training_args):
        monkeypatch.setattr(module, "is_torch_bf16_gpu_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=capability))
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")


# ---- Every field ----


@pytest.mark.parametrize("name", OWN)
def test_an_option_is_read_from_the_command_line_and_from_yaml(name: str, tmp_path: Path):
    value = other_value(name)
    assert value != FIELDS[name].default or name in ("bf16", "dataloader_drop_last")
    words = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else str(value)]
    assert getattr(from_command_line(f"--{name}", *map(str, words)), name) == value
    args = from_yaml(tmp_path / "config.yaml", yaml.safe_dump({name: value}))
    assert getattr(args, name) == value and type(getattr(args, name)) is type(value)


@pytest.mark.parametrize("name", [name for name in OWN if name not in INHERITED])
def test_a_value_of_another_type_is_an_error_that_names_field_and_value(name: str):
    other = [None] if type(None) not in kinds(HINTS[name]) else []
    for wrong in (1j, *other, *WRONG.get(name, ())):
        with pytest.raises((ValueError, TypeError)) as error:
            make(**{name: wrong})
        items = wrong.items() if isinstance(wrong, dict) else enumerate(wrong if isinstance(wrong, list) else [])
        told = [f"{name}={wrong!r}", *(f"{name}[{key!r}]={value!r}" for key, value in items)]
        assert any(text in str(error.value) for text in told), error.value


# ---- Numbers at the ends of what Python and float32 can hold ----

NUMBERS = [name for name in OWN if name not in INHERITED and {int, float} & {*kinds(HINTS[name])}]
EXTREMES = (0, -1, 1e-45, 1e-30, 1e30, 1e300, -1e30, 2**31, 2**70, -(2**70), INF, -INF, NAN, True, "1")


@pytest.mark.parametrize("name", NUMBERS)
def test_an_extreme_number_is_refused_by_name_or_is_one_in_float32(name: str):
    for value in EXTREMES:
        try:
            kept = getattr(make(**{name: value}), name)
        except (ValueError, TypeError) as error:
            assert f"{name}={value!r}" in str(error)
        else:
            assert type(value) in (int, float) and (kept is None or torch.tensor(float(kept)).isfinite()), value


LIMITS = {  # of each: refused, and taken
    "cliprange": (0.0, 1e-9),
    "cliprange_high": (0.0, 1e-9),
    "cliprange_value": (0.0, 1e-9),
    "critic_learning_rate": (-1e-9, 0.0),
    "critic_warmup_steps": (-1, 0),
    "entropy_coef": (-1e-9, 0.0),
    "gamma": (1.0001, 1.0),
    "kl_coef": (-1e-9, 0.0),
    "kl_stop": (0.0, 1e-9),
    "lam": (1.0001, 1.0),
    "lam_critic": (-0.0001, 0.0),
    "lam_policy": (1.0001, 1.0),
    "min_p": (1.0001, 1.0),
    "missing_eos_penalty": (0.0, 1e-9),
    "num_ppo_epochs": (0, 1),
    "ptx_coef": (-1e-9, 0.0),
    "response_length": (0, 1),
    "score_clip": (0.0, 1e-9),
    "temperature": (0.0, 0.001),
    "top_k": (-1, 0),
    "top_p": (0.0, 1.0),
    "vf_coef": (-1e-9, 0.0),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_number_is_taken_up_to_its_limit(name: str):
    refused, taken = LIMITS[name]
    assert getattr(make(**{name: taken}), name) == taken
    with pytest.raises(ValueError, match=f"{name}={re.escape(str(refused))}"):
        make(**{name: refused})


# ---- What excludes each other ----


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop_token": "eos", "stop_token_id": 0}, "stop_token='eos' and stop_token_id=0 exclude each other"),
        ({"missing_eos_penalty": 1.0, "missing_eos_score": 0.0}, "missing_eos_penalty=1.0 and missing_eos_score=0.0"),
        ({"kl_target": 6.0, "kl_coef": 0}, "kl_target=6.0 multiplies kl_coef=0, which stays 0"),
        ({"reward_weights": "{length: 1}"}, "reward_weights='{length: 1}' cannot be read"),
        ({"reward_weights": "[" * 2000}, "[[[ cannot be read"),
    ],
)
def test_what_contradicts_each_other_is_named(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**given)


def test_values_assigned_later_are_checked_when_the_trainer_starts():
    args = PPOConfig()
    args.temperature = 0.0
    with pytest.raises(ValueError, match=r"temperature=0\.0"):
        args.fill_derived(1, 100)


# ---- Values that may be texts ----


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("reward_weights", {"a": 1.0, "b": -2}, {"a": 1.0, "b": -2}),
        ("reward_weights", "[1.0, 0.5]", [1.0, 0.5]),
        ("reward_weights", ['{"a": 1.0}'], {"a": 1.0}),
        ("stop_strings", "END", ["END"]),
        ("stop_strings", r'["\n\n", "é"]', ["\n\n", "é"]),
        ("stop_strings", r"\right)", [r"\right)"]),
    ],
)
def test_a_list_may_be_given_as_text(name: str, given: Any, value: Any, tmp_path: Path):
    assert getattr(make(**{name: given}), name) == value
    words = given if isinstance(given, list) else [given if isinstance(given, str) else json.dumps(given)]
    assert getattr(from_command_line(f"--{name}", *words, "--seed", "1"), name) == value
    assert getattr(from_yaml(tmp_path / "config.yaml", yaml.safe_dump({name: given})), name) == value
    args = PPOConfig()
    setattr(args, name, given)
    args.fill_derived(1, 100)
    assert getattr(args, name) == value


# ---- Precision ----


BF16, FP16, NO = ({"ACCELERATE_MIXED_PRECISION": value} for value in ("bf16", "fp16", "no"))
"""What a launcher sets; `accelerate launch` without `--mixed_precision` sets "no"."""


@pytest.mark.parametrize(
    ("asked", "variables", "capability", "expected"),
    [
        ({}, {}, 8, True),
        ({}, {}, 7, False),
        ({}, {}, None, False),
        ({"fp16": True}, {}, 8, False),
        ({"use_cpu": True}, {}, 8, False),
        ({}, FP16, 8, False),
        ({}, NO, 8, True),
        ({}, BF16, 7, True),
        ({"use_cpu": True}, BF16, None, True),
        ({"bf16": False}, NO, 8, False),
        ({"bf16": False}, FP16, 8, False),
        ({"bf16": True}, NO, 8, True),
        ({}, {"ACCELERATE_USE_CPU": "True"}, 8, False),
        ({"bf16": True, "use_cpu": True}, {}, None, True),
    ],
)
def test_bf16_is_the_launchers_or_on_where_an_accelerator_can_do_it(
    asked: Any, variables: dict[str, str], capability: int | None, expected: bool, monkeypatch: pytest.MonkeyPatch
):
    set_accelerator(monkeypatch, capability)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    args = make(**asked)
    assert args.bf16 is dataclasses.replace(args, seed=1).bf16 is expected
    words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    assert from_command_line(*words).bf16 is expected


@pytest.mark.parametrize(
    ("asked", "launched", "fix"),
    [({"bf16": False}, "bf16", "no"), ({"fp16": True}, "bf16", "fp16"), ({"bf16": True}, "fp16", "bf16")],
)
def test_a_precision_other_than_the_launchers_is_an_error(
    asked: dict[str, Any], launched: str, fix: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    set_accelerator(monkeypatch, 8)
    ((name, value),) = asked.items()
    message = (
        f"{name}={value} contradicts the launcher's mixed_precision='{launched}': give .* --mixed_precision {fix}, or"
    )
    with pytest.raises(ValueError, match=message):
        make(**asked)


@pytest.mark.parametrize(
    ("asked", "launched", "warning"),
    [
        ({}, "no", "bf16 is off, because this GPU does not support it"),
        ({}, "bf16", "this GPU only emulates bf16"),
        ({"bf16": True}, "no", "this GPU only emulates bf16"),
        ({"fp16": True}, "no", None),
        ({"bf16": False}, "no", None),
        ({"use_cpu": True}, "bf16", None),
    ],
)
def test_a_gpu_that_only_emulates_bf16_is_named(
    asked: dict[str, Any], launched: str, warning: str | None, monkeypatch: pytest.MonkeyPatch
):
    set_accelerator(monkeypatch, 7)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    said: list[str] = []
    monkeypatch.setattr(checks.logger, "warning_once", said.append)
    make(**asked)
    assert len(said) == bool(warning) and all(message.startswith(str(warning)) for message in said)


@pytest.mark.parametrize(
    ("asked", "rank"), [({"bf16": True}, "1"), ({"bf16": False}, "0"), ({"fp16": True}, "0"), ({"use_cpu": True}, "0")]
)
def test_a_device_that_need_not_be_asked_is_not(asked: dict[str, Any], rank: str, monkeypatch: pytest.MonkeyPatch):
    """Each rank would otherwise use the first GPU."""
    asked_devices: list[bool] = []
    monkeypatch.setattr(checks, "supports_bf16", lambda: bool(asked_devices.append(True)))
    monkeypatch.setenv("RANK", rank)
    args = SimpleNamespace(**{"bf16": None, "fp16": False, "use_cpu": False, **asked})
    assert checks.choose_bf16(cast(Any, args)) is asked.get("bf16", False) and not asked_devices


# ---- Warm-up and best model ----


def test_warmup_ratio_is_a_share_of_the_updates():
    args = PPOConfig(warmup_ratio=0.1)
    assert args.get_warmup_steps(200) == 20
    assert PPOConfig(warmup_ratio=0.0).get_warmup_steps(200) == 0
    assert PPOConfig(warmup_steps=7).get_warmup_steps(200) == 7
    assert dataclasses.replace(args, seed=1).get_warmup_steps(200) == 20


@pytest.mark.parametrize(
    "asked",
    [
        {"load_best_model_at_end": True, "eval_strategy": "steps", "save_steps": 10},
        {"save_strategy": "best", "eval_strategy": "steps"},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
        {"lr_scheduler_type": "greedy", "eval_strategy": "steps"},
    ],
)
def test_models_are_compared_by_score(asked: dict[str, Any]):
    args = make(**asked)
    assert (args.metric_for_best_model, args.greater_is_better) == ("score", True)


def test_a_maximum_norm_of_none_clips_nothing() -> None:
    assert PPOConfig("out", max_grad_norm=cast(Any, None)).max_grad_norm == 0.0
