"""The command line: YAML, removed options, and the ranges of values."""

from pathlib import Path
from typing import Any

import pytest
from trl.scripts.utils import ScriptArguments
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.cli.arguments import PPOArgumentParser
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.checks import REMOVED


def parse(*arguments: str) -> PPOConfig:
    parser: Any = PPOArgumentParser((ScriptArguments, PPOConfig, ModelConfig))  # pyright: ignore[reportArgumentType]
    return parser.parse_args_and_config(arguments)[1]


def test_yaml_gives_defaults_that_the_command_line_overrides(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yaml"
    path.write_text("learning_rate: 1e-5\nkl_coef: 0.1\nreward_weights: [1.0, 0.5]\nstop_token: eos\n")
    args = parse("--config", str(path), "--kl_coef", "0.2")
    assert (args.learning_rate, args.kl_coef, args.reward_weights, args.stop_token) == (1e-5, 0.2, [1.0, 0.5], "eos")


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_removed_options_name_their_replacement(name: str) -> None:
    with pytest.raises(TypeError) as error:
        parse(f"--{name.replace('_', '-')}", "1")
    assert f"{name}: {REMOVED[name]}" in str(error.value)


def test_values_are_checked_wherever_they_come_from(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yaml"
    path.write_text("kl_estimator: k2\n")
    with pytest.raises(ValueError, match="kl_estimator='k2'"):
        parse("--config", str(path))
    with pytest.raises(ValueError, match=r"missing_eos_penalty=-1\.0"):
        parse("--missing_eos_penalty", "-1.0")
