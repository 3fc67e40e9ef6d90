"""Responses of a model to a data set's prompts, outside of training, through any generation engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from transformers import set_seed

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.encoding import PromptEncoder
from rlhf_ppo.data.lengths import PositionLimit
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.generation.choosing import make_engine
from rlhf_ppo.generation.opponents import Opponents
from rlhf_ppo.generation.protocol import sample_with
from rlhf_ppo.generation.transformers_engine import greedy_config, sampling_config
from rlhf_ppo.rewards.builtin import response_texts
from rlhf_ppo.rewards.reading import Answer


@dataclass(frozen=True)
class Answering:
    """How responses are generated.

    Attributes:
        max_new_tokens: Longest response, in tokens.
        temperature: Of the sampling; 0 takes the most likely token at each step.
        top_p: Share of the probability that is sampled from.
        batch_size: Prompts at a time.
        engine: One of `PPOConfig.generation_engine`.
        seed: Of the sampling.
    """

    max_new_tokens: int
    temperature: float = 0.7
    top_p: float = 1.0
    batch_size: int = 32
    engine: Literal["transformers", "continuous", "vllm"] = "transformers"
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0


@torch.no_grad()
def respond(
    model: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]], dataset: str, how: Answering
) -> list[Answer]:
    """Generate one response to each prompt.

    Args:
        model: A causal language model on its device.
        tokenizer: Its tokenizer.
        rows: The data set's rows, with `prompt` or `input_ids`.
        dataset: What errors call the data set.
        how: How to generate.

    Raises:
        RuntimeError: The engine gave responses that it did not sample whole.
        ValueError: A prompt cannot be read or is too long, or the engine cannot run here.
    """
    encode = PromptEncoder(tokenizer, dataset, len(tokenizer))
    encoded = [{**row, **encode(row, index)} for index, row in enumerate(rows)]
    ends = end_tokens(model, tokenizer)
    args = PPOConfig(
        generation_engine=how.engine, response_length=how.max_new_tokens, temperature=how.temperature or 1.0,
        top_p=how.top_p, local_rollout_forward_batch_size=how.batch_size, report_to="none", seed=how.seed,
        bf16=model.dtype == torch.bfloat16, use_cpu=model.device.type == "cpu",
    )  # fmt: skip
    engine = make_engine(
        args, model, Accelerator(), tokenizer, tokenizer.eos_token_id, None, Opponents((), tokenizer, _all_ended)
    )
    _check_lengths(max(len(row["input_ids"]) for row in encoded), how, getattr(engine, "longest_sequence", None))
    config = (greedy_config if how.is_greedy else sampling_config)(args, ends[0] if ends else None)
    config.eos_token_id = ends or None
    set_seed(how.seed)
    answers: list[Answer] = []
    for start in range(0, len(encoded), how.batch_size):
        batch = encoded[start : start + how.batch_size]
        padded = tokenizer.pad([{"input_ids": row["input_ids"]} for row in batch], return_tensors="pt")
        sampled = sample_with(engine, model, Prompts.from_collated(padded, model.device), config).ids
        answers += [_answer(row, ids, set(ends), tokenizer) for row, ids in zip(batch, sampled.tolist(), strict=True)]
    return answers


def given_answers(
    prompts: Sequence[Any], responses: Sequence[Any], ours: Sequence[Answer | None] = ()
) -> list[Answer | None]:
    """Return a data set's responses as answers.

    Args:
        prompts: The prompts.
        responses: Texts, lists of messages, or None.
        ours: The model's answers to the same prompts, whose tokens of the prompt these take; none: texts alone.
    """
    return [
        None
        if response is None
        else Answer(
            prompt,
            response_texts([response])[0],
            prompt_ids=None if one is None else one.prompt_ids,
            tokenizer=None if one is None else one.tokenizer,
        )
        for prompt, response, one in zip(prompts, responses, ours or [None] * len(responses), strict=True)
    ]


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Collect the tokens at which a row ends: the tokenizer's EOS, and those of the model's generation configuration.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
    """
    configured = model.generation_config.eos_token_id
    several = configured if isinstance(configured, list) else [configured]
    return list(dict.fromkeys(token for token in (tokenizer.eos_token_id, *several) if token is not None))


def _check_lengths(longest_prompt: int, how: Answering, limit: PositionLimit | None) -> None:
    """Raise where the engine would cut a response; `transformers` and `continuous` have the model's own limits."""
    total = longest_prompt + how.max_new_tokens
    if limit is not None and total > limit.tokens:
        raise ValueError(
            f"the longest prompt ({longest_prompt} tokens) and max_new_tokens={how.max_new_tokens} take {total} "
            f"positions, but {limit.reason}: lower max_new_tokens, leave out prompts, or take another engine"
        )


def _answer(row: Mapping[str, Any], sampled: list[int], ends: set[int], tokenizer: Any) -> Answer:
    """Cut what was sampled behind its first end token."""
    length = next((index + 1 for index, token in enumerate(sampled) if token in ends), len(sampled))
    response, prompt = sampled[:length], row.get("prompt")
    text = tokenizer.decode(response, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Answer(prompt, text, bool(response) and response[-1] in ends, row["input_ids"], response, tokenizer)


def _all_ended(responses: Any) -> torch.Tensor:
    return torch.ones(len(responses), dtype=torch.bool)
