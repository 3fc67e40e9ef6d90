"""TRL 1.12's PPO, its last, with the prompts, rewards and settings of examples/follow_instructions.py.

Policy and value model have separate LoRA adapters, each with its learning rate, and the value head starts at zero,
as in the example. But the value model has its own base, gradients are not clipped, and padding is a token beyond
the vocabulary, as in TRL's examples: its PPO never trains a token that is padding, and this model pads with its
end-of-sequence token. It cannot resume, and saves no checkpoints.
"""

from __future__ import annotations

import copy
import operator
import os
import sys
from pathlib import Path
from typing import Any

from peft import get_peft_model
from torch import nn
from torch.optim import AdamW
from transformers import AutoModelForSequenceClassification, set_seed

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.append(str(Path(__file__).parent / "learning"))
SAME = """output_dir seed use_cpu learning_rate per_device_train_batch_size num_ppo_epochs num_mini_batches
response_length stop_token temperature missing_eos_penalty kl_coef gamma lam cliprange cliprange_value vf_coef
whiten_rewards lr_scheduler_type warmup_steps gradient_checkpointing disable_tqdm""".split()


def rewards_of(tokenizer: Any, rows: list[dict[str, Any]], functions: Any, weights: list[float]) -> Any:
    """Return what stands for TRL's reward model, and the rows' prompts as texts."""
    from libraries import FunctionAsModel  # pyright: ignore

    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows
    ]
    told = tokenizer.batch_decode(tokenizer(prompts)["input_ids"], skip_special_tokens=True)
    row_of = dict(zip(told, rows, strict=True))

    def reward(asked: list[str], said: list[str]) -> list[float]:
        found = [row_of[text] for text in asked]
        columns: dict[str, Any] = {name: [row[name] for row in found] for name in found[0]}
        columns["prompts"] = columns.pop("prompt")
        columns["completions"] = [[{"role": "assistant", "content": text}] for text in said]
        scores = [function(log_extra=lambda *_: None, **columns) for function in functions]
        return [sum(map(operator.mul, weights, each)) for each in zip(*scores, strict=True)]

    return FunctionAsModel(reward, tokenizer, prompts), prompts


def make_trainer(
    args: Any, tokenizer: Any, model: Any, reward_funcs: Any, peft_config: Any, rows: list[dict[str, Any]]
) -> Any:
    """Make TRL's trainer of what the example gives ours."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer  # pyright: ignore

    set_seed(args.seed)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "left"
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    policy, critic = get_peft_model(model, peft_config), copy.copy(peft_config)
    critic.task_type = "SEQ_CLS"
    value: Any = AutoModelForSequenceClassification.from_pretrained(
        model.name_or_path, num_labels=1, dtype=model.dtype
    )
    nn.init.zeros_(value.score.weight)
    value = get_peft_model(value, critic).base_model.model
    rates = ((policy, args.learning_rate), (value, args.critic_learning_rate))
    groups = [{"params": [each for each in of.parameters() if each.requires_grad], "lr": rate} for of, rate in rates]
    reward, prompts = rewards_of(tokenizer, rows, reward_funcs, args.reward_weights)
    settings = {name: getattr(args, name) for name in SAME}
    config = PPOConfig(
        **settings, total_episodes=args.max_steps * args.per_device_train_batch_size, bf16=False, logging_steps=1,
        num_sample_generations=0, save_strategy="no", report_to="none",
    )  # fmt: skip
    return PPOTrainer(
        config, tokenizer, policy, None, reward, Dataset.from_dict({"input_ids": tokenizer(prompts)["input_ids"]}),
        value, optimizers=(AdamW(groups, eps=args.adam_epsilon, weight_decay=args.weight_decay), None),
    )  # fmt: skip
