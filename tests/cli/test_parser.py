"""The command line: the documented one as it stands, YAML, and options of the past."""

from dataclasses import fields

import pytest
from trl.scripts.utils import ScriptArguments
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.cli.arguments import PPOArgumentParser
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.validation import REMOVED


def parser() -> PPOArgumentParser:
    return PPOArgumentParser((ScriptArguments, PPOConfig, ModelConfig))  # pyright: ignore[reportArgumentType]


def parse(*arguments: str) -> PPOConfig:
    return parser().parse_args_and_config(arguments)[1]  # pyright: ignore[reportReturnType]


def test_yaml_gives_defaults_that_the_command_line_overrides(tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text("learning_rate: 1e-5\nkl_coef: 0.1\nreward_weights: [1.0, 0.5]\nstop_token: eos\n")
    args = parse("--config", str(path), "--kl_coef", "0.2")
    assert (args.learning_rate, args.kl_coef, args.reward_weights, args.stop_token) == (1e-5, 0.2, [1.0, 0.5], "eos")


def test_no_is_a_word_where_it_is_a_choice(tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text("save_strategy: no\nwhiten_rewards: no\n")
    args = parse("--config", str(path))
    assert (args.save_strategy, args.whiten_rewards) == ("no", False)


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_removed_options_name_their_replacement(name: str):
    bare = [[f"--{name}"]] if name not in {field.name for field in fields(PPOConfig)} else []
    for arguments in (*bare, [f"--{name.replace('_', '-')}", "1"], [f"--{name}=1"]):
        with pytest.raises(TypeError) as error:
            parse(*arguments)
        assert f"{name}: {REMOVED[name]}" in str(error.value)


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_removed_options_in_yaml(name: str, tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text(f"{name}: 1\n")
    with pytest.raises(TypeError) as error:
        parse("--config", str(path))
    assert f"{name}: {REMOVED[name]}" in str(error.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(["q_proj"], ["q_proj"]), (["all-linear"], "all-linear"), ([".*_proj"], ".*_proj"), (["a", "b"], ["a", "b"])],
)
def test_the_name_of_one_module_is_no_pattern(given: list[str], expected: str | list[str]):
    words = ["--use_peft", "--lora_target_modules", *given]
    assert parser().parse_args_and_config(words)[2].lora_target_modules == expected


def test_values_are_checked_however_they_come_in(tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text("kl_estimator: k2\n")
    with pytest.raises(ValueError, match="kl_estimator='k2'"):
        parse("--config", str(path))
    with pytest.raises(ValueError, match=r"missing_eos_penalty=-1\.0"):
        parse("--missing_eos_penalty", "-1.0")
