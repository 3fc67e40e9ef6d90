"""What README and docs show runs, and what they name exists."""

import inspect
import pkgutil
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import ModelConfig, RewardConfig, ScriptArguments, SFTConfig

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.cli.estimate import EstimateArguments
from rlhf_ppo.cli.judge_arguments import JudgeArguments
from rlhf_ppo.cli.main import main
from rlhf_ppo.compat.params import LLMTrainingParams
from rlhf_ppo.rewards.builtin import BUILTIN_REWARDS
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from tests.agents.test_episodes import DONE, made
from tests.conftest import tiny_policy, write_rows
from tests.runs import assert_identical, die_and_resume

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
RUN = ("usage", "rewards", "research", "migrating", "aitraining")
"""Pages whose snippets run in order, with `models/sft`, `models/reward` and `prompts.jsonl`."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def workshop(tmp_path, monkeypatch, tokenizer, plain_runs):
    """A working directory with what the snippets name: two tiny models and some prompts."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained("models/sft")
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained("models/reward")
    for name in ("sft", "reward"):
        tokenizer.save_pretrained(f"models/{name}")
    write_rows("prompts.jsonl", [{"prompt": f"w{i % 20} w{i % 7}", "topic": f"w{i % 5}"} for i in range(140)])
    return tmp_path


def test_the_first_example_trains_a_policy_with_a_local_model_and_data(workshop) -> None:
    [example] = blocks(ROOT / "README.md", "python")
    local = {"Qwen/Qwen2.5-0.5B-Instruct": "models/sft", "trl-lib/tldr": "prompts.jsonl", "4096": "32", "64": "8"}
    for hub, here in local.items():
        assert example.count(hub) == 1
        example = example.replace(hub, here)
    namespace: dict = {"__name__": "snippets"}

    exec(compile(example, "README.md", "exec"), namespace)

    before = LlamaForCausalLM.from_pretrained("models/sft").state_dict()
    after = LlamaForCausalLM.from_pretrained("runs/tldr").state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert namespace["trainer"].state.episode == 32


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_snippets_of_the_docs_run(page, workshop):
    path, namespace = ROOT / "docs" / f"{page}.md", {"__name__": "snippets"}
    found = blocks(path, "python")
    assert found
    for block in found:
        exec(compile(block, str(path), "exec"), namespace)


@pytest.mark.slow
def test_the_commands_of_the_docs_run(workshop, monkeypatch):
    """Those of three pages in order: they train a policy, judge it, write a pipeline's file and a report."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for source, names in {"sft": ("models/base", "runs/writer"), "reward": ("runs/judge",)}.items():
        for name in names:
            shutil.copytree(f"models/{source}", name)
    write_rows("texts.jsonl", [{"text": f"w{i % 20} w{i % 7} w{i % 5}"} for i in range(40)])
    pairs = [{"prompt": f"w{i % 20} w{i % 7}", "chosen": " w1 w2", "rejected": " w3"} for i in range(140)]
    write_rows("pairs.jsonl", pairs)
    pages = (ROOT / "docs" / f"{page}.md" for page in ("command-line", "judging", "pipeline"))
    text = "".join(block for page in pages for block in blocks(page, "bash"))
    for program, command, *words in map(shlex.split, text.replace("\\\n", "").splitlines()):
        if command == "report":
            for run in words[: words.index("--output")]:
                shutil.copytree("runs/policy", run)
        if program == "rlhf-ppo":
            main([command, *words, *(["--dry_run"] if command == "pipeline" else [])])  # its steps are processes
    assert Path("judged/judged-2.parquet").is_file() and Path("report.html").is_file()


def test_the_moving_reference_of_the_recipes_is_an_average_of_the_policies():
    (block,) = (block for block in blocks(ROOT / "docs" / "recipes.md", "python") if "MovingReference" in block)
    namespace: dict = {}
    exec(block, namespace)
    reference, policy = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(reference.weight, 2.0)
    torch.nn.init.constant_(policy.weight, 10.0)
    namespace["MovingReference"](reference, decay=0.75).on_step_end(None, None, None, model=policy)
    assert reference.weight.item() == 4.0 and policy.weight.item() == 10.0


def test_the_moving_reference_of_the_recipes_goes_on_where_a_run_died(make_trainer, tmp_path):
    text, namespace = (ROOT / "docs" / "recipes.md").read_text(), {}
    exec(
        next(block for block in blocks(ROOT / "docs" / "recipes.md", "python") if "MovingReference" in block),
        namespace,
    )
    [saving] = re.findall(r"`(trainer\.register_stateful\(.*?\))`", text)

    def make(callbacks=(), **arguments):
        reference = tiny_policy()
        moving = namespace["MovingReference"](reference, decay=0.5)
        trainer = make_trainer(ref_model=reference, callbacks=[moving, *callbacks], **arguments)
        exec(saving, {"trainer": trainer, "reference": reference})
        return trainer

    resumed, whole = die_and_resume(make, tmp_path, lambda: {"learning_rate": 0.01})
    assert_identical(dict(resumed.reference.model.state_dict()), dict(whole.reference.model.state_dict()))


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "benchmarks").rglob("*.md"))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        if "://" in target:
            continue
        other = page.parent / target if target else page
        assert other.exists(), target
        if anchor and other.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_tables_are_whole(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        cells = [len(re.split(r"(?<!\\)\|", row.strip().strip("|"))) for row in table.splitlines()]
        assert len(set(cells)) == 1 and len(cells) > 1, table.splitlines()[0]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks" / "RESULTS.md"], ids=[*IDS, "benchmarks/RESULTS.md"])
def test_make_targets_and_paths_that_are_named_exist(page):
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    named = re.findall(r"(?<![\w/.])(?:accelerate_configs|benchmarks|examples|rlhf_ppo|tests)/[\w./-]*\w\.\w+", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


OF_OTHERS = {
    "docs/distributed.md": "gpus-per-node nodes nproc_per_node ntasks-per-node signal".split(),  # torchrun, SLURM
    "docs/judging.md": ["num_examples"],
    "docs/faults.md": ["signal", "pid"],  # SLURM, py-spy
    "docs/pipeline.md": "preferences prompts texts".split(),
    "docs/tutorials/lora.md": "file lora preferences prompts texts".split(),
    "docs/tutorials/own-data.md": "preferences prompts texts".split(),
    "docs/command-line.md": "environment tools".split(),
    "docs/agents.md": "environment tools".split(),
    "docs/generation.md": "logprobs-mode weight-transfer-config".split(),  # vLLM's server
    "docs/migrating.md": (
        "adapters reward_model model train_type lora_rank target_modules quant_bits torch_dtype dataset max_length "
        "template external_plugins use_vllm rlhf_type"
    ).split(),
}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_options_that_are_named_exist(page):
    """Of any of our commands, of TRL's, or of `accelerate launch`."""
    kinds = (PPOConfig, LLMTrainingParams, JudgeArguments, EstimateArguments, SFTConfig, RewardConfig, ModelConfig)
    known = {field.name for kind in (*kinds, ScriptArguments) for field in fields(kind)}
    known |= {name.lstrip("-") for name in launch_command_parser()._option_string_actions}
    known |= set("seeds metrics x output separately judged config help dry_run reward_funcs reward_weights".split())
    known |= {"sft_model_path", "reward_model_path", "trainer", "train", "output_dir", "model"}
    named = set(re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", page.read_text()))
    named -= set(OF_OTHERS.get(str(page.relative_to(ROOT)), ()))
    assert {name for name in named if name.replace("-", "_") not in known and name not in known} == set()


def test_the_reference_shows_what_exists_and_every_public_method_of_the_trainer():
    text = (ROOT / "docs" / "reference.md").read_text()
    for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE):
        assert pkgutil.resolve_name(name)
    own = {name for name, value in vars(PPOTrainer).items() if inspect.isfunction(value) and name[0] != "_"}
    assert own <= set(re.findall(r"^        - (\w+)$", text, re.MULTILINE))


