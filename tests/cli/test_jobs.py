"""From AITraining's command line to a run: every option arrives, documented commands work, directories chain."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
)

from rlhf_ppo import PPOConfig
from rlhf_ppo.cli import aitraining
from rlhf_ppo.cli.aitraining import AutoTrainProject, llm
from rlhf_ppo.compat.params import LLMTrainingParams, training_arguments
from rlhf_ppo.rewards.scorer import ScoringBatch
from tests.conftest import make_tokenizer, save_models, tiny_policy, tiny_scorer, write_rows

WORDS = ["w4 w5", "w6 w7 w8", "w9 w10"]


def texts(count: int = 16) -> list[dict[str, Any]]:
    return [{"text": WORDS[index % 3], "answer": "w4"} for index in range(count)]


def pairs(count: int = 16) -> list[dict[str, Any]]:
    return [{"prompt": WORDS[index % 3], "chosen": " w4 w4 w5", "rejected": " w6 w7"} for index in range(count)]


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch, empty_place: Path, plain_runs: None) -> Path:
    """A working directory with a language model, a reward model and data."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    save_models(base=tiny_policy(max_position_embeddings=256), scorer=tiny_scorer(max_position_embeddings=256))
    write_rows("prompts.jsonl", texts())
    write_rows("pairs.jsonl", pairs())
    Path("rewards.py").write_text(
        "def ours(completions, **kwargs):\n    return [1.0 for _ in completions]\n"
        "def theirs(prompt, generated, full_text):\n    return float(full_text == prompt + generated)\n"
    )
    return empty_place


# ---- Every option arrives ----

PPO = "--trainer ppo --rl-reward-model-path scorer --log none"
MULTI = '{"reward_components": {"brief": {"type": "length_penalty"}}}'
# Option: (before, after, what changes in the run; None stands for "not there").
EFFECTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rl_gamma": ("", "--rl-gamma 0.5", {"gamma": 0.5}),
    "rl_gae_lambda": ("", "--rl-gae-lambda 0.5", {"lam": 0.5}),
    "rl_kl_coef": ("", "--rl-kl-coef 0.5", {"kl_coef": 0.5}),
    "rl_value_loss_coef": ("", "--rl-value-loss-coef 0.5", {"vf_coef": 0.5}),
    "rl_clip_range": ("", "--rl-clip-range 0.5", {"cliprange": 0.5}),
    "rl_value_clip_range": ("", "--rl-value-clip-range 0.5", {"cliprange_value": 0.5}),
    "rl_num_ppo_epochs": ("", "--rl-num-ppo-epochs 3", {"num_ppo_epochs": 3}),
    "rl_chunk_size": ("", "--rl-chunk-size 3", {"local_rollout_forward_batch_size": 3}),
    "rl_mini_batch_size": ("", "--rl-mini-batch-size 2", {"num_mini_batches": 4}),
    "rl_optimize_device_cache": ("", "--no-rl-optimize-device-cache", {"torch_empty_cache_steps": None}),
    "rl_max_new_tokens": ("", "--rl-max-new-tokens 7", {"response_length": 7}),
    "rl_top_k": ("", "--rl-top-k 7", {"top_k": 7}),
    "rl_top_p": ("", "--rl-top-p 0.5", {"top_p": 0.5}),
    "rl_temperature": ("", "--rl-temperature 0.5", {"temperature": 0.5}),
    "rl_reward_model_path": (
        "",
        "--rl-reward-model-path other",
        {"reward_model_path": "other", "reward_model": "other"},
    ),
    "rl_reward_fn": ("", "--rl-reward-fn length_penalty", {"functions": ["length_penalty"]}),
    "rl_env_type": (
        f"--rl-multi-objective --rl-env-config '{MULTI}'",
        f"--rl-env-type multi_objective --rl-env-config '{MULTI}'",
        {},
    ),
    "rl_env_config": (
        "--rl-env-type text_generation",
        '--rl-env-type text_generation --rl-env-config \'{"stop_sequences": ["END"]}\'',
        {"stop_strings": ["END"]},
    ),
    "rl_multi_objective": (
        "",
        '--rl-multi-objective --rl-reward-weights \'{"length": 2, "default": 1}\'',
        {"functions": ["length", "default"], "reward_weights": {"reward_model": 1, "length": 2, "default": 1}},
    ),
    "rl_reward_weights": (
        "--rl-reward-fn length",
        "--rl-reward-fn length --rl-reward-weights '{\"length\": 2}'",
        {"reward_weights": {"reward_model": 1.0, "length": 2}},
    ),
    "model_ref": ("", "--model-ref ref", {"ref_model": "ref"}),
}


