"""The presets: in Python, after `--config`, and the options that win over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from trl import ModelConfig

from rlhf_ppo import PPOConfig, preset
from rlhf_ppo.cli.arguments import PPOArgumentParser
from rlhf_ppo.compat.params import LLMTrainingParams, ppo_arguments

CPU: dict[str, Any] = {"use_cpu": True, "report_to": "none"}
PRESETS = ("trl", "nplus", "aitraining", "recommended", "recommended-lora")


def options_of(args: PPOConfig, names: Any) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def parsed(*words: str) -> PPOConfig:
    parser: Any = PPOArgumentParser(PPOConfig)
    (args,) = parser.parse_args_and_config([*words, "--output_dir", "out", "--use_cpu", "--report_to", "none"])
    return args


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_options_in_python_and_on_the_command_line(name: str) -> None:
    options = preset(name)
    assert options_of(PPOConfig("out", **CPU, **options), options) == options
    args = parsed("--config", name, "--kl_coef", "0.4")
    assert options_of(args, {*options, "kl_coef"}) == options | {"kl_coef": 0.4}


def test_recommended_learns_faster_where_adapters_are_trained() -> None:
    (args, models) = cast(Any, PPOArgumentParser)((PPOConfig, ModelConfig)).parse_args_and_config(
        ["--config", "recommended", "--use_peft", "--output_dir", "out", "--use_cpu", "--report_to", "none"]
    )
    assert models.use_peft and options_of(args, preset("recommended-lora")) == preset("recommended-lora")
    assert args.learning_rate > 10 * preset("recommended")["learning_rate"]


def test_a_path_is_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("learning_rate: 2e-6\nkl_coef: 0.1\n")
    args = parsed("--kl_coef", "0.05", "--config", str(tmp_path / "own.yaml"))
    assert (args.learning_rate, args.kl_coef) == (2e-6, 0.05)


def test_trl_is_a_script_of_trl_without_options() -> None:
    assert options_of(PPOConfig("out", **CPU), preset("trl")) == preset("trl")


def test_aitraining_is_its_command_line_without_options() -> None:
    params = LLMTrainingParams(trainer="ppo", rl_reward_model_path="reward")
    assert ppo_arguments(params) | preset("aitraining") == ppo_arguments(params)


@pytest.mark.parametrize(
    ("given", "num_updates", "expected"), [({}, 60, 3), ({}, 1000, 10), ({}, 4, 1), ({"logging_steps": 7}, 60, 7)]
)
def test_a_short_run_logs_about_20_times(given: dict[str, Any], num_updates: int, expected: int) -> None:
    args = PPOConfig("out", max_steps=num_updates, **CPU, **given)
    for _ in range(2):  # the trainer computes the sizes twice
        args.fill_derived(1, num_examples=10_000)
        assert args.logging_steps == expected
