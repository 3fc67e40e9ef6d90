"""What README and docs show runs, and what they name exists."""

import inspect
import json
import pkgutil
import re
import runpy
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl.trainer.model_config import ModelConfig
from trl.trainer.reward_config import RewardConfig
from trl.trainer.sft_config import SFTConfig

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.cli.aitraining import LLMCommand
from rlhf_ppo.cli.arguments import PPOArgumentParser, PPOScriptArguments
from rlhf_ppo.cli.estimate import EstimateArguments
from rlhf_ppo.cli.judge import JudgeArguments
from rlhf_ppo.compat.params import LLMTrainingParams
from rlhf_ppo.rewards.builtin import BUILTIN_REWARDS
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from tests.agents.test_episodes import DONE, made

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_ELSEWHERE = {
    "docs/agents.md",
    "docs/index.md",
    *(f"docs/tutorials/{path.name}" for path in (ROOT / "docs" / "tutorials").glob("*")),
}
LLAMA = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """Line number and text of each ```python block."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text[: match.start()].count("\n") + 1, match.group(1)) for match in found]


@pytest.fixture
def workshop(tmp_path, monkeypatch, tokenizer, plain_runs):
    """A working directory with what the snippets name: two tiny models and some prompts."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    LlamaForCausalLM(LLAMA).save_pretrained("models/sft")
    LlamaForSequenceClassification(LlamaConfig(**{**LLAMA.to_dict(), "num_labels": 1})).save_pretrained(
        "models/reward"
    )
    tokenizer.save_pretrained("models/sft")
    tokenizer.save_pretrained("models/reward")
    rows = [{"prompt": f"w{index % 20} w{index % 7}", "topic": f"w{index % 5}"} for index in range(140)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(page: Path) -> dict:
    """Run a page's snippets in one namespace, so that an error's traceback names the page's own line."""
    namespace: dict = {"__name__": "snippets"}
    for line, block in python_blocks(page):
        exec(compile("\n" * line + block, str(page), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/index.md", marks=pytest.mark.slow)])
def test_the_first_example_trains_a_policy_with_a_local_model_and_data(page, workshop) -> None:
    [(_, example)] = python_blocks(ROOT / page)
    local = {
        '"Qwen/Qwen2.5-0.5B-Instruct"': '"models/sft"',
        '"trl-lib/tldr"': '"prompts.jsonl"',
        "total_episodes=4096": "total_episodes=32",
        "64": "8",
    }
    for hub, here in local.items():
        assert example.count(hub) == 1
        example = example.replace(hub, here)
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 14
    namespace: dict = {"__name__": "snippets"}

    exec(compile(example, page, "exec"), namespace)

    before = LlamaForCausalLM.from_pretrained("models/sft").state_dict()
    after = LlamaForCausalLM.from_pretrained("runs/tldr").state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert namespace["trainer"].state.episode == namespace["args"].total_episodes


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES[1:] if python_blocks(page) and str(page.relative_to(ROOT)) not in RUN_ELSEWHERE],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_snippets_of_the_docs_run(page, workshop):
    run(page)


def test_what_research_brings_takes_at_most_twenty_lines() -> None:
    blocks = [block for _, block in python_blocks(ROOT / "docs" / "research.md")]

    assert len(blocks) == 10 and max(len(block.splitlines()) for block in blocks) <= 20


def commands(page: Path) -> list[list[str]]:
    """The words of each `python examples/ppo...` command in a ```bash block."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("python examples/ppo")]


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for page in PAGES for words in commands(page)], ids=lambda words: words[1])
def test_the_commands_that_are_shown_train_a_policy(words, workshop, monkeypatch):
    """As processes of their own such commands run in `tests/examples/test_documented_commands.py`."""
    monkeypatch.setattr(sys, "argv", [*words[1:], "--use_cpu"])
    runpy.run_path(str(ROOT / words[1]), run_name="__main__")

    saved = Path(words[words.index("--output_dir") + 1])
    assert (saved / "adapter_model.safetensors" if "--use_peft" in words else saved / "model.safetensors").is_file()


def test_launches_on_many_devices_are_understood():
    """By accelerate, and the options of the example by the example; a 2 stands for what the shell would put in."""
    page = (ROOT / "docs" / "distributed.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"accelerate launch (--[^`'\n]*)", page)
    known = PPOArgumentParser((PPOScriptArguments, PPOConfig, ModelConfig))._option_string_actions
    assert len(commands) == 3  # one node, several, SLURM
    for command in commands:
        words = shlex.split(re.sub(r"\$(\(\(.*?\)\)|\w+)", "2", command))
        args = launch_command_parser().parse_args(words)
        assert (ROOT / args.config_file).is_file() and (ROOT / args.training_script).is_file()
        assert {word for word in args.training_script_args if word.startswith("--")} <= known.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]

    assert missing == []


SOURCES = [path for folder in ("rlhf_ppo", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_what_the_reference_shows_exists() -> None:
    for page in PAGES:
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            assert pkgutil.resolve_name(name), page


def test_paths_that_are_named_exist():
    """In pages, docstrings and scripts; `examples/scripts/` is TRL's, and `<...>` stands for a name."""
    named = re.compile(
        r"(?<![\w/.])(?:accelerate_configs|benchmarks|docs|examples(?!/scripts)|rlhf_ppo|tests)/[\w./-]*\w\.\w+"
    )
    texts = {path: path.read_text() for path in (*PAGES, *SOURCES, ROOT / "Makefile", ROOT / "mkdocs.yml")}
    found = {(path, name) for path, text in texts.items() for name in named.findall(text)}

    assert {name for _, name in found} >= {"accelerate_configs/deepspeed_zero2.yaml", "examples/ppo_tldr.py"}
    assert [(str(path.relative_to(ROOT)), name) for path, name in sorted(found) if not (ROOT / name).exists()] == []


OPTIONS_OF_OTHERS = {
    "docs/from-ms-swift.md": set(
        "adapters dataset external_plugins lora_rank max_length quant_bits ref_model reward_adapters reward_model "
        "rlhf_type system target_modules template torch_dtype train_type use_vllm".split()
    ),
    "docs/distributed.md": {
        "gpus-per-node",
        "nodes",
        "nproc_per_node",
        "ntasks-per-node",
        "signal",
    },  # torchrun, SLURM
    "docs/critic.md": {"changes", "credit", "data", "tasks", "variants"},  # of the benchmarks
    "docs/judging.md": {"num_examples"},  # of the script
    "docs/metrics.md": {"env-ids", "filters", "output-filename", "pc", "scan-history"},  # openrlbenchmark
    "docs/pipeline.md": {"judge_preferences", "minutes", "preferences", "prompts", "texts"},  # of `rlhf-ppo init`
    "docs/learning-results.md": {
        "against-trl",
        "data",
        "first-seed",
        "updates",
        "jobs",
        "no-deps",
        "options",
        "purpose",
        "target",
        "tasks",
    },  # of run.py and pip
    "docs/generation.md": {
        *("logprobs-mode", "max-model-len", "weight-transfer-config"),  # vLLM's server
        *("data", "options", "tasks"),  # the benchmark
    },
}
ARGUMENTS_OF_OTHERS = {
    "docs/agents.md": {"environments"},  # of reward functions
    "docs/critic.md": {"answer", "num_labels", "weighted"},  # of rlhf_ppo.decoding.best_of_n, of `from_pretrained`
    "docs/from-old-trl.md": {"kl_penalty"},
    "docs/migrating.md": {"return_dict"},  # of apply_chat_template
    "docs/models.md": {"bias", "is_decoder"},  # of PEFT's LoraConfig; of encoders' configurations
    "docs/usage.md": {"pruner"},  # of Optuna's study
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_and_arguments_that_are_named_exist(page):
    """Of any of our commands or of `accelerate launch`; `name=value` is a field or an argument of the trainer."""
    configurations = (PPOConfig, LLMTrainingParams, LLMCommand, JudgeArguments, EstimateArguments, PPOScriptArguments)
    known = {f.name for each in (*configurations, SFTConfig, RewardConfig, ModelConfig) for f in fields(each)}
    arguments = known | set(inspect.signature(PPOTrainer).parameters)
    launch = {name for names in launch_command_parser()._option_string_actions for name in [names.lstrip("-")]}
    drawing = {"seeds", "metrics", "x", "output", "separately", "judged"}  # of `rlhf-ppo plot` and `report`
    options = known | launch | drawing | {"config", "help", "help_all", "watch"}

    text = page.read_text()
    named = set(re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", text))
    named -= OPTIONS_OF_OTHERS.get(str(page.relative_to(ROOT)), set()) | {"no"}
    assert {name for name in named if name.replace("-", "_").removeprefix("no_") not in options} == set()
    arguments |= ARGUMENTS_OF_OTHERS.get(str(page.relative_to(ROOT)), set())
    assert set(re.findall(r"`([a-z]\w*)=", text)) <= arguments


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_that_are_named_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))

    assert named <= targets


OF_EPISODES = ("episode/", "environment/", "tools/", "time/environment", "rewards/turns/mean")


def test_metrics_page_lists_exactly_what_a_run_logs(make_trainer, tmp_path):
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    trainer = make_trainer(
        eval_dataset=[{"input_ids": [5, 6]}, {"input_ids": [7]}] * 4,
        eval_strategy="steps",
        eval_steps=1,
        on_divergence="skip",
        kl_stop=10.0,
        ptx_coef=0.1,
        ptx_dataset=[{"text": "w1 w2"}],
        positive_nll_coef=0.1,
        positive_nll_threshold=-1.0,
        kl_target=6.0,
        critic_warmup_steps=1,
        critic_audit_steps=1,
        score_scaling=True,
        policy_loss="cispo",
        value_loss="hl_gauss",
        critic_ensemble=2,
    )

    trainer.train()

    entries = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    logged = {key.replace("/count_w4/", "/<name>/") for entry in entries for key in entry} - {"step"}
    played = made(tmp_path, [("add", {"x": 2.0})], DONE)
    played.train()
    of_episodes = {key for entry in played.state.log_history for key in entry if key.startswith(OF_EPISODES)}
    logged |= {re.sub(r"^tools/\w+/", "tools/<name>/", key) for key in of_episodes}
    logged.add("episode/invalid_turns_frac")  # of text environments alone
    logged |= {"generation/lag", "time/worker"}  # of generation_overlap alone: tests/generation/test_overlap.py
    assert {re.sub("^health/.*", "health/<check>", key) for key in logged} == set(rows)
    assert len(rows) == len(set(rows))


def test_rewards_page_lists_the_settings_of_servers_and_built_ins():
    page = (ROOT / "docs" / "rewards.md").read_text()
    defaults = {field.name: field.default for field in fields(RewardEndpoint) if field.name not in ("url", "name")}
    servers = dict(re.findall(r"^\| `(\w+)` \| `?([\w.]+)`? \| [^|]+ \|$", page, re.MULTILINE))
    assert {name: type(defaults[name])(value) for name, value in servers.items()} == defaults

    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)
    settings = {name: set(inspect.signature(made).parameters) for name, made in BUILTIN_REWARDS.items()}
    assert {name: set(re.findall(r"`(\w+)`", listed)) for name, listed in rows} == settings
