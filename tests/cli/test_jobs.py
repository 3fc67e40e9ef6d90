"""From AITraining's command line to a run: options take effect, documented commands work, and directories chain."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

from rlhf_ppo import PPOConfig
from rlhf_ppo.cli import aitraining
from rlhf_ppo.cli.aitraining import AutoTrainProject, llm
from rlhf_ppo.compat.params import LLMTrainingParams
from rlhf_ppo.rewards.builtin import Default
from tests.conftest import make_tokenizer, save_models, tiny_policy, tiny_scorer, write_rows

WORDS = ["w4 w5", "w6 w7 w8", "w9 w10"]


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch, empty_place: Path, plain_runs: None) -> Path:
    """A working directory with a language model, a reward model and data."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    policy, scorer = tiny_policy(max_position_embeddings=256), tiny_scorer(max_position_embeddings=256)
    save_models(base=policy, scorer=scorer)
    write_rows("prompts.jsonl", [{"text": WORDS[index % 3], "answer": "w4"} for index in range(16)])
    rows = [{"prompt": WORDS[index % 3], "chosen": " w4 w4 w5", "rejected": " w6 w7"} for index in range(16)]
    write_rows("pairs.jsonl", rows)
    Path("rewards.py").write_text(
        "def ours(completions, **kwargs):\n    return [1.0 for _ in completions]\n"
        "def theirs(prompt, generated, full_text):\n    return float(full_text == prompt + generated)\n"
    )
    return empty_place


def parsed(options: str) -> AutoTrainProject:
    """The project of a command line."""
    parser: Any = HfArgumentParser(LLMTrainingParams)  # pyright: ignore[reportArgumentType]
    (params,) = parser.parse_args_into_dataclasses(shlex.split(f"--log none {options}"))
    return AutoTrainProject(params)


def settings(options: str) -> dict[str, Any]:
    """All settings of a project."""
    project = parsed(options)
    return {
        **{option.name: getattr(project.args, option.name) for option in fields(type(project.args))},
        **{option.name: getattr(project.model_args, option.name) for option in fields(type(project.model_args))},
        "functions": [function.__name__ for function in project.reward_funcs],
        "reward_model": project.reward_model,
        "ref_model": project.params.model_ref,
    }


