"""One task through either library; each is imported by the function that runs it: environments have only one."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from evaluation import Points
from preferences import scores_of
from task import Scores, Task, reward_of
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase, set_seed

Log = list[dict[str, Any]]


def tokenized(task: Task, num_rows: int) -> Any:
    """Return the prompts of training, from the first again where there are fewer, as a data set of token ids."""
    from datasets import Dataset

    prompts = list(islice(cycle(task.prompts), num_rows))
    return Dataset.from_dict({"input_ids": task.tokenizer(prompts)["input_ids"]})


def train_ours(task: Task, policy: PreTrainedModel, arguments: dict[str, Any], points: Points) -> Log:
    """Train with rlhf_ppo."""
    trainer = our_trainer(task, policy, arguments, callbacks=[points])
    points.log = trainer.log
    trainer.train()
    return trainer.state.log_history


def our_trainer(task: Task, policy: PreTrainedModel, arguments: dict[str, Any], **others: Any) -> Any:
    """Make rlhf_ppo's trainer; a value model is made from the policy where the reward is a function.

    Args:
        task: What to learn.
        policy: The language model.
        arguments: Of `PPOConfig`, and `value_model` of the trainer.
        **others: Further arguments of the trainer, which win.
    """
    from rlhf_ppo import PPOConfig, PPOTrainer

    reward = (
        {"reward_model": str(task.reward), "value_model": str(task.reward)}
        if isinstance(task.reward, Path)
        else {"reward_funcs": in_words(task.reward)}
    )
    models = {name: arguments[name] for name in ("value_model",) if name in arguments}
    args = PPOConfig(**{name: value for name, value in arguments.items() if name not in models})
    return PPOTrainer(
        args,
        task.tokenizer,
        policy,
        train_dataset=tokenized(task, arguments["total_episodes"]),
        ptx_dataset=texts_of(task) if args.ptx_coef else None,
        **(reward | models | others),
    )


def texts_of(task: Task) -> Any:
    """Return the texts that the language model was trained on, as rows with `text`."""
    from datasets import Dataset

    if task.texts is None:
        raise ValueError("this task has no texts of its language model, which ptx_coef needs")
    return Dataset.from_json(str(task.texts))


def in_words(score: Scores) -> Any:
    """Make a reward function of what scores prompts and responses."""

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return score(prompts, completions)

    return reward


def train_trl(task: Task, policy: PreTrainedModel, arguments: dict[str, Any], points: Points) -> Log:
    """Train with TRL's PPO; its value model is a classifier as its documentation makes one."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    set_seed(arguments["seed"])
    start = task.reward if isinstance(task.reward, Path) else task.policy
    trainer = PPOTrainer(
        PPOConfig(**arguments),
        task.tokenizer,
        model=policy,
        ref_model=None,
        reward_model=(
            AutoModelForSequenceClassification.from_pretrained(task.reward, num_labels=1)
            if isinstance(task.reward, Path)
            else FunctionAsModel(reward_of(task, scores_of), task.tokenizer, task.prompts)
        ),
        value_model=AutoModelForSequenceClassification.from_pretrained(start, num_labels=1),
        train_dataset=tokenized(task, arguments["total_episodes"]),
        callbacks=[points],
    )
    trainer.train()
    return trainer.state.log_history


class FunctionAsModel(nn.Module):
    """A reward function in the place of TRL's reward model, of which `read` and `score` are called.

    Args:
        reward: Takes prompts and responses.
        tokenizer: Of the policy.
        prompts: All that training asks, none of which begins with another: so a row's prompt is known.
    """

    base_model_prefix = "read"

    def __init__(self, reward: Scores, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> None:
        super().__init__()
        self.reward, self.tokenizer = reward, tokenizer
        self.prompts = {tuple(ids) for ids in tokenizer(prompts)["input_ids"]}
        self.lengths = sorted({len(ids) for ids in self.prompts})

    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> SimpleNamespace:
        """Return the row's score as the last hidden state of each of its tokens, `(B, T, 1)`."""
        rows = [row[real].tolist() for row, real in zip(input_ids, attention_mask.bool(), strict=True)]
        ends = [next(end for end in self.lengths if tuple(row[:end]) in self.prompts) for row in rows]
        asked, said = (
            self.tokenizer.batch_decode([part(row, end) for row, end in zip(rows, ends, strict=True)], **PLAIN)
            for part in (lambda row, end: row[:end], lambda row, end: row[end:])
        )
        scores = torch.tensor(self.reward(asked, said), device=input_ids.device)
        return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])

    def score(self, states: torch.Tensor) -> torch.Tensor:
        """Return what was read."""
        return states


PLAIN = {"skip_special_tokens": True}
LIBRARIES = {"ours": train_ours, "trl": train_trl}