def parsed(options: str) -> AutoTrainProject:
    """The project of a command line."""
    parser: Any = HfArgumentParser(cast(Any, LLMTrainingParams))
    (params,) = parser.parse_args_into_dataclasses(shlex.split(options))
    return AutoTrainProject(params)


def settings(project: AutoTrainProject) -> dict[str, Any]:
    """All settings of PPO's trainer."""
    return {
        **{option.name: getattr(project.args, option.name) for option in fields(PPOConfig)},
        "functions": [function.__name__ for function in project.reward_funcs],
        "reward_model": project.reward_model,
        "ref_model": project.params.model_ref,
    }


RL_OPTIONS = [option.name for option in fields(LLMTrainingParams) if option.name.startswith("rl_")]


@pytest.mark.parametrize("name", [*RL_OPTIONS, "model_ref"])
def test_every_rl_option_changes_the_run_and_nothing_else(name, workshop):
    before, after, expected = EFFECTS[name]
    old, new = settings(parsed(f"{PPO} {before}")), settings(parsed(f"{PPO} {after}"))

    assert {key: new[key] for key in new if new[key] != old[key]} == expected
    if name == "rl_env_type":  # the short form says the same; without either there is no environment
        assert new["functions"] == ["brief"] and settings(parsed(PPO))["functions"] == []


TRAINING_EFFECTS: dict[str, dict[str, Any]] = {
    "--project-name p": {"output_dir": "p"},
    "--lr 0.5": {"learning_rate": 0.5},
    "--epochs 3": {"num_train_epochs": 3},
    "--batch-size 3": {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 3},
    "--gradient-accumulation 3": {"gradient_accumulation_steps": 3},
    "--warmup-ratio 0.25": {"warmup_steps": 0.25},
    "--optimizer adafactor": {"optim": "adafactor"},
    "--scheduler cosine": {"lr_scheduler_type": "cosine"},
    "--weight-decay 0.5": {"weight_decay": 0.5},
    "--max-grad-norm 0.5": {"max_grad_norm": 0.5},
    "--seed 3": {"seed": 3},
    "--save-strategy steps": {"save_strategy": "steps"},
    "--save-steps 3": {"save_steps": 3},
    "--save-total-limit 3": {"save_total_limit": 3},
    "--logging-steps 3": {"logging_steps": 3},
    "--log tensorboard": {"report_to": ["tensorboard"]},
    "--valid-split train": {"eval_strategy": "epoch", "load_best_model_at_end": True},
    "--valid-split train --eval-strategy no": {},
    "--push-to-hub --username me --token t": {
        "push_to_hub": True,
        "hub_model_id": "me/project-name",
        "hub_token": "t",
    },
}


@pytest.mark.parametrize("trainer", ["reward", "sft", "ppo"])
@pytest.mark.parametrize("options", TRAINING_EFFECTS)
def test_the_options_of_all_trainers_arrive(options, trainer, workshop):
    base = "--log none --trainer " + ("ppo --rl-mini-batch-size 1 --model-ref x" if trainer == "ppo" else trainer)
    old, new = parsed(base).args, parsed(f"{base} {options}").args

    changed = {name for name in TRAINING_NAMES if getattr(new, name) != getattr(old, name)}
    assert {name: getattr(new, name) for name in changed} == TRAINING_EFFECTS[options]


