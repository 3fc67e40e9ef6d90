"""Measurements for `rlhf-ppo init`: lengths and format of data, the model's size, and seconds of its passes here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from rlhf_ppo.cli.arguments import check_columns
from rlhf_ppo.data.prompts import PromptEncoder, is_conversation, prompt_column
from rlhf_ppo.data.sources import HH_TURN, choose_split, load_splits, separate_prompts
from rlhf_ppo.estimate.counting import NoStorage
from rlhf_ppo.estimate.run import measure_rates
from rlhf_ppo.models.capabilities import position_limit
from rlhf_ppo.models.loading import load_pretrained

SAMPLE = 500
"""Rows whose lengths are measured."""

LARGE = 300_000_000
"""Parameters above which a model is not built here; its time follows from the rates of the device."""


@dataclass(frozen=True)
class Data:
    """A measured data set.

    Attributes:
        rows: The rows; pairs have explicit prompts.
        held_out: The rows of the split `test`, or None.
        form: The format, in words.
        prompts: Tokens of the prompts of a sample of rows; empty if there are none.
        responses: Tokens of texts or responses of the sample, of both responses of a pair.
    """

    rows: Any
    held_out: Any
    form: str
    prompts: Sequence[int]
    responses: Sequence[int]

    @property
    def totals(self) -> list[int]:
        """Tokens of prompt and response together; of a pair, of the longer one."""
        if not self.responses:
            return [*self.prompts]
        per_row = len(self.responses) // (len(self.prompts) or len(self.responses))
        longest = np.reshape(self.responses, (-1, per_row)).max(1)
        return list(map(int, longest + np.array(self.prompts or 0)))

    def describe(self) -> str:
        """Return rows, format and lengths in one sentence."""
        parts = [f"{len(self.rows):,} rows ({self.form})"]
        for name, lengths in (("prompts", self.prompts), ("responses", self.responses)):
            if len(lengths):
                label = name if self.prompts else "texts"
                parts.append(f"{label} of {quantile(lengths, 0.5)} tokens, 95% up to {quantile(lengths, 0.95)}")
        return ": ".join([parts[0], ", ".join(parts[1:])])


def quantile(lengths: Sequence[int], share: float) -> int:
    """Return a quantile of numbers, as a whole number."""
    return int(np.quantile(lengths, share, method="higher"))


def measure_data(name: str, argument: str, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Load a data set and measure its lengths.

    Args:
        name: A file, a directory or a hub name.
        argument: "texts", "prompts", or another option that holds preference pairs.
        tokenizer: The model's.

    Raises:
        ValueError: There are no such data, or a column is missing or holds something else.
    """
    splits = load_splits(name, argument=argument)
    names = [*splits]
    rows = choose_split(splits, "train" if "train" in names else names[0], argument)
    held_out = splits["test"] if "test" in names and rows is not splits["test"] else None
    measure = {"texts": _of_texts, "prompts": _of_prompts}.get(argument, _of_pairs)
    if measure is not _of_texts:
        rows, held_out = _with_prompts(rows, argument), held_out and _with_prompts(held_out, argument)
    sample = rows.select(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(int))
    form = _form_of_pairs(rows) if measure is _of_pairs else ""
    try:
        found, prompts, responses = measure(sample, argument, tokenizer)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{argument}={name!r}: {error}") from error
    return Data(rows, held_out, form or found, prompts, responses)


def _with_prompts(rows: Any, argument: str) -> Any:
    return separate_prompts(rows, where_missing=argument == "prompts")


def _of_texts(rows: Any, argument: str, tokenizer: Any) -> tuple[str, list[int], list[int]]:
    check_columns(rows, [{"text"}, {"messages"}, {"prompt", "completion"}, {"input_ids"}])
    if "completion" in rows.column_names:
        return (
            "prompt and completion",
            num_tokens(rows["prompt"], tokenizer),
            num_tokens(rows["completion"], tokenizer),
        )
    column = next(name for name in ("text", "messages", "input_ids") if name in rows.column_names)
    return column, [], num_tokens(rows[column], tokenizer)


def _of_prompts(rows: Any, argument: str, tokenizer: Any) -> tuple[str, list[int], list[int]]:
    column = prompt_column(rows.column_names, argument)
    encode = PromptEncoder(tokenizer, argument, None)
    lengths = [len(encode(row, index)["input_ids"]) for index, row in enumerate(rows)]
    return "conversations" if is_conversation(rows[0][column]) else column, lengths, []


