"""Answers to prompts for `rlhf-ppo judge`: sampled from a model, or read from a column of the data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from rlhf_ppo.cli.judge_arguments import JudgeArguments
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.checks import parse_object
from rlhf_ppo.data.prompts import PromptEncoder, eos_id
from rlhf_ppo.data.rollout import Prompts, check_lengths
from rlhf_ppo.generation.engine_factory import make_engine
from rlhf_ppo.generation.sampling import (
    StopStrings,
    ended,
    greedy_config,
    join_responses,
    sample_with,
    sampling_config,
    stop_tokens,
)
from rlhf_ppo.reporting.run_log import RunSettings
from rlhf_ppo.rewards.builtin import response_texts
from rlhf_ppo.rewards.scorer import Answer, ScoringBatch, settings_of_row


def prompt_encoder(args: JudgeArguments, tokenizer: PreTrainedTokenizerBase) -> PromptEncoder:
    """Return the encoder of the prompts."""
    return PromptEncoder(tokenizer, args.dataset_name, len(tokenizer), template_kwargs=template_kwargs(args))


def template_kwargs(args: JudgeArguments) -> dict[str, Any] | None:
    """Return the further arguments of the chat template, by default those of the run."""
    recorded = RunSettings.load(str(args.model or args.opponent)).arguments.get("chat_template_kwargs")
    text = recorded if args.chat_template_kwargs is None else args.chat_template_kwargs
    return parse_object("chat_template_kwargs", text, '{"enable_thinking": false}')


@torch.no_grad()
def respond(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, object]],
    args: JudgeArguments,
) -> list[Answer]:
    """Generate one response to each prompt.

    Args:
        model: A causal language model on its device.
        tokenizer: Its tokenizer.
        rows: The data set's rows, with `prompt` or `input_ids`.
        args: Settings of the generation, and the name of the data set.

    Raises:
        RuntimeError: The engine returned incomplete responses.
        ValueError: A prompt cannot be read or is too long, or the engine cannot run here.
    """
    encode = prompt_encoder(args, tokenizer)
    encoded = [{**row, **encode(row, index)} for index, row in enumerate(rows)]
    ends = end_tokens(model, tokenizer)
    config = PPOConfig(
        generation_engine=args.generation_engine,
        response_length=args.max_new_tokens,
        temperature=args.temperature or 1.0,
        top_p=args.top_p,
        local_rollout_forward_batch_size=args.batch_size,
        report_to="none",
        seed=args.seed,
        bf16=model.dtype == torch.bfloat16,
        use_cpu=model.device.type == "cpu",
    )
    strings = model.generation_config.stop_strings
    strings = StopStrings(tokenizer, tuple([strings] if isinstance(strings, str) else strings)) if strings else None
    engine = make_engine(config, model, Accelerator(), tokenizer, strings)
    longest = max(len(row["input_ids"]) for row in encoded)
    limit = getattr(engine, "longest_sequence", None)  # of vLLM, which would cut responses
    fix = "lower max_new_tokens, leave out prompts, or use another engine"
    check_lengths(longest, args.max_new_tokens, limit, "max_new_tokens", fix)
    how = (sampling_config if args.temperature else greedy_config)(config, ends)
    set_seed(args.seed)
    answers: list[Answer] = []
    for start in range(0, len(encoded), args.batch_size):
        batch = encoded[start : start + args.batch_size]
        padded = tokenizer.pad([{"input_ids": row["input_ids"]} for row in batch], return_tensors="pt")
        columns = {name: [row.get(name) for row in batch] for name in ("prompt", "tools", "chat_template_kwargs")}
        prompts = Prompts.from_collated({**padded, **columns}, model.device)
        sampled = sample_with(engine, model, prompts, how, strings).ids
        joined = join_responses(prompts, sampled, ends, 0, strings)
        has_ended, how_shown = ended(joined, ends, strings), encode.template_kwargs
        answers += ScoringBatch(joined, prompts, has_ended, ends, tokenizer, how_shown).answers
    return answers


def answers_in_column(
    rows: Sequence[Mapping[str, Any]],
    column: str,
    ours: Sequence[Answer | None] = (),
    defaults: Mapping[str, object] | None = None,
) -> list[Answer | None]:
    """Return a data set's responses as answers.

    Args:
        rows: Rows, with their prompts.
        column: The column of the responses: texts, lists of messages, or None.
        ours: The other side's answers to the same prompts, whose prompt tokens are used; empty: texts only.
        defaults: Further arguments of the chat template, or None; those of a row win.
    """
    answers: list[Answer | None] = []
    for row, one in zip(rows, ours or [None] * len(rows), strict=True):
        known: dict[str, Any] = {} if one is None else {"prompt_ids": one.prompt_ids, "tokenizer": one.tokenizer}
        if not isinstance(row[column], str | list | None):
            raise ValueError(f"column {column!r} has {row[column]!r}, which is no text: convert the column")
        settings = settings_of_row(row, defaults)
        if row[column] is None:
            answers.append(None)
        else:
            (text,) = response_texts([row[column]])
            answers.append(Answer(row.get("prompt"), text, settings=settings, **known))
    return answers


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop: int | None = None) -> list[int]:
    """Return the tokens that end a response: EOS, those of the generation configuration, and a run's stop token."""
    ends = (eos_id(tokenizer), *stop_tokens(model.generation_config), stop)
    return list(dict.fromkeys(token for token in ends if token is not None))