OF_EPISODES = ("episode/", "environment/", "tools/", "time/environment", "rewards/turns/mean")


def test_the_page_of_metrics_lists_exactly_what_a_run_logs(make_trained, tmp_path):
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    trainer = make_trained(
        eval_dataset=[{"input_ids": [5, 6]}, {"input_ids": [7]}] * 4,
        eval_strategy="steps",
        eval_steps=1,
        kl_stop=10.0,
        ptx_coef=0.1,
        ptx_dataset=[{"text": "w1 w2"}],
        kl_target=6.0,
        critic_warmup_steps=1,
        score_scaling=True,
    )
    entries = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    logged = {key.replace("/count_w4/", "/<name>/") for entry in entries for key in entry} - {"step"}
    played = made(tmp_path, [("add", {"x": 2.0})], DONE)
    played.train()
    of_episodes = {key for entry in played.state.log_history for key in entry if key.startswith(OF_EPISODES)}
    logged |= {re.sub(r"^tools/\w+/", "tools/<name>/", key) for key in of_episodes}
    assert {re.sub("^health/.*", "health/<check>", key) for key in logged} == set(rows)
    assert len(rows) == len(set(rows))


def test_the_page_of_rewards_lists_the_settings_of_servers_and_built_ins():
    page = (ROOT / "docs" / "rewards.md").read_text()
    defaults = {field.name: field.default for field in fields(RewardEndpoint) if field.name not in ("url", "name")}
    servers = dict(re.findall(r"^\| `(\w+)` \| `?([\w.]+)`? \| [^|]+ \|$", page, re.MULTILINE))
    assert {name: type(defaults[name])(value) for name, value in servers.items()} == defaults

    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)
    settings = {name: set(inspect.signature(made).parameters) for name, made in BUILTIN_REWARDS.items()}
    assert {name: set(re.findall(r"`(\w+)`", listed)) for name, listed in rows} == settings


def test_the_first_tutorial_shows_the_example_that_is_shipped():
    example = (ROOT / "examples" / "first_run.py").read_text()
    page = (ROOT / "docs" / "tutorials" / "first-run.md").read_text()
    assert f'```python title="examples/first_run.py"\n{example}```\n' in page


def test_the_words_of_the_docs_and_the_lines_of_the_readme_are_few():
    texts = (page.read_text() for page in PAGES if page.name != "CONTRIBUTING.md")
    written = (re.sub(r"^<!-- .*?^<!-- end -->$", "", text, flags=re.DOTALL | re.MULTILINE) for text in texts)
    assert sum(len(text.split()) for text in written) <= 30_000  # without generated tables
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 80 and "`make demo` trains" in readme and "`make test` runs the tests" in readme
