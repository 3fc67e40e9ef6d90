"""Hints for arguments of transformers, TRL and older PPO trainers."""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import pytest

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.cli.arguments import PPOArgumentParser
from rlhf_ppo.config.checks import CONFIG_HINTS, REMOVED, TRAINER_ARGUMENTS

trl: Any = importlib.import_module("trl")

FIELDS = {field.name for field in dataclasses.fields(PPOConfig)}
PPO_OF_TRL_0_11 = """
exp_name seed log_with task_name model_name query_dataset reward_model remove_unused_columns tracker_kwargs
accelerator_kwargs project_kwargs tracker_project_name push_to_hub_if_best_kwargs steps learning_rate adap_kl_ctrl
init_kl_coef kl_penalty target horizon gamma lam cliprange cliprange_value vf_coef batch_size forward_batch_size
mini_batch_size gradient_accumulation_steps world_size ppo_epochs max_grad_norm optimize_cuda_cache
optimize_device_cache early_stopping target_kl compare_steps ratio_threshold use_score_scaling use_score_norm
score_clip whiten_rewards is_encoder_decoder is_peft_model backward_batch_size global_backward_batch_size
global_batch_size
dataset_num_proc
""".split()
PPO_OF_TRL_1_12 = """
run_name dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size num_sample_generations
response_length stop_token stop_token_id temperature missing_eos_penalty sft_model_path world_size num_total_batches
micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size push_to_hub exp_name
reward_model_path model_adapter_name ref_adapter_name num_ppo_epochs whiten_rewards kl_coef kl_estimator cliprange
vf_coef cliprange_value gamma lam ds3_gather_for_generation
""".split()
TRL_CONFIGS = (trl.GRPOConfig, trl.RLOOConfig, trl.SFTConfig)


@pytest.mark.parametrize(
    "names",
    [
        *([field.name for field in dataclasses.fields(config)] for config in TRL_CONFIGS),
        PPO_OF_TRL_0_11,
        PPO_OF_TRL_1_12,
    ],
    ids=[*(config.__name__ for config in TRL_CONFIGS), "PPO of TRL 0.11", "PPO of TRL 1.12"],
)
def test_every_option_of_trl_exists_or_has_a_hint(names: list[str]) -> None:
    assert {*names} - FIELDS - {*CONFIG_HINTS, *REMOVED, *TRAINER_ARGUMENTS} == set()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"beta": 0.1}, "'beta' (use kl_coef)"),
        ({"epsilon": 0.1, "max_completion_length": 9}, "'epsilon' (use cliprange), 'max_completion_length' (use res"),
        ({"reward_funcs": len}, "'reward_funcs' (it is an argument of PPOTrainer)"),
        ({"learnin_rate": 1.0}, "'learnin_rate' (did you mean 'learning_rate'?)"),
        ({"qqqq": 1}, "'qqqq'"),
    ],
)
def test_ppo_config_explains(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"PPOConfig got an unexpected keyword argument {said}")):
        PPOConfig(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokenizer": None}, "'tokenizer' (use processing_class)"),
        ({"config": None}, "'config' (use args)"),
        ({"kl_coef": 0.1}, "'kl_coef' (it is an argument of PPOConfig)"),
        ({"reward_func": len}, "'reward_func' (use reward_funcs)"),
    ],
)
def test_ppo_trainer_explains(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"PPOTrainer got an unexpected keyword argument {said}")):
        PPOTrainer(**given)


def test_the_command_line_gives_the_same_hints() -> None:
    parser: Any = PPOArgumentParser(PPOConfig)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"there is no option --beta \(use kl_coef\), --epsilon-high \(use clip"):
        parser.parse_args_and_config(["--output_dir", "out", "--beta", "0.1", "--epsilon-high", "0.3"])
