"""The presets: in Python, after `--config`, and the options that win over them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trl.trainer.model_config import ModelConfig

from rlhf_ppo import PPOConfig, preset
from rlhf_ppo.cli.arguments import PPOArgumentParser, PPOScriptArguments, parse
from rlhf_ppo.compat.params import LLMTrainingParams, ppo_arguments

CPU: dict[str, Any] = {"use_cpu": True, "report_to": "none"}
PRESETS = ("trl", "nplus", "aitraining", "recommended", "recommended-lora")


def options_of(args: PPOConfig, names: Any) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def parsed(*words: str) -> PPOConfig:
    parser: Any = PPOArgumentParser((PPOConfig, ModelConfig), prog="rlhf-ppo train")
    (args, _) = parser.parse_args_and_config([*words, "--output_dir", "out", "--use_cpu", "--report_to", "none"])
    return args


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_options_in_python_and_on_the_command_line(name: str) -> None:
    options = preset(name)
    assert options_of(PPOConfig("out", **CPU, **options), options) == options
    args = parsed("--config", name, "--kl_coef", "0.4", *(["--use_peft"] if name.endswith("lora") else []))
    assert options_of(args, {*options, "kl_coef"}) == options | {"kl_coef": 0.4}


def test_the_presets_of_a_paper_and_for_adapters_hold_these_values() -> None:
    """arXiv 2403.17031, and benchmarks/EQUAL_COST.md."""
    nplus = {
        "learning_rate": 3e-6, "lr_scheduler_type": "linear", "warmup_steps": 0, "adam_epsilon": 1e-5,
        "weight_decay": 0.0, "max_grad_norm": 1.0, "num_ppo_epochs": 4, "num_mini_batches": 1, "response_length": 53,
        "temperature": 0.7, "kl_coef": 0.05, "kl_estimator": "k1", "gamma": 1.0, "lam": 0.95, "cliprange": 0.2,
        "cliprange_value": 0.2, "vf_coef": 0.1, "whiten_rewards": False, "stop_token": "eos",
        "missing_eos_score": -1.0,
    }  # fmt: skip
    adapters = {
        "learning_rate": 5e-4, "critic_learning_rate": 1e-3, "num_ppo_epochs": 2, "num_mini_batches": 4,
        "num_generations": 4, "temperature": 1.0, "lam": 1.0,
    }  # fmt: skip
    assert preset("nplus") == nplus and preset("recommended-lora") == adapters


@pytest.mark.parametrize("config", [["--config", "recommended"], ["--config=recommended"]])
@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "recommended"),
        (["--use_peft", "False"], "recommended"),
        (["--use_peft=false"], "recommended"),
        (["--run_name", "use_peft"], "recommended"),
        (["--use_peft"], "recommended-lora"),
        (["--use-peft"], "recommended-lora"),
        (["--use_peft=true"], "recommended-lora"),
        (["--sft_model_path", "adapter"], "recommended-lora"),
        (["--use_peft", "--learning_rate", "1e-5"], "recommended-lora"),
    ],
)
def test_recommended_is_chosen_by_what_is_trained(
    config: list[str], words: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    wanted = preset(name) | ({"learning_rate": 1e-5} if "--learning_rate" in words else {})
    for line in ([*config, *words], [*words, *config]):
        assert options_of(parsed(*line), wanted) == wanted


@pytest.mark.parametrize(
    ("words", "critic"),
    [
        ("--config recommended --use_peft", "policy"),
        ("--config recommended --use_peft --value_model_path own", "own"),
        ("--config recommended --use_peft --share_base_model", None),
        ("--config recommended", None),
        ("--use_peft", None),
    ],
)
def test_rates_for_lora_do_not_train_all_weights_of_a_value_model(words: str, critic: str | None) -> None:
    script, *_ = parse(
        (PPOScriptArguments, PPOConfig, ModelConfig), "rlhf-ppo train", f"{words} --output_dir out --use_cpu".split()
    )
    assert script.value_model_path == critic


@pytest.mark.parametrize("words", [["--config", "recommended-lora"], ["--config=recommended-lora", "--use_peft=no"]])
def test_rates_for_lora_without_lora_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(*words)
    assert capsys.readouterr().err == (
        "rlhf-ppo train: error: --config recommended-lora has learning rates for LoRA adapters: add --use_peft, or "
        "use recommended\n"
    )


@pytest.mark.parametrize(("name", "near"), [("recomended", " (did you mean 'recommended'?)"), ("own.yaml", "")])
def test_a_config_that_is_neither_file_nor_preset_names_the_presets(
    name: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed("--config", name)
    assert capsys.readouterr().err == (
        f"rlhf-ppo train: error: --config {name} is no file and no preset{near}: the presets are aitraining, nplus, "
        "recommended, recommended-lora, trl\n"
    )


def test_a_path_is_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("learning_rate: 2e-6\nkl_coef: 0.1\n")
    for config in (["--config", str(tmp_path / "own.yaml")], [f"--config={tmp_path / 'own.yaml'}"]):
        args = parsed("--kl_coef", "0.05", *config)
        assert (args.learning_rate, args.kl_coef) == (2e-6, 0.05)


def test_a_file_may_say_that_adapters_are_trained(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("use_peft: true\nlearning_rate: 2e-4\n")
    parser: Any = PPOArgumentParser((PPOConfig, ModelConfig))
    words = ["--output_dir", "out", "--use_cpu", f"--config={tmp_path / 'own.yaml'}"]
    for more, expected in (([], True), (["--use_peft", "False"], False)):
        args, models = parser.parse_args_and_config([*words, *more])
        assert (models.use_peft, args.learning_rate) == (expected, 2e-4)


def test_trl_is_a_script_of_trl_without_options() -> None:
    assert options_of(PPOConfig("out", **CPU), preset("trl")) == preset("trl")


def test_aitraining_is_its_command_line_without_options() -> None:
    arguments = ppo_arguments(LLMTrainingParams(trainer="ppo", rl_reward_model_path="reward", log="none"))
    assert arguments["bf16"] is preset("aitraining")["bf16"] is False  # which both are on a CPU
    command = PPOConfig(**{**arguments, **CPU})
    in_python = PPOConfig("out", **{**CPU, **preset("aitraining")})
    differing = {option.name for option in fields(PPOConfig)} - {"output_dir", "exp_name", "run_name", "logging_dir"}
    differing = {name for name in differing if getattr(command, name) != getattr(in_python, name)}
    paths, outputs = {"sft_model_path", "reward_model_path"}, {"logging_steps", "save_strategy", "save_total_limit"}
    assert differing == paths | outputs | {"per_device_eval_batch_size"}


@pytest.mark.parametrize(
    ("given", "num_updates", "expected"), [({}, 60, 3), ({}, 1000, 10), ({}, 4, 1), ({"logging_steps": 7}, 60, 7)]
)
def test_a_short_run_logs_about_20_times(given: dict[str, Any], num_updates: int, expected: int) -> None:
    args = PPOConfig("out", max_steps=num_updates, **CPU, **given)
    for _ in range(2):  # the trainer computes the sizes twice
        args.fill_derived(1, num_examples=10_000)
        assert args.logging_steps == expected
