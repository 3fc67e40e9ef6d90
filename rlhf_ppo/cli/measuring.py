"""Measurement of data, model and machine for `rlhf-ppo init`, and the sizes, rates and steps that fit them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from rlhf_ppo.cli.arguments import check_columns
from rlhf_ppo.data.prompts import PromptEncoder, is_conversation, prompt_column, text_of_content
from rlhf_ppo.data.sources import HH_TURN, choose_split, load_splits, separate_prompts
from rlhf_ppo.estimate.run import best_seconds, measure_rates
from rlhf_ppo.estimate.update import NoStorage
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
    try:
        form, prompts, responses = measure(sample, argument, tokenizer)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{argument}={name!r}: {error}") from error
    return Data(rows, held_out, form, prompts, responses)


def _with_prompts(rows: Any, argument: str) -> Any:
    return separate_prompts(rows, where_missing=argument == "prompts")


def _of_texts(rows: Any, argument: str, tokenizer: Any) -> tuple[str, list[int], list[int]]:
    check_columns(rows, [{"text"}, {"messages"}, {"prompt", "completion"}, {"input_ids"}], argument)
    if "completion" in rows.column_names:
        prompts, completions = (num_tokens(rows[name], tokenizer) for name in ("prompt", "completion"))
        return "prompt and completion", prompts, completions
    column = next(name for name in ("text", "messages", "input_ids") if name in rows.column_names)
    return column, [], num_tokens(rows[column], tokenizer)


def _of_prompts(rows: Any, argument: str, tokenizer: Any) -> tuple[str, list[int], list[int]]:
    column = prompt_column(rows.column_names, argument)
    encode = PromptEncoder(tokenizer, argument, None)
    lengths = [len(encode(row, index)["input_ids"]) for index, row in enumerate(rows)]
    return "conversations" if is_conversation(rows[0][column]) else column, lengths, []


def _of_pairs(rows: Any, argument: str, tokenizer: Any) -> tuple[str, list[int], list[int]]:
    check_columns(rows, [{"chosen", "rejected"}], argument)
    prompts = num_tokens(rows["prompt"], tokenizer) if "prompt" in rows.column_names else []
    both = zip(*(num_tokens(rows[name], tokenizer) for name in ("chosen", "rejected")), strict=True)
    return _form_of_pairs(rows), prompts, [length for pair in both for length in pair]


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
            value = "\n".join(text_of_content(message.get("content") or "") for message in value)
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
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
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
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(device)
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
    """Return the least seconds of five calls; on a CPU of this thread alone, which other programs hardly lengthen."""
    return best_seconds(function, device, 5, time.perf_counter if device.type == "cuda" else time.thread_time)


def distinct_prompts(rows: Any) -> Any:
    """Return the rows with the first occurrence of each prompt."""
    column = prompt_column(rows.column_names, "prompts")
    first: dict[str, int] = {}
    for index, prompt in enumerate(rows[column]):
        first.setdefault(str(prompt), index)
    return rows if len(first) == len(rows) else rows.select(list(first.values()))


# ---- Proposals ----

BATCH = 64
"""Largest number of episodes of an update, and of rows of an optimizer step."""
MAX_RESPONSE, MAX_TEXT = 256, 1024
SECONDS_TO_START = 15
"""Seconds of a step for imports, loading and saving."""
BYTES_PER_PARAMETER = 40
"""Of PPO in float32: policy and value model with gradients and AdamW's state, reference and reward model."""
PPO_EPOCHS = 4
MIN_UPDATES, MAX_UPDATES = 20, 200
"""Of PPO."""
MIN_STEPS = 50
"""Optimizer steps of SFT and of a reward model, if the data suffice."""
SHORTENED, SMALLEST_BATCH = 32, 16
"""Tokens of a response, and episodes of an update, that are not made fewer to save time; see `propose`."""
SHARES = {"sft": 0.15, "reward": 0.2, "judge_reward": 0.2}
"""Largest shares of the time for the steps before PPO."""


