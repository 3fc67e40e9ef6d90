"""The command line: the documented one as it stands, YAML, and options of the past."""

import shlex
from dataclasses import fields

import pytest
from trl.scripts.utils import ScriptArguments
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.cli.arguments import PPOArgumentParser
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.hints import REMOVED

DOCUMENTED = """
    --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style --dataset_train_split descriptiveness
    --learning_rate 3e-6 --output_dir models/minimal/ppo --per_device_train_batch_size 64
    --gradient_accumulation_steps 1 --total_episodes 10000 --model_name_or_path EleutherAI/pythia-1b-deduped
    --sft_model_path sft --reward_model_path reward --missing_eos_penalty 1.0
"""


def parser() -> PPOArgumentParser:
    return PPOArgumentParser((ScriptArguments, PPOConfig, ModelConfig))  # pyright: ignore[reportArgumentType]


def parse(*arguments: str) -> PPOConfig:
    return parser().parse_args_and_config(arguments)[1]  # pyright: ignore[reportReturnType]


def test_the_documented_command_line():
    script, training, model = parser().parse_args_and_config(shlex.split(DOCUMENTED))
    assert (script.dataset_name, script.dataset_train_split) == (
        "trl-internal-testing/descriptiveness-sentiment-trl-style",
        "descriptiveness",
    )
    assert (training.learning_rate, training.output_dir, training.per_device_train_batch_size) == (
        3e-6,
        "models/minimal/ppo",
        64,
    )
    assert (training.total_episodes, training.missing_eos_penalty) == (10000, 1.0)
    assert (training.sft_model_path, training.reward_model_path) == ("sft", "reward")
    assert model.model_name_or_path == "EleutherAI/pythia-1b-deduped"


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


def test_other_unknown_options_are_errors(tmp_path):
    with pytest.raises(ValueError, match="--no_such_option"):
        parse("--no_such_option", "1")
    path = tmp_path / "ppo.yaml"
    path.write_text("no_such_option: 1\n")
    with pytest.raises(ValueError, match="--no_such_option"):
        parse("--config", str(path))


def test_values_are_checked_however_they_come_in(tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text("kl_estimator: k2\n")
    with pytest.raises(ValueError, match="kl_estimator='k2'"):
        parse("--config", str(path))
    with pytest.raises(ValueError, match=r"missing_eos_penalty=-1\.0"):
        parse("--missing_eos_penalty", "-1.0")
