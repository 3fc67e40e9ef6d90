"""`rlhf-ppo init`: read the data, split it, and write one commented file for `rlhf-ppo pipeline`."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
import yaml
from datasets import Dataset
from jinja2 import Environment
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase
from trl.data_utils import maybe_apply_chat_template

from rlhf_ppo.cli.arguments import check_columns
from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.trainers import load_tokenizer, say_how_prompts_are_read
from rlhf_ppo.config.checks import supports_bf16
from rlhf_ppo.data.prompts import (
    PROMPT_COLUMNS,
    PromptEncoder,
    is_conversation,
    prepare_prompts,
    prompt_column,
)
from rlhf_ppo.data.sources import (
    HH_TURN,
    HH_USER,
    choose_split,
    hold_out_pairs,
    load_splits,
    separate_prompts,
    with_prompts_from,
)
from rlhf_ppo.models.adapters import base_of_adapter, is_adapter_directory
from rlhf_ppo.models.loading import load_pretrained
from rlhf_ppo.rewards.resolve import resolve_rewards
from rlhf_ppo.terminal import print_text

PROGRAM = "rlhf-ppo init"
TEMPLATE = Path(__file__).with_name("run.yaml.jinja")
"""The text of the file."""

COLUMNS = {
    "texts": [{"prompt", "completion"}, {"messages"}, {"text"}],
    "preferences": [{"chosen", "rejected"}],
    "judge_preferences": [{"chosen", "rejected"}],
}
"""Alternative sets of columns for the data of each option; the first set that the data have is used, as in TRL."""

SAMPLE = 500
"""Rows whose lengths are measured."""
MIN_PAIRS_TO_SPLIT = 100
JUDGE_SHARE = 0.4
"""Share of the pairs that train the judge's reward model."""
MAX_HELD_OUT = 256
BATCH = 64
"""Largest number of episodes of an update."""
SLOW = 10_000_000
"""Weights above which a model without an accelerator gets fewer and shorter updates."""
SLOW_BATCH, SLOW_UPDATES, SLOW_HELD_OUT = 16, 10, 64
RATES = {"sft": 2e-5, "reward": 1e-5, "ppo": 3e-6}
LORA_RATES = {"sft": 2e-4, "reward": 1e-4, "ppo": 7e-5}
"""Learning rates for a billion weights."""


def write_file(args: argparse.Namespace, path: Path, folder: Path) -> None:
    """Read the data, split it, and write the file.

    Args:
        args: The options of `rlhf-ppo init`.
        path: The file.
        folder: Where the split-off data go.

    Raises:
        SystemExit: The data or the model cannot be read.
    """
    with user_errors(PROGRAM):
        resolve_rewards(args.reward_funcs)  # its file and its name
        tokenizer = load_tokenizer(args.model, False, "model")
        names = [name for name in ("texts", "preferences", "judge_preferences", "prompts") if getattr(args, name)]
        data = {name: read_data(getattr(args, name), name, tokenizer, args.prompt_column) for name in names}
        base = base_of_adapter(args.model) if is_adapter_directory(args.model) else args.model
        config: Any = load_pretrained(AutoConfig, base, "model")
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 10**9
        response = response_length(data, positions)
        data["prompts"] = fitting(data["prompts"], tokenizer, positions - response)
        sections = split(args, data)
        size = num_weights(config)
        is_slow = size > SLOW and not torch.accelerator.is_available()
        options = propose(size, is_slow, sections, positions, response, args.lora)
        prompt = data["prompts"].rows[0][prompt_column(data["prompts"].rows.column_names, "prompts")]
        text = written(args, is_slow, sections, options, HH_USER if is_dialogue(prompt) else None)
        folder.mkdir(parents=True)
        for section in sections.values():
            if section.is_split:
                section.rows.save_to_disk(os.path.expanduser(section.name))  # keeps every type, unlike JSON
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name, section in sections.items():
        print_text(f"{name}: {section.describe()}")
    if "judge_reward" not in sections and not args.judge_model:
        why = ""
        if pairs := sections.get("reward"):
            why = (
                f": the {len(pairs.rows)} pairs are not split: that needs {MIN_PAIRS_TO_SPLIT} with different prompts"
            )
        print_text(f"The judge is PPO's own reward{why}. Give --judge_model or --judge_preferences for another judge.")
    say_how_prompts_are_read(data["prompts"].rows, tokenizer)
    if is_dialogue(prompt):
        print_text("The prompts are Human/Assistant dialogues: stop_strings ends a response at the next Human.")
    print_text(f"{args.file} is written. Read it, then run: rlhf-ppo pipeline {shlex.quote(args.file)}")


