"""An option is complete: its numbers are checked, or a reason says why it has none; docs and changelog name it."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from rlhf_ppo import PPOConfig
from tests.fuzz.options import BASE, OPTIONS
from tests.test_first_update import NUMBERS

ROOT = Path(__file__).parents[2]
GENERATED = {"config.md", "reference.md"}
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
PAGES = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md") if page.name not in GENERATED]
HELP = {field.name: field.metadata.get("help") for field in fields(PPOConfig)}
OWN = {field.name for field in fields(PPOConfig)} - {field.name for field in fields(TrainingArguments)}

WITHOUT_NUMBERS = {
    "computed from other options; tests/config/test_sizes.py": "batch_size local_batch_size local_mini_batch_size "
    "micro_batch_size mini_batch_size num_total_batches world_size",
    "paths and names: they choose models and places, tests/models, tests/run/test_directory.py": "exp_name "
    "model_adapter_name overwrite_output_dir ref_adapter_name reward_model_path save_critic sft_model_path",
    "where and how long responses are generated; tests/vllm": "vllm_enable_sleep_mode vllm_gpu_memory_utilization "
    "vllm_group_port vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host "
    "vllm_server_port vllm_server_timeout vllm_tensor_parallel_size",
    "what is printed or watched; tests/reporting": "health_checks log_console num_sample_generations",
    "prompts and tools before any number; tests/data, tests/agents": "chat_template_kwargs dataset_num_proc "
    "max_prompt_length max_tool_calling_iterations tool_timeout",
    "launchers and schedules of the libraries; tests/distributed, tests/config": "ds3_gather_for_generation "
    "warmup_ratio",
}
"""Options without an equation of their own: the reason and the tests, and their names."""

EXPLAINED_BY_THEIR_HELP = set(
    "dataset_num_proc exp_name local_batch_size local_mini_batch_size micro_batch_size model_adapter_name "
    "num_total_batches vllm_group_port vllm_max_model_length vllm_model_impl vllm_server_base_url vllm_server_port "
    "vllm_tensor_parallel_size warmup_ratio world_size".split()
)
"""Options of TRL and transformers that the page of options explains in one line, and no other page."""


@pytest.mark.parametrize("option", sorted(OWN))
def test_an_option_is_complete(option: str) -> None:
    has_numbers = option in {*OPTIONS, *BASE} or any(option in variant for variant in NUMBERS.values())
    reasons = [reason for reason, names in WITHOUT_NUMBERS.items() if option in names.split()]
    assert has_numbers != bool(reasons), (
        f"{option} needs values in OPTIONS of tests/fuzz/options.py with its equation in tests/fuzz/simulation.py, a "
        "row in NUMBERS of tests/test_first_update.py, or, without any number, its reason here"
    )
    assert HELP[option], f"{option} needs a help: make its field with _option"
    assert re.search(rf"\b{option}\b", CHANGELOG), f"{option} needs a line in CHANGELOG.md"
    pages = [text for text in PAGES if re.search(rf"\b{option}\b", text)]
    assert bool(pages) != (option in EXPLAINED_BY_THEIR_HELP), f"{option}: explain it on a page of docs/"


def test_the_lists_name_only_options() -> None:
    listed = " ".join(WITHOUT_NUMBERS.values()).split()
    assert len(listed) == len({*listed})
    assert {*listed, *EXPLAINED_BY_THEIR_HELP} <= {field.name for field in fields(PPOConfig)}