PPO = "--trainer ppo --rl-reward-model-path scorer"
SFT, REWARD = "--trainer sft", "--trainer reward"
BRIEF = '{"reward_components": {"brief": {"type": "length_penalty"}}}'
EFFECTS: list[tuple[str, str, dict[str, Any]]] = [
    (PPO, "--rl-gamma 0.5", {"gamma": 0.5}),
    (PPO, "--rl-gae-lambda 0.5", {"lam": 0.5}),
    (PPO, "--rl-kl-coef 0.5", {"kl_coef": 0.5}),
    (PPO, "--rl-value-loss-coef 0.5", {"vf_coef": 0.5}),
    (PPO, "--rl-clip-range 0.5", {"cliprange": 0.5}),
    (PPO, "--rl-value-clip-range 0.5", {"cliprange_value": 0.5}),
    (PPO, "--rl-num-ppo-epochs 3", {"num_ppo_epochs": 3}),
    (PPO, "--rl-chunk-size 3", {"local_rollout_forward_batch_size": 3}),
    (PPO, "--rl-mini-batch-size 2", {"num_mini_batches": 4}),
    (PPO, "--no-rl-optimize-device-cache", {"torch_empty_cache_steps": None}),
    (PPO, "--rl-max-new-tokens 7", {"response_length": 7}),
    (PPO, "--rl-top-k 7", {"top_k": 7}),
    (PPO, "--rl-top-p 0.5", {"top_p": 0.5}),
    (PPO, "--rl-temperature 0.5", {"temperature": 0.5}),
    (PPO, "--rl-reward-model-path other", {"reward_model_path": "other", "reward_model": "other"}),
    (PPO, "--rl-reward-fn length_penalty", {"functions": ["length_penalty"]}),
    (PPO, "--model-ref ref", {"ref_model": "ref"}),
    (f"{PPO} --rl-env-type text_generation", '--rl-env-config \'{"stop_sequences": ["END"]}\'',
     {"stop_strings": ["END"]}),
    (PPO, f"--rl-env-type multi_objective --rl-env-config '{BRIEF}'", {"functions": ["brief"]}),
    (PPO, '--rl-multi-objective --rl-reward-weights \'{"length": 2, "default": 1}\'',
     {"functions": ["length", "default"], "reward_weights": {"reward_model": 1, "length": 2, "default": 1}}),
    (f"{PPO} --rl-reward-fn length", "--rl-reward-weights '{\"length\": 2, \"reward_model\": 0.5}'",
     {"reward_weights": {"reward_model": 0.5, "length": 2}}),
    (f"{PPO} --rl-reward-fn length", "--rl-reward-weights '{\"reward_model\": 0.5}'",
     {"reward_weights": {"reward_model": 0.5, "length": 1}}),
    (f"{PPO} --rl-reward-fn length", '--rl-multi-objective --rl-reward-weights \'{"length": 2, "default": 3}\'',
     {"functions": ["default", "length"], "reward_weights": {"reward_model": 1, "length": 2, "default": 3}}),
    (f"{PPO} --rl-reward-fn length", '--rl-multi-objective --rl-reward-weights \'{"default": 3}\'',
     {"functions": ["default", "length"], "reward_weights": {"reward_model": 1, "length": 1, "default": 3}}),
    (f"{PPO} --rl-reward-fn rewards.py:ours", '--rl-multi-objective --rl-reward-weights \'{"ours": 2}\'',
     {"reward_weights": {"reward_model": 1, "ours": 2}}),
    (PPO, "--rl-env-type preference_comparison", {"functions": ["preference"], "reward_model": None}),
    (PPO, "--block-size 300", {"max_prompt_length": 150}),
    (PPO, "--model-max-length 200", {"max_prompt_length": 72}),
    (PPO, "--disable-gradient-checkpointing",
     {"gradient_checkpointing": False, "activation_checkpointing": False}),
    (REWARD, "--block-size 300", {"max_length": 300}),
    (SFT, "--model-max-length 77", {"max_length": 77}),
    (SFT, "--packing", {"packing": True}),
    (SFT, "--peft --lora-r 3 --lora-alpha 5", {"use_peft": True, "lora_r": 3, "lora_alpha": 5}),
    (f"{SFT} --peft", "--target-modules q_proj,v_proj", {"lora_target_modules": ["q_proj", "v_proj"]}),
    (SFT, "--quantization int4", {"load_in_4bit": True}),
    (SFT, "--attn-implementation eager", {"attn_implementation": "eager"}),
    *(
        (trainer, option, effect)
        for trainer in (f"{PPO} --rl-mini-batch-size 1", REWARD, SFT)
        for option, effect in (
            ("--lr 0.5", {"learning_rate": 0.5}),
            ("--epochs 3", {"num_train_epochs": 3}),
            ("--warmup-ratio 0.25", {"warmup_steps": 0.25}),
            ("--scheduler cosine", {"lr_scheduler_type": "cosine"}),
            ("--weight-decay 0.5", {"weight_decay": 0.5}),
            ("--seed 3", {"seed": 3}),
            ("--save-strategy steps --save-steps 3", {"save_strategy": "steps", "save_steps": 3}),
            ("--valid-split train", {"eval_strategy": "epoch", "load_best_model_at_end": True}),
            ("--valid-split train --eval-strategy steps --save-strategy steps --save-steps 3",
             {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3,
              "load_best_model_at_end": True}),
            ("--push-to-hub --username me --token t",
             {"push_to_hub": True, "hub_model_id": "me/project-name", "hub_token": "t"}),
        )
    ),
]  # fmt: skip
FOLLOWS = {"metric_for_best_model", "greater_is_better", "do_eval", "eval_delay", "eval_steps", "run_name"}
"""What TrainingArguments derives from others."""


@pytest.mark.parametrize(("before", "option", "effect"), EFFECTS, ids=[f"{one[:14]} {two}" for one, two, _ in EFFECTS])
def test_an_option_changes_what_it_names_and_nothing_else(
    before: str, option: str, effect: dict[str, Any], workshop: Path
) -> None:
    old, new = settings(before), settings(f"{before} {option}")
    changed = {key: new[key] for key in new if new[key] != old[key] and key not in FOLLOWS - effect.keys()}
    assert changed == {key: value for key, value in effect.items() if key in new}


def test_defaults_that_follow_from_sizes(workshop: Path) -> None:
    assert parsed(f"{PPO} --batch-size 1").args.num_mini_batches == 1  # 4 episodes are fewer than 8
    assert parsed(f"{PPO} --batch-size 4").args.num_mini_batches == 2
    assert parsed(PPO).args.stop_token == "eos" and parsed("--trainer ppo --model-ref x").reward_funcs
    assert parsed(f"{REWARD} --peft").model_args.lora_modules_to_save == ["score"]


MULTI_OBJECTIVE = """--train --trainer ppo --model base --rl-reward-model-path ./scorer
    --rl-env-type multi_objective --rl-multi-objective true --rl-env-config '{
    "reward_components": {
      "correctness": {"type": "keyword", "keywords": ["correct", "yes"]},
      "formatting": {"type": "keyword", "keywords": ["Answer:"]}
    },
    "reward_weights": {"correctness": 1.0, "formatting": 0.1}
  }' --data-path prompts.jsonl --project-name ppo_multi_objective"""