def _of_pairs(rows: Any, argument: str, tokenizer: Any) -> tuple[str, list[int], list[int]]:
    check_columns(rows, [{"chosen", "rejected"}])
    prompts = num_tokens(rows["prompt"], tokenizer) if "prompt" in rows.column_names else []
    both = zip(*(num_tokens(rows[name], tokenizer) for name in ("chosen", "rejected")), strict=True)
    return "", prompts, [length for pair in both for length in pair]


def _form_of_pairs(rows: Any) -> str:
    first = rows[0]
    if is_conversation(first.get("chosen")):
        return "pairs of conversations"
    if str(first.get("prompt", "")).endswith(HH_TURN):
        return "pairs in hh-rlhf's raw text"
    return "pairs with a prompt" if first.get("prompt") else "pairs without prompts"


def num_tokens(values: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of texts, conversations (by their contents) or token ids.

    Raises:
        TypeError: A value is something else.
    """
    texts = []
    for value in values:
        if is_conversation(value):
            value = "\n".join(str(message.get("content")) for message in value)
        if isinstance(value, list):
            return [*map(len, values)]
        if not isinstance(value, str):
            raise TypeError(f"a row holds {value!r:.60} ({type(value).__name__}); make it a text or messages")
        texts.append(value)
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]  # pyright: ignore[reportArgumentType]


# ---- Model and machine ----


@dataclass(frozen=True)
class Machine:
    """A model on this machine.

    Attributes:
        parameters: Number of the model's parameters.
        positions: Its longest sequence, or None.
        device: The device.
        memory: Bytes of the device's memory that are free.
        seconds_per_call: Seconds of a forward pass of a few tokens.
        seconds_per_token: Seconds to train on a token, with the backward pass.
    """

    parameters: int
    positions: int | None
    device: torch.device
    memory: int
    seconds_per_call: float
    seconds_per_token: float

    def training(self, tokens: int) -> float:
        """Return the seconds of an optimizer step on this many tokens."""
        return 3 * self.seconds_per_call + tokens * self.seconds_per_token

    def forward(self, tokens: int) -> float:
        """Return the seconds of a forward pass over this many tokens."""
        return self.seconds_per_call + tokens * self.seconds_per_token / 3


def measure_machine(path: str) -> Machine:
    """Count a model's parameters, and time its passes on this machine.

    Args:
        path: A directory or hub name; weights are not loaded.
    """
    config = load_pretrained(AutoConfig, path, "model")
    with NoStorage():
        empty = AutoModelForCausalLM.from_config(config)
        parameters = sum(weight.numel() for weight in empty.parameters())
        limit = position_limit(empty)
    device: Any = PartialState().device
    is_cuda = device.type == "cuda"
    memory = torch.cuda.mem_get_info(device)[0] if is_cuda else psutil.virtual_memory().available
    if parameters <= LARGE:
        call, token = _passes(config, device)
    else:
        flops, bandwidth = measure_rates(device, torch.bfloat16 if is_cuda else torch.float32)
        call, token = 2 * parameters / bandwidth, 6 * parameters / (0.4 * flops)
    return Machine(parameters, None if limit is None else limit.tokens, device, memory, call, token)


def _passes(config: Any, device: torch.device) -> tuple[float, float]:
    """Time a short forward pass, and training on a token, of a model with random weights."""
    model = AutoModelForCausalLM.from_config(config).to(device)
    few = torch.zeros((8, 2), dtype=torch.long, device=device)
    length = min(64, getattr(config, "max_position_embeddings", None) or 64)
    many = torch.zeros((16, length), dtype=torch.long, device=device)

    def short() -> None:
        with torch.no_grad():
            model(few)

    def train() -> None:
        model(many, labels=many).loss.backward()

    call, step = seconds_of(short, device), seconds_of(train, device)
    return call, max(step - 3 * call, 0.0) / many.numel()


def seconds_of(function: Callable[[], None], device: torch.device) -> float:
    """Return the least seconds of five calls, after one that warms up.

    On a CPU that other programs use too, these are the seconds of this process alone.
    """
    seconds = []
    for _ in range(6):
        start, cpu = time.perf_counter(), time.process_time()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = time.perf_counter() - start
        seconds.append(taken if device.type == "cuda" else min(taken, time.process_time() - cpu))
    return min(seconds[1:])


def distinct_prompts(rows: Any) -> Any:
    """Return the rows with the first occurrence of each prompt."""
    column = prompt_column(rows.column_names, "prompts")
    first: dict[str, int] = {}
    for index, prompt in enumerate(rows[column]):
        first.setdefault(str(prompt), index)
    return rows if len(first) == len(rows) else rows.select(list(first.values()))
