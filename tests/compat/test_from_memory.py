"""Scripts as users of TRL write them from memory: each trains, or its error names the line to write instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from datasets import Dataset

from rlhf_ppo import PPOTrainer
from tests.conftest import QUIET, save_models, tiny_policy, tiny_scorer

START = """
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from rlhf_ppo import PPOConfig, PPOTrainer

def reward_len(completions, **kwargs):
    return [-abs(4 - len(completion)) / 4 for completion in completions]

"""

TRAINS = {
    "GRPO: hub names, a reward function, no tokenizer": """
dataset = load_dataset("json", data_files="prompts.jsonl", split="train")
args = PPOConfig(output_dir="out", **tiny)
trainer = PPOTrainer(model="models/sft", reward_funcs=reward_len, args=args, train_dataset=dataset)
""",
    "trl.experimental.ppo: models as objects and a reward model": """
tokenizer = AutoTokenizer.from_pretrained("models/sft", padding_side="left")
value_model = AutoModelForSequenceClassification.from_pretrained("models/reward", num_labels=1)
reward_model = AutoModelForSequenceClassification.from_pretrained("models/reward", num_labels=1)
ref_policy = AutoModelForCausalLM.from_pretrained("models/sft")
policy = AutoModelForCausalLM.from_pretrained("models/sft")
dataset = load_dataset("json", data_files="prompts.jsonl", split="train")

def tokenize(element):
    outputs = tokenizer(element["prompt"], padding=False)
    return {"input_ids": outputs["input_ids"]}

dataset = dataset.map(tokenize, batched=True, remove_columns=dataset.column_names)
trainer = PPOTrainer(
    args=PPOConfig("out", missing_eos_penalty=1.0, stop_token="eos", **tiny),
    processing_class=tokenizer, model=policy, ref_model=ref_policy,
    reward_model=reward_model, value_model=value_model, train_dataset=dataset, eval_dataset=dataset,
)
""",
    "DPO: preference pairs as data": """
rows = load_dataset("json", data_files="pairs.jsonl", split="train")
args = PPOConfig("out", **tiny)
trainer = PPOTrainer(args, model="models/sft", reward_funcs=reward_len, train_dataset=rows, eval_dataset="pairs.jsonl")
""",
    "the old trainer: a loop over queries and step()": """
import torch

tokenizer = AutoTokenizer.from_pretrained("models/sft")
trainer = PPOTrainer(PPOConfig("out", **tiny), tokenizer, AutoModelForCausalLM.from_pretrained("models/sft"))
queries = [torch.tensor(tokenizer(text)["input_ids"]) for text in ("w1 w2", "w3", "w4 w5 w6", "w7")]
responses = [trainer.policy_model.generate(ids[None], max_new_tokens=4)[0, len(ids) :] for ids in queries]
stats = trainer.step(queries, responses, [torch.tensor(1.0) for _ in responses])
""",
}
FAILS = {
    "the old trainer: models by position": (
        """
model = AutoModelForCausalLM.from_pretrained("models/sft")
PPOTrainer(PPOConfig("out", **tiny), model, None, AutoTokenizer.from_pretrained("models/sft"))
""",
        "write PPOTrainer(args, model=..., processing_class=...)",
    ),
    "the old trainer: a model with a value head": (
        """from rlhf_ppo import AutoModelForCausalLMWithValueHead""",
        "'AutoModelForCausalLMWithValueHead': use AutoModelForCausalLM: PPOTrainer makes the value model itself",
    ),
    "the old trainer: sizes": (
        """
config = PPOConfig("out", batch_size=16, mini_batch_size=4, **tiny)
PPOTrainer(config, model="models/sft", reward_funcs=reward_len, train_dataset="prompts.jsonl")
""",
        "batch_size=16 was set, but the other arguments result in 4; leave it None",
    ),
    "GRPO: its classes": (
        "from rlhf_ppo import GRPOConfig, GRPOTrainer",
        "module 'rlhf_ppo' has no attribute 'GRPOConfig': use PPOConfig",
    ),
    "RLOO: several responses, and normalized rewards": (
        """PPOConfig("out", rloo_k=2, token_level_kl=False)""",
        "'rloo_k' (use num_generations), 'token_level_kl' (drop it: the",
    ),
    "DPO: options of the trainer": (
        """PPOTrainer(PPOConfig("out", **tiny), model="models/sft", beta=0.1, max_length=9, train_dataset="saved")""",
        "'beta' (in PPOConfig: use kl_coef), 'max_length' (set max_prompt_length and response_length in PPOConfig)",
    ),
    "no reward": (
        """PPOTrainer(PPOConfig("out", **tiny), model="models/sft", train_dataset="prompts.jsonl")""",
        "no reward: pass reward_funcs, a reward_model",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models and prompts that the scripts name."""
    folder = tmp_path_factory.mktemp("from_memory")
    save_models(folder / "models", sft=tiny_policy(), reward=tiny_scorer())
    tiny_policy().save_pretrained(folder / "models/bare")
    rows = Dataset.from_list([{"prompt": f"w{index} w2 w3", "answer": "w4"} for index in range(8)])
    rows.to_json(folder / "prompts.jsonl")
    rows.save_to_disk(folder / "saved")
    asked = "\n\nHuman: w1\n\nAssistant:"
    Dataset.from_list([{"chosen": f"{asked} w2", "rejected": f"{asked} w3"}] * 8).to_json(folder / "pairs.jsonl")
    return folder


@pytest.fixture
def names(folder: Path, empty_place: Path, plain_runs: None) -> dict[str, object]:
    """What a script finds: a directory of its own with the files, and sizes of a short run."""
    for path in folder.iterdir():
        (empty_place / path.name).symlink_to(path)
    sizes = {"per_device_train_batch_size": 4, "total_episodes": 4, "response_length": 4, "num_ppo_epochs": 1}
    return {"tiny": {**QUIET, **sizes}}


@pytest.mark.parametrize("script", TRAINS)
def test_it_trains(script: str, names: dict[str, object]) -> None:
    exec(START + TRAINS[script], names)
    trainer = names["trainer"]
    if "step()" not in script:
        trainer.train()  # pyright: ignore[reportAttributeAccessIssue]
    assert trainer.state.global_step == 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dataloader", "use trainer.get_train_dataloader()"),
        ("eval_dataloader", "use trainer.get_eval_dataloader()"),
        (
            "ref_model",
            "use trainer.reference.separate_policy, None if the policy without its adapter is the reference",
        ),
        ("null_ref_context", "use trainer.reference.generating(trainer.model_wrapped, trainer.policy_model)"),
    ],
)
def test_an_attribute_of_trls_trainer_names_the_line_to_write(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"'PPOTrainer' object has no attribute {name!r} ({hint}")):
        getattr(object.__new__(PPOTrainer), name)


def test_a_search_is_refused_in_one_sentence() -> None:
    with pytest.raises(NotImplementedError, match="PPOTrainer has no hyperparameter search: train a run with each"):
        object.__new__(PPOTrainer).hyperparameter_search(n_trials=1)


@pytest.mark.parametrize("script", FAILS)
def test_the_error_names_the_line_to_write(script: str, names: dict[str, object]) -> None:
    text, said = FAILS[script]
    with pytest.raises((AttributeError, ImportError, TypeError, ValueError), match=re.escape(said)):
        exec(START + text, names)