TRAINING_NAMES = {name for effect in TRAINING_EFFECTS.values() for name in effect}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--trainer reward --block-size 300", {"max_length": 300}),
        ("--trainer sft", {"max_length": 1024, "packing": False}),
        ("--trainer sft --model-max-length 77", {"max_length": 77}),
        ("--trainer sft --packing", {"packing": True}),
        ("--trainer sft --auto-find-batch-size", {"auto_find_batch_size": True}),
        ("--trainer ppo --model-ref x --block-size 300", {"max_prompt_length": 150}),
        ("--trainer ppo --model-ref x --model-max-length 200", {"max_prompt_length": 72}),
        ("--trainer ppo --model-ref x", {"max_prompt_length": None, "stop_token": "eos", "num_mini_batches": 1}),
        ("--trainer ppo --model-ref x --batch-size 1", {"num_mini_batches": 1}),  # 4 episodes are fewer than 8
        ("--trainer ppo --model-ref x --batch-size 4 --rl-mini-batch-size 8", {"num_mini_batches": 2}),
        ("--trainer ppo --model-ref x --disable-gradient-checkpointing", {"gradient_checkpointing": False}),
        ("--trainer ppo --model-ref x", {"gradient_checkpointing": True}),
    ],
)
def test_the_options_of_one_trainer_arrive(options, expected, workshop):
    args = parsed(f"--log none {options}").args

    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--model m", {"model_name_or_path": "m", "use_peft": False, "attn_implementation": None}),
        ("--peft --lora-r 3 --lora-alpha 5", {"use_peft": True, "lora_r": 3, "lora_alpha": 5}),
        ("--lora-dropout 0.5", {"lora_dropout": 0.5, "lora_target_modules": "all-linear"}),
        ("--target-modules q_proj,v_proj", {"lora_target_modules": ["q_proj", "v_proj"]}),
        ("--peft --quantization int4", {"load_in_4bit": True, "load_in_8bit": False}),
        ("--peft --quantization int8", {"load_in_4bit": False, "load_in_8bit": True}),
        ("--use-flash-attention-2", {"attn_implementation": "flash_attention_2"}),
        ("--attn-implementation eager", {"attn_implementation": "eager"}),
    ],
)
def test_the_options_of_models_and_adapters_arrive(options, expected):
    args = parsed(f"--trainer sft --log none {options}").model_args

    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("value", "expected"), [("bf16", (True, False)), ("fp16", (False, True)), (None, (False, False))]
)
def test_mixed_precision(value, expected):
    arguments = training_arguments(LLMTrainingParams(trainer="sft", mixed_precision=value))

    assert (arguments["bf16"], arguments["fp16"]) == expected


def test_wandb_is_left_out_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    assert parsed("--trainer sft").args.report_to == []


# ---- Rewards ----


@pytest.mark.parametrize(
    ("options", "model", "functions", "weights"),
    [
        ("--model-ref base", None, ["default"], None),
        ("--model-ref base --rl-reward-fn correctness", None, ["correctness"], None),
        ("--model-ref base --rl-reward-fn rewards.py:ours", None, ["ours"], None),
        ("--rl-reward-model-path scorer --rl-env-type text_generation", "scorer", [], None),
        ("--model-ref base --rl-env-type text_generation --rl-reward-fn rewards.py:ours", None, ["ours"], None),
        (
            """--model-ref base --rl-multi-objective --rl-reward-weights '{"length": 2}'""",
            None,
            ["length"],
            {"length": 2.0},
        ),
        (
            """--rl-reward-model-path scorer --rl-multi-objective --rl-reward-weights '{"length": 2}'""",
            "scorer",
            ["length"],
            {"reward_model": 1.0, "length": 2.0},
        ),
        ("--rl-reward-model-path scorer --rl-env-type preference_comparison", None, ["preference"], None),
    ],
)
def test_what_scores_responses(options, model, functions, weights, workshop):
    job = parsed(f"--trainer ppo --log none {options}")

    assert job.reward_model == model
    assert [function.__name__ for function in job.reward_funcs] == functions
    assert job.args.reward_weights == weights


def test_a_reward_function_may_have_aitrainings_signature(workshop):
    job = parsed("--trainer ppo --log none --model-ref base --rl-reward-fn rewards.py:theirs")

    assert job.reward_funcs[0](prompts=["a ", "b "], completions=["x", "y"]) == [1.0, 1.0]