"""As it stands in AITraining's documentation, but for the names of models and data."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trainers that would have been trained; none is."""
    trainers: list[Any] = []
    monkeypatch.setattr(aitraining, "train_and_save", lambda trainer, *_, **__: trainers.append(trainer))
    return trainers


def test_a_documented_command_builds_its_trainer(workshop: Path, built: list[Any]) -> None:
    llm(shlex.split(MULTI_OBJECTIVE))
    (trainer,) = built
    assert (trainer.args.gamma, trainer.args.response_length, trainer.args.top_k) == (0.99, 128, 50)
    assert list(trainer.scorer.names) == ["reward_model", "correctness", "formatting"]
    assert trainer.args.report_to == ["wandb"] and isinstance(trainer.args, PPOConfig)


def test_python_as_documented(workshop: Path) -> None:
    params = LLMTrainingParams(
        model="base", data_path="prompts.jsonl", text_column="text", project_name="runs/from-python", trainer="ppo",
        rl_reward_model_path="scorer", rl_max_new_tokens=4, max_samples=8, log="none",
    )  # fmt: skip
    trainer = AutoTrainProject(params=params, backend="local", process=True).create()
    assert trainer.state.global_step == 1
    AutoModelForCausalLM.from_pretrained("runs/from-python")


def test_a_reference_of_ones_own(workshop: Path, built: list[Any]) -> None:
    save_models(other=tiny_policy(seed=5, max_position_embeddings=256))
    llm(shlex.split(f"{PPO} --log none --model base --data-path prompts.jsonl --model-ref other --max-samples 9"))
    (trainer,) = built
    assert len(trainer.train_dataset) == 9
    for folder, model in (("base", trainer.policy_model), ("other", trainer.reference.model)):
        expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        found = model.state_dict()
        assert all(torch.equal(found[next(n for n in found if n.endswith(name))], expected[name]) for name in expected)


RUN = "--log none --lr 1e-2 --batch-size 4 --gradient-accumulation 1 --disable-gradient-checkpointing"


def test_each_steps_directory_feeds_the_next(workshop: Path) -> None:
    llm(shlex.split(f"--train --trainer sft --model base --data-path prompts.jsonl --project-name sft {RUN}"))
    llm(shlex.split(f"--train --trainer reward --model sft --data-path pairs.jsonl --project-name judge {RUN}"))
    words = f"--train --trainer ppo --model sft --rl-reward-model-path judge --data-path prompts.jsonl {RUN}"
    ppo: Any = llm(
        shlex.split(f"{words} --project-name out --rl-max-new-tokens 4 --save-strategy steps --save-steps 2")
    )

    assert ppo.state.global_step == 4
    assert AutoTokenizer.from_pretrained("out").get_vocab() == make_tokenizer().get_vocab()
    final, start = (AutoModelForCausalLM.from_pretrained(name).state_dict() for name in ("out", "sft"))
    assert any(not torch.equal(final[name], start[name]) for name in start)
    resumed: Any = llm(shlex.split(f"{words} --project-name out --epochs 2 --resume-from-checkpoint True"))
    assert resumed.state.global_step == 8 and resumed._initial_global_step == 4


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("trainer", ["sft", "reward"])
def test_adapters_are_merged_unless_switched_off(trainer: str, merge: bool, workshop: Path) -> None:
    data = "pairs.jsonl" if trainer == "reward" else "prompts.jsonl"
    switch = "" if merge else "--no-merge-adapter"
    words = f"--trainer {trainer} --model base --data-path {data} --project-name out --peft {switch} {RUN}"
    trained: Any = llm(shlex.split(f"{words} --save-strategy no --lora-dropout 0 --padding right"))

    assert Path("out/adapter_config.json").exists() is not merge
    assert Path("out/model.safetensors").exists() is merge
    assert json.loads(Path("out/tokenizer_config.json").read_text())["padding_side"] == "right"
    if merge:
        auto = AutoModelForSequenceClassification if trainer == "reward" else AutoModelForCausalLM
        ids = torch.tensor([[5, 6, 7, 1]])
        with torch.no_grad():
            wanted, found = trained.model.eval()(ids).logits, auto.from_pretrained("out")(ids).logits
        assert torch.allclose(wanted, found, atol=1e-5)


@pytest.mark.parametrize(
    "environment", [{}, {"rl_env_type": "text_generation", "rl_env_config": '{"stop_sequences": ["END"]}'}]
)
def test_without_a_reward_model_the_reward_is_default(environment: dict[str, str]) -> None:
    params = LLMTrainingParams(trainer="ppo", model_ref="base", **environment)
    model, functions, _ = aitraining.reward_sources(params)
    assert (model, functions) == (None, [Default()])
