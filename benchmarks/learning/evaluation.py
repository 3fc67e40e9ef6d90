"""A policy's responses to held-out prompts, measured in the same way for both libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from task import Scores, Task
from transformers import GenerationConfig, PreTrainedModel, TrainerCallback


@dataclass
class Evaluator:
    """Samples responses to held-out prompts and scores them; training's random numbers stay as they are.

    Attributes:
        task: Whose prompts and judge.
        reference: The policy before training.
        reward: The training reward, as a function.
        seed: Of the sampled responses.
        batch_size: Responses at a time.
    """

    task: Task
    reference: PreTrainedModel
    reward: Scores
    seed: int = 0
    batch_size: int = 128

    @torch.no_grad()
    def __call__(self, policy: PreTrainedModel, num_prompts: int) -> dict[str, float]:
        """Evaluate a policy.

        Args:
            policy: What is sampled from, at the task's temperature.
            num_prompts: How many responses; the held-out prompts are taken again where they are fewer.

        Returns:
            Means over responses: `gold`, the judge; `reward`, what training pays; `kl`, the sum over a response's
            places of `sum_v pi(v) (log pi(v) - log pi_ref(v))` over the vocabulary at the temperature, nats, which
            varies less than that of the sampled tokens alone and has the same mean; `length`, tokens. And `unique`,
            the share of different responses.
        """
        prompts = [self.task.held_out[row % len(self.task.held_out)] for row in range(num_prompts)]
        figures: dict[str, list[float]] = {"gold": [], "reward": [], "kl": [], "length": []}
        texts: list[str] = []
        with seeded(self.seed), evaluating(policy):
            for start in range(0, num_prompts, self.batch_size):
                some = prompts[start : start + self.batch_size]
                kl, mask, said = self._respond(policy, some)
                asked = self._texts(self.task.tokenizer(some)["input_ids"])
                figures["kl"] += (kl * mask).sum(1).tolist()
                figures["length"] += mask.sum(1).tolist()
                figures["gold"] += self.task.judge(asked, said)
                figures["reward"] += self.reward(asked, said)
                texts += said
        return {name: fmean(values) for name, values in figures.items()} | {"unique": len(set(texts)) / len(texts)}

    def _respond(self, policy: PreTrainedModel, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        """Return the KL at each place `(B, T)`, the mask of real tokens `(B, T)` and the responses."""
        tokenizer, said = self.task.tokenizer, self.task.arguments
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        how = GenerationConfig(
            do_sample=True,
            temperature=said["temperature"],
            top_k=0,
            top_p=1.0,
            max_new_tokens=said["response_length"],
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            use_cache=True,
        )
        sequences = policy.generate(**inputs, generation_config=how)
        context = inputs["input_ids"].shape[1]
        responses = sequences[:, context:]
        is_end = (responses == tokenizer.eos_token_id).long()
        mask = (is_end.cumsum(1) - is_end) == 0
        whole = torch.cat((inputs["attention_mask"].bool(), mask), 1)
        logprobs, theirs = (self._logprobs(model, sequences, whole, context) for model in (policy, self.reference))
        kept = [row[real].tolist() for row, real in zip(responses, mask, strict=True)]
        return (logprobs.exp() * (logprobs - theirs)).sum(2), mask, self._texts(kept)

    def _logprobs(
        self, model: PreTrainedModel, sequences: torch.Tensor, mask: torch.Tensor, context: int
    ) -> torch.Tensor:
        """Return the log-probabilities of all tokens at each place of the responses, `(B, T, V)`."""
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=sequences, attention_mask=mask.long(), position_ids=positions).logits
        scaled = logits[:, context - 1 : -1].float() / self.task.arguments["temperature"]
        return scaled.log_softmax(-1)

    def _texts(self, rows: list[list[int]]) -> list[str]:
        return self.task.tokenizer.batch_decode(rows, skip_special_tokens=True)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random numbers from a seed, and leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put a model into evaluation mode, and back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class Points(TrainerCallback):
    """Evaluates the policy as it trains, before the first update and after every few.

    Args:
        evaluate: Takes the policy and the number of prompts.
        policy: The model that learns.
        every: Updates from one evaluation to the next.
        num_prompts: Of each.

    Attributes:
        found: Of each evaluation the figures and `update`.
        log: Called with each evaluation's judge, where set.
    """

    def __init__(self, evaluate: Evaluator, policy: PreTrainedModel, every: int, num_prompts: int) -> None:
        self.evaluate, self.policy, self.every, self.num_prompts = evaluate, policy, every, num_prompts
        self.found: list[dict[str, float]] = []
        self.log: Callable[[dict[str, float]], None] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate what training starts from."""
        self._look(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate, if it is time."""
        if state.global_step % self.every == 0:
            will_log = control.should_log
            self._look(state.global_step)
            control.should_log = will_log  # what has been logged just now is not the update

    def _look(self, update: int) -> None:
        figures = self.evaluate(self.policy, self.num_prompts)
        self.found.append({"update": update, **figures})
        if self.log is not None:
            self.log({"eval_judge": figures["gold"]})