# ---- Documented command lines ----

DOCUMENTED = {
    "PPO with the reward model": """--train --trainer ppo --model gpt2 --rl-reward-model-path ./reward_model
        --data-path prompts.csv --project-name ppo_model""",
    "text generation": """--train --trainer ppo --model gpt2 --rl-reward-model-path ./reward_model
        --rl-env-type text_generation --rl-env-config '{"stop_sequences": ["\\n", "END"]}' --data-path prompts.csv
        --project-name ppo_custom_env""",
    "multi-objective": """--train --trainer ppo --model gpt2 --rl-reward-model-path ./reward_model
        --rl-env-type multi_objective --rl-multi-objective true --rl-env-config '{
    "reward_components": {
      "correctness": {"type": "keyword", "keywords": ["correct", "yes"]},
      "formatting": {"type": "keyword", "keywords": ["Answer:"]}
    },
    "reward_weights": {"correctness": 1.0, "formatting": 0.1}
  }' --data-path math_problems.csv --project-name ppo_multi_objective""",
    "preferences": """--train --trainer ppo --model gpt2 --rl-reward-model-path ./reward_model
        --rl-env-type preference_comparison --rl-env-config '{}' --data-path preferences.csv
        --project-name ppo_preferences""",
    "reward model": """--train --trainer reward --model gpt2 --data-path preference_data
        --project-name reward_model""",
    "reward model by columns": """--model gpt2 --trainer reward --data-path ./preferences.json
        --prompt-text-column prompt --text-column chosen --rejected-text-column rejected
        --project-name my-reward-model --epochs 3 --batch-size 8""",
}
"""As they stand in AITraining's documentation, after `aitraining llm`."""