@dataclass(frozen=True)
class Proposal:
    """Values of a pipeline's file.

    Attributes:
        sections: Options of each training step and of the judge; `common` is for all training steps.
        minutes: Expected minutes of each step.
        notes: Sentences about data or memory that do not fit, each with its steps.
    """

    sections: Mapping[str, Mapping[str, Any]]
    minutes: Mapping[str, float]
    notes: Mapping[str, Sequence[str]]


def propose(machine: Machine, data: Mapping[str, Data], num_held_out: int, minutes: float) -> Proposal:
    """Propose the options of a pipeline; to save time, at most half of the data's responses become too long.

    Args:
        machine: The model on this machine.
        data: The data of `sft`, `reward`, `judge_reward` and `ppo`, as far as there are any.
        num_held_out: Prompts for the judge.
        minutes: About how long all steps may take.
    """
    notes: dict[str, list[str]] = {}
    seconds = 60 * minutes
    source = data.get("reward") or data.get("sft")
    answers = [] if source is None else [length + 1 for length in source.responses]  # with EOS
    response = _response_length(machine, answers, data["ppo"].prompts)
    needed = machine.parameters * BYTES_PER_PARAMETER
    has_room = 4 * needed < machine.memory
    sections: dict[str, dict[str, Any]] = {"common": {"gradient_checkpointing": False} if has_room else {}}
    took: dict[str, float] = {}
    for name in ("sft", "reward", "judge_reward"):
        if name in data:
            wanted = SHARES[name] * seconds
            sections[name], took[name] = _training(name, data[name], machine, wanted, notes)
    longest, batch = response, min(BATCH, _power(len(data["ppo"].rows)))
    shortest = min(longest, max(SHORTENED, _rounded_up(quantile(answers, 0.5), 4) if answers else 0))
    while True:
        judge_seconds = SECONDS_TO_START + _answering(machine, response, num_held_out)
        left = seconds - sum(took.values()) - judge_seconds - SECONDS_TO_START
        sections["ppo"], each = _ppo(data["ppo"], machine, response, batch, left)
        if each <= left or (response == shortest and batch <= SMALLEST_BATCH):
            break
        if response > shortest:
            response = max(shortest, response // 2)
        else:
            batch //= 2
    cut = sum(length > response for length in answers) / max(len(answers), 1)
    if response < longest or cut > 0.1:
        why = f", not {longest}, to save time (--minutes)" if response < longest else ""
        _note(notes, "ppo", f"responses end after {response} tokens{why}; {cut:.0%} of those in the data are longer.")
    if room := sections["ppo"].get("max_prompt_length"):
        share = sum(length > room for length in data["ppo"].prompts) / len(data["ppo"].prompts)
        _note(notes, "ppo", f"{share:.0%} of the prompts are longer than {room} tokens and are left out.")
    took |= {"ppo": each, "judge": judge_seconds, "report": SECONDS_TO_START}
    sections["judge"] = {"num_prompts": num_held_out, "max_new_tokens": response}
    if needed > machine.memory:
        memory = f"all weights need about {needed / 2**30:.0f} GiB, and {machine.memory / 2**30:.0f} GiB are free."
        _note(notes, "ppo", f"{memory} Use LoRA (use_peft: true in `ppo`), or several devices (launch).")
    return Proposal(sections, {name: value / 60 for name, value in took.items()}, notes)


def _note(notes: dict[str, list[str]], step: str, note: str) -> None:
    notes.setdefault(note, []).append(step)


def learning_rate(at_a_billion: float, parameters: int) -> float:
    """Return a learning rate that falls with the root of the model's size, rounded to one digit, at most 0.002."""
    rate = min(at_a_billion * math.sqrt(1e9 / parameters), 2e-3)
    digit = 10 ** math.floor(math.log10(rate))
    return round(rate / digit) * digit


def _response_length(machine: Machine, answers: Sequence[int], prompts: Sequence[int]) -> int:
    """Return a length that nine of ten responses of the data do not exceed and that fits into the model."""
    length = quantile(answers, 0.9) if answers else 128
    room = (machine.positions or 10**9) - quantile(prompts, 0.95)
    largest = min(MAX_RESPONSE, max(room, (machine.positions or 10**9) // 2))
    return max(4, min(_rounded_up(length, 4), largest))


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _power(number: float) -> int:
    """Return the largest power of two that is not above a number, at least 1."""
    return 2 ** max(0, math.floor(math.log2(max(number, 1))))


def _training(
    name: str, data: Data, machine: Machine, seconds: float, notes: dict[str, list[str]]
) -> tuple[dict[str, Any], float]:
    """Propose SFT or a reward model: up to three epochs, and fewer in the time that is given."""
    limit = min(MAX_TEXT, machine.positions or MAX_TEXT)
    length = min(_rounded_up(quantile(data.totals, 0.98) + 2, 8), limit)
    too_long = sum(total + 2 > length for total in data.totals) / len(data.totals)
    if too_long > 0.05:
        action = "are cut" if name == "sft" else "are left out"
        _note(notes, name, f"{too_long:.0%} of the rows are longer than {length} tokens and {action}.")
    if name != "sft" and len(data.rows) < 1000:
        few = "fewer than 1,000 pairs. A reward model of human preferences needs thousands; its accuracy will tell."
        _note(notes, name, few)
    rows = len(data.rows) if name == "sft" else len(data.rows) * 9 // 10  # a tenth of the pairs is held out
    epochs = 1 if rows > 50_000 else 2 if rows > 10_000 else 3
    batch = max(4, min(_power(rows * epochs / 200), BATCH // (1 if name == "sft" else 2)))
    mean = sum(min(total, length) for total in data.totals) / len(data.totals)
    tokens = mean * (1.3 if name == "sft" else 2.6)  # padding; both responses
    step = machine.training(int(batch * tokens)) * 1.25
    every = max(1, rows * epochs // batch)
    updates = max(min(MIN_STEPS, every), min(int((seconds - SECONDS_TO_START) / step), every))
    if updates < every:
        epochs = max(round(updates * batch / rows, 2), 0.01)
        updates = max(1, round(epochs * rows / batch))
    options = {
        "num_train_epochs": epochs,
        "learning_rate": learning_rate(2e-5 if name == "sft" else 1e-5, machine.parameters),
        "per_device_train_batch_size": batch,
        "max_length": length,
        "save_steps": max(10, _rounded_up(updates // 4, 10)),
    }
    return options, SECONDS_TO_START + updates * step


def _ppo(data: Data, machine: Machine, response: int, batch: int, seconds: float) -> tuple[dict[str, Any], float]:
    """Propose PPO, and its seconds: as many updates as the time allows, from 20 to 200."""
    longest = max(data.prompts)
    prompt = quantile(data.prompts, 0.95)
    options: dict[str, Any] = {"response_length": response}
    room = None if machine.positions is None else machine.positions - response
    if room is not None and longest > room:
        options["max_prompt_length"] = room
        prompt = min(prompt, room)
    row_bytes = 4 * 60 * (prompt + response) * math.sqrt(machine.parameters)  # activations, roughly
    free = machine.memory - machine.parameters * BYTES_PER_PARAMETER
    per_device = max(1, min(batch, _power(free / 2 / row_bytes)))
    tokens = batch * (prompt + response)
    passes = 2 * PPO_EPOCHS * (batch // per_device)  # policy and value model
    learning = passes * machine.training(tokens // (batch // per_device))
    each = _answering(machine, response, batch) + 3 * machine.forward(tokens) + 1.25 * learning
    updates = min(MAX_UPDATES, max(MIN_UPDATES, int((seconds - SECONDS_TO_START) / each)))
    options |= {
        "learning_rate": learning_rate(3e-6, machine.parameters),
        "total_episodes": updates * batch,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": batch // per_device,
        "save_steps": max(5, _rounded_up(updates // 4, 5)),
    }
    return options, SECONDS_TO_START + updates * each


def _answering(machine: Machine, response: int, rows: int) -> float:
    """Return the seconds to sample responses to a batch of prompts, 64 at a time."""
    return -(-rows // BATCH) * response * 1.5 * machine.forward(BATCH)
