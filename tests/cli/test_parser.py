"""The command line: YAML, removed options, and the ranges of values."""

from pathlib import Path
from typing import Any

from trl.scripts.utils import ScriptArguments
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.cli.arguments import PPOArgumentParser
from rlhf_ppo.config import PPOConfig


def parse(*arguments: str) -> PPOConfig:
    parser: Any = PPOArgumentParser((ScriptArguments, PPOConfig, ModelConfig))  # pyright: ignore[reportArgumentType]
    return parser.parse_args_and_config(arguments)[1]


def test_yaml_gives_defaults_that_the_command_line_overrides(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yaml"
    path.write_text("learning_rate: 1e-5\nkl_coef: 0.1\nreward_weights: [1.0, 0.5]\nstop_token: eos\n")
    args = parse("--config", str(path), "--kl_coef", "0.2")
    assert (args.learning_rate, args.kl_coef, args.reward_weights, args.stop_token) == (1e-5, 0.2, [1.0, 0.5], "eos")