@pytest.fixture
def documented_places(workshop: Path) -> Path:
    """What the documented commands name, in local directories."""
    policy, scorer = tiny_policy(max_position_embeddings=256), tiny_scorer(max_position_embeddings=256)
    save_models(**{"gpt2": policy, "google/gemma-3-270m": policy, "reward_model": scorer, "reward-model": scorer})
    for name in ("prompts.csv", "math_problems.csv", "preferences.csv"):
        Path(name).write_text("text,answer\n" + "".join(f"{WORDS[index % 3]},w4\n" for index in range(16)))
    write_rows("preference_data/train.jsonl", pairs())
    Path("preferences.json").write_text(json.dumps(pairs()))
    return workshop


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trainers that would have been trained; none is."""
    trainers: list[Any] = []
    monkeypatch.setattr(aitraining, "train_and_save", lambda trainer, *_, **__: trainers.append(trainer))
    return trainers


@pytest.mark.parametrize("command", DOCUMENTED)
def test_a_documented_command_builds_its_trainer(command, documented_places, built):
    llm(shlex.split(DOCUMENTED[command]))

    (trainer,) = built
    if "reward model" in command and "PPO" not in command:
        assert set(trainer.train_dataset.column_names) >= {"chosen_ids", "rejected_ids"}
        assert trainer.args.per_device_train_batch_size == (8 if "columns" in command else 2)
        return
    assert (trainer.args.gamma, trainer.args.response_length, trainer.args.top_k) == (0.99, 128, 50)
    assert trainer.args.report_to == ["wandb"]
    names = {
        "multi-objective": ["reward_model", "correctness", "formatting"],
        "preferences": ["preference"],
    }.get(command, ["reward_model"])
    assert list(trainer.scorer.names) == names
    assert trainer.args.stop_strings == (["\n", "END"] if command == "text generation" else None)


def test_the_built_trainer_has_the_resolved_arguments_and_models(workshop):
    save_models(other=tiny_policy(seed=5, max_position_embeddings=256))
    job = parsed(f"{PPO} --model base --data-path prompts.jsonl --model-ref other --max-samples 9")

    trainer: Any = job.build()

    assert trainer.args is job.args and len(trainer.train_dataset) == 9
    for folder, model in (("base", trainer.policy_model), ("other", trainer.reference.model)):
        expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        found = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
        assert all(torch.equal(found[next(n for n in found if n.endswith(name))], expected[name]) for name in expected)


# ---- Running ----


RUN = "--log none --lr 1e-2 --batch-size 4 --gradient-accumulation 1 --disable-gradient-checkpointing"


def test_each_steps_directory_feeds_the_next(workshop):
    llm(shlex.split(f"--train --trainer sft --model base --data-path prompts.jsonl --project-name sft {RUN}"))
    trained: Any = llm(
        shlex.split(f"--train --trainer reward --model sft --data-path pairs.jsonl --project-name judge {RUN}")
    )
    ppo: Any = llm(
        shlex.split(
            f"--train --trainer ppo --model sft --rl-reward-model-path judge --data-path prompts.jsonl {RUN} "
            "--project-name out --rl-max-new-tokens 4"
        )
    )

    assert ppo.state.global_step == 4
    final = AutoModelForCausalLM.from_pretrained("out").state_dict()
    assert AutoTokenizer.from_pretrained("out").get_vocab() == make_tokenizer().get_vocab()
    start = AutoModelForCausalLM.from_pretrained("sft").state_dict()
    assert any(not torch.equal(final[name], start[name]) for name in start)
    assert json.loads(Path("out/trainer_state.json").read_text())["global_step"] == 4
    # The same texts score the same in both steps.
    rows = [*trained.train_dataset["chosen_ids"][:3], *trained.train_dataset["rejected_ids"][:3]]
    for ids in map(torch.tensor, rows):
        with torch.no_grad():
            wanted = trained.model.eval()(input_ids=ids[None]).logits
        mask = torch.ones_like(ids)[None].bool()
        batch = ScoringBatch(ids[None], mask, mask[:, 2:], {}, mask[:, 0])
        assert abs(ppo.scorer(batch).total.item() - wanted.item()) < 1e-5


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("trainer", ["sft", "reward"])
def test_adapters_are_merged_unless_switched_off(trainer, merge, workshop):
    pytest.importorskip("peft")
    data = "pairs.jsonl" if trainer == "reward" else "prompts.jsonl"
    switch = "" if merge else "--no-merge-adapter"

    trained: Any = llm(
        shlex.split(
            f"--trainer {trainer} --model base --data-path {data} --project-name out --peft {switch} {RUN} "
            "--save-strategy no --lora-dropout 0"
        )
    )

    assert Path("out/adapter_config.json").exists() is not merge
    assert Path("out/model.safetensors").exists() is merge
    if merge:
        auto = AutoModelForSequenceClassification if trainer == "reward" else AutoModelForCausalLM
        ids = torch.tensor([[5, 6, 7, 1]])
        with torch.no_grad():
            wanted, found = trained.model.eval()(ids).logits, auto.from_pretrained("out")(ids).logits
        assert torch.allclose(wanted, found, atol=1e-5)


def test_padding_is_the_saved_tokenizers_side(workshop):
    llm(shlex.split(f"--trainer sft --model base --data-path prompts.jsonl --project-name out --padding right {RUN}"))

    assert json.loads(Path("out/tokenizer_config.json").read_text())["padding_side"] == "right"


def test_the_documented_python_interface(documented_places, built):
    params = LLMTrainingParams(
        model="google/gemma-3-270m", data_path="./prompts.csv", project_name="ppo-model", trainer="ppo",
        rl_reward_model_path="./reward-model", rl_gamma=0.99, rl_gae_lambda=0.95, rl_kl_coef=0.1, rl_clip_range=0.2,
        rl_num_ppo_epochs=4, epochs=1, batch_size=4, lr=1e-5,
        rl_multi_objective=True, rl_env_type="multi_objective",
        rl_reward_weights='{"correctness": 1.0, "formatting": 0.1}',
    )  # fmt: skip
    AutoTrainProject(params=params, backend="local", process=True).create()

    (trainer,) = built
    assert (trainer.args.kl_coef, trainer.args.learning_rate) == (0.1, 1e-5)
    assert list(trainer.scorer.names) == ["reward_model", "correctness", "formatting"]
