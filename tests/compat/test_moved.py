"""Import paths that scripts for the version before the rooms have."""

import importlib
import subprocess
import sys

import pytest

from rlhf_ppo.compat.moved import MOVED

# Every import of the documentation and the examples of that version, and of the structures that its steps receive.
BEFORE = {
    "rlhf_ppo": ["PPOConfig", "PPOTrainer", "batch_generation", "forward", "generate", "truncate_response"],
    "rlhf_ppo.algorithm.advantages": ["gae"],
    "rlhf_ppo.algorithm.losses": ["clipped_policy_loss", "clipped_value_loss", "PolicyLoss", "ValueLoss"],
    "rlhf_ppo.algorithm.masked": ["masked_whiten"],
    "rlhf_ppo.algorithm.penalties": [
        "clip_scores",
        "kl_estimate",
        "penalize_missing_eos",
        "replace_missing_eos",
        "token_rewards",
    ],
    "rlhf_ppo.batch": ["Experience", "Prompts", "Responses", "Rollout", "pad_right"],
    "rlhf_ppo.cli.aitraining": ["AutoTrainProject", "LLMTrainingParams"],
    "rlhf_ppo.cli.commands": ["train"],
    "rlhf_ppo.cli.demo": ["demo"],
    "rlhf_ppo.cli.errors": ["user_errors"],
    "rlhf_ppo.cli.main": ["main"],
    "rlhf_ppo.cli.params": ["LLMTrainingParams"],
    "rlhf_ppo.cli.parser": ["PPOArgumentParser"],
    "rlhf_ppo.cli.quantization": ["quantization_options"],
    "rlhf_ppo.cli.sources": ["PPOScriptArguments", "choose_split", "load_splits"],
    "rlhf_ppo.cli.training": ["running", "scored_ppo_trainer", "train_and_save"],
    "rlhf_ppo.config": ["PPOConfig"],
    "rlhf_ppo.engine_arguments": ["EngineArguments"],
    "rlhf_ppo.generation.helpers": ["batch_generation", "forward", "generate"],
    "rlhf_ppo.generation.sequences": ["truncate_response"],
    "rlhf_ppo.given": ["check_output_dir"],
    "rlhf_ppo.inherited_arguments": ["REJECTED", "REJECTED_VALUES", "REMOVED"],
    "rlhf_ppo.reporting.estimate": ["Estimate", "Sharding", "Workload", "estimate_update"],
    "rlhf_ppo.reporting.plots": ["plot_metrics"],
    "rlhf_ppo.reporting.run_log": ["read_log"],
    "rlhf_ppo.rewards.builtin": ["builtin_reward"],
    "rlhf_ppo.rewards.endpoint": ["RewardEndpoint"],
    "rlhf_ppo.rewards.environments": ["Environment", "make_environment"],
    "rlhf_ppo.rewards.judges": ["RewardModelJudge"],
    "rlhf_ppo.rewards.preference": ["PreferenceReward"],
    "rlhf_ppo.rewards.resolve": ["resolve_reward"],
    "rlhf_ppo.trainer": ["PPOTrainer"],
}


@pytest.mark.parametrize("module", BEFORE)
def test_a_documented_import_of_before_works(module: str) -> None:
    imported = importlib.import_module(module)

    assert [name for name in BEFORE[module] if not hasattr(imported, name)] == []


@pytest.mark.parametrize("module", MOVED)
def test_an_old_path_gives_the_very_objects_that_the_new_one_has(module: str) -> None:
    old, sources = importlib.import_module(module), [importlib.import_module(name) for name in MOVED[module]]

    for source in sources:
        own = {name for name, value in vars(source).items() if getattr(value, "__module__", None) == source.__name__}
        assert own
        assert all(getattr(old, name) is getattr(source, name) for name in own)


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"rlhf_ppo\.batches"):
        importlib.import_module("rlhf_ppo.batches")


def test_the_package_imports_nothing_heavy() -> None:
    code = "import rlhf_ppo, sys; assert not {'torch', 'transformers'} & set(sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