# ---- Data ----


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        name: The file, directory or hub name.
        rows: The rows; pairs have explicit prompts.
        held_out: The rows of the split `test`, or None.
        prompts: Tokens of the prompts of a sample of rows; 0 without a prompt, and before `fitting`.
        responses: Tokens of texts or responses of the sample; of the longer response of a pair.
        is_split: Whether the rows are split off and `name` is the directory to write.
        num_dropped: Number of prompts that were too long.
        train_split: The split that holds the rows: `train`, or the first one of a data set without it.
    """

    name: str
    rows: Dataset
    held_out: Dataset | None
    prompts: Sequence[int]
    responses: Sequence[int]
    is_split: bool = False
    num_dropped: int = 0
    train_split: str = "train"

    def describe(self) -> str:
        """Return rows and lengths in one line."""
        lengths = {"prompts": self.prompts, "responses" if any(self.prompts) else "whole texts": self.responses}
        parts = [
            f"{name} of {quantile(tokens, 0.5)} tokens (median), 95% up to {quantile(tokens, 0.95)}"
            for name, tokens in lengths.items()
            if any(tokens)
        ]
        return ": ".join([f"{len(self.rows):,} rows", ", ".join(parts)])


def quantile(lengths: Sequence[int], share: float) -> int:
    """Return a quantile of whole numbers, as one of them."""
    return int(np.quantile(lengths, share, method="higher"))


def read_data(name: str, argument: str, tokenizer: PreTrainedTokenizerBase, column: str | None = None) -> Data:
    """Load a data set and measure the lengths of a sample.

    Args:
        name: A file, a directory or a hub name.
        argument: The option that names it: "texts", "preferences", "judge_preferences" or "prompts".
        tokenizer: The model's.
        column: Column of the prompts in `prompts`; None takes `input_ids`, `prompt`, `text` or `messages`.

    Raises:
        ValueError: There are no such data, or a column is missing.
    """
    splits = load_splits(name, argument=argument)
    train_split = "train" if "train" in splits else next(iter(splits))
    rows = choose_split(splits, train_split, argument)
    held_out = splits["test"] if "test" in splits and rows is not splits["test"] else None
    if argument == "prompts":
        rows, held_out = with_prompts(rows, name, column), held_out and with_prompts(held_out, name, column)
    elif argument != "texts":
        rows, held_out = separate_prompts(rows), held_out and separate_prompts(held_out)
    if argument in COLUMNS:
        check_columns(rows, COLUMNS[argument], f"{argument}={name!r}")
    sample = rows.select(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(int))
    prompts, responses = [0] * len(sample), list[Sequence[int]]()
    if argument in COLUMNS:
        columns = next(columns for columns in COLUMNS[argument] if columns <= {*rows.column_names})
        columns = columns | ({"prompt"} & {*rows.column_names} if argument != "texts" else set())
        measured = num_tokens(sample.select_columns(sorted(columns)), tokenizer)
        prompts = measured.pop("prompt", prompts)
        responses = [*measured.values()]
    longest = [max(lengths) for lengths in zip(*responses, strict=True)]
    return Data(name, rows, held_out, prompts, longest, train_split=train_split)


def with_prompts(rows: Any, name: str, column: str | None) -> Any:
    """Return the rows with a prompt; the last answer of a dialogue is left out, since the policy writes its own.

    Args:
        rows: Prompts, dialogues or preference pairs.
        name: The file, directory or hub name.
        column: See `read_data`.

    Raises:
        ValueError: There is no such column.
    """
    if column is None and "messages" in rows.column_names and {*PROMPT_COLUMNS}.isdisjoint(rows.column_names):
        column = "messages"
    rows = separate_prompts(with_prompts_from(rows, column), where_missing=True)
    column = prompt_column(rows.column_names, name)
    whole = rows[column][:]
    prompts = [without_last_answer(prompt) for prompt in whole]
    if num_cut := sum(after is not before for after, before in zip(prompts, whole, strict=True)):
        print_text(f"{name}: {num_cut} of {len(prompts)} prompts end in an answer; the policy writes its own instead.")
        rows = rows.remove_columns(column).add_column(column, prompts)
    filled = [index for index, prompt in enumerate(prompts) if prompt and str(prompt).strip()]
    if 0 < len(filled) < len(rows):
        dropped = f"dropped {len(rows) - len(filled)} of {len(rows)} rows without a prompt"
        print_text(f"{name}: {dropped}; the others are numbered anew.")
        rows = rows.select(filled)
    return rows


def is_dialogue(prompt: Any) -> TypeGuard[str]:
    """Return whether a prompt is a raw Human/Assistant dialogue, as in hh-rlhf; it may begin with "Human:"."""
    return isinstance(prompt, str) and HH_USER.strip() in prompt and HH_TURN in prompt


def without_last_answer(prompt: Any) -> Any:
    """Return a dialogue up to its last answer: messages without it, or a raw text up to its "Assistant:".

    Args:
        prompt: A prompt; one that is no dialogue, or has no last answer, is returned as it is.
    """
    if is_conversation(prompt) and prompt[-1]["role"] == "assistant":
        return prompt[:-1]
    if is_dialogue(prompt) and not prompt.rstrip().endswith(HH_TURN.strip()):
        return prompt[: prompt.rindex(HH_TURN) + len(HH_TURN)]
    return prompt


def fitting(prompts: Data, tokenizer: PreTrainedTokenizerBase, longest: int) -> Data:
    """Drop the prompts that `train` would drop, print their number, and measure the others.

    Args:
        prompts: The prompts.
        tokenizer: The model's.
        longest: Tokens of the longest prompt that leaves room for a response.

    Raises:
        ValueError: A prompt cannot be read, or none is left.
    """

    def kept(rows: Dataset, name: str) -> tuple[Dataset, list[int]]:
        prepared = prepare_prompts(rows, PromptEncoder(tokenizer, name, len(tokenizer)), longest)
        lengths = [len(ids) for ids in prepared["input_ids"]]
        return prepared.remove_columns([*({*prepared.column_names} - {*rows.column_names})]), lengths

    rows, lengths = kept(prompts.rows, prompts.name)
    held_out = prompts.held_out and kept(prompts.held_out, f"{prompts.name}, split test")[0]
    num_dropped = len(prompts.rows) - len(rows)
    return replace(prompts, rows=rows, held_out=held_out, prompts=lengths, num_dropped=num_dropped)


def num_tokens(rows: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Count the tokens of texts and conversations by column.

    Tokens that the chat template adds to a response count as the response's.
    """
    texts = Dataset.from_list([maybe_apply_chat_template(row, tokenizer) for row in _answered([*rows])])
    encoded: Any = {name: tokenizer(texts[name][:], add_special_tokens=False) for name in texts.column_names}
    return {name: [len(ids) for ids in column["input_ids"]] for name, column in encoded.items()}


def _answered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the dialogues that end in an answer, as prompt and completion; other rows as they are."""
    answered = [
        {"prompt": messages[:-1], "completion": messages[-1:]}
        for messages in (row.get("messages", ()) for row in rows)
        if [message["role"] for message in messages[-2:]] in (["user", "assistant"], ["tool", "assistant"])
    ]
    for text in (row.get("text", "") for row in rows):
        if (prompt := without_last_answer(text)) != text:
            answered.append({"prompt": prompt, "completion": text[len(prompt) :]})
    return answered or rows


def split(args: argparse.Namespace, data: Mapping[str, Data]) -> dict[str, Data]:
    """Split prompts off for the judge, and pairs for its reward model; return the data of each section.

    Args:
        args: The options.
        data: The data by option.

    Raises:
        ValueError: There is only one prompt.
    """

    def part(source: Data, folder: str, rows: Dataset) -> Data:
        name = str(Path(args.output_dir, "data", folder))
        return replace(source, name=name, rows=rows, is_split=True, train_split="train")

    options = {"texts": "sft", "preferences": "reward", "judge_preferences": "judge_reward"}
    sections = {section: data[name] for name, section in options.items() if name in data}
    pairs = sections.get("reward")
    if pairs and "judge_reward" not in sections and not args.judge_model and len(pairs.rows) >= MIN_PAIRS_TO_SPLIT:
        ours, theirs = hold_out_pairs(pairs.rows, int(JUDGE_SHARE * len(pairs.rows)), 1.0)
        if theirs is not None and len(ours):
            sections["reward"] = part(pairs, "pairs", ours)
            sections["judge_reward"] = part(pairs, "judge_pairs", theirs)
    prompts = data["prompts"]
    rows = distinct_prompts(prompts.rows)
    if prompts.held_out is None:
        if len(rows) < 2:
            raise ValueError(
                f"prompts={args.prompts!r} has {len(rows)} distinct prompt: init holds some out for the judge; "
                "give at least 2"
            )
        num_held_out = max(1, min(MAX_HELD_OUT, len(rows) // 5))
        shuffled = rows.shuffle(seed=0)
        rows, held_out = shuffled.select(range(num_held_out, len(rows))), shuffled.select(range(num_held_out))
    else:
        held_out = distinct_prompts(prompts.held_out).shuffle(seed=0)
        held_out = held_out.select(range(min(MAX_HELD_OUT, len(held_out))))
    sections["ppo"] = part(prompts, "prompts", rows)
    sections["judge"] = part(prompts, "held_out_prompts", held_out)
    return sections


def distinct_prompts(rows: Dataset) -> Dataset:
    """Return the rows with the first occurrence of each prompt."""
    column = prompt_column(rows.column_names, "prompts")
    first: dict[str, int] = {}
    for index, prompt in enumerate(rows[column]):
        first.setdefault(str(prompt), index)
    return rows.select(list(first.values()))


# ---- Options ----


def response_length(data: Mapping[str, Data], positions: int) -> int:
    """Propose a response length from the data by option, at most half of the model's positions."""
    source = data.get("preferences") or data.get("texts")
    response = 128 if source is None else -(-(quantile(source.responses, 0.9) + 1) // 4) * 4
    return min(256, positions // 2, response)


def num_weights(config: PreTrainedConfig) -> int:
    """Count the weights of a model from its configuration."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return sum(weight.numel() for weight in model.parameters())


def propose(
    size: int, is_slow: bool, data: Mapping[str, Data], positions: int, response: int, is_lora: bool
) -> dict[str, dict[str, Any]]:
    """Propose the options of each section.

    Args:
        size: Weights of the model.
        is_slow: Whether the machine is slow for this model: fewer and shorter updates, and one body.
        data: The data by section.
        positions: The model's longest sequence.
        response: Length of responses.
        is_lora: Whether adapters are trained.
    """
    rates = LORA_RATES if is_lora else RATES
    sections: dict[str, dict[str, Any]] = {}
    for name in ("sft", "reward", "judge_reward"):
        if section := data.get(name):
            totals = np.add(section.prompts, section.responses).tolist()
            sections[name] = {
                "num_train_epochs": 1 if is_slow or len(section.rows) > 10_000 else 3,
                "learning_rate": learning_rate(rates["sft" if name == "sft" else "reward"], size),
                "max_length": min(1024, positions, -(-(quantile(totals, 0.98) + 2) // 8) * 8),
            }
    num_prompts = len(data["ppo"].rows)
    num_prompts -= min(100, num_prompts // 10)  # `train` evaluates on these
    batch = min(SLOW_BATCH if is_slow else BATCH, 2 ** int(math.log2(num_prompts)))
    num_updates = SLOW_UPDATES if is_slow else min(200, max(20, num_prompts // batch))
    sizes = {"per_device_train_batch_size": min(8, batch), "gradient_accumulation_steps": batch // min(8, batch)}
    if is_slow:
        sizes = {
            "per_device_train_batch_size": batch,
            "num_mini_batches": min(4, batch),
            "num_ppo_epochs": 2,
            "value_model_path": "policy",
            "num_sample_generations": 3,
        }
    sections["ppo"] = {
        "learning_rate": learning_rate(rates["ppo"], size),
        **({"critic_learning_rate": learning_rate(5 * rates["ppo"], size)} if is_lora else {}),
        "response_length": response,
        **({"max_prompt_length": positions - response} if data["ppo"].num_dropped else {}),
        "total_episodes": num_updates * batch,
        **sizes,
    }
    num_judged = min(SLOW_HELD_OUT if is_slow else MAX_HELD_OUT, len(data["judge"].rows))
    sections["judge"] = {"num_prompts": num_judged, "max_new_tokens": response}
    return sections


def learning_rate(at_a_billion: float, size: int) -> float:
    """Return a learning rate that falls with the root of the model's size, rounded to one digit, at most 0.002."""
    return float(f"{min(at_a_billion * math.sqrt(1e9 / size), 2e-3):.0e}")


def written(
    args: argparse.Namespace,
    is_slow: bool,
    sections: Mapping[str, Data],
    options: Mapping[str, Mapping[str, object]],
    stop_string: str | None,
) -> str:
    """Return the text of the pipeline's file.

    Args:
        args: The options.
        is_slow: As for `propose`.
        sections: The data of each section.
        options: The options of each section.
        stop_string: A text that ends a response, or None.
    """
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["scalar"] = scalar
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        args=args,
        data=sections,
        is_slow=is_slow,
        stop_string=stop_string,
        bf16=supports_bf16(),
        options={name: yaml.safe_dump(section, sort_keys=False) for name, section in options.items()},
    )


def scalar(text: str) -> str:
    """Write a text so that YAML reads it as the same text."""
    return yaml.safe_dump(text, default_style='"', width=math.inf).strip()
